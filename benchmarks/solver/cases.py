"""The cases by name, each a row; the first word of a name is its group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from placer.schema import Constraints, Placement, PlacementRequest
from placer.solver import costs
from placer.solver.problem import Problem
from placer.solver.solve import Portfolio, solve

from .. import record
from . import chain, latency, models, neurips20, peers, pipedream, replicated
from .rows import Wanted, measured, peak_mib

LIMIT_S = 20.0
LONG_LIMIT_S = 60.0
MODEL_LIMIT_S = 10.0
CHAIN_LIMIT_S = 30.0
REPLICAS_LIMIT_S = 10.0
MANY_REPLICAS_LIMIT_S = 30.0
TIGHT = 0.85
REPEATS = 20
CONTIGUOUS = Constraints(contiguous=True)
FREE = Constraints(contiguous=False)


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        group: the group that selects it.
        name: the name of the case.
        run: measures the case.
    """

    group: str
    name: str
    run: Callable[[str], dict[str, Any]]

    def row(self) -> dict[str, Any]:
        """Run it in this process."""
        return self.run(self.name)


def every() -> dict[str, Case]:
    """Return all cases by name."""
    cases = [
        *_published(),
        *_free(),
        *_latency(),
        *_profiles(),
        *_models(),
        *_memory(),
        *_steps(),
        *_replicas(),
        *_by_stage(),
        *_chains(),
    ]
    return {case.name: case for case in cases}


def groups() -> list[str]:
    """Return the names of all groups."""
    return list(dict.fromkeys(case.group for case in every().values()))


def _published() -> Iterator[Case]:
    """Return the NeurIPS 2020 inputs, contiguous, at the published objective.

    The target is the known optimum.
    """
    ways = (
        ("contiguous", neurips20.OPTIMA, lambda given: given, 1.0),
        ("16 devices, contiguous", neurips20.OPTIMA_ON_16, neurips20.on_16, 3.0),
        ("tight, contiguous", neurips20.OPTIMA_WHEN_TIGHT, neurips20.tight, 1.0),
    )
    for name in neurips20.OPTIMA:
        for text, known, changed, proven_s in ways:
            wanted = Wanted(known[name], proven_s=proven_s)
            yield Case(
                "contiguous",
                f"neurips20 {name}, {text}",
                partial(_graph, name, changed, True, LIMIT_S, wanted),
            )


def _free() -> Iterator[Case]:
    """Return the NeurIPS 2020 inputs without contiguity; the target is the best that is known."""
    for name, known in neurips20.BEST_WHEN_FREE.items():
        wanted = Wanted(known, gap=5.0)
        run = partial(_graph, name, lambda given: given, False, LONG_LIMIT_S, wanted)
        yield Case("free", f"neurips20 {name}, free", run)


def _graph(
    name: str,
    changed: Callable[[dict[str, Any]], dict[str, Any]],
    contiguous: bool,
    limit_s: float,
    wanted: Wanted,
    case: str,
) -> dict[str, Any]:
    given = changed(neurips20.load(name))

    def problem() -> Problem:
        return replace(neurips20.problem(given, limit_s), contiguous=contiguous)

    return measured(
        case,
        "bottleneck",
        lambda: Portfolio(problem()).answer(),
        wanted,
        value=lambda placement: neurips20.bottleneck(
            given, placement.layer_devices, contiguous=contiguous
        ),
        peers=lambda: peers.values(problem()),
    )


def _latency() -> Iterator[Case]:
    """Return the NeurIPS 2020 inputs at their latency; the target is the best that is known."""
    for name, known in latency.BEST.items():
        wanted = Wanted(known, gap=50.0)
        yield Case("latency", f"neurips20 {name}, latency", partial(_way, name, wanted))


def _way(name: str, wanted: Wanted, case: str) -> dict[str, Any]:
    given = latency.load(name)
    return measured(
        case,
        "latency",
        lambda: latency.solve(given, LONG_LIMIT_S),
        wanted,
        value=lambda placement: latency.latency_ms(given, placement.layer_devices),
    )


def _profiles() -> Iterator[Case]:
    """Return the PipeDream profiles as training requests over 10 GB/s links.

    This objective has no published values.
    """
    for name in pipedream.NAMES:
        for devices in (4, 8, 16):
            hard = name == "nasnetamobile" and devices < 16
            asked = partial(
                pipedream.request,
                name,
                devices,
                constraints=CONTIGUOUS,
                time_limit_s=LONG_LIMIT_S if hard else LIMIT_S,
            )
            wanted = Wanted(gap=5.0, time_s=LONG_LIMIT_S + 1) if hard else Wanted(proven_s=2.0)
            case = f"pipedream {name}, {devices} devices, training, contiguous"
            yield Case("pipedream", case, partial(_request, asked, wanted))
    for name in ("gnmt_large", "resnet101"):
        asked = partial(pipedream.request, name, 8, constraints=FREE, time_limit_s=LIMIT_S)
        case = f"pipedream {name}, 8 devices, training, free"
        yield Case("pipedream", case, partial(_request, asked, Wanted(gap=5.0)))


def _models() -> Iterator[Case]:
    """Return real models split into leaves, in training, on eight unlike devices of two hosts."""
    for name in models.names():
        asked = partial(models.request, name, time_limit_s=MODEL_LIMIT_S)
        wanted = Wanted(gap=2.0, time_s=MODEL_LIMIT_S + 1)
        yield Case(
            "models", f"model {name}, 8 unlike devices, training", partial(_request, asked, wanted)
        )
    for name in models.names():
        asked = partial(models.roomy, name, time_limit_s=MODEL_LIMIT_S)
        case = f"model {name}, 8 unlike devices with memory to spare, training"
        yield Case("models", case, partial(_request, asked, wanted))
        asked = partial(models.roomy, name, constraints=FREE, time_limit_s=MODEL_LIMIT_S)
        yield Case("models", f"{case}, free", partial(_request, asked, Wanted()))


def _memory() -> Iterator[Case]:
    """Return the same models where memory binds.

    The largest stage no longer fits, with recompute or without.
    """
    for name in ("inception", "resnet50", "unet"):
        for recompute in ("never", "auto"):
            asked = partial(models.tight, name, TIGHT, recompute, time_limit_s=MODEL_LIMIT_S)
            case = (
                f"model {name}, 8 unlike devices, training, "
                f"{TIGHT:.0%} of the largest stage, recompute {recompute}"
            )
            yield Case("memory", case, partial(_request, asked, Wanted()))


def _request(asked: Callable[[], PlacementRequest], wanted: Wanted, case: str) -> dict[str, Any]:
    request = asked()

    def others() -> dict[str, float | None]:
        return peers.values(Problem.from_request(request))

    return measured(case, "bottleneck", lambda: solve(request), wanted, peers=others)


def _steps() -> Iterator[Case]:
    """Return whole batches: joint schedule and map, next to the best bottleneck's map in 1F1B."""
    requests: dict[str, Callable[..., PlacementRequest]] = {
        f"pipedream {name}, 8 devices": partial(pipedream.request, name, 8)
        for name in ("gnmt_large", "resnet101")
    }
    requests["chain of 50 layers, 8 devices"] = partial(chain.request, 50, 8)
    for name, made in requests.items():
        asked = partial(made, chunks=16, time_limit_s=LIMIT_S, constraints=CONTIGUOUS)
        yield Case("steps", f"{name}, 16 micro-batches, training", partial(_step, asked))
    for name in models.names():
        asked = partial(models.alike, name, time_limit_s=MODEL_LIMIT_S)
        case = (
            f"model {name}, 8 alike devices with memory to spare, "
            f"{models.CHUNKS} micro-batches, training"
        )
        yield Case("steps", case, partial(_step, asked))
    case = "model gpt2 with split embeddings, 8 alike devices with memory to spare"
    yield Case(
        "steps",
        f"{case}, {models.CHUNKS} micro-batches, training",
        partial(_step, partial(models.split, "gpt2", time_limit_s=MODEL_LIMIT_S)),
    )


def _step(made: Callable[[], PlacementRequest], case: str) -> dict[str, Any]:
    asked = made().model_copy(update={"objective": "step", "schedule": "auto"})

    def others() -> dict[str, float | None]:
        return {"smallest bottleneck, then 1F1B": _bottleneck_first(asked)}

    return measured(case, "step", lambda: solve(asked), Wanted(), peers=others)


def _bottleneck_first(asked: PlacementRequest) -> float | None:
    """Return the step of the map with the smallest bottleneck, under 1F1B."""
    overlapped = {"objective": "throughput", "schedule": "1f1b", "transfers": "overlapped"}
    placement = solve(asked.model_copy(update=overlapped))
    problem = Problem.from_request(asked.model_copy(update={"schedule": "1f1b"}))
    index = {device.name: number for number, device in enumerate(problem.devices)}
    result = costs.evaluate(problem, [index[name] for name in placement.layer_devices.values()])
    return None if result is None else result.objective_value


def _replicas() -> Iterator[Case]:
    """Return requests whose stages may have replicas.

    By steps: PipeDream's profiles and the models, on hosts of four devices. By bottleneck: the
    profiles on hosts of one device, as PipeDream's optimizer also plans them.
    """
    wanted = Wanted(gap=2.0, time_s=REPLICAS_LIMIT_S + 1)
    limit = {"time_limit_s": REPLICAS_LIMIT_S}
    for devices in (4, 8, 16):
        for name in pipedream.NAMES:
            asked = partial(replicated.of_profile, name, devices, **limit)
            case = f"pipedream {name}, replicas on {devices} devices, step"
            yield Case("replicas", case, partial(replicated.row, asked, wanted))
            alone = {"per_host": 1, "objective": "throughput", "schedule": "1f1b"}
            asked = partial(asked, **alone, step_kind="isolated")
            case = f"pipedream {name}, replicas on {devices} devices, bottleneck"
            yield Case("replicas", case, partial(replicated.row_of_profile, asked, wanted))
        for name in models.names():
            asked = partial(replicated.of_model, name, devices, **limit)
            case = f"model {name}, replicas on {devices} devices, step"
            yield Case("replicas", case, partial(replicated.row, asked, wanted))
    wanted = Wanted(gap=2.0, time_s=MANY_REPLICAS_LIMIT_S + 1)
    many = {"per_host": 64, "time_limit_s": MANY_REPLICAS_LIMIT_S}
    for name in pipedream.NAMES:
        asked = partial(replicated.of_profile, name, 64, **many)
        case = f"pipedream {name}, replicas on 64 devices, step"
        yield Case("replicas", case, partial(replicated.row, asked, wanted))


def _by_stage() -> Iterator[Case]:
    """Return requests whose stages may each have a number of replicas of their own.

    They have one device per host, and an exchange for each micro-batch, as in PipeDream.
    """
    wanted = Wanted(gap=2.0, time_s=REPLICAS_LIMIT_S + 1)
    planned = [("vgg16", 4), ("vgg16", 8), ("vgg16", 16), ("gnmt_large", 16), ("resnet101", 16)]
    for name, devices in planned:
        asked = partial(replicated.by_stage, name, devices, time_limit_s=REPLICAS_LIMIT_S)
        case = f"pipedream {name}, replicas by stage on {devices} devices, bottleneck"
        yield Case("by-stage", case, partial(replicated.row_by_stage, asked, wanted))


def _chains() -> Iterator[Case]:
    """Yield the time of an easy answer, and the gap with very many layers."""
    yield Case("overhead", "chain of 50 layers, 4 devices, training", _overhead)
    asked = partial(chain.request, 10_000, 64, memory_bytes=2**40, time_limit_s=CHAIN_LIMIT_S)
    wanted = Wanted(gap=1.0, time_s=CHAIN_LIMIT_S, peak_mib=2048)
    yield Case(
        "large", "chain of 10,000 layers, 64 devices, training", partial(_request, asked, wanted)
    )


def _overhead(case: str) -> dict[str, Any]:
    """Return the time from request to checked answer, after import."""
    request = chain.request(50, 4)
    solve(request)
    times: list[float] = []
    for _ in range(REPEATS):
        began = perf_counter()
        placement: Placement = solve(request)
        times.append(1e3 * (perf_counter() - began))
    assert placement.status == "optimal"
    spread = (round(min(times), 2), round(max(times), 2))
    return record.row(
        case,
        "request to checked answer",
        "ms",
        round(median(times), 2),
        spread=spread,
        target=100.0,
        figures={"peak, MiB": round(peak_mib())},
    )
