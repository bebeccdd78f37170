"""A token's time on one GPU, with a part of the weights in the host's memory, or on its disk.

A Llama with the shapes of 6.7 billion parameters may use so little of a GPU's memory that 7.5 GB
of its weights rest on the host. Placer chooses the layers, and accelerate's ``dispatch_model``
offloads the same ones. Files were just written, so reads mostly find them in the host's page cache,
for both. The models are made on ``meta`` and have equal random weights, which are
filled on the GPU, layer by layer.

The third kind is a mixture with the shapes of Qwen3's 30 billion parameters, but with 6 layers of
48, all of which rest on the host: a token chooses 8 of the 128 experts of a layer.

On CPU stand-ins, a tiny model only shows that the benchmark runs; its map is given, since stand-ins
have no link to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from .. import record
from . import models
from .engine import shown

PEER = "accelerate's dispatch_model, the same layers offloaded"
RESIDENT = "ours, all weights on the device"


@dataclass(frozen=True)
class Kind:
    """A model of which a part rests.

    Attributes:
        tier: where weights rest, "host" or "disk".
        turns: the most turns; accelerate takes more than a second for a token.
        new: tokens of a text.
        before: texts before the timed ones; the third prompt of a length is recorded.
        is_mixture: whether the model is the mixture of experts.
    """

    tier: str
    turns: int
    new: int
    before: int = 3
    is_mixture: bool = False


HOST, DISK = Kind("host", 3, 32), Kind("disk", 1, 8)
EXPERTS = Kind("host", 2, 8, before=1, is_mixture=True)

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
            stack.enter_context(logical_devices(1))
        place = cases.places(1)[0]
        folder = stack.enter_context(TemporaryDirectory())
        batch, length, new = (2, 8, 6) if cases.is_small() else (1, 512, kind.new)
        ids = torch.randint(2, 100, (batch, length), generator=torch.Generator().manual_seed(0))
        placement = _placement(place, ids, new, kind)
        engines = {"ours": _ours(place, placement, stack, folder, kind)}
        # without a GPU, accelerate has no device to offload from
        if not cases.on_gpus():
            everything = placement.model_copy(update={"resting": {}})
            engines[RESIDENT] = _ours(place, everything, stack, folder, kind)
        elif find_spec("accelerate") is not None:
            engines[PEER] = _dispatched(place, placement.resting, folder, kind)
        times: dict[str, list[float]] = {name: [] for name in engines}
        texts = {}
        for name, generate in engines.items():
            for _ in range(kind.before):
                texts[name] = _timed(generate, ids.to(place), new)[1]
        for turn in range(min(turns, kind.turns)):
            for name in list(engines) if turn % 2 == 0 else reversed(engines):
                prompt_ms, _ = _timed(engines[name], ids.to(place), 1)
                whole_ms, texts[name] = _timed(engines[name], ids.to(place), new)
                times[name].append((whole_ms - prompt_ms) / (new - 1))
    size = sum(load.resting_bytes for load in placement.devices)
    what = f"{len(placement.resting)} of {len(placement.layer_devices)} layers on the {kind.tier}"
    if size:
        what = f"{size / 1e9:.2f} GB of the weights on the {kind.tier}"
    yield from _rows(
        f"{_name(kind)}, {what}, {batch} x {length} tokens and {new} more, one device",
        times,
        texts,
        placement.generation.token_ms if placement.generation is not None else None,
        kind,
    )


def _name(kind: Kind) -> str:
    from ..executor import cases

    if cases.is_small():
        return "tiny mixture" if kind.is_mixture else "tiny Llama"
    parameters = "4.4" if kind.is_mixture else "6.7"
    return f"{'mixture' if kind.is_mixture else 'Llama'} of {parameters} billion parameters, bf16"


def _rows(
    case: str,
    times: Mapping[str, list[float]],
    texts: Mapping[str, list[list[int]]],
    predicted_ms: float | None,
    kind: Kind,
) -> Iterator[dict[str, Any]]:
    from ..executor import cases

    ours = median(times["ours"])
    yield record.row(
        case,
        f"a token of each text, weights copied from the {kind.tier}",
        "ms",
        shown(ours),
        spread=(shown(min(times["ours"])), shown(max(times["ours"]))),
        target=_TARGET_MS if kind == HOST and not cases.is_small() else None,
        peers={name: shown(median(found)) for name, found in times.items() if name != "ours"},
    )
    # Predictions are for reads from the disk itself, not from the page cache.
    if predicted_ms is not None and kind.tier == "host":
        error = 100.0 * abs(predicted_ms / ours - 1)
        yield record.row(
            case,
            "error of the predicted time of such a token",
            "%",
            shown(error),
            target=8.0,
            figures={"predicted ms": shown(predicted_ms), "measured ms": shown(ours)},
        )
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
        resting = {f"model.layers.{number}": kind.tier for number in numbers}
        return Placement(
            status="feasible", objective="generation", layer_devices=layers, resting=resting
        )
    model = _on_meta(kind)
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    layer = sum(one.numel() * one.element_size() for one in model.model.layers[0].parameters())
    return suggest(
        model,
        {"input_ids": ids},
        devices=[place],
        memory_bytes=weights - _HOST_BYTES + 2 * layer + _OTHER_BYTES,
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
    flow = DataFlow(model, [place], inference_only=True, disk_folder=folder)
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
