"""Values that a text gives to modules, and their lookup by layer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

from placer.errors import InputError
from placer.exports.units import modules_of
from placer.schema.base import paths_around
from placer.schema.faults import nearest

V = TypeVar("V", bound=Hashable)

MAX_DEPTH = 100
"""Maximum steps of a module's path in a text; the time of a lookup grows with the depth."""


class PathTable(Generic[V]):
    """Values by module path; a value holds for everything inside the module.

    Args:
        values: by path; ``""`` is the model itself.
        title: of the text, for errors.

    Raises:
        InputError: a path has more than 100 steps.
    """

    def __init__(self, values: Mapping[str, V], title: str = "") -> None:
        self._values, self._title = values, title
        self._inside: dict[str, dict[V, str]] = {}  # by outer path, the first path of each value
        for path, value in values.items():
            if path.count(".") >= MAX_DEPTH:
                raise InputError(
                    f"the module path {path!r:.80} has more than {MAX_DEPTH} steps; name a module "
                    "of the model"
                )
            for outer in paths_around(path):
                self._inside.setdefault(outer, {}).setdefault(value, path)

    def of(self, layer: str) -> dict[V, str]:
        """Return the values that hold for parts of a layer, each with the first path that has it.

        They are the value of the innermost path around each module of the layer, and the values of
        paths inside these modules.
        """
        found: dict[V, str] = {}
        for module in modules_of(layer):
            for path in (module, *paths_around(module, MAX_DEPTH)):
                if path in self._values:
                    found.setdefault(self._values[path], path)
                    break
            for value, path in self._inside.get(module, {}).items():
                found.setdefault(value, path)
        return found

    def one_of(self, layer: str, kind: str = "") -> V:
        """Return the value that holds for the whole of a layer.

        Raises:
            InputError: no value, or several, hold for parts of the layer.
        """
        found = self.of(layer)
        if not found:
            raise InputError(
                f"{self._title} has no entry for layer {layer!r}"
                f"{nearest(layer, list(self._values))}; name its module"
            )
        if len(found) > 1:
            parts = ", ".join(f"{path!r} on {kind}{value}" for value, path in found.items())
            raise InputError(
                f"{self._title} cuts inside layer {layer!r} ({parts}); profile with a finer "
                "granularity, or keep the layer whole"
            )
        return next(iter(found))
