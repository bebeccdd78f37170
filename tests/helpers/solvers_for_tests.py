"""Solvers that the service's tests inject; workers import them by name."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from placer.errors import InputError
from placer.schema import Placement, PlacementRequest
from placer.solver.solve import Incumbent


def _all_on_first(request: PlacementRequest, **fields: Any) -> Placement:
    device = request.devices[0].name
    devices = {layer.name: device for layer in request.profile.layers}
    values = {"status": "optimal", "objective_value": 1.0, "layer_devices": devices, **fields}
    return Placement(objective=request.objective, **values)


def quick(
    request: PlacementRequest, *, progress: Any = None, stop: threading.Event | None = None
) -> Placement:
    return _all_on_first(request, method=f"process {os.getpid()}")


def until_stopped(
    request: PlacementRequest, *, progress: Any = None, stop: threading.Event | None = None
) -> Placement:
    """Finds something at once, and goes on until it is stopped."""
    assert stop is not None
    found = _all_on_first(request, status="feasible", objective_value=7.0, bound=3.0)
    progress(Incumbent(7.0, bound=3.0, time_s=0.0, placement=lambda: found))
    stop.wait(60)
    return found


def deaf(
    request: PlacementRequest, *, progress: Any = None, stop: threading.Event | None = None
) -> Placement:
    """Does not listen when it is told to stop."""
    time.sleep(60)
    return _all_on_first(request)


def lost(
    request: PlacementRequest, *, progress: Any = None, stop: threading.Event | None = None
) -> Placement:
    """Finds, as Placer's solver does, and then ends as its model is called: deaf, dying, or out of
    memory."""
    from placer.solver.solve import solve

    told: list[Incumbent] = []
    solve(request, progress=told.append)
    last = told[-1]
    if request.profile.model.endswith("wrong"):
        wrong = last.placement().model_copy(
            update={"objective_value": 0.001, "bound": 0.0, "gap": 1.0}
        )
        last = Incumbent(last.objective_value, last.bound, last.time_s, lambda: wrong)
    progress(last)
    time.sleep(0.5)  # what is told is made in another thread
    if request.profile.model.startswith("dying"):
        os.kill(os.getpid(), 9)
    if request.profile.model.startswith("out of memory"):
        raise MemoryError
    time.sleep(60)
    return _all_on_first(request)


def talkative(
    request: PlacementRequest, *, progress: Any = None, stop: threading.Event | None = None
) -> Placement:
    """Tells without a pause, and does not listen when it is told to stop."""
    found = _all_on_first(request)
    until_s = time.monotonic() + 3
    while time.monotonic() < until_s:
        progress(Incumbent(7.0, bound=3.0, time_s=0.0, placement=lambda: found))
    return found


def dying(
    request: PlacementRequest, *, progress: Any = None, stop: threading.Event | None = None
) -> Placement:
    """Dies where the seed is odd, as a process does that runs out of memory."""
    if request.seed % 2:
        os.kill(os.getpid(), 9)
    return _all_on_first(request)


def failing(
    request: PlacementRequest, *, progress: Any = None, stop: threading.Event | None = None
) -> Placement:
    raise RuntimeError("a defect " + "x" * 10_000)


def refusing(
    request: PlacementRequest, *, progress: Any = None, stop: threading.Event | None = None
) -> Placement:
    raise InputError("layer 'a' cannot be placed for a reason that only the solver sees")


def cluster_of_one(payload: bytes, report: Any, stop: threading.Event) -> bytes:
    return b'{"devices": [{"name": "cpu:0", "type": "cpu", "memory_bytes": 1}]}'


def cluster_without_torch(payload: bytes, report: Any, stop: threading.Event) -> bytes:
    from placer.errors import MissingExtraError

    raise MissingExtraError("torch is not installed here: pip install 'torch-placer[torch]'")


def cluster_that_fails(payload: bytes, report: Any, stop: threading.Event) -> bytes:
    raise RuntimeError("no driver")


def slow_start(
    request: PlacementRequest, *, progress: Any = None, stop: threading.Event | None = None
) -> Placement:
    """Waits to be killed the first time, and answers the second; its incumbent is its process."""
    mark = (
        Path(tempfile.gettempdir()) / f"placer-slow-start-{os.getppid()}-{request.content_hash()}"
    )
    if mark.exists():
        mark.unlink()
        return _all_on_first(request)
    mark.touch()
    found = _all_on_first(request)
    progress(Incumbent(float(os.getpid()), bound=0.0, time_s=0.0, placement=lambda: found))
    time.sleep(60)
    return found


def noted(
    request: PlacementRequest, *, progress: Any = None, stop: threading.Event | None = None
) -> Placement:
    """Takes a moment, and adds a line to the file that the model is named after."""
    assert stop is not None
    with open(request.profile.model, "a") as notes:
        notes.write(f"{request.seed}\n")
    stop.wait(0.3)
    return _all_on_first(request, status="feasible" if stop.is_set() else "optimal")


def noted_until_released(
    request: PlacementRequest, *, progress: Any = None, stop: threading.Event | None = None
) -> Placement:
    """Add a line to the file that the model is named after; wait for ``release`` in its folder.

    End without a proof when stopped before.
    """
    assert stop is not None
    notes = Path(request.profile.model)
    with notes.open("a") as file:
        file.write(f"{request.seed}\n")
    release = notes.with_name("release")
    while not release.exists() and not stop.wait(0.01):
        pass
    return _all_on_first(request, status="optimal" if release.exists() else "feasible")


def greedy(
    request: PlacementRequest, *, progress: Any = None, stop: threading.Event | None = None
) -> Placement:
    """Takes 3 GiB."""
    return _all_on_first(request, method=str(len(bytearray(3 * 2**30))))


def torch_without_memory(payload: bytes, report: Any, stop: threading.Event) -> bytes:
    """Task of a worker that fails as torch does where the host has too little memory."""
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 68 GB")
