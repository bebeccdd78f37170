"""How good the solver's answers are, and how fast it proves them: published graphs, published profiles, and overhead.

Each search may take ``LIMIT_S``; a time is that until the proof, and None where none came.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import permutations
from statistics import median
from time import perf_counter
from typing import Any

from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, Placement, PlacementRequest, Profile
from placer.solver import costs, exact
from placer.solver.problem import Problem
from placer.solver.reduce import reduced
from placer.solver.solve import Search, solve

from .. import record
from . import neurips20, pipedream

LIMIT_S = 20.0
FREE_LIMIT_S = 60.0
ONE_ORDER = "DP over one topological order"
REPEATS = 20


def run() -> list[dict[str, Any]]:
    """Measure every row."""
    return [
        *_published_graphs(),
        *_published_free(),
        *_published_profiles(),
        *_free_profiles(),
        *_steps(),
        *_overhead(),
        *_large(),
    ]


def _published_graphs() -> Iterator[dict[str, Any]]:
    """The NeurIPS 2020 inputs, contiguous, at the published objective; the target is the known optimum."""
    for name in neurips20.OPTIMA:
        given = neurips20.load(name)
        yield from _published_graph(name, given, neurips20.OPTIMA[name], target_s=1.0)
        on_16 = neurips20.on_16(given)
        yield from _published_graph(f"{name}, 16 devices", on_16, neurips20.OPTIMA_ON_16[name], target_s=3.0)
        tight = neurips20.tight(given)
        yield from _published_graph(f"{name}, tight", tight, neurips20.OPTIMA_WHEN_TIGHT[name], target_s=1.0)


def _published_free() -> Iterator[dict[str, Any]]:
    """The NeurIPS 2020 inputs without contiguity; the target is the best that is known."""
    for name, known in neurips20.BEST_WHEN_FREE.items():
        problem = replace(neurips20.problem(neurips20.load(name), FREE_LIMIT_S), contiguous=False)
        began = perf_counter()
        placement = Search(problem).answer()
        time_s = perf_counter() - began
        value = neurips20.bottleneck(neurips20.load(name), placement.layer_devices)
        case = f"neurips20 {name}, free"
        met = value <= known * (1 + 2e-6)  # the known values are rounded so
        yield record.row(case, "bottleneck", "ms", value, target=known, met=met)
        yield from _proof(case, placement, time_s, target_s=FREE_LIMIT_S)


def _published_graph(name: str, given: Mapping[str, Any], optimum: float, target_s: float) -> Iterator[dict[str, Any]]:
    began = perf_counter()
    problem = neurips20.problem(given, LIMIT_S)
    placement = Search(problem).answer()
    time_s = perf_counter() - began
    value = neurips20.bottleneck(given, placement.layer_devices)
    case = f"neurips20 {name}, contiguous"
    near = abs(value - optimum) <= 2e-6 * optimum  # the known values are rounded so
    peer = {ONE_ORDER: _one_order(problem)}
    yield record.row(case, "bottleneck", "ms", value, target=optimum, met=value < optimum or near, peers=peer)
    yield from _proof(case, placement, time_s, target_s=target_s)


def _published_profiles() -> Iterator[dict[str, Any]]:
    """The PipeDream profiles as training requests over 10 GB/s; no values are known for this objective."""
    for name in pipedream.NAMES:
        for devices in (4, 8, 16):
            rules = Constraints(contiguous=True)
            request = pipedream.request(name, devices, constraints=rules, time_limit_s=LIMIT_S)
            began = perf_counter()
            placement = solve(request)
            time_s = perf_counter() - began
            case = f"pipedream {name}, {devices} devices, training, contiguous"
            peer = {ONE_ORDER: _one_order(Problem.from_request(request))}
            yield record.row(case, "bottleneck", "ms", placement.objective_value, peers=peer)
            yield from _proof(case, placement, time_s, target_s=2.0)


def _free_profiles() -> Iterator[dict[str, Any]]:
    """Two of them without contiguity, where the bound is the hard part."""
    for name in ("gnmt_large", "resnet101"):
        rules = Constraints(contiguous=False)
        placement = solve(pipedream.request(name, 8, constraints=rules, time_limit_s=LIMIT_S))
        case = f"pipedream {name}, 8 devices, training, free"
        yield record.row(case, "bottleneck", "ms", placement.objective_value)
        yield record.row(case, "gap", "%", None if placement.gap is None else 100 * placement.gap, target=5.0)


def _steps() -> Iterator[dict[str, Any]]:
    """Whole batches of 16 micro-batches: schedule and map together, against the best bottleneck's map under 1F1B."""
    rules = Constraints(contiguous=True)
    requests = {
        f"pipedream {name}, 8 devices": pipedream.request(name, 8, constraints=rules, time_limit_s=LIMIT_S)
        for name in ("gnmt_large", "resnet101")
    }
    requests["chain of 50 layers, 8 devices"] = _chain(50, 8).model_copy(update={"constraints": rules})
    for name, given in requests.items():
        asked = given.model_copy(
            update={"objective": "step", "schedule": "auto", "chunks": 16, "time_limit_s": LIMIT_S}
        )
        began = perf_counter()
        placement = solve(asked)
        time_s = perf_counter() - began
        case = f"{name}, 16 micro-batches, training"
        peer = {"smallest bottleneck, then 1F1B": _bottleneck_first(asked)}
        yield record.row(case, "step", "ms", placement.objective_value, peers=peer)
        yield record.row(case, "gap", "%", None if placement.gap is None else 100 * placement.gap)
        yield record.row(case, "input to checked answer", "s", round(time_s, 2))


def _bottleneck_first(asked: PlacementRequest) -> float | None:
    """The step of the map with the smallest bottleneck, under 1F1B."""
    overlapped = {"objective": "throughput", "schedule": "1f1b", "transfers": "overlapped"}
    placement = solve(asked.model_copy(update=overlapped))
    problem = Problem.from_request(asked.model_copy(update={"schedule": "1f1b"}))
    index = {device.name: number for number, device in enumerate(problem.devices)}
    result = costs.evaluate(problem, [index[name] for name in placement.layer_devices.values()])
    return None if result is None else result.objective_value


def _proof(case: str, placement: Placement, time_s: float, target_s: float) -> Iterator[dict[str, Any]]:
    gap = None if placement.gap is None else 100 * placement.gap
    yield record.row(case, "gap", "%", gap)
    proven = placement.status == "optimal"
    yield record.row(case, "input to proven answer", "s", round(time_s, 3) if proven else None, target=target_s)


def _one_order(problem: Problem) -> float | None:
    """What cutting the layers' one given order into stages reaches."""
    devices = exact.best_cut(problem, reduced(problem)).devices
    result = costs.evaluate(problem, devices) if devices is not None else None
    return None if result is None else result.objective_value


def _overhead() -> Iterator[dict[str, Any]]:
    """A chain of 50 layers on 4 devices, from request to checked answer, after import."""
    request = _chain(50, 4)
    solve(request)
    times = []
    for _ in range(REPEATS):
        began = perf_counter()
        placement = solve(request)
        times.append(1e3 * (perf_counter() - began))
    assert placement.status == "optimal"
    spread = (round(min(times), 2), round(max(times), 2))
    case = "chain of 50 layers, 4 devices, training"
    yield record.row(case, "request to checked answer", "ms", round(median(times), 2), spread=spread, target=100.0)


def _large() -> Iterator[dict[str, Any]]:
    """A chain of 10,000 layers on 64 devices: how close in half a minute."""
    request = _chain(10_000, 64, memory_bytes=2**40).model_copy(update={"time_limit_s": 30.0})
    began = perf_counter()
    placement = solve(request)
    time_s = perf_counter() - began
    case = "chain of 10,000 layers, 64 devices, training"
    yield record.row(case, "gap", "%", None if placement.gap is None else 100 * placement.gap, target=1.0)
    yield record.row(case, "input to checked answer", "s", round(time_s, 2), target=30.0)


def _chain(layers: int, devices: int, memory_bytes: int = 2**27) -> PlacementRequest:
    names = [f"device:{index}" for index in range(devices)]
    return PlacementRequest(
        profile=Profile(
            training=True,
            layers=tuple(
                Layer(
                    name=f"layer{i}",
                    forward_ms={"made up": 1.0 + i % 7},
                    backward_ms={"made up": 2.0 + i % 5},
                    param_bytes=1_000_000 * (1 + i % 3),
                    saved_bytes=2_000_000,
                )
                for i in range(layers)
            ),
            edges=tuple(
                Edge(source=f"layer{i}", targets=(f"layer{i + 1}",), bytes=1_000_000, gradient_bytes=1_000_000)
                for i in range(layers - 1)
            ),
        ),
        cluster=Cluster(
            devices=tuple(Device(name=name, type="made up", memory_bytes=memory_bytes) for name in names),
            links=tuple(Link(source=a, target=b, bandwidth_bytes_per_s=1e10) for a, b in permutations(names, 2)),
        ),
        chunks=8,
    )
