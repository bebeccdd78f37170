"""Inference over a stream of batches: ours, eager PyTorch on one device, and peers.

A stream is the case's batch, cut into so many batches, several times over. Times are of one batch of the case, with no
drain before the stream's end; each engine counts at the best of its sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

from placer import DataFlow, profile
from placer.graph.structure import flatten

from . import cases, ours, parts, timing, tutorial
from .cases import Training
from .sample import Sample, attempt

PREFIX = "stream-"
NAMES = ("resnet101", "gpt")
DISPATCH = "accelerate"
ROUNDS = 2 if cases.is_small() else 8
PIECES = (2,) if cases.is_small() else (4, 2, 8)
GRANULARITY = "fine"
"""Whole blocks cannot always be cut into parts of equal time: a cut may go through one."""
_WHOLE_BLOCKS = ["BasicBlock", "Bottleneck", "Block"]
"""Modules that accelerate is not to cut: what skips over their layers stays inside."""

Run = Callable[[Sequence[Tensor]], Any]


def stream(case: Training) -> Iterator[Sample]:
    """One device, at each size; then ours, at each size and number of devices."""
    cases.prepare()
    name, model = PREFIX + case.name, _model(case)
    for pieces in (1, *PIECES):
        yield attempt(name, "eager", 1, pieces, partial(_times, _one_by_one(model), case, pieces, 1))
    for pieces in PIECES:
        yield from _ours(case, model, pieces)


def _ours(case: Training, model: nn.Module, pieces: int) -> Iterator[Sample]:
    found: list[Any] = []

    def measure() -> dict[str, list[float]]:
        part = _pieces(case, pieces)[0].cpu()
        names = [str(place) for place in cases.places()]
        options: dict[str, Any] = {"training": False, "granularity": GRANULARITY, "progress": False}
        found.append(profile(copy.deepcopy(model).cpu(), part, names, **options))
        return {}

    name = PREFIX + case.name
    prepared = attempt(name, "ours", 0, pieces, measure)
    if prepared.failed:
        yield prepared
        return
    for count in cases.counts():
        yield attempt(name, "ours", count, pieces, partial(_streamed, case, model, found[0], count, pieces))


def _streamed(case: Training, model: nn.Module, found: Any, count: int, pieces: int) -> dict[str, list[float]]:
    placement = ours.placed(found, count, pieces)
    flow = DataFlow(copy.deepcopy(model), [str(place) for place in cases.places()])
    flow.update_flow(placement)
    batches = _pieces(case, pieces)
    with torch.no_grad():
        differences = [_difference(y, model(x)) for x, y in zip(batches, flow.stream(batches), strict=True)]
    values = _times(lambda inputs: _exhaust(flow.stream(inputs)), case, pieces, count)
    bottleneck = max(load.load_ms for load in placement.devices)
    stages = [stage for pipeline in flow._streams.pipelines() for stage in pipeline.stages]
    return values | {
        "difference": [max(differences)],
        "predicted_ms": [bottleneck * pieces],
        "eager_stages": [sum(bool(stage.not_recorded_because) for stage in stages)],
        "stages": [len(placement.stages)],
    }


def dispatched(case: Training) -> Iterator[Sample]:
    """Peer: accelerate's ``dispatch_model``, its own map for balanced memory."""
    cases.prepare()
    for count in cases.counts():
        for pieces in PIECES:
            yield attempt(PREFIX + case.name, DISPATCH, count, pieces, partial(_dispatched, case, count, pieces))


def _dispatched(case: Training, count: int, pieces: int) -> dict[str, list[float]]:
    accelerate, helpers = import_module("accelerate"), import_module("accelerate.utils")
    model = _model(case).cpu()
    options = {"no_split_module_classes": _WHOLE_BLOCKS}
    if cases.is_small():
        where: Any = {"": "cpu"}
    else:
        room = {index: torch.cuda.get_device_properties(index).total_memory for index in range(count)}
        balanced = helpers.get_balanced_memory(model, max_memory=room, **options)
        where = accelerate.infer_auto_device_map(model, max_memory=balanced, **options)
    model = accelerate.dispatch_model(model, device_map=where, force_hooks=True)
    return _times(_one_by_one(model), case, pieces, count)


def tutorial_split(case: Training) -> Iterator[Sample]:
    """Peer: the tutorial's pipeline, batch after batch."""
    cases.prepare()
    for count in cases.counts():
        for pieces in PIECES:
            yield attempt(PREFIX + case.name, tutorial.ENGINE, count, pieces, partial(_split, case, count, pieces))


def _split(case: Training, count: int, pieces: int) -> dict[str, list[float]]:
    batch = case.batch(cases.home())[0]
    units = parts.units(_model(case))
    cut = parts.equal_parts(units, batch[: len(batch) // pieces], count)
    model = tutorial.Pipeline(cut, cases.places(count), len(batch) // pieces)
    return _times(_one_by_one(model), case, 1, count)


def _model(case: Training) -> nn.Module:
    return case.model(cases.home()).eval()


def _pieces(case: Training, count: int) -> list[Tensor]:
    return list(case.batch(cases.home())[0].chunk(count))


def _one_by_one(model: nn.Module) -> Run:
    def run(batches: Sequence[Tensor]) -> None:
        for batch in batches:
            model(batch)

    return run


def _exhaust(results: Iterator[Any]) -> None:
    for _ in results:
        pass


def _times(run: Run, case: Training, pieces: int, count: int) -> dict[str, list[float]]:
    """Times of one batch of the case, in ms, in a stream of several."""
    batches = list(chain.from_iterable(repeat(_pieces(case, pieces), ROUNDS)))
    with torch.no_grad():
        times = timing.steps(lambda: run(batches), cases.places(count))
    return {measure: [value / ROUNDS for value in values] for measure, values in times.items()}


def _difference(given: Any, expected: Any) -> float:
    """The largest difference, over the largest value."""
    pairs = zip(flatten(given)[0], flatten(expected)[0], strict=True)
    return max(float((a.float() - b.to(a.device).float()).abs().max() / b.float().abs().max()) for a, b in pairs)
