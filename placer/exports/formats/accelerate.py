"""The device map of accelerate and transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from placer.errors import InputError
from placer.exports.format import Format
from placer.exports.path_table import PathTable
from placer.exports.plan import Plan
from placer.exports.python_data import python_data
from placer.exports.units import Unit, block_path, modules_of, units_anywhere
from placer.schema.base import WHOLE
from placer.schema.export import Place, device_map, never_split

_EXAMPLE = '{"model.embed_tokens": 0, "model.layers": 1, "lm_head": 1}'


class Accelerate(Format):
    """The device of each module: ``{"embed": 0, "blocks.0": 0, "blocks.1": 1, "head": 1}``.

    accelerate moves the inputs of a module to the module's device, in any order of devices. It
    moves nothing between operations inside a module. So a block is placed as a whole.
    """

    name = "accelerate"
    title = "device_map of accelerate"
    source = "accelerate 1.15, src/accelerate/big_modeling.py, dispatch_model; Placement.device_map"
    in_segments = False

    def units(self, layers: Sequence[str]) -> list[Unit]:
        """Return blocks, and modules outside blocks; see ``Format.units``."""
        return units_anywhere(layers, lambda module: block_path(module) or module)

    def kept_whole(self, layers: Sequence[str], model: Any) -> list[tuple[str, ...]]:
        """Return the layers of each module in ``_no_split_modules``; see ``Format.kept_whole``."""
        groups: dict[str, list[str]] = {}
        whole = PathTable({path: path for path in never_split(model)})
        for layer in layers:
            for path in whole.of(layer):
                groups.setdefault(path, []).append(layer)
        return [tuple(group) for group in groups.values() if len(group) > 1]

    def text(self, plan: Plan) -> str:
        """Return the device of each module, as JSON; see ``Format.text``.

        A model's ``_no_split_modules`` say which modules stay whole. Without them, blocks do, and
        the map names each block, so that accelerate also moves what the block adds to its parts.
        """
        if plan.model is not None and never_split(plan.model):
            return json.dumps(device_map(plan.layer_devices, plan.model), indent=1)
        whole = {
            key or WHOLE: device for unit, device in self.placed_units(plan) for key in unit.keys
        }
        return json.dumps(device_map(whole, plan.model), indent=1)

    def notes(self, plan: Plan) -> list[str]:
        """Return what the map cannot say; see ``Format.notes``.

        These are stand-ins for devices, and places where an operation between modules may fail.
        """
        stand_ins = sorted(
            {device for device in plan.layer_devices.values() if _named("cpu", [device])}
        )
        found = super().notes(plan)
        if len(stand_ins) > 1:
            found.append(
                f"The map has 'cpu' for {' and '.join(stand_ins)}, because accelerate knows one "
                "CPU, so this map does not split the model there. Place the model on GPUs for a "
                "map that does."
            )
        outside = [
            layer
            for layer in plan.layer_devices
            if all(block_path(module) is None for module in modules_of(layer))
        ]
        cuts = [
            f"{before!r} and {after!r}"
            for before, after in pairwise(outside)
            if plan.layer_devices[before] != plan.layer_devices[after]
        ]
        if not cuts:
            return found
        return [
            "accelerate moves the inputs of modules only. An operation between modules, such as "
            "the sum of two embeddings, fails if its inputs are on two devices. Run the model "
            f"once: devices change between {' and between '.join(cuts[:3])}.",
            *found,
        ]

    def read(self, text: str, layers: Sequence[str], devices: Sequence[str]) -> dict[str, str]:
        """Return the device of each layer; see ``Format.read``.

        A number is the device with this index, or else at this position. ``"cpu"`` is the only
        device of this kind. A module that no layer belongs to is ignored.
        """
        given = python_data(text, self.title, _EXAMPLE)
        if not isinstance(given, dict) or not given:
            raise InputError(
                f"{self.title} is {text.strip()!r:.80}; give a dictionary from modules to devices, "
                f"such as {_EXAMPLE}"
            )
        places = {str(path): _device(str(path), place, devices) for path, place in given.items()}
        table = PathTable(places, self.title)
        return {layer: table.one_of(layer) for layer in layers}


def _device(path: str, place: Place, devices: Sequence[str]) -> str:
    """Return the device that a map's value means.

    Raises:
        InputError: there is no such device.
    """
    if isinstance(place, int | str) and not isinstance(place, bool):
        found = _named(place, devices)
        if len(found) == 1:
            return found[0]
        if isinstance(place, int) and not found and 0 <= place < len(devices):
            return devices[place]
    else:
        found = []
    several = f"is one of {', '.join(found)}; name one of them" if found else _why_unknown(place)
    raise InputError(
        f"the device map has {path!r} on {place!r:.80}, which {several} (the devices are "
        f"{', '.join(devices)})"
    )


def _named(place: Place, devices: Sequence[str]) -> list[str]:
    """Return the devices that a name or an index may mean; names may leave out the host."""
    local = {device: device.rpartition("/")[2] for device in devices}
    if isinstance(place, int):
        return [device for device in devices if local[device] == f"cuda:{place}"]
    if place in devices:
        return [place]
    kind, _, index = place.partition(":")
    exact = [device for device in devices if local[device] in (place, f"{kind}:{index or 0}")]
    if index or kind != "cpu":
        return exact
    return [device for device in devices if local[device].partition(":")[0] == "cpu"]


def _why_unknown(place: Place) -> str:
    if place == "disk":
        return "keeps the weights on disk and names no device that computes; solve with disk_bytes"
    if place == "cpu":
        return "keeps the weights on the host, which is not among the devices; include it"
    return "is not a device; give a GPU's index or a device's name"
