"""The device of each layer, module and parameter, by the names in ``layer_gpus``."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from placer import devices
from placer.capture.layers import Layer, LayerGraph
from placer.errors import InputError, PlacementError, kind_of
from placer.executor.state.replication import ONE_PIPELINE, Replication, owners
from placer.schema import Placement
from placer.schema.base import MERGED, WHOLE, Tier, module_paths, paths_around
from placer.utils.units import listed
from placer.utils.user_warnings import warn

WRAPPERS = ("module", "_orig_mod")
"""Attributes under which DataParallel and similar wrappers, and torch.compile, hold the model."""


ALL = ""
"""A map's key for everything that is not named, as in accelerate."""


class Assignment:
    """A map from layer names to devices that answers for every name of the model.

    The device of a name that is not in the map is, in this order: the device of the module's first
    call, of the innermost named module around it, of the first named module inside it, or of "". A
    layer without any of these takes the device of the previous layer.

    Args:
        devices_of: by layer name.
        default: the device of everything else.
        replication: the further devices that hold the same layers.

    Attributes:
        default: the device of everything else.
        replication: as given.
        resting: the layer of each parameter that rests on the host, by name.
        tiers: where the parameters of resting layers rest.
        owners: the devices of parameters that are not on the device of their layer, but on another
            one that holds it; by name.
    """

    def __init__(
        self,
        devices_of: Mapping[str, torch.device],
        default: torch.device,
        replication: Replication = ONE_PIPELINE,
    ) -> None:
        self.default = default
        self.replication = replication
        self.owners: Mapping[str, torch.device] = {}
        self.resting: Mapping[str, str] = {}
        self.tiers: Mapping[str, Tier] = {}
        self._layers: dict[str, str] = {}
        self._exact = dict(devices_of)
        self._names = list(devices_of)
        self._inner: dict[str, torch.device] = {}
        # every path of a merged or repeated layer, and all modules around it, first entry wins
        for name, device in devices_of.items():
            for path in module_paths(name):
                self._exact.setdefault(path, device)
                self._layers.setdefault(path, name)
                for around in paths_around(path):
                    self._inner.setdefault(around, device)

    @property
    def layers(self) -> list[str]:
        """Return the names in the map, in its order."""
        return self._names

    @property
    def devices(self) -> list[torch.device]:
        """Return the devices of the map, and the default device."""
        return list(dict.fromkeys([*self._exact.values(), self.default]))

    def of_path(self, path: str) -> torch.device | None:
        """Return the device of a module path; None if the map does not determine it."""
        here = path
        while here:
            if here in self._exact:
                return self._exact[here]
            here = here.rpartition(".")[0]
        rest = self._exact.get(ALL)
        return self._inner.get(path, rest) if path else rest

    def of_state(self, name: str) -> torch.device:
        """Return the device of a parameter or buffer."""
        if name in self.owners:
            return self.owners[name]
        return self.of_path(name.rpartition(".")[0]) or self.default

    def place_of(self, name: str) -> torch.device:
        """Return the device that reads a parameter or buffer, wherever it rests."""
        if name in self.resting:
            return self.of_path(name.rpartition(".")[0]) or self.default
        return self.of_state(name)

    def rests_on_disk(self, name: str) -> bool:
        """Return whether a parameter rests in a file."""
        return name in self.resting and self.tiers[self.resting[name]] == "disk"

    def rest(self, module: nn.Module, layers: Mapping[str, Tier]) -> None:
        """Let the parameters of layers rest in the host's memory, or on its disk.

        Parameters that other layers share stay on their device, and so does everything on a device
        whose memory is the host's.

        Args:
            module: the model.
            layers: where they rest, by the names of layers in the map.

        Raises:
            PlacementError: a parameter is of a kind that cannot rest on the host.
        """
        users: dict[int, set[str | None]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            users.setdefault(id(parameter), set()).add(self._layer_of(name))
        resting = {}
        for name, parameter in module.named_parameters():
            layer = self._layer_of(name)
            if layer is None or layer not in layers or users[id(parameter)] != {layer}:
                continue
            if devices.same(self.of_state(name), devices.HOST):
                continue
            _refuse_resting(name, parameter)
            resting[name] = layer
        self.resting, self.tiers = resting, dict(layers)
        self.owners = {**self.owners, **dict.fromkeys(resting, devices.HOST)}

    def _layer_of(self, name: str) -> str | None:
        """Return the layer of a parameter; None if no layer of the map is around it."""
        return next(
            (self._layers[path] for path in paths_around(name) if path in self._layers), None
        )

    def divide(self, module: nn.Module) -> None:
        """Divide the parameters of every stage among the devices that hold it."""
        self.owners = {}
        self.owners = owners(module, self.of_state, self.replication)

    def of_layers(self, graph: LayerGraph) -> list[torch.device]:
        """Return the device of every layer, in execution order."""
        found: list[torch.device] = []
        for layer in graph.layers:
            found.append(self._of_layer(layer) or (found[-1] if found else self.default))
        return found

    def _of_layer(self, layer: Layer) -> torch.device | None:
        if layer.name in self._exact:
            return self._exact[layer.name]
        places = (self.of_path(path) for path in layer.modules)
        return next((place for place in places if place is not None), None)


def _refuse_resting(name: str, parameter: nn.Parameter) -> None:
    """Raise a PlacementError if a parameter cannot be copied to a buffer as a block of memory."""
    is_usual = type(parameter) is nn.Parameter and parameter.layout == torch.strided
    if not is_usual or devices.attached(parameter):
        raise PlacementError(
            f"parameter {name!r} is {kind_of(parameter)}, which cannot rest on the host; give a "
            "placement that was solved without host_memory_bytes and disk_bytes"
        )


def placing(given: Placement | Mapping[str, Any]) -> Placement:
    """Return the placement, converted from its JSON form if necessary.

    Raises:
        PlacementError: if it is invalid or places no layer.
    """
    try:
        placement = given if isinstance(given, Placement) else Placement.model_validate(given)
    except InputError as error:
        raise PlacementError(f"this is not a placement: {error}") from error
    if not placement.layer_devices:
        why = f": {placement.infeasible.reason}" if placement.infeasible else ""
        raise PlacementError(f"the placement is {placement.status} and places no layer{why}")
    return placement


def layer_names(module: nn.Module, fine_grained: bool) -> list[str]:
    """Return the names of the default map: the model's children, or every leaf module."""
    if fine_grained:
        return [path for path, child in module.named_modules() if path and not child._modules]
    return [path for path, _ in module.named_children()]


def refuse_unknown_layers(module: nn.Module, names: Iterable[str], examples: Sequence[str]) -> None:
    """Raise a PlacementError if a name is not a layer of the model.

    Args:
        module: the model.
        names: to check.
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
                    f"layer {part!r} is not a module of {type(module).__name__}; its layers are "
                    f"{listed(examples or [WHOLE], 8)}{_wrapping(part, known)}"
                )


def warn_of_missing_blocks(module: nn.Module, placement: Placement) -> None:
    """Warn if a placement ends before the last blocks of the model.

    It was solved for a shallower model then, or the model does not run them. Other layers may be
    missing: those that do not run, such as experts inside a block, are in no placement, and a map
    written by hand may have any.

    Args:
        module: the model; it has all layers of the placement.
        placement: for the model.
    """
    if not placement.devices:  # written by hand
        return
    units = {path for name in placement.layer_devices for path in module_paths(name)}
    parents = dict.fromkeys(around for unit in units for around in paths_around(unit))
    missing = [
        name
        for path in parents
        if units.isdisjoint([path, *paths_around(path)])
        and not any(part.isdigit() for part in path.split("."))
        for name in _later_blocks(module.get_submodule(path), path, {*units, *parents})
    ]
    if missing:
        warn(
            f"the placement has no device for {listed([*map(repr, missing)], 8)} of "
            f"{type(module).__name__}, and they go to any of its devices. If the model "
            "runs them, the placement was solved for a model with fewer blocks: suggest another"
        )


def _later_blocks(parent: nn.Module, path: str, placed: Container[str]) -> list[str]:
    """Return the names of the blocks of a list after the last one that is placed.

    A list of which one module is placed may have alternatives, such as heads, of which one runs.
    """
    blocks = {
        int(name): (f"{path}.{name}" if path else name, child)
        for name, child in parent.named_children()
        if name.isdigit()
    }
    known = [number for number, (name, _) in blocks.items() if name in placed]
    kinds = {type(blocks[number][1]) for number in known}
    return [
        name
        for number, (name, child) in blocks.items()
        if len(known) > 1
        and number > max(known)
        and type(child) in kinds
        and any(True for _ in child.parameters())
    ]


def _named(module: nn.Module, given: Any) -> str:
    """Return the name that was probably meant by an index of ``nn.Sequential`` or a module."""
    own = (path for path, child in module.named_modules() if path and child is given)
    return (
        next(own, str(given))
        if isinstance(given, (int, nn.Module))
        else next(iter(layer_names(module, False)), "")
    )


def _wrapping(name: str, known: Iterable[str]) -> str:
    """Return advice if this or the placement's model is in a wrapper, such as DataParallel."""
    for wrapper in WRAPPERS:
        if f"{wrapper}.{name}" in known:
            return f"; there is {wrapper}.{name}: give the model that is wrapped, model.{wrapper}"
        if name.startswith(f"{wrapper}.") and name.removeprefix(f"{wrapper}.") in known:
            return f"; the placement is of a wrapped model: suggest one for model.{wrapper}"
    return ""
