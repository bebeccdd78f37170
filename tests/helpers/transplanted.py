"""A model that is made again needs no capture again: what was captured of its equal, over its own
parameters.

Where captures are not what is tested, they are most of the time: a half second for a model that
trains in a tenth."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn

from placer.capture.export.export import Exported, export

_KEPT: dict[Hashable, tuple[nn.Module, Exported]] = {}


@contextmanager
def captured_once(key: Hashable) -> Iterator[None]:
    """Let pipelines that are built inside take what was captured of an equal model and micro-batch
    in this process.

    Args:
        key: that they are equal.
    """
    with mock.patch("placer.distributed.build.export", _once(key)):
        yield


def _once(key: Hashable) -> Callable[..., Exported]:
    def once(model: nn.Module, args: Any, kwargs: Any, dims: Any) -> Exported:
        if key in _KEPT:
            return transplanted(*_KEPT[key], model)
        exported = export(model, args, kwargs, dims)
        equal = copy.deepcopy(model)
        _KEPT[key] = equal, transplanted(model, exported, equal)
        return exported

    return once


def transplanted(model: nn.Module, exported: Exported, other: nn.Module) -> Exported:
    """What was captured of a model, over the modules, parameters and buffers of its equal."""
    pairs = zip(_parts(model), _parts(other), strict=True)
    # files and classes are there once
    holders = {id(holder): holder for holder, _ in exported.attributes}
    with warnings.catch_warnings():
        # torch's own trees look at themselves in a way that is to go
        warnings.simplefilter("ignore")
        return copy.deepcopy(exported, holders | {id(part): its for part, its in pairs})


def _parts(model: nn.Module) -> list[Any]:
    return [*model.modules(), *model.parameters(), *model.buffers()]
