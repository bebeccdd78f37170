"""The cost of a new map: weights already on every device, and a gigabyte of weights to move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from time import perf_counter

import torch
from torch import nn

from placer import DataFlow

from . import cases, timing
from .sample import Sample, attempt

CASE = "switching"


def measure() -> Iterator[Sample]:
    """Yield samples of both kinds of ``update_flow``."""
    count = len(cases.places())
    yield attempt(CASE, "clones", count, 1, lambda: clones(100, cases.sized(32, 256)))
    yield attempt(CASE, "moves", count, 1, lambda: moves(60, cases.sized(64, 2048)))


def clones(layers: int, width: int) -> dict[str, list[float]]:
    """Time ``update_flow`` with ``enable_clone``, and the extra time of the first call after it."""
    model, x = _chain(layers, width), torch.randn(8, width, device=cases.home())
    flow = DataFlow(model, _names(), inference_only=True, enable_clone=True).eval()
    maps = _maps(layers, len(cases.places()))
    values: dict[str, list[float]] = {"switch_ms": [], "update_flow_ms": []}
    warm_ups = timing.repetitions().warm_ups
    with torch.no_grad():
        for index in range(warm_ups + cases.sized(3, 21)):
            flow.layer_gpus.update(zip(flow.layer_gpus, maps[index % 2], strict=True))
            timing.wait(cases.places())
            began = perf_counter()
            flow.update_flow()
            updated = 1e3 * (perf_counter() - began)
            flow(x)
            timing.wait(cases.places())
            first = 1e3 * (perf_counter() - began)
            steady = median(timing.steps(lambda: flow(x), cases.places(), 3)["step_ms"])
            if index >= warm_ups:
                values["switch_ms"].append(first - steady)
                values["update_flow_ms"].append(updated)
    return values


def moves(layers: int, width: int) -> dict[str, list[float]]:
    """Time ``update_flow`` to a map under which every layer changes its device."""
    model = _chain(layers, width)
    flow = DataFlow(model, _names())
    places = len(cases.places())
    forwards = [layer * places // layers for layer in range(layers)]
    maps = [forwards, [(place + 1) % places for place in forwards]]
    times, usual = [], timing.repetitions()
    for index in range(usual.warm_ups + usual.repeats):
        flow.layer_gpus.update(zip(flow.layer_gpus, maps[index % 2], strict=True))
        timing.wait(cases.places())
        began = perf_counter()
        flow.update_flow()
        timing.wait(cases.places())
        if index >= usual.warm_ups:
            times.append(1e3 * (perf_counter() - began))
    gigabytes = sum(item.numel() * item.element_size() for item in model.parameters()) / 1e9
    return {"move_ms": times, "gigabytes": [gigabytes]}


def _chain(layers: int, width: int) -> nn.Module:
    with cases.home():
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def _names() -> list[str]:
    return [str(place) for place in cases.places()]


def _maps(layers: int, places: int) -> list[Sequence[int]]:
    """Return two maps: equal stages in device order, and unequal stages in reverse order."""
    forwards = [layer * places // layers for layer in range(layers)]
    backwards = [places - 1 - int(places * (layer / layers) ** 2) for layer in range(layers)]
    return [forwards, backwards]
