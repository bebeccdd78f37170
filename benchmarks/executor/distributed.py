"""Peer: torch.distributed.pipelining, 1F1B, one process a device, its stages made by hand."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import ProcessException, spawn

from placer import devices

from . import cases, parts, timing
from .cases import Training
from .sample import Sample, append, attempt, read, reason

ENGINE = "torch.distributed"


def train(case: Training) -> Iterator[Sample]:
    """At each number of devices and micro-batches, in as many processes as there are devices."""
    with tempfile.TemporaryDirectory() as folder:
        found, meeting = Path(folder) / "samples", Path(folder) / "meeting"
        world = cases.counts()[0]
        given = (world, case.name, str(found), str(meeting))
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
            yield Sample(case.name, ENGINE, world, 0, failed=died)


def work(rank: int, world: int, name: str, found: str, meeting: str) -> None:
    """One process: joins the others, then runs its stage of every pipeline that it belongs to."""
    cases.prepare()
    place = cases.places(world)[rank]
    if place.type == "cuda":
        torch.cuda.set_device(place)
    backend = "nccl" if place.type == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world)
    groups = {count: distributed.new_group(list(range(count))) for count in cases.counts()}
    case = cases.training(name)
    for count, group in groups.items():
        if rank >= count:
            break
        ends: list[int] = []
        for chunks in case.tried(count):
            sample = attempt(name, ENGINE, count, chunks, partial(_step_times, case, chunks, place, group, ends))
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
    case: Training, chunks: int, place: torch.device, group: Any, ends: list[int]
) -> dict[str, list[float]]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, count = distributed.get_rank(), distributed.get_world_size(group)
    here = torch.device("cpu") if place.type == "cpu" else place
    inputs, target = case.batch(here)
    chain = parts.units(case.model(here))
    if not ends:
        ends.extend(_agreed_cuts(chain, inputs, count, group))
    module = parts.cut(chain, ends)[rank]
    del chain
    stage = PipelineStage(module, rank, count, here, group=group)
    schedule = Schedule1F1B(stage, n_microbatches=chunks, loss_fn=case.loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
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


def _agreed_cuts(chain: Sequence[nn.Module], inputs: Tensor, count: int, group: Any) -> list[int]:
    """Parts of equal time, as the first process measures it."""
    measured = distributed.get_rank() == 0
    found = [parts.cuts(parts.unit_ms(chain, inputs[: len(inputs) // 2]), count) if measured else []]
    distributed.broadcast_object_list(found, src=0, group=group)
    return found[0]


def _timed(step: Any, place: torch.device, group: Any) -> dict[str, list[float]]:
    """As ``timing.steps``, for a step in which every process of the group takes part."""
    times = []
    for index in range(timing.WARM_UPS + timing.REPEATS):
        devices.synchronise(place)
        distributed.barrier(group=group)
        devices.synchronise(place)
        began = perf_counter()
        step()
        devices.synchronise(place)
        distributed.barrier(group=group)
        devices.synchronise(place)
        if index >= timing.WARM_UPS:
            times.append(1e3 * (perf_counter() - began))
    return {"step_ms": times}
