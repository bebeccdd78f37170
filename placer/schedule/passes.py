"""The data types of schedules: passes, pipelines of stages, plans and timelines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from placer.errors import InputError

Phase = Literal["forward", "backward", "weights"]
"""The kind of a pass; ``weights`` is a separate weight-gradient pass."""

Lane = tuple[int, int, Phase]
"""A direction between two devices: sender, receiver, and whether it carries values or gradients."""


class Pass(NamedTuple):
    """One pass of one micro-batch through one stage."""

    stage: int
    phase: Phase
    micro_batch: int


class TimelineTask(NamedTuple):
    """A pass with its device and its times in ms since the start of the step."""

    stage: int
    phase: Phase
    micro_batch: int
    start_ms: float
    end_ms: float
    device: int


class TimelineTransfer(NamedTuple):
    """A transfer between two stages for one micro-batch, with its times in ms.

    In phase ``forward`` it carries values, in phase ``backward`` their gradients, from the reader
    to the producer.
    """

    source: int
    target: int
    phase: Phase
    micro_batch: int
    start_ms: float
    end_ms: float


class Transfer(NamedTuple):
    """The data that one device sends to another for one micro-batch.

    Attributes:
        source: the stage that makes the values.
        target: the first stage on the receiving device that reads them.
        forward_ms: transfer time of the values.
        gradient_ms: transfer time of their gradients; None without gradients.
    """

    source: int
    target: int
    forward_ms: float
    gradient_ms: float | None = None

    def repeated(self, times: int) -> Transfer:
        """Return this and further transfers like it as one transfer.

        Args:
            times: how many there are.
        """
        gradient_ms = None if self.gradient_ms is None else times * self.gradient_ms
        return self._replace(forward_ms=times * self.forward_ms, gradient_ms=gradient_ms)


@dataclass(frozen=True)
class Pipeline:
    """The stages of a step in pipeline order, with times for one micro-batch.

    Attributes:
        places: for each stage, the index of its device; a device may have several.
        forward_ms: for each stage.
        backward_ms: for each stage, the whole backward pass.
        weight_grad_ms: for each stage, the part of ``backward_ms`` for gradients of parameters.
        transfers: between stages of different devices; each source precedes its target.
        optimizer_ms: for each stage, its part of the optimizer's step, which follows the last pass
            of its device; empty for none.
    """

    places: tuple[int, ...]
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    weight_grad_ms: tuple[float, ...]
    transfers: tuple[Transfer, ...] = ()
    optimizer_ms: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "forward_ms",
            "backward_ms",
            "weight_grad_ms",
            *(["optimizer_ms"] if self.optimizer_ms else []),
        ):
            if len(getattr(self, name)) != len(self.places):
                raise InputError(
                    f"{name} has {len(getattr(self, name))} entries for {len(self.places)} stages"
                )
        for transfer in self.transfers:
            if not 0 <= transfer.source < transfer.target < len(self.places):
                raise InputError(
                    f"{transfer} does not run forwards between two of {len(self.places)} stages"
                )

    def optimizer_by_device(self) -> dict[int, float]:
        """Return the time of the optimizer's step on each device, in ms."""
        total: dict[int, float] = defaultdict(float)
        # optimizer_ms is empty without an optimizer
        for place, time_ms in zip(self.places, self.optimizer_ms, strict=False):
            total[place] += time_ms
        return dict(total)

    @classmethod
    def chain(
        cls,
        forward_ms: Sequence[float],
        backward_ms: Sequence[float],
        *,
        weight_grad_ms: Sequence[float] | None = None,
        places: Sequence[int] | None = None,
        transfer_ms: float = 0.0,
        gradient_ms: float = 0.0,
        optimizer_ms: Sequence[float] = (),
    ) -> Pipeline:
        """Return a chain of stages, each of which reads from the previous one.

        Args:
            forward_ms: for each stage.
            backward_ms: for each stage, the whole backward pass.
            weight_grad_ms: for each stage, the weight-gradient pass; half of ``backward_ms`` by
                default.
            places: the device of each stage; one device per stage by default.
            transfer_ms: from a stage to the next one on another device.
            gradient_ms: from a stage back to the previous one.
            optimizer_ms: for each stage; none by default.
        """
        places = tuple(range(len(forward_ms)) if places is None else places)
        return cls(
            places,
            tuple(forward_ms),
            tuple(backward_ms),
            tuple([time / 2 for time in backward_ms] if weight_grad_ms is None else weight_grad_ms),
            tuple(
                Transfer(stage, stage + 1, transfer_ms, gradient_ms)
                for stage in range(len(places) - 1)
                if places[stage] != places[stage + 1]
            ),
            tuple(optimizer_ms),
        )


@dataclass(frozen=True)
class Plan:
    """The order of passes, shared by solver and executor.

    Attributes:
        places: for each stage, the index of its device.
        chunks: micro-batches in a batch.
        issue: every pass, after all that it depends on; each device runs its own passes in this
            order.
        in_flight: for each stage, the maximum number of micro-batches between forward and last
            backward pass.
        split: whether backward passes are split into ``backward`` and ``weights``.
        training: whether there are backward passes.
        sharing: for each stage, how many micro-batches in flight share the memory of one backward
            pass; all of them if empty. See ``orders.sharing``.
    """

    places: tuple[int, ...]
    chunks: int
    issue: tuple[Pass, ...]
    in_flight: tuple[int, ...]
    split: bool = False
    training: bool = True
    sharing: tuple[int, ...] = ()

    def backward_memory(self, stage: int) -> list[int]:
        """Return for each micro-batch in flight the index of its backward pass's memory.

        The micro-batches are divided into consecutive runs of about equal length, one run for each
        that shares a memory. Within a run, memory 0, 1, ... are used in order. Of 5 micro-batches,
        two of which share: 0 1 | 0 1 2.
        """
        # split ``room`` slots into ``runs`` nearly equal runs, and number the slots of each run
        # from 0
        room = self.in_flight[stage]
        runs = self.sharing[stage] if self.sharing else room
        ends = [run * room // runs for run in range(runs + 1)]
        return [place for begin, end in pairwise(ends) for place in range(end - begin)]

    def by_device(self) -> dict[int, tuple[Pass, ...]]:
        """Return the passes of each device, in its execution order."""
        orders: dict[int, list[Pass]] = defaultdict(list)
        for item in self.issue:
            orders[self.places[item.stage]].append(item)
        return {device: tuple(order) for device, order in sorted(orders.items())}


@dataclass(frozen=True)
class Timeline:
    """One simulated step, or several consecutive ones.

    Attributes:
        step_ms: from the first start to the last end of a pass.
        tasks: the passes, ordered by start, then stage.
        transfers: between devices, ordered by start.
        busy_ms: computing time of each device that has stages.
        in_flight: for each stage, the peak number of micro-batches between forward and last
            backward pass.
        ends_ms: for each step, the end of its last pass or optimizer step.
    """

    step_ms: float
    tasks: tuple[TimelineTask, ...]
    transfers: tuple[TimelineTransfer, ...]
    busy_ms: dict[int, float]
    in_flight: tuple[int, ...]
    ends_ms: tuple[float, ...] = ()

    @property
    def idle_ms(self) -> dict[int, float]:
        """Return the idle time of each device."""
        return {device: self.step_ms - busy for device, busy in self.busy_ms.items()}

    @property
    def bubble(self) -> float:
        """Return the idle share of the devices' time, from 0 to 1."""
        there = self.step_ms * len(self.busy_ms)
        return 1.0 - sum(self.busy_ms.values()) / there if there else 0.0


def most_held(passes: Iterable[Pass], stages: int, last: Phase) -> tuple[int, ...]:
    """Return for each stage the peak number of micro-batches from forward to ``last`` pass.

    Args:
        passes: in the order of execution.
        stages: number of stages.
        last: the pass after which a stage no longer holds a micro-batch.
    """
    held, most = [0] * stages, [0] * stages
    for stage, phase, _ in passes:
        held[stage] += (phase == "forward") - (phase == last)
        most[stage] = max(most[stage], held[stage])
    return tuple(most)
