"""``from_pretrained``: from a checkpoint of transformers to a running, placed model in one call."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from placer.checkpoints.load import load
from placer.checkpoints.meta_parameters import on_meta
from placer.devices import DeviceLike, resolve
from placer.errors import InfeasibleError, InputError
from placer.estimator import checkpoints, kv_cache
from placer.estimator.memory_profiles import with_cache
from placer.estimator.memory_search import Asked, ShorterTexts, estimated
from placer.executor.dataflow import DataFlow
from placer.executor.engine.compiled_segments import Backend, backend_of
from placer.executor.generation.cache_view import capacity_at_end
from placer.pretrained import quantised
from placer.pretrained.checkpoint_folder import checkpoint_folder, has_weights, tokenizer_of
from placer.pretrained.pretrained import Pretrained
from placer.report.estimate import headline
from placer.schema import (
    GenerationOptions,
    Placement,
    PlacementRequest,
    Profile,
    SuggestOptions,
)
from placer.schema.options import combined
from placer.solver.latency import generation
from placer.utils.dtypes import as_dtype
from placer.utils.option_checks import require_count
from placer_client.suggest import answer, or_error, question

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
    memory_bytes: int | str | Mapping[DeviceLike, int | str] | None = None,
    compile: bool | Backend = False,
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
        memory_bytes: the memory that the model may use, in bytes or as ``"24GiB"``, of each device
            or by device; by default all of it.
        compile: compile decoding with ``torch.compile`` where that is faster, as for
            ``flow.applied``. The first text of its kind then waits for the compiler.
        progress: show progress on a terminal.
        options: what to solve and how to measure, as for ``suggest``; by default objective
            ``latency`` and granularity ``blocks``. Under objective ``generation``, the option
            ``generation`` replaces ``context``.
            With ``host_memory_bytes``, weights that do not fit on the devices rest in the host's
            memory, and with ``disk_bytes`` in the files of the checkpoint.
        fields: single fields of ``options``, for short.

    Returns:
        The placed model, with its tokenizer.

    Raises:
        InputError: there is no such checkpoint, or an argument cannot be used.
        MissingExtraError: transformers is not installed.
        InfeasibleError: memory is missing; the message says how much, and what would fit.
        SolveLimitError: no placement was found in time.
    """
    asked = _asked(options, fields, context)
    if context is not None:
        require_count("context", context, "tokens")
    require_count("batch_size", batch_size, "texts")
    backend_of(compile)  # refuse a wrong one before minutes of work
    kind = as_dtype(dtype)
    used = resolve(devices)
    folder = checkpoint_folder(path)
    if not has_weights(folder):
        raise InputError(f"{folder} has no weights; download its safetensors files")
    model = _made(folder, kind)
    is_quantised = getattr(model, "is_quantized", False)
    resting = {"host_memory_bytes": asked.host_memory_bytes, "disk_bytes": asked.disk_bytes}
    for name, given in resting.items() if is_quantised else ():
        if given is not None:
            raise InputError(
                f"{name} is given, but the weights in {folder} are quantised, and cannot rest on"
                " the host; leave it out"
            )
    disk_folder = asked.disk_folder
    if asked.disk_bytes is not None and disk_folder is None:
        # The disk that is read, unless a conversion writes other files.
        asked = asked.model_copy(update={"disk_folder": folder})
    longest = _longest(model, context, asked.generation)
    prompt_tokens = _prompt_tokens(longest, asked.generation)
    inputs = _inputs(model, prompt_tokens, batch_size)
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
    texts = _texts(request, model, batch_size, longest, is_asked=context is not None)
    placement = _placement(request, texts, server)
    # numbers next to quantised weights, such as scales, keep their dtypes
    own: Any = None if is_quantised else model.dtype
    load(
        model,
        placement,
        folder,
        dtype=own,
        devices=used,
        progress=progress,
        disk_folder=disk_folder,
    )
    if longest is not None and prompt_tokens is not None and longest > prompt_tokens:
        _limit_passes(model, prompt_tokens)
    flow = DataFlow(model, device_ids=used, inference_only=True, disk_folder=disk_folder)
    flow.update_flow(placement)
    return Pretrained(model, flow, placement, tokenizer_of(folder), longest, compile)


def _asked(
    options: SuggestOptions | None, fields: Mapping[str, Any], context: Any
) -> SuggestOptions:
    """Return the options, with defaults for inference.

    Raises:
        InputError: they ask for training, for measurements on another machine, or for a generation
            without its length or with two lengths.
    """
    asked = combined(SuggestOptions, options, fields, from_pretrained)
    if asked.training or asked.profile_on_server:
        name = "training" if asked.training else "profile_on_server"
        raise InputError(
            f"{name} is True, but from_pretrained places inference on this machine; leave it out"
        )
    if asked.objective == "generation" and asked.generation is None:
        raise InputError(
            "objective is 'generation', but the lengths of the texts are missing; give"
            " generation=placer.GenerationOptions(prompt_tokens=..., new_tokens=...)"
        )
    if asked.generation is not None and context is not None:
        raise InputError(
            f"context is {context}, but generation has the length of the texts; leave context out"
        )
    missing = {
        name: value for name, value in _DEFAULTS.items() if name not in asked.model_fields_set
    }
    return asked.model_copy(update={**missing, "training": False, "profile_on_server": False})


def _longest(model: nn.Module, context: int | None, texts: GenerationOptions | None) -> int | None:
    """Return the tokens of the longest text; None if the model generates none.

    Args:
        model: the model.
        context: the length that was asked for; None for the default.
        texts: what is generated, under objective ``generation``.

    Raises:
        InputError: a length is given, and the model does not generate, or not texts of that length.
    """
    name, asked = "context", context
    if texts is not None:
        name, asked = "prompt_tokens + new_tokens", texts.prompt_tokens + texts.new_tokens
    kind, most = type(model).__name__, checkpoints.most_tokens(model)
    if not _generates(model):
        if asked is not None:
            raise InputError(f"{name} is {asked}, but {kind} generates no text; leave it out")
        return None
    if asked is None:
        return min(DEFAULT_CONTEXT, most or DEFAULT_CONTEXT)
    if most is not None and asked > most:
        raise InputError(
            f"{name} is {asked}, but {kind} reads at most {most} tokens; give {most} or less"
        )
    return asked


def _made(folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """Return the model of a checkpoint on ``meta``, with the checkpoint's way to generate.

    Quantised weights are mapped from their files.

    Raises:
        InputError: transformers cannot make it, or a dtype is asked for quantised weights.
        MissingExtraError: the package that quantised the weights is not installed.
    """
    config = checkpoints.read_config(folder, _OTHERWISE, with_quantisation=True)
    quantizer = quantised.taken_quantizer(config, _OTHERWISE)
    if quantizer is not None and dtype is not None:
        raise InputError(
            f"dtype is {dtype}, but the weights in {folder} are quantised; leave dtype out"
        )
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
    return model if quantizer is None else quantised.with_weights(model, quantizer, folder)


def _with_buffers(make: Callable[[], Any]) -> Any:
    """Return what a function makes, with parameters on ``meta`` and buffers with their values."""
    with on_meta():
        return make()


def _generates(model: Any) -> bool:
    return hasattr(model, "can_generate") and bool(model.can_generate())


def _inputs(model: nn.Module, tokens: int | None, batch_size: int) -> dict[str, torch.Tensor]:
    """Return inputs to measure the model with.

    Args:
        model: the model.
        tokens: that it reads at once; None for a model that generates no text.
        batch_size: samples.
    """
    shape = None if tokens is None or model.main_input_name != "input_ids" else (1, tokens)
    given = checkpoints.default_inputs(model, training=False, shape=shape)
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


class _Texts(NamedTuple):
    """The memory of the longest texts that are generated.

    Attributes:
        profile: of a pass, without keys and values.
        tokens: of each text; None if the model generates none.
        cached: returns the bytes of keys and values by layer, for a number of tokens.
        cache: the bytes of keys and values by layer.
    """

    profile: Profile
    tokens: int | None
    cached: Callable[[int], dict[str, int]]
    cache: dict[str, int]


def _texts(
    request: PlacementRequest,
    model: nn.Module,
    batch_size: int,
    longest: int | None,
    is_asked: bool,
) -> _Texts:
    """Return the memory of the texts of a request.

    Args:
        request: as ``suggest`` asks it.
        model: the model.
        batch_size: texts that are generated together.
        longest: tokens of each text; None if the model generates none.
        is_asked: whether the caller gave the number of tokens.

    Raises:
        InputError: the cache is unknown, and the caller gave the number of tokens.
    """
    if request.generation is not None and longest is not None:
        return _generated_texts(request, request.generation, longest)
    layers = [layer.name for layer in request.profile.layers]
    cached = partial(_cache, model, layers, batch_size, is_asked=is_asked)
    return _Texts(request.profile, longest, cached, {} if longest is None else cached(longest))


def _generated_texts(request: PlacementRequest, asked: GenerationOptions, longest: int) -> _Texts:
    """Return the memory of the texts of a request with objective ``generation``, which has it."""
    cache = generation.cache_bytes(request)
    mean_pass = generation.mean_pass_request(request).profile
    without = with_cache(mean_pass, {layer: -size for layer, size in cache.items()})

    def cached(tokens: int) -> dict[str, int]:
        shorter, whole = (_capacity(one, asked.prompt_tokens) for one in (tokens, longest))
        return {layer: size * shorter // whole for layer, size in cache.items()}

    return _Texts(without, longest, cached, cache)


def _capacity(tokens: int, prompt_tokens: int = 1) -> int:
    """Return the tokens that decoding allocates for a text of that many tokens."""
    before = max(1, min(prompt_tokens, tokens - 1))
    return capacity_at_end(before, max(1, tokens - before))


def _cache(
    model: nn.Module, layers: Sequence[str], batch_size: int, tokens: int, is_asked: bool
) -> dict[str, int]:
    """Return the bytes of keys and values that decoding allocates, by layer.

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
    capacity = _capacity(tokens)
    # a model may fail on more tokens than it reads, although the cache has room for them
    counted = min(capacity, checkpoints.most_tokens(model) or capacity)
    try:
        cache = kv_cache.cache_bytes(
            model,
            layers,
            batch_size,
            counted,
            min(tokens, checkpoints.DEFAULT_TOKENS),
            "leave context out",
        )
    except InputError as error:
        if is_asked:
            raise
        _log.warning("no memory is reserved for keys and values: %s", error)
        return {}
    return {layer: -(-size * capacity // counted) for layer, size in cache.items()}


def _prompt_tokens(longest: int | None, texts: GenerationOptions | None) -> int | None:
    """Return the tokens that a prompt's pass reads at once; None if the model generates no text.

    Args:
        longest: tokens of the longest text.
        texts: what is generated, under objective ``generation``.
    """
    if texts is not None:
        return texts.prompt_tokens
    return None if longest is None else min(longest, checkpoints.DEFAULT_TOKENS)


def _placement(request: PlacementRequest, texts: _Texts, server: str | None) -> Placement:
    """Return the placement with memory for the texts.

    Args:
        request: with the profile without the cache; under objective ``generation`` with both
            profiles, which have it.
        texts: the cache.
        server: the URL of a service that solves; None to solve here.

    Raises:
        InfeasibleError: memory is missing.
        SolveLimitError: no placement was found in time.
    """
    if request.objective == "generation":
        found = answer(request, server)
    else:
        profile = with_cache(request.profile, texts.cache)
        found = answer(request.model_copy(update={"profile": profile}), server)
    missing = _missing(request, texts) if found.status == "infeasible" else ""
    if missing:
        raise InfeasibleError(missing)
    return or_error(found, request.time_limit_s)


def _missing(request: PlacementRequest, texts: _Texts) -> str:
    """Return the memory that is missing and what would fit; empty if something else is wrong.

    Args:
        request: that is infeasible.
        texts: the cache.
    """
    asked = Asked(1, "1f1b", "never", texts.cache, 0, _CHANGES_S)
    shorter = None
    if texts.tokens is not None and texts.cache:
        shorter = ShorterTexts(texts.tokens, texts.cached)
    found = estimated(texts.profile, request.placed_on, asked, shorter=shorter)
    if found.fits is not False:
        return ""
    length = "" if texts.tokens is None else f" with texts of {texts.tokens} tokens"
    flight = 1 if request.generation is None else request.generation.sequences_in_flight
    several = "" if flight == 1 else f", {flight} at the same time,"
    text = f"{found.model}{length}{several} {headline(found)}"
    changes = ", or ".join(change.change for change in found.changes)
    return f"{text}; would fit: {changes}" if changes else text
