"""A token's time on one GPU, with a part of the weights in the host's memory, or on its disk.

A Llama with the shapes of 6.7 billion parameters may use so little of a GPU's memory that 7.5 GB
of its weights rest on the host. Placer chooses the layers, and accelerate's ``dispatch_model``
offloads the same ones. Files were just written, so reads mostly find them in the host's page cache,
for both. The models are made on ``meta`` and have equal random weights, which are
filled on the GPU, layer by layer.

The third kind is a mixture with the shapes of Qwen3's 30 billion parameters, but with 6 layers of
48, all of which rest on the host: a token chooses 8 of the 128 experts of a layer.

In the fourth kind, the host's CPU is a device, too: the solver chooses the layers that the CPU
computes and those that are copied. The peer is the placement that copies all of them.

On CPU stand-ins, a tiny model only shows that the benchmark runs; its map is given, since stand-ins
have no link to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from operator import attrgetter
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from .. import record
from . import models
from .engine import shown

PEER = "accelerate's dispatch_model, the same layers offloaded"
RESIDENT = "ours, all weights on the device"
COPIED = "ours, all weights of the host copied"


@dataclass(frozen=True)
class Kind:
    """A model of which a part rests.

    Attributes:
        tier: where weights rest, "host" or "disk".
        turns: the most turns; accelerate takes more than a second for a token.
        new: tokens of a text.
        before: texts before the timed ones, for Placer, which records the third prompt of a length;
            one text for a peer.
        is_mixture: whether the model is the mixture of experts.
        has_cpu: whether the CPU may compute layers.
        length: tokens of a prompt.
    """

    tier: str
    turns: int
    new: int
    before: int = 3
    is_mixture: bool = False
    has_cpu: bool = False
    length: int = 512


HOST, DISK = Kind("host", 3, 32), Kind("disk", 1, 8)
EXPERTS = Kind("host", 2, 8, before=1, is_mixture=True)
CPU_LAYERS = Kind("host", 3, 64, has_cpu=True, length=64)

_HOST_BYTES = 7_500_000_000
"""Weights that are to rest on the host."""

_OTHER_BYTES = 300_000_000
"""Less than the keys and values of the text and the workspace of its passes take, in bytes."""

_TARGET_MS = 170.0
"""The requested time of a token: 7.5 GB cross a link of 55 GB/s in 136 ms."""


def rows(turns: int, kind: Kind = HOST) -> Iterator[dict[str, Any]]:
    """Yield the time of a token, the prediction, and whether the tokens are equal.

    Args:
        turns: how often each engine runs.
        kind: of the model.
    """
    import torch

    from placer.testing import logical_devices

    from ..executor import cases

    with ExitStack() as stack:
        if not cases.on_gpus():
            stack.enter_context(logical_devices(2 if kind.has_cpu else 1))
        place = cases.places(1)[0]
        folder = stack.enter_context(TemporaryDirectory())
        batch, length, new = (2, 8, 6) if cases.is_small() else (1, kind.length, kind.new)
        ids = torch.randint(2, 100, (batch, length), generator=torch.Generator().manual_seed(0))
        placement = _placement(place, ids, new, kind)
        engines = {"ours": _ours(place, placement, stack, folder, kind)}
        # without a GPU, accelerate has no device to offload from
        if kind.has_cpu:
            copied = _placement(place, ids, new, replace(kind, has_cpu=False))
            engines[COPIED] = _ours(place, copied, stack, folder, kind)
        elif not cases.on_gpus():
            everything = placement.model_copy(update={"resting": {}})
            engines[RESIDENT] = _ours(place, everything, stack, folder, kind)
        elif find_spec("accelerate") is not None:
            engines[PEER] = _dispatched(place, placement.resting, folder, kind)
        times: dict[str, list[_Times]] = {name: [] for name in engines}
        texts = {}
        for name, generate in engines.items():
            for _ in range(1 if name == PEER else kind.before):
                texts[name] = _timed(generate, ids.to(place), new)[1]
        for turn in range(min(turns, kind.turns)):
            for name in list(engines) if turn % 2 == 0 else reversed(engines):
                prompt_ms, _ = _timed(engines[name], ids.to(place), 1)
                whole_ms, texts[name] = _timed(engines[name], ids.to(place), new)
                times[name].append(_Times(whole_ms, (whole_ms - prompt_ms) / (new - 1)))
    case = (
        f"{_name(kind)}, {_rested(placement, kind)}, {batch} x {length} tokens and {new} more, "
        f"one device{' and the CPU' if kind.has_cpu else ''}"
    )
    yield from _rows(case, times, placement.generation, kind)
    yield from _equal_tokens(case, texts)


@dataclass(frozen=True)
class _Times:
    """Times of a text in ms: from the prompt to the last token, and of each later token."""

    whole_ms: float
    token_ms: float


def _cpu() -> str:
    """Return the name of the host's CPU in a placement; of a stand-in without a GPU."""
    from ..executor import cases

    return "cpu:0" if cases.on_gpus() else "cpu:1"


def _rested(placement: Any, kind: Kind) -> str:
    """Return what rests, and what the CPU computes."""
    on_cpu = sum(device == _cpu() for device in placement.layer_devices.values())
    computed = f"{on_cpu} layers computed by the CPU, " if kind.has_cpu else ""
    size = sum(load.resting_bytes for load in placement.devices)
    if size:
        return f"{computed}{size / 1e9:.2f} GB of the weights on the {kind.tier}"
    count = len(placement.layer_devices)
    return f"{computed}{len(placement.resting)} of {count} layers on the {kind.tier}"


def _name(kind: Kind) -> str:
    from ..executor import cases

    if cases.is_small():
        return "tiny mixture" if kind.is_mixture else "tiny Llama"
    parameters = "4.4" if kind.is_mixture else "6.7"
    return f"{'mixture' if kind.is_mixture else 'Llama'} of {parameters} billion parameters, bf16"


def _rows(
    case: str, times: Mapping[str, list[_Times]], predicted: Any, kind: Kind
) -> Iterator[dict[str, Any]]:
    """Yield the times and the error of their prediction, which is None for a given placement."""
    from ..executor import cases

    token_of: Callable[[_Times], float] = attrgetter("token_ms")
    whole_of: Callable[[_Times], float] = attrgetter("whole_ms")
    what = "layers computed or copied" if kind.has_cpu else f"weights copied from the {kind.tier}"
    has_target = kind == HOST and not cases.is_small()
    yield _times_row(
        case, f"a token of each text, {what}", times, token_of, _TARGET_MS if has_target else None
    )
    if kind.has_cpu:
        yield _times_row(case, f"a text, {what}", times, whole_of)
    # Predictions are for reads from the disk itself, not from the page cache.
    if predicted is None or kind.tier == "disk":
        return
    measured = times["ours"]
    yield _error_row(
        case, "such a token", predicted.token_ms, median(token_of(one) for one in measured)
    )
    if kind.has_cpu:
        foreseen = predicted.generation_ms + (predicted.host_ms or 0.0)
        yield _error_row(case, "such a text", foreseen, median(whole_of(one) for one in measured))


def _times_row(
    case: str,
    measure: str,
    times: Mapping[str, list[_Times]],
    of: Callable[[_Times], float],
    target: float | None = None,
) -> dict[str, Any]:
    found = {name: [of(one) for one in some] for name, some in times.items()}
    ours = found.pop("ours")
    return record.row(
        case,
        measure,
        "ms",
        shown(median(ours)),
        spread=(shown(min(ours)), shown(max(ours))),
        target=target,
        peers={name: shown(median(some)) for name, some in found.items()},
    )


def _error_row(case: str, what: str, predicted_ms: float, measured_ms: float) -> dict[str, Any]:
    return record.row(
        case,
        f"error of the predicted time of {what}",
        "%",
        shown(100.0 * abs(predicted_ms / measured_ms - 1)),
        target=8.0,
        figures={"predicted ms": shown(predicted_ms), "measured ms": shown(measured_ms)},
    )


def _equal_tokens(case: str, texts: Mapping[str, list[list[int]]]) -> Iterator[dict[str, Any]]:
    for name, text in texts.items():
        if name == "ours":
            continue
        same = [
            one == other
            for some, others in zip(texts["ours"], text, strict=True)
            for one, other in zip(some, others, strict=True)
        ]
        share = 100.0 * sum(same) / len(same)
        yield record.row(case, f"tokens equal to the tokens of: {name}", "%", share)


def _placement(place: Any, ids: Any, new: int, kind: Kind) -> Any:
    """Return a placement whose weights rest in part."""
    from placer import GenerationOptions, Placement, suggest

    from ..executor import cases

    if cases.is_small() or kind.is_mixture:
        count = 4 if cases.is_small() else models.MIXTURE_LAYERS
        layers = {name: str(place) for name in _parts(count)}
        numbers = range(count) if kind.is_mixture else (0, 1, 3)
        if kind.has_cpu:
            numbers = (0,)
            layers |= dict.fromkeys(["model.layers.1", "model.layers.3"], _cpu())
        resting = {f"model.layers.{number}": kind.tier for number in numbers}
        return Placement(
            status="feasible", objective="generation", layer_devices=layers, resting=resting
        )
    model = _on_meta(kind)
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    layer = sum(one.numel() * one.element_size() for one in model.model.layers[0].parameters())
    memory_bytes = {str(place): weights - _HOST_BYTES + 2 * layer + _OTHER_BYTES}
    return suggest(
        model,
        {"input_ids": ids},
        devices=[place, _cpu()] if kind.has_cpu else [place],
        memory_bytes=memory_bytes,
        objective="generation",
        generation=GenerationOptions(prompt_tokens=ids.shape[1], new_tokens=new),
        granularity="blocks",
        **{"host": {"host_memory_bytes": "64GiB"}, "disk": {"disk_bytes": "64GiB"}}[kind.tier],
    )


def _on_meta(kind: Kind) -> Any:
    """Return a model on ``meta``, with the values of its buffers."""
    from placer import on_meta

    from ..executor import cases

    with on_meta():
        return (models.mixture if kind.is_mixture else models.llama)(cases.is_small())


def _model(place: Any, resting: Collection[str], kind: Kind) -> Any:
    """Return the model with its weights, which are equal each time, on the device and the host."""
    import torch

    model = _on_meta(kind)
    torch.manual_seed(0)
    for name in _parts(len(model.model.layers)):
        part = model.get_submodule(name)
        part.to_empty(device=place)
        for parameter in part.parameters():
            parameter.requires_grad_(False)
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0)
        if name in resting:
            part.to("cpu")
    model.model.rotary_emb.to(place)
    return model


def _parts(layers: int) -> list[str]:
    """Return the paths of the modules with weights, in execution order."""
    blocks = [f"model.layers.{number}" for number in range(layers)]
    return ["model.embed_tokens", *blocks, "model.norm", "lm_head"]


def _ours(
    place: Any, placement: Any, stack: ExitStack, folder: str, kind: Kind
) -> Callable[..., Any]:
    from placer import DataFlow

    model = _model(place, placement.resting, kind)
    places = dict.fromkeys([str(place), *placement.layer_devices.values()])
    flow = DataFlow(model, list(places), inference_only=True, disk_folder=folder)
    flow.update_flow(placement)
    stack.callback(flow.undo)

    def generate(*args: Any, **options: Any) -> Any:
        with flow.applied() as model:
            return model.generate(*args, **options)

    def tell() -> None:
        if flow.generation_report.not_recorded_because:
            print(f"not recorded: {flow.generation_report.not_recorded_because}")

    stack.callback(tell)
    return generate


def _dispatched(
    place: Any, resting: Mapping[str, str], folder: str, kind: Kind
) -> Callable[..., Any]:
    from accelerate import dispatch_model

    model = _model(place, resting, kind)
    parts = [*_parts(len(model.model.layers)), "model.rotary_emb"]
    names = {"host": "cpu", "disk": "disk"}
    where = {name: names[resting[name]] if name in resting else place.index for name in parts}
    options = {"main_device": place.index, "offload_dir": folder}
    generate: Callable[..., Any] = dispatch_model(model, where, **options).generate
    return generate


def _timed(generate: Callable[..., Any], ids: Any, new: int) -> tuple[float, list[list[int]]]:
    """Return the time of a text in ms, and its tokens."""
    options = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    began = perf_counter()
    # copying to the host waits for the device
    tokens: list[list[int]] = generate(ids, **options).tolist()
    return 1e3 * (perf_counter() - began), tokens
