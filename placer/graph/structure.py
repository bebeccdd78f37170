"""Any nest of inputs or outputs as a flat list of tensors, and back.

torch's pytree knows containers that were registered with it. A model may also take or return dataclasses, caches and
other objects that hold tensors, and these must not have to be registered by the user.

    (x, {"mask": m}, Cache(k, v), None)   <->   [x, m, k, v]  +  Structure
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_OPAQUE = (nn.Module, type, torch.Generator)


@dataclasses.dataclass(frozen=True)
class Structure:
    """What is left of a nest once its tensors are taken out.

    Attributes:
        key: equal for equal nests: containers, their types, and plain constants by value.
        rebuild: makes the nest again from an iterator over its tensors.
        paths: where each tensor stands, for messages: ``[0]``, ``['mask']``, ``.logits``.
    """

    key: Hashable
    rebuild: Callable[[Iterator[Any]], Any]
    paths: tuple[str, ...]

    def unflatten(self, tensors: Sequence[Any]) -> Any:
        """The nest with these tensors, in the order in which ``flatten`` gave them."""
        return self.rebuild(iter(tensors))


def flatten(nest: Any) -> tuple[list[Any], Structure]:
    """The tensors of a nest, depth first, and the structure that holds them.

    Args:
        nest: tensors in any nest of tuples, lists, dicts, named tuples, dataclasses and objects with attributes.

    Returns:
        The tensors (and, while a model is captured, numbers that depend on a shape), and the structure.
    """
    return _flat(nest, anew=False)


def flatten_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Structure]:
    """The same of ``(args, kwargs)``; objects without tensors are made anew as well, as forward may write into them."""
    return _flat((args, kwargs), anew=True)


def _flat(nest: Any, anew: bool) -> tuple[list[Any], Structure]:
    leaves: list[Any] = []
    paths: list[str] = []
    key, rebuild = _walk(nest, "", leaves, paths, (), anew)
    return leaves, Structure(key, rebuild, tuple(paths))


def _walk(
    nest: Any, path: str, leaves: list[Any], paths: list[str], above: tuple[int, ...], anew: bool
) -> tuple[Hashable, Callable[[Iterator[Any]], Any]]:
    if isinstance(nest, (Tensor, *NUMBERS)):
        leaves.append(nest)
        paths.append(path)
        return "*", next
    if isinstance(nest, CONSTANTS):
        return (type(nest), repr(nest)), lambda _: nest
    if id(nest) in above or holds_nothing(nest):
        return (type(nest), id(nest)), lambda _: nest
    parts = parts_of(nest)
    if parts is None:
        return (type(nest), id(nest)), lambda _: nest
    labels, children, assemble = parts
    start = len(leaves)
    walked = [
        _walk(child, f"{path}{label}", leaves, paths, (*above, id(nest)), anew)
        for label, child in zip(labels, children, strict=True)
    ]
    if len(leaves) == start and not isinstance(nest, (tuple, list, dict)) and not (anew and _is_of_a_user(nest)):
        return (type(nest), id(nest)), lambda _: nest  # an object without tensors passes as it is
    rebuilds = [rebuild for _, rebuild in walked]
    key = (type(nest), tuple(labels), tuple(key for key, _ in walked))
    return key, lambda flat: assemble([rebuild(flat) for rebuild in rebuilds])


def holds_nothing(nest: Any) -> bool:
    """Whether it is a module, a class, a function or the like, of which a nest takes no parts."""
    return isinstance(nest, _OPAQUE) or callable(nest)


def _is_of_a_user(nest: Any) -> bool:
    """Whether an object is of a class that neither Python nor torch has."""
    owner = type(nest).__module__.split(".")[0]
    return owner != "torch" and owner not in sys.stdlib_module_names


def parts_of(nest: Any) -> tuple[list[str], list[Any], Callable[[list[Any]], Any]] | None:
    """Labels, children and the way back of one container, or None for what is no container."""
    kind = type(nest)
    if isinstance(nest, PackedSequence):
        return [f".{name}" for name in kind._fields], list(nest), _packed
    if isinstance(nest, tuple) and hasattr(kind, "_fields"):
        return [f".{name}" for name in kind._fields], list(nest), lambda items: kind(*items)
    if isinstance(nest, (tuple, list)):
        return [f"[{index}]" for index in range(len(nest))], list(nest), kind
    if dataclasses.is_dataclass(nest) and isinstance(nest, dict):  # transformers' ModelOutput is both
        names = list(nest.keys())
        return [f".{name}" for name in names], list(nest.values()), lambda items: kind(**_paired(names, items))
    if isinstance(nest, dict):
        return _mapping_parts(nest)
    attributes = attributes_of(nest)
    if attributes is None:
        return None
    names = list(attributes)
    template = _bare(nest, names)
    if template is None:
        return None
    return [f".{name}" for name in names], list(attributes.values()), lambda items: _filled(template, names, items)


def _packed(items: list[Any]) -> PackedSequence:
    """A packed sequence, which takes its lengths from the host alone."""
    return PackedSequence(items[0], items[1].cpu(), *items[2:])


def _mapping_parts(nest: dict[Any, Any]) -> tuple[list[str], list[Any], Callable[[list[Any]], Any]]:
    names = list(nest)
    template = copy.copy(nest)
    template.clear()

    def assemble(items: list[Any]) -> Any:
        filled = copy.copy(template)
        filled.update(_paired(names, items))
        return filled

    return [f"[{name!r}]" for name in names], list(nest.values()), assemble


def attributes_of(nest: Any) -> Mapping[str, Any] | None:
    """What an object holds by name; None where that is nothing."""
    if dataclasses.is_dataclass(nest):
        return {
            field.name: getattr(nest, field.name) for field in dataclasses.fields(nest) if hasattr(nest, field.name)
        }
    return getattr(nest, "__dict__", None) or None


def _bare(nest: Any, names: Sequence[str]) -> Any:
    """A shallow copy of an object without the attributes that will be filled in; None of one that allows no copy."""
    try:
        template = copy.copy(nest)
    except Exception:  # whatever its own code raises
        return None
    if template is nest:
        return None
    for name in names:
        if name in getattr(template, "__dict__", {}):
            object.__delattr__(template, name)
    return template


def _filled(template: Any, names: Sequence[str], items: Sequence[Any]) -> Any:
    filled = copy.copy(template)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(filled, name, item)
    return filled


def _paired(names: Sequence[Any], items: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(names, items, strict=True))
