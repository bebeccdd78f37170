"""Results of a model that generates: without the static cache, and compared with one another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.executor.checks.tolerances import Closeness, shown


class UsersCache:
    """A placeholder for the user's cache in a result."""


def copied(tensor: Tensor, target: torch.device) -> Tensor:
    """Return a copy of a result on the caller's device; the next pass overwrites the result.

    Args:
        tensor: of a result.
        target: the device.
    """
    if devices.same(devices.location(tensor), target):
        return tensor.clone()
    return devices.move(tensor, target)


def exchanged(nest: Any, old: Any, new: Any) -> Any:
    """Return a result with ``new`` in place of the object ``old``.

    Args:
        nest: the result.
        old: an object anywhere in it.
        new: another object.
    """
    if nest is old:
        return new
    if isinstance(nest, dict):
        items = {name: exchanged(item, old, new) for name, item in nest.items()}
        if all(items[name] is item for name, item in nest.items()):
            return nest
        return type(nest)(**items) if type(nest) is not dict else items
    if type(nest) in (tuple, list):
        return type(nest)(exchanged(item, old, new) for item in nest)
    return nest


def difference(found: Any, expected: Any, message: str, rounded: int = 1) -> str:
    """Return a message if two results are not equal up to rounding; an empty string if they are.

    Args:
        found: a result.
        expected: another one.
        message: what an inequality means.
        rounded: how many of both are rounded in ways of their own; the tolerance is for one.
    """
    some, others = tensors_without_caches(found), tensors_without_caches(expected)
    if len(some) != len(others):
        return message
    close = Closeness(rounded * Closeness.for_tensors(others).tolerance)
    unlike = (
        f"{message}: {shown(one, other)}"
        for one, other in zip(some, others, strict=True)
        if not close(one, other)
    )
    return next(unlike, "")


def tensors_without_caches(nest: Any) -> list[Any]:
    """Return the tensors of a result without its caches.

    Args:
        nest: the result.
    """
    if isinstance(nest, Tensor):
        return [nest]
    if isinstance(nest, dict):
        return [leaf for item in nest.values() for leaf in tensors_without_caches(item)]
    if isinstance(nest, (tuple, list)):
        return [leaf for item in nest for leaf in tensors_without_caches(item)]
    return []
