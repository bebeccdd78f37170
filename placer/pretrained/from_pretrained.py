"""``from_pretrained``: from a checkpoint of transformers to a running, placed model in one call."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from placer.checkpoints.load import load
from placer.checkpoints.meta_parameters import on_meta
from placer.devices import DeviceLike, resolve
from placer.errors import InfeasibleError, InputError, SolveLimitError
from placer.estimator import checkpoints, kv_cache
from placer.estimator.memory_search import Asked, ShorterTexts, estimated, with_cache
from placer.executor.dataflow import DataFlow
from placer.pretrained.checkpoint_folder import checkpoint_folder, has_weights, tokenizer_of
from placer.pretrained.pretrained import Pretrained
from placer.report.estimate import headline
from placer.schema import Placement, PlacementRequest, SuggestOptions
from placer.schema.options import combined
from placer.utils.dtypes import as_dtype
from placer_client.suggest import answer, question

__all__ = ["from_pretrained"]

_log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 4096
"""Longest text in tokens, where the model allows so many; the cache takes memory for all of it."""

_DEFAULTS = {"objective": "latency", "granularity": "blocks", "training": False}
"""Generation waits for every token. Whole blocks keep each part of the cache on one device."""

_OTHERWISE = "make the model yourself on meta, and fill it with placer.load(model, placement, path)"

_VOCABULARY = 32
"""Token ids below this number exist in the vocabulary of every model."""

_CHANGES_S = 10.0
"""Seconds to find what would fit, if the model does not."""


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    devices: int | Sequence[DeviceLike] | None = None,
    context: int | None = None,
    batch_size: int = 1,
    dtype: Any = None,
    memory_bytes: int | Mapping[DeviceLike, int] | None = None,
    progress: bool = True,
    options: SuggestOptions | None = None,
    **fields: Any,
) -> Pretrained:
    """Place a model of transformers from its checkpoint, ready to run.

    The model is made without memory for its weights, measured layer by layer, and placed. The
    measurements are kept, so that the next call takes them from there. The weights are then read
    straight to their devices.

        llm = placer.from_pretrained("path/to/checkpoint", devices=2, context=4096)
        for piece in llm.stream_text("Once upon a time", max_new_tokens=64):
            print(piece, end="", flush=True)

    Args:
        path: a folder as ``save_pretrained`` writes it, or the name of a model on the hub.
        devices: the devices to place on: a number, a list, or None for all available devices. One
            GPU or the CPU alone suffices for a model that fits there.
        context: tokens of the longest text, prompt included, for whose keys and values memory is
            reserved; by default 4096, or the maximum of the model if that is smaller.
        batch_size: texts that are generated at the same time.
        dtype: of the parameters, as ``"bfloat16"``; by default the configuration's own.
        memory_bytes: the memory that the model may use, in bytes, of each device or by device; by
            default all of it.
        progress: show progress on a terminal.
        options: what to solve and how to measure, as for ``suggest``; by default objective
            ``latency`` and granularity ``blocks``.
        fields: single fields of ``options``, for short.

    Returns:
        The placed model, with its tokenizer.

    Raises:
        InputError: there is no such checkpoint, or an argument cannot be used.
        MissingExtraError: transformers is not installed.
        InfeasibleError: memory is missing; the message says how much, and what would fit.
        SolveLimitError: no placement was found in time.
    """
    asked = _asked(options, fields)
    _require_counts(context, batch_size)
    kind = as_dtype(dtype)
    used = resolve(devices)
    folder = checkpoint_folder(path)
    if not has_weights(folder):
        raise InputError(f"{folder} has no weights; download its safetensors files")
    model = _made(folder, kind)
    longest = _longest(model, context)
    inputs = _inputs(model, longest, batch_size)
    server = os.environ.get("PLACER_URL")
    with checkpoints.without_cache(model):
        request = question(
            model,
            inputs,
            asked,
            devices=used,
            memory_bytes=memory_bytes,
            server=server,
            progress=progress,
        )
    layers = [layer.name for layer in request.profile.layers]
    cached = partial(_cache, model, layers, batch_size, is_asked=context is not None)
    placement = _placement(request, cached, longest, server)
    own: Any = model.dtype  # transformers' models have the attribute
    load(model, placement, folder, dtype=own, devices=used, progress=progress)
    if longest is not None and longest > _prompt_tokens(longest):
        _limit_passes(model, _prompt_tokens(longest))
    flow = DataFlow(model, device_ids=used, inference_only=True)
    flow.update_flow(placement)
    return Pretrained(model, flow, placement, tokenizer_of(folder), longest)


def _asked(options: SuggestOptions | None, fields: Mapping[str, Any]) -> SuggestOptions:
    """Return the options, with defaults for generation.

    Raises:
        InputError: they ask for training, or for measurements on another machine.
    """
    asked = combined(SuggestOptions, options, fields, from_pretrained)
    if asked.training or asked.profile_on_server:
        name = "training" if asked.training else "profile_on_server"
        raise InputError(
            f"{name} is True, but from_pretrained places inference on this machine; leave it out"
        )
    if asked.objective == "generation":
        raise InputError(
            "objective is 'generation', which from_pretrained does not place; leave it out, or make"
            " the model yourself, and call placer.suggest and placer.load"
        )
    missing = {
        name: value for name, value in _DEFAULTS.items() if name not in asked.model_fields_set
    }
    return asked.model_copy(update={**missing, "training": False, "profile_on_server": False})


def _require_counts(context: Any, batch_size: Any) -> None:
    for name, given in {"context": context, "batch_size": batch_size}.items():
        is_count = isinstance(given, int) and not isinstance(given, bool) and given >= 1
        if not is_count and not (name == "context" and given is None):
            raise InputError(f"{name} is {given!r}; give a whole number from 1")


def _longest(model: nn.Module, context: int | None) -> int | None:
    """Return the tokens of the longest text; None if the model generates none.

    Raises:
        InputError: a length is given, and the model does not generate, or not texts of that length.
    """
    kind, most = type(model).__name__, checkpoints.most_tokens(model)
    if not _generates(model):
        if context is not None:
            raise InputError(f"context is {context}, but {kind} generates no text; leave it out")
        return None
    if context is None:
        return min(DEFAULT_CONTEXT, most or DEFAULT_CONTEXT)
    if most is not None and context > most:
        raise InputError(f"context is {context}, but {kind} reads at most {most} tokens")
    return context


def _made(folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """Return the model of a checkpoint on ``meta``, with the checkpoint's way to generate.

    Raises:
        InputError: transformers cannot make it.
    """
    config = checkpoints.read_config(folder, _OTHERWISE)
    try:
        model = checkpoints.model_of(config, dtype, _with_buffers).eval()
    except InputError as error:
        raise InputError(f"{error}; {_OTHERWISE}") from error
    main = getattr(model, "main_input_name", None)
    if main not in ("input_ids", "pixel_values"):
        raise InputError(
            f"{type(model).__name__} reads {main!r}, of which there is no example; {_OTHERWISE}"
        )
    if _generates(model):
        library = checkpoints.transformers_library()
        with suppress(OSError):  # without such a file, the configuration has these settings
            model.generation_config = library.GenerationConfig.from_pretrained(str(folder))
    return model


def _with_buffers(make: Callable[[], Any]) -> Any:
    """Return what a function makes, with parameters on ``meta`` and buffers with their values."""
    with on_meta():
        return make()


def _generates(model: Any) -> bool:
    return hasattr(model, "can_generate") and bool(model.can_generate())


def _inputs(model: nn.Module, context: int | None, batch_size: int) -> dict[str, torch.Tensor]:
    """Return inputs to measure the model with: as many tokens as it reads at once."""
    given = checkpoints.default_inputs(model, training=False, tokens=context)
    # different tokens, so that the experts of a mixture share them
    return {
        name: torch.arange(batch_size * one[0].numel())
        .remainder(_VOCABULARY)
        .view(batch_size, *one.shape[1:])
        .to(one.dtype)
        for name, one in given.items()
    }


def _limit_passes(model: Any, tokens: int) -> None:
    """Let prompts pass in pieces of the measured length, so that longer ones need no more memory.

    Args:
        model: that generates.
        tokens: the measured length.
    """
    if not model.config.is_encoder_decoder:
        model.generation_config.prefill_chunk_size = tokens


def _cache(
    model: nn.Module, layers: Sequence[str], batch_size: int, tokens: int, is_asked: bool
) -> dict[str, int]:
    """Return the bytes of keys and values by layer.

    Args:
        model: the model.
        layers: of the profile.
        batch_size: texts that are generated together.
        tokens: of each text.
        is_asked: whether the caller gave the number of tokens; otherwise a model whose cache is
            unknown is placed without memory for it.

    Raises:
        InputError: the cache is unknown, and the caller gave the number of tokens.
    """
    try:
        return kv_cache.cache_bytes(
            model, layers, batch_size, tokens, _prompt_tokens(tokens), "leave context out"
        )
    except InputError as error:
        if is_asked:
            raise
        _log.warning("no memory is reserved for keys and values: %s", error)
        return {}


def _prompt_tokens(context: int) -> int:
    return min(context, checkpoints.DEFAULT_TOKENS)


def _placement(
    request: PlacementRequest,
    cached: Callable[[int], dict[str, int]],
    context: int | None,
    server: str | None,
) -> Placement:
    """Return the placement with memory for the cache of ``context`` tokens.

    Args:
        request: without the cache.
        cached: returns the bytes of keys and values by layer, for a number of tokens.
        context: tokens of the longest text; None without a cache.
        server: the URL of a service that solves; None to solve here.

    Raises:
        InfeasibleError: memory is missing.
        SolveLimitError: no placement was found in time.
    """
    cache = {} if context is None else cached(context)
    profile = with_cache(request.profile, cache)
    found = answer(request.model_copy(update={"profile": profile}), server)
    if found.status == "infeasible":
        reason = found.infeasible.text if found.infeasible else "no placement is possible"
        raise InfeasibleError(_missing(request, cache, cached, context) or reason)
    if not found.layer_devices:
        raise SolveLimitError(
            f"no placement was found within {request.time_limit_s:g} s; allow more with"
            " time_limit_s"
        )
    return found


def _missing(
    request: PlacementRequest,
    cache: dict[str, int],
    cached: Callable[[int], dict[str, int]],
    context: int | None,
) -> str:
    """Return the memory that is missing and what would fit; empty if something else is wrong."""
    asked = Asked(1, "1f1b", "never", cache, 0, _CHANGES_S)
    shorter = ShorterTexts(context, cached) if context is not None and cache else None
    found = estimated(request.profile, request.placed_on, asked, shorter=shorter)
    if found.fits is not False:
        return ""
    texts = "" if context is None else f" with texts of {context} tokens"
    text = f"{found.model}{texts} {headline(found)}"
    changes = ", or ".join(change.change for change in found.changes)
    return f"{text}; would fit: {changes}" if changes else text
