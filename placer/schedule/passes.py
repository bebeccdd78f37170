"""The words of a schedule: passes, the stages that they go through, and the timeline of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from placer.errors import InputError

Phase = Literal["forward", "backward", "weights"]
"""``weights`` is the half of a backward pass that computes the gradients of parameters, where it
runs apart."""

Lane = tuple[int, int, Phase]
"""The device that sends, the one that receives, and whether values or gradients go there."""


class Pass(NamedTuple):
    """One pass of one micro-batch through one stage."""

    stage: int
    phase: Phase
    micro_batch: int


class TimelineTask(NamedTuple):
    """A pass with its device and its times, in milliseconds from the start of the step."""

    stage: int
    phase: Phase
    micro_batch: int
    start_ms: float
    end_ms: float
    device: int


class TimelineTransfer(NamedTuple):
    """What goes from one stage to another for one micro-batch, with its times in milliseconds.

    In phase ``forward`` it is values, in phase ``backward`` their gradients, from the reader to the
    maker.
    """

    source: int
    target: int
    phase: Phase
    micro_batch: int
    start_ms: float
    end_ms: float


class Transfer(NamedTuple):
    """What one device sends to another for one micro-batch, by stage.

    Attributes:
        source: the stage that makes the values.
        target: the first stage on the receiving device that reads them.
        forward_ms: how long the values take.
        gradient_ms: how long their gradients take back; None if none come.
    """

    source: int
    target: int
    forward_ms: float
    gradient_ms: float | None = None


@dataclass(frozen=True)
class Pipeline:
    """The stages of a step in pipeline order, what each takes for one micro-batch, and what passes
    between them.

    Attributes:
        places: by stage, the index of its device; a device may have several.
        forward_ms: by stage.
        backward_ms: by stage, both halves.
        weights_ms: by stage, the part of ``backward_ms`` that gradients of parameters take.
        transfers: between stages of different devices; each source comes before its target.
        optimizer_ms: by stage, its part of the optimizer's step, which follows the last pass of its
            device; empty where there is none.
    """

    places: tuple[int, ...]
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    weights_ms: tuple[float, ...]
    transfers: tuple[Transfer, ...] = ()
    optimizer_ms: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "forward_ms",
            "backward_ms",
            "weights_ms",
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
        """By device, how long the optimizer's step on all of its stages takes."""
        total: dict[int, float] = defaultdict(float)
        # of none there are no times
        for place, time_ms in zip(self.places, self.optimizer_ms, strict=False):
            total[place] += time_ms
        return dict(total)

    @classmethod
    def chain(
        cls,
        forward_ms: Sequence[float],
        backward_ms: Sequence[float],
        *,
        weights_ms: Sequence[float] | None = None,
        places: Sequence[int] | None = None,
        transfer_ms: float = 0.0,
        gradient_ms: float = 0.0,
        optimizer_ms: Sequence[float] = (),
    ) -> Pipeline:
        """Stages in a row, each of which reads from the one before.

        Args:
            forward_ms: by stage.
            backward_ms: by stage, both halves.
            weights_ms: by stage, the weight half; half of the backward pass if left out.
            places: by stage, its device; a device each if left out.
            transfer_ms: from a stage to the next, where that is on another device.
            gradient_ms: from a stage back to the one before.
            optimizer_ms: by stage; none if left out.
        """
        places = tuple(range(len(forward_ms)) if places is None else places)
        return cls(
            places,
            tuple(forward_ms),
            tuple(backward_ms),
            tuple([time / 2 for time in backward_ms] if weights_ms is None else weights_ms),
            tuple(
                Transfer(stage, stage + 1, transfer_ms, gradient_ms)
                for stage in range(len(places) - 1)
                if places[stage] != places[stage + 1]
            ),
            tuple(optimizer_ms),
        )


@dataclass(frozen=True)
class Plan:
    """In which order passes run, the same for the solver and for execution.

    Attributes:
        places: by stage, the index of its device.
        chunks: micro-batches in a batch.
        issue: every pass, after all that it waits for; each device runs its own in this order.
        in_flight: by stage, for how many micro-batches it has room: begun forwards, not yet done
            backwards.
        split: whether backward passes are in two halves, ``backward`` and ``weights``.
        training: whether there are backward passes.
        sharing: by stage, how many of the micro-batches in flight share the memory in which a
            backward pass works; all of them if left out. See ``orders.sharing``.
    """

    places: tuple[int, ...]
    chunks: int
    issue: tuple[Pass, ...]
    in_flight: tuple[int, ...]
    split: bool = False
    training: bool = True
    sharing: tuple[int, ...] = ()

    def backward_memory(self, stage: int) -> list[int]:
        """Return by micro-batch in flight at a stage the number of the memory in which its backward
        pass works.

        The micro-batches are dealt out in runs of about equal length, one for each that shares a
        memory. The first of each run has memory 0, the second memory 1, and so on: of 5
        micro-batches, two of which share, 0 1 | 0 1 2.
        """
        room = self.in_flight[stage]
        runs = self.sharing[stage] if self.sharing else room
        ends = [run * room // runs for run in range(runs + 1)]
        return [place for begin, end in pairwise(ends) for place in range(end - begin)]

    def by_device(self) -> dict[int, tuple[Pass, ...]]:
        """The passes of each device, in the order in which it runs them."""
        orders: dict[int, list[Pass]] = defaultdict(list)
        for item in self.issue:
            orders[self.places[item.stage]].append(item)
        return {device: tuple(order) for device, order in sorted(orders.items())}


@dataclass(frozen=True)
class Timeline:
    """A simulated step, or several in a row.

    Attributes:
        step_ms: from the first start to the last end of a pass.
        tasks: the passes, by start, then stage.
        transfers: what passed between devices, by start.
        busy_ms: by device, the time that it computes; devices without stages are left out.
        in_flight: by stage, the most micro-batches that it holds at once: run forwards, not yet
            backwards.
        ends_ms: by step, when its last pass or optimizer ends.
    """

    step_ms: float
    tasks: tuple[TimelineTask, ...]
    transfers: tuple[TimelineTransfer, ...]
    busy_ms: dict[int, float]
    in_flight: tuple[int, ...]
    ends_ms: tuple[float, ...] = ()

    @property
    def idle_ms(self) -> dict[int, float]:
        """By device, the time that it does not compute."""
        return {device: self.step_ms - busy for device, busy in self.busy_ms.items()}

    @property
    def bubble(self) -> float:
        """The share of the devices' time that is idle, from 0 to 1."""
        there = self.step_ms * len(self.busy_ms)
        return 1.0 - sum(self.busy_ms.values()) / there if there else 0.0


def most_held(passes: Iterable[Pass], stages: int, last: Phase) -> tuple[int, ...]:
    """By stage, the most micro-batches at once between their forward pass and the ``last`` one."""
    held, most = [0] * stages, [0] * stages
    for stage, phase, _ in passes:
        held[stage] += (phase == "forward") - (phase == last)
        most[stage] = max(most[stage], held[stage])
    return tuple(most)
