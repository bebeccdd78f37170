"""The schedule classes of torch.distributed.pipelining for Placer's schedules.

    schedule      one stage per device            several stages per device
    fill-drain    ScheduleGPipe                   ScheduleLoopedBFS
    1f1b          Schedule1F1B                    ScheduleInterleaved1F1B
    interleaved   -                               ScheduleInterleaved1F1B
    zero-bubble   ScheduleInterleavedZeroBubble   ScheduleInterleavedZeroBubble

The library assigns stage ``i`` to process ``i % processes``. If the devices of the line have
another order than the processes, the stages are given the actual mapping.

If stages have different numbers of replicas, ``UnitSchedule`` runs the library's stages instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from placer.capture.argument_checks import require_chunks
from placer.distributed.stage_passes import ReportingStage
from placer.errors import InputError
from placer.schedule import Pass, Phase, plan

SCHEDULES = ("fill-drain", "1f1b", "interleaved", "zero-bubble")

LibrarySchedule = PipelineScheduleSingle | PipelineScheduleMulti


def splits(schedule: str) -> bool:
    """Return whether weight gradients have a pass of their own."""
    return schedule == "zero-bubble"


def make(
    schedule: str,
    stages: Sequence[PipelineStage],
    ranks: Sequence[int],
    position: int,
    chunks: int,
    loss: Callable[..., Tensor] | None,
) -> LibrarySchedule:
    """Return the library's schedule of this process's stages.

    Args:
        schedule: one of ``SCHEDULES``.
        stages: of this process, in order.
        ranks: the group rank of each device in the line.
        position: of this process's device in the line.
        chunks: micro-batches in a batch.
        loss: a function from the last stage's output and a target to the micro-batch's share of the
            loss; None for inference.

    Raises:
        InputError: if the schedule does not support this number of micro-batches.
    """
    check(schedule, chunks, len(ranks), len(stages))
    many = len(stages) > 1 or (splits(schedule) and loss is not None)
    library: Any = (
        _several(schedule, loss is not None) if many else _single(schedule, chunks, len(ranks))
    )
    made = library(
        list(stages) if many else stages[0], n_microbatches=chunks, loss_fn=loss, scale_grads=False
    )
    where = {index: ranks[index % len(ranks)] for index in range(stages[0].num_stages)}
    for stage in stages:
        stage.stage_index_to_group_rank = where
    if many:
        made.rank = position  # selects this process's row of the schedule
    result: LibrarySchedule = made
    return result


def make_by_stage(
    schedule: str,
    stages: Sequence[ReportingStage],
    chains: Sequence[Sequence[int]],
    chunks: int,
    loss: Callable[..., Tensor] | None,
    room: Sequence[int] = (),
) -> LibrarySchedule:
    """Return a schedule of this process's stages, if some processes are part of several pipelines.

    Args:
        schedule: one of ``SCHEDULES``.
        stages: of this process, in order.
        chains: for each pipeline, the rank of each device in the line.
        chunks: micro-batches in a batch.
        loss: as for ``make``.
        room: for each stage, the maximum number of micro-batches in flight; another number of
            entries than stages has no effect.
    """
    units = Units(schedule, chains, dist.get_rank(), chunks, len(stages), room)
    return UnitSchedule(units, stages, loss)


def check(schedule: str, chunks: int, devices: int, rounds: int, by_stage: bool = False) -> None:
    """Raise an InputError for an unknown schedule or an unsupported number of micro-batches.

    Args:
        schedule: its name.
        chunks: micro-batches in a batch.
        devices: number of devices in the line.
        rounds: stages on each device.
        by_stage: whether stages have different numbers of replicas.
    """
    if schedule not in SCHEDULES:
        raise InputError(f"schedule {schedule!r} is not known; give one of {', '.join(SCHEDULES)}")
    require_chunks(chunks)
    if schedule == "interleaved" and rounds == 1:
        raise InputError(
            "schedule 'interleaved' needs several stages on a device, and each has one; give '1f1b'"
        )
    if by_stage:
        return
    interleaved = splits(schedule) or (schedule != "fill-drain" and rounds > 1)
    # the library requires equally large rounds of micro-batches
    turns = max(1, chunks // devices)
    if interleaved and chunks % turns:
        fitting = [
            count
            for count in range(1, 2 * chunks + devices)
            if count % max(1, count // devices) == 0
        ]
        below, above = max(c for c in fitting if c < chunks), min(c for c in fitting if c > chunks)
        raise InputError(
            f"schedule {schedule!r} on {devices} devices cannot have {chunks} micro-batches; "
            f"give chunks={below} or chunks={above}"
        )


def _single(schedule: str, chunks: int, devices: int) -> type[PipelineScheduleSingle]:
    # With fewer micro-batches than stages, 1F1B equals fill-drain, and the library rejects it.
    return Schedule1F1B if schedule == "1f1b" and chunks >= devices else ScheduleGPipe


def _several(schedule: str, training: bool) -> type[PipelineScheduleMulti]:
    if not training or schedule == "fill-drain":
        return ScheduleLoopedBFS
    return ScheduleInterleavedZeroBubble if splits(schedule) else ScheduleInterleaved1F1B


class Turn(NamedTuple):
    """What a process does at one place of the common order of all processes.

    Attributes:
        phase: the phase of a pass; of the pass that sends, if this process receives.
        stage: the stage of this process that runs the pass, or receives for a later one.
        part: the number of the unit among this process's units.
        receives: whether it begins to receive, instead of running the pass.
    """

    phase: Phase
    stage: int
    part: int
    receives: bool


@dataclass(frozen=True)
class Units:
    """The order of the passes of stages with different numbers of replicas.

    Each of U pipelines runs one unit of every micro-batch. Two replicas, then one::

        pipeline 0      process 0 ──▶ process 2
        pipeline 1      process 1 ──▶ process 2

    All processes go through one list of the passes of all units, such as this one with one
    micro-batch (letters are backward passes). A process sends right after its pass, and at that
    same place of the list the receiver begins to receive::

        list            0.0     0.1     1.0     1.1     1.a     1.b     0.a     0.b
        process 0       run 0                           get a           run a
        process 1               run 1                           get b           run b
        process 2       get 0   get 1   run 0   run 1   run a   run b

    So messages have the same order in all processes. No process waits for a message that another
    one sends or receives later, even if a message cannot leave before its receiver is ready.

    Attributes:
        schedule: one of ``SCHEDULES``.
        chains: for each pipeline, the rank of each device in the line.
        rank: of this process.
        chunks: micro-batches in a batch.
        rounds: stages on each device.
        room: for each stage, the maximum number of micro-batches in flight, see
            ``placer.schedule.plan``; another number of entries than stages has no effect.
    """

    schedule: str
    chains: Sequence[Sequence[int]]
    rank: int
    chunks: int
    rounds: int
    room: Sequence[int] = ()

    @property
    def own(self) -> list[int]:
        """The pipelines that this process is part of."""
        return [unit for unit, ranks in enumerate(self.chains) if self.rank in ranks]

    def passes(self, training: bool) -> Iterator[tuple[Pass, int]]:
        """Yield every pass of a micro-batch and its unit, after all passes that it depends on.

        Replicas take turns, as in one process.
        """
        devices = len(self.chains[0])
        # a pass takes as long as there are units on a device
        share = [self._rounds_of(position) for position in range(devices)]
        places = [stage % devices for stage in range(devices * self.rounds)]
        found = plan(
            self.schedule,  # type: ignore[arg-type]
            places,
            self.chunks,
            forward_ms=[len(share[place]) for place in places],
            room=self.room if len(self.room) == len(places) else None,
            training=training,
        )
        for item in found.issue:
            for units in share[places[item.stage]]:
                yield from ((item, unit) for unit in units)
                if item.phase == "backward" and splits(self.schedule) and not found.split:
                    yield from ((item._replace(phase="weights"), unit) for unit in units)

    def turns(self, training: bool) -> list[Turn]:
        """Return what this process does, in order."""
        own = self.own
        devices = len(self.chains[0])
        stages = devices * self.rounds
        found = []
        for (stage, phase, chunk), unit in self.passes(training):
            # the stage that receives the results of the pass
            to = {"forward": stage + 1, "backward": stage - 1, "weights": -1}[phase]
            for index in (stage, to):
                if 0 <= index < stages and self.chains[unit][index % devices] == self.rank:
                    part = chunk * len(own) + own.index(unit)
                    found.append(Turn(phase, index, part, receives=index == to))
        return found

    def _rounds_of(self, position: int) -> list[list[int]]:
        """Return which units run at one time, one on each replica of a stage."""
        by_rank: dict[int, list[int]] = {}
        for unit, ranks in enumerate(self.chains):
            by_rank.setdefault(ranks[position], []).append(unit)
        return [list(units) for units in zip(*by_rank.values(), strict=True)]


class UnitSchedule(PipelineScheduleMulti):
    """A schedule of stages that have different numbers of replicas, see ``Units``.

    Args:
        units: the order of passes.
        stages: of this process, in order; their group has all processes.
        loss: as for ``make``.
    """

    def __init__(
        self, units: Units, stages: Sequence[ReportingStage], loss: Callable[..., Tensor] | None
    ) -> None:
        own = units.own
        super().__init__(
            list(stages),
            n_microbatches=units.chunks * len(own),
            loss_fn=loss,
            scale_grads=False,
        )
        self._turns = units.turns(loss is not None)
        self._split = splits(units.schedule)
        # for each unit of a micro-batch, the process of every stage
        self._routes = [
            {index: ranks[index % len(ranks)] for index in range(len(ranks) * units.rounds)}
            for ranks in (units.chains[unit] for unit in own)
        ]
        for stage in stages:
            stage.units = len(own)

    def _step_microbatches(  # type: ignore[override]
        self,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        losses: Any = None,
        return_outputs: bool = True,
        **_: Any,
    ) -> None:
        """Run all passes of one batch; the library calls it from ``step``."""
        # the library has no annotations
        library, stages = cast(Any, self), {stage.stage_index: stage for stage in self._stages}
        arg_mbs, kwarg_mbs = library._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        library._initialize_stages(arg_mbs[0], kwarg_mbs[0])
        arriving: dict[Turn, list[dist.Work]] = {}
        sent: deque[dist.Work] = deque()
        for turn in self._turns:
            # messages that have arrived need no memory any more
            while sent and sent[0].is_completed():
                sent.popleft().wait()
            stage, part = stages[turn.stage], turn.part
            stage.stage_index_to_group_rank = self._routes[part % len(self._routes)]
            if turn.receives:
                is_forward = turn.phase == "forward"
                receive = stage.get_fwd_recv_ops if is_forward else stage.get_bwd_recv_ops
                arriving[turn] = _begun(receive(part))
                continue
            for work in arriving.pop(turn._replace(receives=True), ()):
                work.wait()
            if turn.phase == "forward":
                output = stage.forward_one_chunk(
                    part, arg_mbs[part], kwarg_mbs[part], save_forward_output=return_outputs
                )
                library._maybe_compute_loss(stage, output, target_mbs, part)
                sent += _begun(stage.get_fwd_send_ops(part))
            elif turn.phase == "backward":
                stage.backward_one_chunk(
                    part,
                    loss=library._maybe_get_loss(stage, part),
                    full_backward=not self._split,
                    last_backward=part == self._n_microbatches - 1,
                )
                sent += _begun(stage.get_bwd_send_ops(part))
            else:
                stage.backward_weight_one_chunk(part)
        while sent:
            sent.popleft().wait()
        library._update_losses(self._stages, losses)


def _begun(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []
