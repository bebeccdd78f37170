"""Profiles of both passes of a generation: over the prompt, and over one token.

    keys and values, capacity ──▶ buffers of the modules of attention
                                            │
    one id ──▶ one-token pass, over a cache with room for the whole text ──▶ profile
    prompt ──▶ the prompt's pass, with the same layers                   ──▶ profile

Decoding works on a static cache, which stays on the device of its layers. For the one-token pass
the keys and values are therefore buffers of the modules that fill them, as weights are: the pass
writes one row and reads all of them, and their memory counts with their layer. As inputs of the
model, they would be copied in every pass.

The profiles also say which bytes of a layer are experts of a mixture, and which part of them the
tokens of a pass are expected to choose. With n experts, of which each of t tokens chooses k, every
choice equally likely and independent of the other tokens, that part is 1 - (1 - k / n) ** t.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from placer.capture import input_forms
from placer.capture.argument_checks import require_module
from placer.capture.expert_stacks import stacks_in
from placer.devices import DeviceLike
from placer.errors import InputError
from placer.profiler.links.cluster import MemoryLimit
from placer.profiler.profile import profile
from placer.profiler.progress import Shown
from placer.schema import GenerationOptions, Profile, ProfileOptions
from placer.schema.base import module_paths, paths_around

__all__ = ["REMEDY", "filled_cache", "host_ms", "profile_generation", "prompt_inputs"]

KeyValues = Sequence[tuple[str, Tensor, Tensor]]
"""Paths of modules of attention, each with the keys and values of one token, possibly on meta."""

_LOG = logging.getLogger(__name__)

REMEDY = "choose another objective, or give profiles of both passes that you measured yourself"

_BUFFERS = ("placer_keys", "placer_values")
"""Names of the buffers that a module of attention has during a measurement."""

_TOKENS = -2
"""The dimension of tokens in keys and values."""

_CALLS = 7
"""Calls of ``generate`` of which the median time counts, after a first one."""


def prompt_inputs(
    model: nn.Module, example_inputs: Any, asked: GenerationOptions
) -> dict[str, Tensor]:
    """Return the inputs of the prompt's pass, by keyword.

    Args:
        model: a model of transformers.
        example_inputs: token ids of shape ``[sequences, prompt tokens]``, alone, in a tuple, or as
            ``input_ids`` with ``attention_mask`` in a dict; None for one sequence of zeros.
        asked: the prompt and the new tokens.

    Raises:
        InputError: the model has no cache of transformers, the inputs have another form, or a
            prompt of another length.
    """
    require_module(model)
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise InputError(
            f"objective is 'generation', but {type(model).__name__} is not a model of transformers,"
            f" whose cache is known; {REMEDY}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"objective is 'generation', but {type(model).__name__} is an encoder-decoder, whose"
            f" two passes run different layers; {REMEDY}"
        )
    if example_inputs is None:
        place = next((one.device for one in model.parameters()), torch.device("cpu"))
        return {"input_ids": torch.zeros(1, asked.prompt_tokens, dtype=torch.int64, device=place)}
    args, given = input_forms.call_arguments(example_inputs, "example_inputs")
    given = {**dict(zip(("input_ids", "attention_mask"), args, strict=False)), **given}
    strange = sorted(given.keys() - {"input_ids", "attention_mask"})
    ids = given.get("input_ids")
    if strange or len(args) > 2 or not isinstance(ids, Tensor) or ids.dim() != 2:
        named = ", ".join(strange) or "other arguments"
        raise InputError(
            f"example_inputs has {named}; objective 'generation' takes input_ids of shape"
            " [sequences, tokens], and attention_mask; leave example_inputs out for ids of zeros"
        )
    if ids.shape[1] != asked.prompt_tokens:
        raise InputError(
            f"example_inputs has {ids.shape[1]} tokens, and prompt_tokens is"
            f" {asked.prompt_tokens}; give a prompt of that length, or leave example_inputs out"
        )
    return given


def profile_generation(
    model: nn.Module,
    prompt: Mapping[str, Tensor],
    asked: GenerationOptions,
    attention: KeyValues,
    capacity: int,
    devices: int | Sequence[DeviceLike] | None = None,
    *,
    memory_bytes: MemoryLimit = None,
    progress: Shown = True,
    options: ProfileOptions | None = None,
    experts: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Profile, Profile]:
    """Measure the prompt's pass and the pass of one token, with the same layers.

    Args:
        model: a model of transformers, on any device; it is left unchanged.
        prompt: the inputs of ``prompt_inputs``.
        asked: the prompt and the new tokens.
        attention: the keys and values of one token of the prompt's sequences, by module.
        capacity: tokens that the cache of a sequence has room for.
        devices: as for ``profile``.
        memory_bytes: as for ``profile``.
        progress: as for ``profile``.
        options: as for ``profile``.
        experts: by path of a module of experts, how many of them a token chooses.

    Returns:
        The profile of the prompt's pass, with the cluster, and of a token's pass halfway through
        the text. The latter has the keys and values of its sequences among its buffers.

    Raises:
        InputError: as for ``profile``.
        CaptureError: as for ``profile``.
        ProfilingError: as for ``profile``.
    """
    how = options or ProfileOptions()
    ids = prompt["input_ids"]
    length = min(asked.prompt_tokens + asked.new_tokens // 2, capacity - 1)

    def measured(inputs: dict[str, Any], granularity: Any) -> Profile:
        found: Profile = profile(
            model,
            inputs,
            devices,
            training=False,
            memory_bytes=memory_bytes,
            progress=progress,
            options=how.model_copy(update={"granularity": granularity}),
        )
        return found

    with filled_cache(model, attention, capacity, length) as cache:
        one = {"input_ids": ids[:, :1], "past_key_values": cache, "use_cache": False}
        token = measured(one, how.granularity)
    # Writes to the cache may join layers, so the names of this pass are the layers of both.
    names = tuple(layer.name for layer in token.layers)
    first = measured({**prompt, "use_cache": False}, names)
    first = _with_experts(first, model, experts, ids.numel())
    token = _with_experts(token, model, experts, len(ids))
    return (
        first.model_copy(update={"granularity": token.granularity}),
        token.model_copy(update={"cluster": None}),
    )


def _with_experts(
    profile: Profile, model: nn.Module, experts: Mapping[str, int], tokens: int
) -> Profile:
    """Return a profile whose layers say which bytes are experts, and which part tokens choose.

    Args:
        profile: of a pass.
        model: the model.
        experts: by path of a module of experts, how many of them a token chooses.
        tokens: of all sequences in the pass.
    """
    stacks = stacks_in(model, {name for name, _ in model.named_parameters()})
    by_path = _layers_by_path([layer.name for layer in profile.layers])
    held: defaultdict[str, int] = defaultdict(int)
    chosen: defaultdict[str, float] = defaultdict(float)
    for path, count in experts.items():
        parameters = [model.get_parameter(name) for name in stacks[path]]
        size = sum(one.nbytes for one in parameters)
        layers = next((by_path[one] for one in (path, *paths_around(path)) if one in by_path), [])
        # Parameters of several layers stay on their device.
        if len(layers) == 1:
            held[layers[0]] += size
            chosen[layers[0]] += size * (1 - (1 - count / parameters[0].shape[0]) ** tokens)
    return profile.model_copy(
        update={
            "layers": tuple(
                layer.model_copy(
                    update={
                        "expert_bytes": held[layer.name],
                        "expert_share": chosen[layer.name] / held[layer.name],
                    }
                )
                # shared parameters count in their first layer, and stay on their device, too
                if 0 < held[layer.name] <= layer.param_bytes
                else layer
                for layer in profile.layers
            )
        }
    )


def _layers_by_path(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the layers of each path of a module."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        for path in module_paths(name):
            found[path].append(name)
    return dict(found)


def host_ms(model: nn.Module, prompt: Mapping[str, Tensor], place: torch.device) -> float | None:
    """Return the time in ms that the host needs in ``generate`` before the prompt's pass.

    ``generate`` checks its options and makes the cache while the devices wait. It is called as far
    as that, so the weights may be anywhere.

    Args:
        model: a model of transformers; it is left unchanged.
        prompt: the inputs of ``prompt_inputs``.
        place: where a user's prompt will be.

    Returns:
        The median; None if the model has no such ``generate``.
    """
    inputs = {name: tensor.to(place) for name, tensor in prompt.items()}
    times = list[float]()

    def stop(*_: Any) -> None:
        times.append(1000 * (perf_counter() - began))
        raise _PassReached

    hook = model.register_forward_pre_hook(stop)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weights on another device than the prompt
            for _ in range(1 + _CALLS):
                began = perf_counter()
                try:
                    model.generate(**inputs, max_new_tokens=1, pad_token_id=0)  # type: ignore[operator]
                except _PassReached:
                    continue
                return None
    except Exception as error:  # another library's method: without it, a time is unknown
        _LOG.info("the host's time of %s.generate is unknown: %r", type(model).__name__, error)
        return None
    finally:
        hook.remove()
    return median(times[1:])


class _PassReached(Exception):
    """``generate`` has called the model."""


@contextmanager
def filled_cache(
    model: nn.Module, attention: KeyValues, capacity: int, length: int
) -> Iterator[Any]:
    """Give a model a static cache in buffers, inside the block.

    Args:
        model: a model of transformers.
        attention: the keys and values of one token, by module.
        capacity: tokens that the cache has room for.
        length: tokens in it, below ``capacity``.

    Yields:
        The cache, for ``past_key_values``. It has the same length after every pass.
    """
    kinds = sys.modules["transformers.cache_utils"]
    make = _layer_class(kinds)
    changed: list[nn.Module] = []
    layers = []
    try:
        for path, *parts in attention:
            module = model.get_submodule(path)
            changed.append(module)
            for name, part in zip(_BUFFERS, parts, strict=True):
                module.register_buffer(name, _room(module, part, capacity), persistent=False)
            layers.append(make(module, capacity, length))
        yield kinds.Cache(layers=layers)
    finally:
        for module in changed:
            for name in _BUFFERS:
                if name in module._buffers:
                    delattr(module, name)


def _room(module: nn.Module, part: Tensor, capacity: int) -> Tensor:
    """Return memory for the keys or values of a layer, where its module is.

    It is finite: a masked value counts zero times, and zero times NaN is NaN.
    """
    place = next((one.device for one in module.parameters()), part.device)
    shape = list(part.shape)
    shape[_TOKENS] = capacity
    return torch.zeros(shape, dtype=part.dtype, device=place)


def _layer_class(kinds: Any) -> Any:
    """Return a class of static layers whose keys and values are buffers of a module."""

    class BufferLayer(kinds.StaticLayer):  # type: ignore[misc]
        """A static layer that is as long after a pass as before it."""

        def __init__(self, module: nn.Module, capacity: int, length: int) -> None:
            super().__init__(max_cache_len=capacity)
            # a tensor would be an input of the model
            if hasattr(self, "cumulative_length"):
                del self.cumulative_length
            self.module, self.length = module, length
            self.is_initialized = True

        def update(
            self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            """Write the keys and values of new tokens, and return the whole buffers."""
            stored = tuple(getattr(self.module, name) for name in _BUFFERS)
            for whole, new in zip(stored, (keys, values), strict=True):
                whole.narrow(_TOKENS, self.length, new.shape[_TOKENS]).copy_(new)
            return stored[0], stored[1]

        def get_seq_length(self) -> int:
            """Return the number of tokens before the pass."""
            return self.length

        def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
            """Return the number of tokens that a mask covers, and the first of them."""
            return self.max_cache_len, 0

    return BufferLayer
