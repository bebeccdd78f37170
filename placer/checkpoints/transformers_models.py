"""What transformers declares about its models' checkpoints: conversions, dtypes, superfluous keys.

Checkpoints on hubs keep the names and shapes that models had when they were published. From
version 5 on, transformers converts them while it loads: a mixture of experts has one tensor for all
experts of a block, where its checkpoints have one for each expert.

Source: ``transformers.core_model_loading.convert_and_load_state_dict_in_model`` and
``transformers.conversion_mapping`` (read for transformers 5.23; earlier versions convert nothing).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Derived:
    """A tensor that is computed from several tensors of a checkpoint when it is placed.

    Attributes:
        on_meta: a tensor of its shape and dtype on meta.
        read: returns the tensor on the host.
    """

    on_meta: Tensor
    read: Callable[[], Tensor]


@dataclass
class _Conversion:
    """A conversion of transformers, and the tensors of the checkpoint that it reads."""

    converter: Any
    model: nn.Module
    name: str
    sources: list[tuple[str, str, Tensor]] = field(default_factory=list)

    def outputs(self, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the converted tensors by name, computed from changed sources."""
        converter = copy.deepcopy(self.converter)  # it consumes the tensors that it is given
        for key, pattern, tensor in self.sources:
            converter.add_tensor(self.name, key, pattern, change(tensor))
        made = converter.convert(self.name, model=self.model, config=self.model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}

    def derived(self) -> dict[str, Derived]:
        """Return what it makes, by the names of the model; nothing is read."""
        on_meta = self.outputs(lambda tensor: torch.empty_like(tensor, device="meta"))
        return {name: Derived(tensor, self._reader(name)) for name, tensor in on_meta.items()}

    def _reader(self, name: str) -> Callable[[], Tensor]:
        return lambda: self.outputs(lambda tensor: tensor)[name]


def converted(
    model: nn.Module, values: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of a checkpoint as a model of transformers has them.

    Args:
        model: any module; values for others than transformers' models stay unchanged.
        values: by the key of the checkpoint.
        saved: the model's ``state_dict``.

    Returns:
        By name: values of the checkpoint, and ``Derived`` for those that are converted.
    """
    library = _loading_of(model)
    if library is None:
        return dict(values)
    loading, transforms = library
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix = getattr(model, "base_model_prefix", "") or None
    found: dict[str, Any] = {}
    conversions: dict[str, _Conversion] = {}
    # conversions take the experts in the order of their numbers
    for key in sorted(values, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, saved)
        if name not in saved and key in saved:
            name, pattern = key, None
        if pattern is None or name not in saved:
            found[name] = values[key]
            continue
        conversion = conversions.setdefault(name, _Conversion(by_pattern[pattern], model, name))
        conversion.sources.append((key, pattern, values[key]))
    for conversion in conversions.values():
        found.update(conversion.derived())
    return found


def tie(model: Any) -> None:
    """Let a model of transformers tie its parameters; some ways to build it on meta do not.

    Args:
        model: any module; others than transformers' models stay unchanged.
    """
    if _is_transformers(model):
        model.tie_weights()


def superfluous(model: nn.Module) -> re.Pattern[str] | None:
    """Return the pattern of keys that a model declares as superfluous in checkpoints, or None."""
    found: list[str] = []
    for module in model.modules():
        declared = getattr(module, "_keys_to_ignore_on_load_unexpected", None)
        found += [one for one in declared or () if isinstance(one, str)]
    return re.compile("|".join(f"(?:{one})" for one in found)) if found else None


def dtypes(model: nn.Module, dtype: torch.dtype | None) -> Callable[[str], torch.dtype | None]:
    """Return a function from a tensor's name to its dtype.

    Some models of transformers keep modules in float32 when the others are in half precision.

    Args:
        model: any module.
        dtype: the dtype that was asked for; None keeps the checkpoint's.
    """
    declared = getattr(model, "_get_dtype_plan", None)
    plan: Mapping[str, torch.dtype] = {}
    if dtype is not None and callable(declared):
        plan = declared(dtype)
    patterns = [(re.compile(glob.replace("*", ".*")), kept) for glob, kept in plan.items()]

    def dtype_of(name: str) -> torch.dtype | None:
        return next((kept for pattern, kept in patterns if pattern.search(name)), dtype)

    return dtype_of


def _loading_of(model: Any) -> tuple[Any, list[Any]] | None:
    """Return transformers' loading module and a model's conversions; None without conversions."""
    if not _is_transformers(model):
        return None
    try:
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before version 5
        return None
    return core_model_loading, get_model_conversion_mapping(model)


def _is_transformers(model: nn.Module) -> bool:
    return hasattr(model, "tie_weights") and any(
        kind.__module__.startswith("transformers.") for kind in type(model).__mro__
    )
