"""Inference over a stream of batches: Placer, eager PyTorch on one device, and peers, in turns.

A stream is the case's batch, cut into equal batches, several times over. The batches are on the
first device. Results stay on the last layer's device, except with accelerate, which returns them to
the first. A time covers one batch of the case, without the drain at the stream's end. Each engine
counts at its best batch size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

from placer import DataFlow, Placement, Profile, profile
from placer.capture.pytrees import flatten

from . import cases, contest, ours, parts, timing, tutorial
from .cases import Training
from .contest import Contender
from .sample import Sample, reason, release

PREFIX = "stream-"
COMPILED = "compile-stream-"
NAMES = ("resnet101", "gpt")
DISPATCH = "accelerate"
ALONE = "torch.compile"
"""The engine that compiles the whole model on one device."""
EAGER = "eager"
ENGINES = (ours.ENGINE, tutorial.ENGINE, DISPATCH)
"""Eager PyTorch on one device always takes part beside them."""
TRIED = 2
"""Of our sizes, those that are run for each number of devices: the fastest by prediction."""
GRANULARITY = "fine"
"""Whole blocks cannot always be cut into parts of equal time: a cut may go through one."""
_WHOLE_BLOCKS = ["BasicBlock", "Bottleneck", "Block"]
"""Modules that accelerate is not to cut: what skips over their layers stays inside."""

Run = Callable[[Sequence[Tensor]], Any]


def measure(case: Training, count: int, engines: Sequence[str]) -> Iterator[Sample]:
    """Yield the samples of a contest.

    Args:
        case: the case whose batch is streamed.
        count: the number of devices.
        engines: the engines that take part, from ``ENGINES``.
    """
    cases.prepare()
    name, model = PREFIX + case.name, _model(case)
    engines, missing = contest.installed(name, count, engines)
    yield from missing
    divisors = _divisors()
    # An engine that runs one device after another gains nothing by smaller batches.
    whole = cases.sized((1,), (1, 2))
    makers: dict[str, Callable[[], list[Contender]]] = {
        EAGER: lambda: [
            _contender(EAGER, case, 1, pieces, _one_by_one(model)) for pieces in (1, *divisors)
        ],
        ours.ENGINE: partial(_ours, case, model, count),
        tutorial.ENGINE: lambda: [_split(case, count, pieces) for pieces in divisors],
        DISPATCH: lambda: [_dispatched(case, count, pieces) for pieces in whole],
    }
    yield from _contest(
        name, {engine: make for engine, make in makers.items() if engine in (EAGER, *engines)}
    )


def compiled(case: Training, count: int, backend: str) -> Iterator[Sample]:
    """Yield samples with and without the compiler, for Placer and for one device.

    Args:
        case: the streamed case.
        count: the number of devices.
        backend: the backend of ``torch.compile``.
    """
    cases.prepare()
    name, model = COMPILED + case.name, _model(case)
    sizes = _divisors()[:2]
    placements: list[Placement] = []

    def placed(engine: str, compile: str | bool) -> list[Contender]:
        if not placements:
            placements.extend(_fastest(case, _profiles(case, model, count), count)[:1])
        return [_streamed(engine, case, model, placements[0], count, compile)]

    def alone() -> list[Contender]:
        made: Any = torch.compile(copy.deepcopy(model), backend=backend, dynamic=False)
        return [_contender(ALONE, case, 1, pieces, _one_by_one(made)) for pieces in sizes]

    makers: dict[str, Callable[[], list[Contender]]] = {
        EAGER: lambda: [_contender(EAGER, case, 1, pieces, _one_by_one(model)) for pieces in sizes],
        ours.ENGINE: partial(placed, ours.ENGINE, False),
        "compiled": partial(placed, "compiled", backend),
        ALONE: alone,
    }
    yield from _contest(name, makers)


def _contest(name: str, makers: dict[str, Callable[[], list[Contender]]]) -> Iterator[Sample]:
    """Yield the samples of engines that take turns, each at its best batch size."""
    contenders = []
    for engine, make in makers.items():
        try:
            best, failed = contest.fastest(name, make())
        except Exception as error:
            best, failed = None, [Sample(name, engine, failed=reason(error))]
        yield from failed
        contenders += [] if best is None else [best]
        release()
    yield from contest.alternate(name, contenders)


def _contender(
    engine: str, case: Training, devices: int, pieces: int, run: Run, shortest: int = 1
) -> Contender:
    """Return an engine that runs streams.

    Args:
        engine: its name.
        case: the case whose batch is streamed.
        devices: the number of devices.
        pieces: the number of batches into which the case's batch is cut.
        run: runs the model over batches.
        shortest: the smallest number of the case's batches in a stream.
    """
    places, batch, rounds = cases.places(devices), _pieces(case, pieces), []

    def once(count: int) -> float:
        """Return the time of one of ``count`` batches of the case in a stream, in ms."""
        batches = list(chain.from_iterable(repeat(batch, count)))
        return timing.row(lambda: run(batches), partial(timing.wait, places), 1) / count

    def turn() -> float:
        with torch.no_grad():
            alone = [once(2) for _ in range(timing.repetitions().warm_ups)]
            if not rounds:
                rounds.append(max(shortest, timing.row_of(alone[-1:])))
            return once(rounds[0])

    return Contender(engine, devices, pieces, turn)


def _ours(case: Training, model: nn.Module, count: int) -> list[Contender]:
    """Return Placer at the batch sizes predicted to be fastest, each with a flow of its own."""
    placements = _fastest(case, _profiles(case, model, count), count)
    return [_streamed(ours.ENGINE, case, model, placement, count) for placement in placements]


def _divisors() -> tuple[int, ...]:
    """Return the numbers of batches that the case's batch is cut into."""
    return cases.sized((2,), (2, 4, 8))


def _profiles(case: Training, model: nn.Module, count: int) -> list[Profile]:
    """Return the profile of every batch size, for a model on the host, as a user's model is."""
    inputs = case.batch(cases.home())[0].cpu()
    sizes = [len(inputs) // pieces for pieces in _divisors()]
    return profile(
        copy.deepcopy(model).cpu(),
        inputs[: max(sizes)],
        [str(place) for place in cases.places(count)],
        training=False,
        granularity=GRANULARITY,
        progress=False,
        batch_sizes=sizes,
    )


def _fastest(case: Training, profiles: Sequence[Profile], count: int) -> list[Placement]:
    """Return a placement for each batch size that is predicted to be among the fastest."""
    size = len(case.batch(torch.device("cpu"))[0])
    placements = [ours.placed(found, count, size // found.batch_size) for found in profiles]
    return sorted(placements, key=_predicted_ms)[:TRIED]


def _predicted_ms(placement: Placement) -> float:
    """Return the predicted time of a batch of the case in the steady state."""
    return placement.chunks * max(load.load_ms for load in placement.devices)


def _streamed(
    engine: str,
    case: Training,
    model: nn.Module,
    placement: Placement,
    count: int,
    backend: str | bool = False,
) -> Contender:
    """Return Placer's engine; its first stream is compared with the unsplit model."""
    flow = DataFlow(copy.deepcopy(model), [str(place) for place in cases.places(count)])

    def run(inputs: Sequence[Tensor]) -> None:
        if not made.values:
            made.values |= first()
        for _ in flow.stream(inputs, compile=backend):
            pass

    def first() -> dict[str, list[float]]:
        flow.output_device = torch.device(placement.stages[-1])
        flow.update_flow(placement)
        batches = _pieces(case, placement.chunks)
        results = list(flow.stream(batches, compile=backend))
        differences = [_difference(y, model(x)) for x, y in zip(batches, results, strict=True)]
        del results
        for place, told in (flow.compiled | flow.not_compiled_because).items():
            print(f"{place}: {told}", flush=True)
        stages = [stage for pipeline in flow.calls.streams.pipelines() for stage in pipeline.stages]
        return {
            "difference": [max(differences)],
            "predicted_ms": [_predicted_ms(placement)],
            "eager_stages": [float(sum(bool(stage.not_recorded_because) for stage in stages))],
            "stages": [len(placement.stages)],
            "compiled_segments": [float(len(flow.compiled))],
        }

    # Filling and draining the devices is no part of the time of a batch.
    shortest = count * cases.sized(2, 8)
    made = _contender(engine, case, count, placement.chunks, run, shortest)
    return made


def _dispatched(case: Training, count: int, pieces: int) -> Contender:
    """Return a peer: accelerate's ``dispatch_model`` with its own map for balanced memory."""
    accelerate, helpers = import_module("accelerate"), import_module("accelerate.utils")
    model = _model(case).cpu()
    options = {"no_split_module_classes": _WHOLE_BLOCKS}
    if not cases.on_gpus():
        where: Any = {"": "cpu"}
    else:
        room = {
            index: torch.cuda.get_device_properties(index).total_memory for index in range(count)
        }
        balanced = helpers.get_balanced_memory(model, max_memory=room, **options)
        where = accelerate.infer_auto_device_map(model, max_memory=balanced, **options)
    model = accelerate.dispatch_model(model, device_map=where, force_hooks=True)
    return _contender(DISPATCH, case, count, pieces, _one_by_one(model))


def _split(case: Training, count: int, pieces: int) -> Contender:
    """Return a peer: the tutorial's pipeline, batch after batch."""
    batch = case.batch(cases.home())[0]
    units = parts.units(_model(case))
    times = parts.unit_ms(units, batch[: len(batch) // pieces], training=False)
    cut = parts.cut(units, parts.cuts(times, count))
    model = tutorial.Pipeline(cut, cases.places(count), len(batch) // pieces)
    return replace(_contender(tutorial.ENGINE, case, count, 1, _one_by_one(model)), chunks=pieces)


def _model(case: Training) -> nn.Module:
    return case.model(cases.home()).eval()


def _pieces(case: Training, count: int) -> list[Tensor]:
    return list(case.batch(cases.home())[0].chunk(count))


def _one_by_one(model: Callable[[Tensor], Any]) -> Run:
    def run(batches: Sequence[Tensor]) -> None:
        for batch in batches:
            model(batch)

    return run


def _difference(given: Any, expected: Any) -> float:
    """Return the largest difference relative to the largest value."""
    pairs = zip(flatten(given)[0], flatten(expected)[0], strict=True)
    return max(
        float((a.float() - b.to(a.device).float()).abs().max()) / float(b.float().abs().max())
        for a, b in pairs
    )
