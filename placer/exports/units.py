"""Units of a format: groups of layers that a format places as a whole.

layers   embed  rotary  layers.0.attn  layers.0.mlp  layers.1.attn  layers.1.mlp  norm  head
units    [embed rotary] [layers.0                 ]  [layers.1               ]    [norm] [head]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from placer.schema.base import MAX_LAYERS, WHOLE, module_paths

_MOST_DIGITS = len(str(MAX_LAYERS - 1))
"""Digits of the largest number of a block. A format counts all blocks up to it, so a longer name
would need time and memory without limit."""


@dataclass(frozen=True)
class Unit:
    """Layers that a format places as a whole.

    Attributes:
        keys: the names that the format gives to the parts of the unit, in execution order.
        layers: the names of its layers, in execution order.
    """

    keys: tuple[str, ...]
    layers: tuple[str, ...]

    def __str__(self) -> str:
        """Return the names of its parts, for messages."""
        return " and ".join(map(repr, self.keys)) or "the model"


def modules_of(layer: str) -> list[str]:
    """Return the path of each call in a layer's name; ``""`` for the model itself."""
    return ["" if path == WHOLE else path for path in module_paths(layer)]


def is_number(name: str) -> bool:
    """Return whether the name of a module is its number in a list."""
    return name.isdecimal() and len(name) <= _MOST_DIGITS


def block_path(module: str) -> str | None:
    """Return the path of the outermost numbered module around a module; None without one.

    Blocks of a model are the elements of a ``ModuleList`` or ``Sequential``, whose names are
    numbers: ``model.layers.3`` for ``model.layers.3.mlp.up_proj``.
    """
    steps = module.split(".")
    for depth, step in enumerate(steps):
        if is_number(step):
            return ".".join(steps[: depth + 1])
    return None


def units_in_order(layers: Sequence[str], key: Callable[[str], str | None]) -> list[Unit]:
    """Return units that follow one another in execution order.

    Layers between two layers of a unit belong to the unit. So a module that is called twice forms
    one unit with everything that runs between its calls.

    Args:
        layers: the names of all layers, in execution order.
        key: the format's name for the part that a module path belongs to; None if the format does
            not name it. Unnamed layers join the unit before them, or at the start the first unit.
    """
    keys_at = [_keys(layer, key) for layer in layers]
    last = {each: index for index, keys in enumerate(keys_at) for each in keys}
    begins: list[int] = []
    reach = -1  # the last layer of the parts that began before
    for index, keys in enumerate(keys_at):
        if keys and index > reach:
            begins.append(index)
        reach = max([reach, *(last[each] for each in keys)])
    begins = [0, *begins[1:]]  # unnamed layers at the start join the first unit
    ends = [*begins[1:], len(layers)]
    return [
        _unit(layers, keys_at, begin, end) for begin, end in zip(begins, ends, strict=True) if end
    ]


def units_anywhere(layers: Sequence[str], key: Callable[[str], str]) -> list[Unit]:
    """Return units for a format that places each module by itself, in any order.

    Args:
        layers: the names of all layers, in execution order.
        key: the format's name for the part that a module path belongs to.
    """
    keys_at = [list(dict.fromkeys(map(key, modules_of(layer)))) for layer in layers]
    joined: dict[str, str] = {}  # from each key to another key of its unit, or to itself

    def first(each: str) -> str:
        # each step also shortens the way for later calls, so that all calls take linear time
        while (next_key := joined.setdefault(each, each)) != each:
            joined[each] = joined[next_key]
            each = next_key
        return each

    for keys in keys_at:
        for other in keys[1:]:
            joined[first(other)] = first(keys[0])
    groups: dict[str, tuple[dict[str, None], list[str]]] = {}
    for layer, keys in zip(layers, keys_at, strict=True):
        known, members = groups.setdefault(first(keys[0]), ({}, []))
        known.update(dict.fromkeys(keys))
        members.append(layer)
    return [Unit(tuple(keys), tuple(members)) for keys, members in groups.values()]


def _keys(layer: str, key: Callable[[str], str | None]) -> list[str]:
    found = (key(path) for path in modules_of(layer))
    return list(dict.fromkeys(each for each in found if each is not None))


def _unit(layers: Sequence[str], keys_at: Sequence[Iterable[str]], begin: int, end: int) -> Unit:
    keys = dict.fromkeys(each for keys in keys_at[begin:end] for each in keys)
    return Unit(tuple(keys), tuple(layers[begin:end]))
