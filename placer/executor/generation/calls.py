"""Calls of a model that generate: their tokens, and what tells one kind of call from another."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from placer import devices
from placer.capture import autocast
from placer.capture.pytrees import Structure, flatten
from placer.executor.engine.compiled_segments import Backend
from placer.executor.generation.cache_view import CacheView, cache_of
from placer.executor.generation.model_state import CannotRecordError

_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
"""Arguments of transformers with one entry per token in their second dimension."""


@dataclass
class Call:
    """A call of the model with one token per sequence, or with a prompt.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments without the cache.
        name: of the cache argument.
        cache: the user's.
        view: its layers.
        capacity: of its static copy, in tokens.
        signature: of its static copy.
        backend: of ``torch.compile``, for the recorded pass; None for none.
        tokens: per sequence.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    cache: Any
    view: CacheView
    capacity: int
    signature: Hashable
    backend: Backend | None = None
    tokens: int = 1


def _tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument with one entry per token in its second dimension; None if unknown."""
    given = (kwargs.get(name) for name in _TOKENS)
    return next((one for one in given if isinstance(one, Tensor)), args[0] if args else None)


def new_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the number of tokens per sequence in a call; 0 if it is unknown.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
    """
    tokens = _tokens(args, kwargs)
    return tokens.shape[1] if isinstance(tokens, Tensor) and tokens.dim() > 1 else 0


_SHORT = 8192
"""Most tokens in a pass for which a plan of cuDNN's attention would take longer than it saves."""


def attention_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Return a context for a call through hooks: a new length of the cache needs no plan there.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
    """
    is_short = cache_of(kwargs) is not None and new_tokens(args, kwargs) <= _SHORT
    return devices.without_attention_plans() if is_short else nullcontext()


def padded(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with a mask over all tokens that the static cache has room for.

    Args:
        call: with a cache of which ``view.length`` tokens are in use.
    """
    args, kwargs, length = call.args, call.kwargs, call.view.length
    name = "decoder_attention_mask" if call.view.cross else "attention_mask"
    mask = kwargs.get(name)
    if length is None:
        return args, kwargs
    length += call.tokens
    if mask is None and call.view.cross:
        # decoders of transformers would make one of a length that only the device knows
        tokens = _tokens(args, kwargs)
        mask = tokens.new_ones((tokens.shape[0], length), dtype=torch.int64)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return args, kwargs
    if mask.shape[1] != length:
        raise CannotRecordError(f"{name} has {mask.shape[1]} columns for {length} tokens")
    whole = torch.nn.functional.pad(mask, (0, call.capacity - mask.shape[1]))
    return args, {**kwargs, name: whole}


def modes() -> tuple[Hashable, ...]:
    """Return the modes of torch that a recorded pass depends on."""
    return autocast.current_dtypes(), torch.is_inference_mode_enabled()


def kind_of(leaf: Any) -> Hashable:
    """Return what a recorded pass depends on in an argument.

    Args:
        leaf: of the flattened arguments.
    """
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, devices.location(leaf)
    return leaf  # type: ignore[no-any-return]


class Kind(NamedTuple):
    """What the recorded pass of a call depends on, and the call's arguments.

    Attributes:
        general: what does not depend on sizes.
        key: everything.
        leaves: of the arguments.
        structure: of the arguments.
        target: the device of the results.
    """

    general: Hashable
    key: Hashable
    leaves: list[Any]
    structure: Structure
    target: torch.device

    @classmethod
    def of(cls, call: Call, target: torch.device) -> Kind:
        """Return the kind of a call.

        Args:
            call: the call.
            target: the device of the results.
        """
        leaves, structure = flatten(padded(call))
        general = structure.key, call.view.kinds(), *modes(), call.tokens
        key = general, call.signature, tuple(map(kind_of, leaves)), target, call.backend
        return cls(general, key, leaves, structure, target)
