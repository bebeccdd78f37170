"""Paths of modules, such as ``layers.0.mlp``, and the layers' names that are made of them."""

from __future__ import annotations

from placer.schema.base import MERGED


def module_paths(layer: str) -> list[str]:
    """Return the paths in a layer's name, without the numbers of their calls.

    A merged layer names several modules, each once: ``a+b+b@1`` has the paths ``a`` and ``b``.
    """
    return list(dict.fromkeys(unit.partition("@")[0] for unit in layer.split(MERGED)))


def paths_around(path: str) -> list[str]:
    """Return the paths of the modules around a module, innermost first; the model's is ``""``."""
    steps = path.split(".")
    return [".".join(steps[:depth]) for depth in reversed(range(len(steps)))] if path else []
