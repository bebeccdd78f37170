"""Which device a layer, a module or a parameter runs on, by the names in ``layer_gpus``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from placer.capture.layers import Layer, LayerGraph
from placer.errors import InputError, PlacementError
from placer.schema import Placement
from placer.schema.base import MERGED, WHOLE

WRAPPERS = ("module", "_orig_mod")
"""Where DataParallel and its like, and torch.compile, keep the model."""


ALL = ""
"""In a map, as accelerate has it: whatever is not named."""


class Assignment:
    """A map from layer names to devices that answers for every name of the model.

    A name that is not in the map takes the device of its module's next call's first, then of the
    module around it, then of the first module inside it, then that of "", if it is there; a layer
    without any takes the device of the layer before it.

    Args:
        devices: layer name -> device.
        default: where everything else goes.

    Attributes:
        default: the same.
    """

    def __init__(self, devices: Mapping[str, torch.device], default: torch.device) -> None:
        self.default = default
        self._exact = dict(devices)
        self._inner: dict[str, torch.device] = {}
        for name, device in devices.items():
            for unit in name.split(MERGED):
                path = unit.partition("@")[0]
                self._exact.setdefault(path, device)
                while path:
                    path = path.rpartition(".")[0]
                    self._inner.setdefault(path, device)

    @property
    def devices(self) -> list[torch.device]:
        """The devices that the map names, and the one where everything else goes."""
        return list(dict.fromkeys([*self._exact.values(), self.default]))

    def of_path(self, path: str) -> torch.device | None:
        """The device of a module path, or None where the map says nothing of it."""
        here = path
        while here:
            if here in self._exact:
                return self._exact[here]
            here = here.rpartition(".")[0]
        rest = self._exact.get(ALL)
        return self._inner.get(path, rest) if path else rest

    def of_state(self, name: str) -> torch.device:
        """The device of a parameter or buffer."""
        return self.of_path(name.rpartition(".")[0]) or self.default

    def of_layers(self, graph: LayerGraph) -> list[torch.device]:
        """The device of every layer, in execution order."""
        found: list[torch.device] = []
        for layer in graph.layers:
            found.append(self._of_layer(layer) or (found[-1] if found else self.default))
        return found

    def _of_layer(self, layer: Layer) -> torch.device | None:
        if layer.name in self._exact:
            return self._exact[layer.name]
        places = (self.of_path(path) for path in layer.modules)
        return next((place for place in places if place is not None), None)


def placing(given: Placement | Mapping[str, Any]) -> Placement:
    """A placement that places layers, given as one or as what its JSON holds.

    Raises:
        PlacementError: it is none, or places no layer.
    """
    try:
        placement = given if isinstance(given, Placement) else Placement.model_validate(given)
    except InputError as error:
        raise PlacementError(f"this is no placement: {error}") from error
    if not placement.layer_devices:
        why = f": {placement.infeasible.reason}" if placement.infeasible else ""
        raise PlacementError(f"the placement is {placement.status} and places no layer{why}")
    return placement


def layer_names(module: nn.Module, fine_grained: bool) -> list[str]:
    """The names in a map that nobody has edited: the named children of a model, or every leaf
    module.
    """
    if fine_grained:
        return [path for path, child in module.named_modules() if path and not child._modules]
    return [path for path, _ in module.named_children()]


def refuse_unknown_layers(module: nn.Module, names: Iterable[str], examples: Sequence[str]) -> None:
    """Raise a PlacementError if a name is no layer of the model.

    Args:
        module: the model.
        names: to look at.
        examples: names for the message.
    """
    known = {path for path, _ in module.named_modules(remove_duplicate=False)} | {WHOLE}
    for name in names:
        if not isinstance(name, str):
            raise PlacementError(
                f"layer_gpus has the key {name!r}; give names of layers, such as "
                f"{_named(module, name)!r}"
            )
        for part in name.split(MERGED):
            if part.partition("@")[0] not in known:
                raise PlacementError(
                    f"layer {part!r} is no module of {type(module).__name__}; its layers are "
                    f"{', '.join(examples[:8])}, ...{_wrapping(part, known)}"
                )


def _named(module: nn.Module, given: Any) -> str:
    """The name that was probably meant: an index of ``nn.Sequential``, or a module itself."""
    own = (path for path, child in module.named_modules() if path and child is given)
    return (
        next(own, str(given))
        if isinstance(given, (int, nn.Module))
        else next(iter(layer_names(module, False)), "")
    )


def _wrapping(name: str, known: Iterable[str]) -> str:
    """What to do where this model, or the one of the placement, is in a wrapper, such as
    DataParallel.
    """
    for wrapper in WRAPPERS:
        if f"{wrapper}.{name}" in known:
            return f"; there is {wrapper}.{name}: give the model that is wrapped, model.{wrapper}"
        if name.startswith(f"{wrapper}.") and name.removeprefix(f"{wrapper}.") in known:
            return f"; the placement is of a wrapped model: suggest one for model.{wrapper}"
    return ""
