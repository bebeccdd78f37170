"""The keys and values that a model of transformers keeps for the texts that it generates.

The model runs once on ``meta``, on as many tokens as the texts will have. Its cache then has the
shapes of the real cache, with its sliding windows, shared heads and compressed keys.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from placer.errors import InputError
from placer.estimator.meta_models import made_on_meta, meta_copy
from placer.schema.base import is_part, module_paths


class CacheLayer(NamedTuple):
    """A layer of a cache, on ``meta``.

    Attributes:
        module: the path of the module that fills it.
        content: what the cache holds for it.
        factor: the factor from the bytes of its tensors to the real bytes.
    """

    module: str
    content: Any
    factor: int


class KeysAndValues(NamedTuple):
    """The keys and values that a module of attention keeps for one token, on ``meta``.

    Attributes:
        module: the path of the module.
        keys: ``[samples, heads, 1, size]``, in the dtype of the real cache.
        values: likewise.
    """

    module: str
    keys: Tensor
    values: Tensor


def keys_and_values(model: nn.Module, samples: int, remedy: str) -> list[KeysAndValues]:
    """Return the keys and values of one token by module of attention.

    Args:
        model: a model of transformers.
        samples: texts that are generated together.
        remedy: what the caller can do, for messages.

    Raises:
        InputError: the model has no cache, or a cache of another kind.
    """
    found = []
    for layer in cache_layers(model, samples, 1, 1, remedy):
        keys, values = (getattr(layer.content, name, None) for name in ("keys", "values"))
        if not (_holds_tokens(keys) and _holds_tokens(values)):
            kind = type(layer.content).__name__
            raise InputError(
                f"the cache of {type(model).__name__} has a {kind}, which is not keys and values of"
                f" every token; {remedy}"
            )
        if layer.factor != 1:
            # the model ran on meta in another dtype than its own
            own = next(one.dtype for one in model.parameters() if one.is_floating_point())
            keys, values = keys.to(own), values.to(own)
        found.append(KeysAndValues(layer.module, keys, values))
    return found


def _holds_tokens(part: Any) -> TypeGuard[Tensor]:
    return isinstance(part, Tensor) and part.dim() == 4


def cache_bytes(
    model: nn.Module,
    layers: Sequence[str],
    samples: int,
    tokens: int,
    source_tokens: int = 1,
    remedy: str = "leave generate out",
) -> dict[str, int]:
    """Return the bytes of keys and values by layer.

    Args:
        model: a model of transformers.
        layers: the names of the layers, as in a profile.
        samples: texts that are generated together.
        tokens: tokens of each text, prompt included.
        source_tokens: tokens that the encoder of an encoder-decoder reads.
        remedy: what the caller can do, for messages.

    Raises:
        InputError: the model has no cache, or it is unknown which module fills it.
    """
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise InputError(
            f"generate is {tokens}, but {type(model).__name__} is not a model of transformers,"
            f" whose cache could be estimated; {remedy}"
        )
    found: dict[str, int] = {}
    for filled in cache_layers(model, samples, tokens, source_tokens, remedy):
        layer = layer_of(filled.module, layers)
        size = filled.factor * _tensor_bytes(filled.content)
        found[layer] = found.get(layer, 0) + size
    return found


def cache_layers(
    model: nn.Module, samples: int, tokens: int, source_tokens: int, remedy: str
) -> list[CacheLayer]:
    """Return the layers of a cache after a forward pass on ``meta``.

    Args:
        model: a model of transformers.
        samples: texts that are generated together.
        tokens: tokens of each text.
        source_tokens: tokens that the encoder of an encoder-decoder reads.
        remedy: what the caller can do, for messages.

    Raises:
        InputError: the model has no cache, or it is unknown which module fills it.
    """
    copied = runnable_on_meta(model)
    parts, factor = _filled(copied, samples, tokens, source_tokens, remedy)
    modules = _modules(copied, len(parts), remedy)
    return [CacheLayer(module, part, factor) for module, part in zip(modules, parts, strict=True)]


def runnable_on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model of transformers on ``meta``.

    Layers of quantised weights cannot run there; the cache is the one of the usual layers.
    """
    if getattr(model, "hf_quantizer", None) is None:
        return meta_copy(model).eval()
    own: Any = model  # of transformers
    config = copy.deepcopy(own.config)
    del config.quantization_config
    made: nn.Module = made_on_meta(lambda: type(own)._from_config(config, dtype=own.dtype))
    return made.eval()


def layer_of(module: str, layers: Sequence[str]) -> str:
    """Return the layer that runs a module, or that runs first of its parts.

    Args:
        module: the path of the module.
        layers: names of layers in execution order: paths of modules, with ``@1`` for a later call,
            several joined by ``+`` if merged.

    Raises:
        InputError: no layer belongs to the module.
    """
    inside = None
    best, depth = None, -1
    for layer in layers:
        for path in module_paths(layer):
            if is_part(module, path) and len(path) > depth:
                best, depth = layer, len(path)
            elif inside is None and path.startswith(f"{module}."):
                inside = layer
    # A model that is one layer may have a name that is no module's path.
    found = best or inside or (layers[0] if len(layers) == 1 else None)
    if found is None:
        raise InputError(f"no layer of the profile belongs to module {module!r}, which has a cache")
    return found


def _filled(
    model: nn.Module, samples: int, tokens: int, source_tokens: int, remedy: str
) -> tuple[list[Any], int]:
    """Return the content of each layer of the cache, and the factor to its real bytes."""

    def ids(length: int) -> Tensor:
        return torch.zeros(samples, length, dtype=torch.int64, device="meta")

    given = {"input_ids": ids(tokens)}
    if getattr(model.config, "is_encoder_decoder", False):
        given = {"input_ids": ids(source_tokens), "decoder_input_ids": ids(tokens)}
    try:
        with torch.no_grad():
            result, factor = run_on_meta(model, given)
    except Exception as error:
        raise InputError(
            f"the cache of {type(model).__name__} cannot be estimated: {type(error).__name__}:"
            f" {error}; {remedy}"
        ) from error
    cache = getattr(result, "past_key_values", None)
    if cache is None:
        cache = getattr(result, "cache_params", None)
    parts = list(_layers(cache))
    if not parts:
        raise InputError(
            f"{type(model).__name__} returns no past_key_values, so it has no cache to estimate;"
            f" {remedy}"
        )
    return parts, factor


def run_on_meta(model: nn.Module, given: Mapping[str, Tensor]) -> tuple[Any, int]:
    """Run a model on ``meta``, and return its result and the factor from its bytes to real bytes.

    Masks of fused attention may depend on values; the masks of eager attention do not. Products
    over the experts of a mixture may have kernels for bfloat16 only.

    Args:
        model: of ``runnable_on_meta``; its attention and its dtype may change.
        given: its inputs by keyword.
    """
    try:
        return model(**given, use_cache=True), 1
    except RuntimeError:
        if not hasattr(model, "set_attn_implementation"):
            raise
        model.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        return model(**given, use_cache=True), 1
    except RuntimeError:
        sizes = [one.element_size() for one in model.parameters() if one.is_floating_point()]
        model.to(torch.bfloat16)
        return model(**given, use_cache=True), max(sizes, default=2) // torch.bfloat16.itemsize


def _layers(cache: Any) -> Iterator[Any]:
    """Yield what the cache holds for each layer of the model; both caches of a decoder together."""
    own = getattr(cache, "self_attention_cache", None)
    if own is not None:
        crossing = getattr(cache.cross_attention_cache, "layers", ())
        yield from zip(getattr(own, "layers", ()), crossing, strict=True)
    elif isinstance(cache, tuple | list):
        yield from cache
    elif cache is not None:
        yield from getattr(cache, "layers", ())


def _tensor_bytes(part: Any) -> int:
    """Return the bytes of all tensors that a layer of a cache holds, each counted once."""
    seen: dict[int, int] = {}
    waiting = [part]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            # a scalar counts the tokens of a sliding window, and holds none of them
            seen[id(one)] = one.numel() * one.element_size() if one.dim() else 0
        elif isinstance(one, tuple | list):
            waiting.extend(one)
        elif isinstance(one, Mapping):
            waiting.extend(one.values())
        elif hasattr(one, "__dict__"):
            waiting.extend(value for value in vars(one).values() if not callable(value))
    return sum(seen.values())


def _modules(model: nn.Module, count: int, remedy: str) -> list[str]:
    """Return the path of the module that fills each layer of the cache.

    Modules of transformers that have a cache know its layer as ``layer_idx``.
    """
    is_pair = getattr(model.config, "is_encoder_decoder", False)
    find_decoder: Any = getattr(model, "get_decoder", None)
    decoder = find_decoder() if is_pair and find_decoder is not None else model
    paths = {id(module): path for path, module in model.named_modules()}
    found: dict[int, str] = {}
    for module in decoder.modules():
        number = getattr(module, "layer_idx", None)
        if isinstance(number, int):
            found.setdefault(number, paths[id(module)])
    missing = next((number for number in range(count) if number not in found), None)
    if missing is not None:
        raise InputError(
            f"no module of {type(model).__name__} has layer_idx={missing}, so the device of that"
            f" part of the cache is unknown; {remedy}"
        )
    return [found[number] for number in range(count)]
