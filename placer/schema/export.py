"""A placement in the format of another engine, and accelerate's device maps.

A map of accelerate's ``dispatch_model`` and of ``from_pretrained`` names modules, and accelerate
moves the inputs of a module to the module's device. It moves nothing between operations inside a
module. So the inside of a module must be on one device, unless the module only calls its parts one
after the other. transformers lists the classes that must stay whole in ``_no_split_modules``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from placer.errors import PlacementError
from placer.schema.base import WHOLE, FormatName, Wire, is_part, module_paths, paths_around

Place = int | str
"""A device in accelerate's format: a GPU's index, or another device's name."""


class Export(Wire):
    """A placement in the format of another engine.

    Attributes:
        format: its name.
        text: for the engine: a file's content, an option or a setting, as the format's page in the
            documentation says.
        notes: what the text cannot say and the user of the engine needs to do.
    """

    format: FormatName
    text: str
    notes: tuple[str, ...] = ()


def device_map(layer_devices: Mapping[str, str], model: Any = None) -> dict[str, Place]:
    """Return the device of each module, in execution order; see ``Placement.device_map``.

    Args:
        layer_devices: the device of each layer.
        model: the ``nn.Module`` that was placed; None for the modules that layers name.

    Raises:
        PlacementError: if there is no layer, devices are on several hosts, the model has other
            layers, or accelerate could not run the map.
    """
    hosts = sorted({device.partition("/")[0] for device in layer_devices.values() if "/" in device})
    if len(hosts) > 1 or not layer_devices:
        why = (
            f"its devices are of several hosts, {', '.join(hosts)}"
            if hosts
            else "it places no layer"
        )
        raise PlacementError(f"this placement has no device map: {why}")
    found: dict[str, str] = {}
    for name, device in layer_devices.items():
        for path in module_paths(name):
            found.setdefault("" if path == WHOLE else path, device.rpartition("/")[2])
    # CPU stand-ins count as different devices until here, so that an invalid map is detected on
    # them, too.
    return {
        path: _place(device)
        for path, device in (found if model is None else _completed(found, model)).items()
    }


def _place(device: str) -> Place:
    kind, _, index = device.partition(":")
    number = index or "0"
    if kind == "cuda" and number.isdecimal():
        return int(number)
    return "cpu" if kind == "cpu" else device


def _completed(found: Mapping[str, str], model: Any) -> dict[str, str]:
    """Return a map of all parameters and buffers, with modules as large as possible."""
    if isinstance(model, type) or not hasattr(model, "named_modules"):
        raise PlacementError(
            f"device_map was given {model!r:.80}; give the nn.Module that was placed, or nothing"
        )
    modules = {path for path, _ in model.named_modules(remove_duplicate=False)}
    if other := [path for path in found if path not in modules]:
        raise PlacementError(
            f"layer {other[0]!r} is not a module of {type(model).__name__}; give the model that "
            "was placed"
        )
    every = _with_rest(found, model)
    tensors = {name: _covering(every, name) for name, _ in _tensors(model)}
    _refuse_ties_apart(model, tensors)
    places: dict[str, set[str]] = {}
    for name, place in (*tensors.items(), *every.items()):
        for path in _around(name):
            places.setdefault(path, set()).add(place)
    _refuse_cuts(model, every, places)
    # a module with a single device is named as a whole, instead of its parts
    whole = {path for path, devices in places.items() if len(devices) == 1 and path in modules}
    result: dict[str, str] = {}
    for name, place in every.items():
        around = reversed(_around(name))
        result.setdefault(next((path for path in around if path in whole), name), place)
    return result


def never_split(model: Any) -> dict[str, str]:
    """Return the outermost modules that ``_no_split_modules`` keeps whole, and their class names.

    A model, the models that it contains, and the model inside a wrapper may each list classes.
    """
    names: set[str] = set()
    for module in model.modules():
        named = getattr(module, "_no_split_modules", None)
        names.update(named if isinstance(named, list | tuple | set | frozenset) else ())
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if type(module).__name__ in names and not any(outer in found for outer in _around(path)):
            found[path] = type(module).__name__
    return found


def _with_rest(found: Mapping[str, str], model: Any) -> dict[str, str]:
    """Return the map, extended by modules and parameters that it does not cover.

    They go where the same tensor is mapped already, or else to the first device.
    """
    places: dict[int, str] = {}
    missing: dict[str, list[int]] = {}
    for name, tensor in _tensors(model):
        inside = _covering(found, name)
        if inside is None:
            path = name.rpartition(".")[0]
            missing.setdefault(path or name, []).append(id(tensor))
        else:
            places.setdefault(id(tensor), inside)
    # tensors outside all layers, such as unused ones, are small: the first device takes them
    first = next(iter(found.values()))
    rest = {
        path: next((places[one] for one in of if one in places), first)
        for path, of in missing.items()
    }
    return {**found, **rest}


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters and buffers under all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _around(name: str) -> list[str]:
    """Return a name and the module paths that contain it, innermost first."""
    return [name, *paths_around(name)]


def _covering(found: Mapping[str, str], name: str) -> Any:
    """Return the device of the innermost mapped module around a tensor; None without one."""
    return next((found[path] for path in _around(name) if path in found), None)


def _refuse_ties_apart(model: Any, places: Mapping[str, str]) -> None:
    # tied parameters are one object under several names
    known: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = known.setdefault(id(parameter), name)
        if places[first] != places[name]:
            raise PlacementError(
                f"{first!r} and {name!r} are one parameter, which this placement has on "
                f"{places[first]} and {places[name]}; accelerate keeps it on one device, so that "
                "the other module fails: make the placement without split_tied, or run it with "
                "DataFlow"
            )


def _refuse_cuts(model: Any, found: Mapping[str, str], places: Mapping[str, set[str]]) -> None:
    for path, kind in never_split(model).items():
        if len(places.get(path, ())) > 1:
            parts = ", ".join(
                f"{name!r} on {place}" for place, name in _inside(path, found).items()
            )
            raise PlacementError(
                f"this placement cuts inside {path!r}, a {kind}, which the model's "
                f"_no_split_modules keeps whole ({parts}): place whole blocks with "
                'granularity="blocks", or run this placement with DataFlow'
            )


def _inside(path: str, found: Mapping[str, str]) -> dict[str, str]:
    """Return for each device the first mapped module at or below a path."""
    inside = [(name, place) for name, place in found.items() if is_part(name, path)]
    return {place: name for name, place in reversed(inside)}
