"""Inference over a stream of batches: ours, eager PyTorch on one device, and peers.

A stream is the case's batch, cut into so many batches, several times over. They are on the first device; results stay
where the last layer makes them, but for accelerate, which brings them back. Times are of one batch of the case, with no
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

from placer import DataFlow, Placement, Profile, profile
from placer.graph.structure import flatten

from . import cases, ours, parts, timing, tutorial
from .cases import Training
from .sample import Sample, attempt, reason

PREFIX = "stream-"
COMPILED = "compile-stream-"
NAMES = ("resnet101", "gpt")
DISPATCH = "accelerate"
ALONE = "torch.compile"
"""The engine that compiles the whole model on one device."""
ROUNDS = 2
"""How often the case's batch comes in a stream to those who work off one batch after another."""
LONG = 2 if cases.is_small() else 8
"""The same for ours, for each device: filling and draining the devices is no part of the time of a batch."""
PIECES = (2,) if cases.is_small() else (2, 4, 8)
WHOLE = (1,) if cases.is_small() else (1, 2)
"""The sizes for who runs one device after another, and so gains nothing by smaller ones."""
TRIED = 2
"""Of our sizes, those that are run for each number of devices: the fastest by prediction."""
GRANULARITY = "fine"
"""Whole blocks cannot always be cut into parts of equal time: a cut may go through one."""
_WHOLE_BLOCKS = ["BasicBlock", "Bottleneck", "Block"]
"""Modules that accelerate is not to cut: what skips over their layers stays inside."""

Run = Callable[[Sequence[Tensor]], Any]


def stream(case: Training) -> Iterator[Sample]:
    """One device, at each size; then ours, at the sizes that are predicted to be fastest for each number of devices."""
    cases.prepare()
    name, model = PREFIX + case.name, _model(case)
    for pieces in (1, *PIECES):
        yield attempt(name, "eager", 1, pieces, partial(_times, _one_by_one(model), case, pieces, 1))
    flows: list[DataFlow] = []
    profiles: list[Profile] = []

    def prepare() -> dict[str, list[float]]:
        profiles.extend(_profiles(case, model))
        flows.append(DataFlow(copy.deepcopy(model), [str(place) for place in cases.places()]))
        return {}

    prepared = attempt(name, "ours", 0, 0, prepare)
    if prepared.failed:
        yield prepared
        return
    for count in cases.counts():
        try:
            placements = _fastest(case, profiles, count)
        except Exception as error:
            yield Sample(name, "ours", count, 0, failed=reason(error))
            continue
        for placement in placements:
            pieces = placement.chunks
            yield attempt(name, "ours", count, pieces, partial(_streamed, case, model, flows[0], placement, count))


def _profiles(case: Training, model: nn.Module) -> list[Profile]:
    """Of every size of batch, on all devices, of a model that is on the host, as a user's is."""
    inputs = case.batch(cases.home())[0].cpu()
    return profile(
        copy.deepcopy(model).cpu(),
        inputs[: len(inputs) // min(PIECES)],
        [str(place) for place in cases.places()],
        training=False,
        granularity=GRANULARITY,
        progress=False,
        batch_sizes=[len(inputs) // pieces for pieces in PIECES],
    )


def _fastest(case: Training, profiles: Sequence[Profile], count: int) -> list[Placement]:
    """A placement for each of the sizes at which so many devices are predicted to be fastest."""
    size = len(case.batch(torch.device("cpu"))[0])
    placements = [ours.placed(found, count, size // found.batch_size) for found in profiles]
    return sorted(placements, key=_predicted_ms)[:TRIED]


def _predicted_ms(placement: Placement) -> float:
    """Of a batch of the case, once the stream is on its way."""
    return placement.chunks * max(load.load_ms for load in placement.devices)


def _streamed(
    case: Training, model: nn.Module, flow: DataFlow, placement: Placement, count: int, backend: str | bool = False
) -> dict[str, list[float]]:
    flow.output_device = torch.device(placement.stages[-1])
    flow.update_flow(placement)
    batches = _pieces(case, placement.chunks)
    with torch.no_grad():
        results = list(flow.stream(batches, compile=backend))
        differences = [_difference(y, model(x)) for x, y in zip(batches, results, strict=True)]
        del results
    for place, told in (flow.compiled | flow.not_compiled_because).items():
        print(f"{place}: {told}", flush=True)

    def run(inputs: Sequence[Tensor]) -> None:
        for _ in flow.stream(inputs, compile=backend):
            pass

    values = _times(run, case, placement.chunks, len(cases.places()), LONG * count)
    stages = [stage for pipeline in flow._streams.pipelines() for stage in pipeline.stages]
    return values | {
        "difference": [max(differences)],
        "predicted_ms": [_predicted_ms(placement)],
        "eager_stages": [sum(bool(stage.not_recorded_because) for stage in stages)],
        "stages": [len(placement.stages)],
        "compiled_segments": [float(len(flow.compiled))],
    }


def compiled(case: Training, count: int, backend: str) -> Iterator[Sample]:
    """Ours on so many devices without and with the compiler, and one device without and with it.

    Args:
        case: what is streamed.
        count: of devices.
        backend: of ``torch.compile``.
    """
    cases.prepare()
    name, model = COMPILED + case.name, _model(case)
    sizes = PIECES[:2]
    for pieces in sizes:
        yield attempt(name, "eager", 1, pieces, partial(_times, _one_by_one(model), case, pieces, 1))
    flow = DataFlow(copy.deepcopy(model), [str(place) for place in cases.places()])
    placements: list[Placement] = []

    def place() -> dict[str, list[float]]:
        placements.extend(_fastest(case, _profiles(case, model), count)[:1])
        return {}

    placed = attempt(name, "ours", count, 0, place)
    if placed.failed:
        yield placed
    for placement in placements:
        for engine, compile in (("ours", False), ("compiled", backend)):
            run = partial(_streamed, case, model, flow, placement, count, compile)
            yield attempt(name, engine, count, placement.chunks, run)
    made: Any = torch.compile(copy.deepcopy(model), backend=backend, dynamic=False)
    for pieces in sizes:
        yield attempt(name, ALONE, 1, pieces, partial(_times, _one_by_one(made), case, pieces, 1))


def dispatched(case: Training) -> Iterator[Sample]:
    """Peer: accelerate's ``dispatch_model``, its own map for balanced memory."""
    cases.prepare()
    for count in cases.counts():
        for pieces in WHOLE:
            yield attempt(PREFIX + case.name, DISPATCH, count, pieces, partial(_dispatched, case, count, pieces))


def _dispatched(case: Training, count: int, pieces: int) -> dict[str, list[float]]:
    accelerate, helpers = import_module("accelerate"), import_module("accelerate.utils")
    model = _model(case).cpu()
    options = {"no_split_module_classes": _WHOLE_BLOCKS}
    if not cases.on_gpus():
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
    times = parts.unit_ms(units, batch[: len(batch) // pieces], training=False)
    cut = parts.cut(units, parts.cuts(times, count))
    model = tutorial.Pipeline(cut, cases.places(count), len(batch) // pieces)
    return _times(_one_by_one(model), case, 1, count)


def _model(case: Training) -> nn.Module:
    return case.model(cases.home()).eval()


def _pieces(case: Training, count: int) -> list[Tensor]:
    return list(case.batch(cases.home())[0].chunk(count))


def _one_by_one(model: Callable[[Tensor], Any]) -> Run:
    def run(batches: Sequence[Tensor]) -> None:
        for batch in batches:
            model(batch)

    return run


def _times(run: Run, case: Training, pieces: int, count: int, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Times of one batch of the case, in ms, in a stream of several."""
    batches = list(chain.from_iterable(repeat(_pieces(case, pieces), rounds)))
    with torch.no_grad():
        times = timing.steps(lambda: run(batches), cases.places(count))
    return {measure: [value / rounds for value in values] for measure, values in times.items()}


def _difference(given: Any, expected: Any) -> float:
    """The largest difference, over the largest value."""
    pairs = zip(flatten(given)[0], flatten(expected)[0], strict=True)
    return max(float((a.float() - b.to(a.device).float()).abs().max()) / float(b.float().abs().max()) for a, b in pairs)
