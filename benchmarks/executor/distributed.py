"""torch.distributed.pipelining, one process a device: with stages made by hand, a peer, and as Placer places them."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import ProcessException, spawn

import placer
from placer import Placement, devices

from . import cases, ours, parts, timing
from .cases import Training
from .sample import Sample, append, attempt, read, reason

ENGINE = "torch.distributed"
INTERLEAVED = "torch.distributed interleaved"
ZERO_BUBBLE = "torch.distributed zero-bubble"
PLACED = "placer.distributed"
"""``placer.distributed``: the same library, with Placer's stages."""

ROUNDS = {INTERLEAVED: 2}
"""Stages that a device has; 1 of the others."""


@dataclass(frozen=True)
class Turn:
    """What all processes run together.

    Attributes:
        engine: the schedule, or ``PLACED``.
        devices: how many of them take part.
        chunks: micro-batches.
    """

    engine: str
    devices: int
    chunks: int


def train(case: Training) -> Iterator[Sample]:
    """The peer: each schedule at each number of devices and micro-batches, in a process for each device."""
    return together(case, _turns(case, (ENGINE, INTERLEAVED, ZERO_BUBBLE)))


def placed(case: Training) -> Iterator[Sample]:
    """The same by ``placer.distributed``, with the zero-bubble schedule, on a solved placement."""
    return together(case, _turns(case, (PLACED,)))


def _turns(case: Training, engines: Sequence[str]) -> list[Turn]:
    counts = cases.counts()
    return [Turn(engine, count, chunks) for engine in engines for count in counts for chunks in case.tried(count)]


def together(case: Training, turns: Sequence[Turn]) -> Iterator[Sample]:
    """A sample of each turn; where one fails, its processes end with it, and others go on with the next one."""
    while turns:
        done: set[int] = set()
        for sample in _world(case, turns):
            index = turns.index(Turn(sample.engine, sample.devices, sample.chunks))
            if index not in done:  # a failure that a second process tells of is one
                done.add(index)
                yield sample
        turns = turns[1 + max(done) :]


def _world(case: Training, turns: Sequence[Turn]) -> Iterator[Sample]:
    """The samples of the processes of one start, which end with the first turn that fails."""
    with tempfile.TemporaryDirectory() as folder:
        found, meeting = Path(folder) / "samples", Path(folder) / "meeting"
        world = cases.counts()[0]
        given = (world, case.name, tuple(turns), str(found), str(meeting))
        context = spawn(work, given, nprocs=world, join=False)  # type: ignore[no-untyped-call]
        handed_on, ended, died = 0, False, ""
        while not ended:
            try:
                ended = context.join(timeout=0.5)
            except ProcessException as error:
                ended, died = True, reason(error)
            samples = list(read(found))
            yield from samples[handed_on:]
            handed_on = len(samples)
        if died and not any(sample.failed for sample in samples):
            turn = turns[min(len(samples), len(turns) - 1)]
            yield Sample(case.name, turn.engine, turn.devices, turn.chunks, failed=died)


def work(rank: int, world: int, name: str, turns: Sequence[Turn], found: str, meeting: str) -> None:
    """One process: joins the others, then runs its stages of every pipeline that it belongs to."""
    cases.prepare()
    os.environ["LOCAL_RANK"] = str(rank)
    place = cases.places(world)[rank]
    if place.type == "cuda":
        torch.cuda.set_device(place)
    backend = "nccl" if place.type == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world)
    groups = {count: distributed.new_group(list(range(count))) for count in cases.counts()}
    case = cases.training(name)
    times: dict[int, list[float]] = {}
    for turn in turns:
        if rank >= turn.devices:
            continue
        given = (case, turn.chunks, place, groups[turn.devices])
        run: Callable[[], dict[str, list[float]]] = (
            partial(_placed_times, *given, Path(f"{found}.{turn.devices}.{turn.chunks}"))
            if turn.engine == PLACED
            else partial(_step_times, *given, turn.engine, times.setdefault(turn.devices, []))
        )
        sample = attempt(name, turn.engine, turn.devices, turn.chunks, run)
        if rank == 0 or sample.failed:
            append(sample, Path(found))
        if sample.failed:  # the others wait for this process: nothing more can be had
            os._exit(1)
    _meet(rank, Path(f"{found}.all"))
    distributed.destroy_process_group()


def _meet(rank: int, path: Path) -> None:
    """Wait until the first process, which is in every pipeline, has run them all: communicators end together."""
    if rank == 0:
        path.touch()
    while not path.exists():
        sleep(0.1)


def _step_times(
    case: Training, chunks: int, place: torch.device, group: Any, engine: str, times: list[float]
) -> dict[str, list[float]]:
    from torch.distributed.pipelining import PipelineStage

    rank, count = distributed.get_rank(), distributed.get_world_size(group)
    here = torch.device("cpu") if place.type == "cpu" else place
    inputs, target = case.batch(here)
    chain = parts.units(case.model(here))
    if not times:
        times.extend(_agreed_times(chain, inputs, group))
    number = count * ROUNDS.get(engine, 1)
    modules = [_Part(part) for part in parts.cut(chain, parts.cuts(times, number))[rank::count]]
    del chain
    stages = [
        PipelineStage(module, rank + turn * count, number, here, group=group) for turn, module in enumerate(modules)
    ]
    schedule = _schedule(engine, stages, chunks, case.loss)
    optimizer = torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=1e-3)
    options: dict[str, Any] = {}
    if "return_outputs" in inspect.signature(schedule.step).parameters:
        options["return_outputs"] = False

    def step() -> None:
        optimizer.zero_grad()
        given = (inputs,) if rank == 0 else ()
        last: dict[str, Any] = {"target": target, "losses": []} if rank == count - 1 else {}
        schedule.step(*given, **last, **options)
        optimizer.step()

    return _timed(step, here, group)


class _Part(nn.Module):
    """A part of a chain, as the library calls its stages: the tensors of a tuple one by one, all of them contiguous."""

    def __init__(self, chain: nn.Sequential) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, *values: Tensor) -> parts.Value:
        values = tuple(_with_contiguous_gradient(value) for value in values)
        made = self.chain(values if len(values) > 1 else values[0])
        return tuple(value.contiguous() for value in made) if isinstance(made, tuple) else made.contiguous()


def _with_contiguous_gradient(value: Tensor) -> Tensor:
    """The gradient of a tensor that was joined with others is a view of theirs, which cannot be sent."""
    if value.requires_grad:
        value = value.view_as(value)
        value.register_hook(lambda gradient: gradient.contiguous())  # type: ignore[no-untyped-call]
    return value


def _schedule(engine: str, stages: Sequence[Any], chunks: int, loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

    if engine == ENGINE:
        return Schedule1F1B(stages[0], n_microbatches=chunks, loss_fn=loss)
    several = ScheduleInterleaved1F1B if engine == INTERLEAVED else ScheduleInterleavedZeroBubble
    return several(list(stages), n_microbatches=chunks, loss_fn=loss)


def _agreed_times(chain: Sequence[nn.Module], inputs: Tensor, group: Any) -> list[float]:
    """The time of each module, as the first process measures it."""
    measured = distributed.get_rank() == 0
    found = [parts.unit_ms(chain, inputs[: len(inputs) // 2]) if measured else []]
    distributed.broadcast_object_list(found, src=0, group=group)
    return found[0]


def _placed_times(case: Training, chunks: int, place: torch.device, group: Any, path: Path) -> dict[str, list[float]]:
    """As ``_step_times``, on the placement that the first process makes."""
    here = torch.device("cpu") if place.type == "cpu" else place
    model = case.model(here).cpu()
    inputs, target = case.batch(here)
    if distributed.get_rank() == 0:
        count = distributed.get_world_size(group)
        _hand_on(ours.placed(ours.measured(model, inputs, chunks), count, chunks).to_json(), path)
    placement = Placement.model_validate_json(_handed_on(path))
    example = inputs[: len(inputs) // chunks]
    pipeline = placer.distributed.build(model, placement, example, case.loss, schedule="zero-bubble", group=group)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        pipeline.step(inputs, target)
        optimizer.step()

    return _timed(step, pipeline.device, group)


def _hand_on(text: str, path: Path) -> None:
    """Give a text to all processes, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def _handed_on(path: Path) -> str:
    """The text, once it is there. Who waits for it in a collective keeps a GPU busy, on which there is measuring."""
    while not path.exists():
        sleep(0.1)
    return path.read_text()


def _timed(step: Any, place: torch.device, group: Any) -> dict[str, list[float]]:
    """As ``timing.in_a_row``, for a step in which every process of the group takes part."""

    def meet() -> None:
        devices.synchronise(place)
        distributed.barrier(group=group)
        devices.synchronise(place)

    for _ in range(timing.WARM_UPS):
        step()
    times: dict[str, list[float]] = {"alone_ms": [], "step_ms": []}

    def time(measure: str, count: int) -> None:
        for _ in range(timing.FEWEST):
            meet()
            began = perf_counter()
            for _ in range(count):
                step()
            meet()
            times[measure].append(1e3 * (perf_counter() - began) / count)

    time("alone_ms", 1)
    count = torch.tensor(timing.row_of(times["alone_ms"]), device=place)
    distributed.broadcast(count, src=0, group=group)  # all go the same number of steps
    time("step_ms", int(count))
    return times
