"""Parameters of which several stages have a copy."""

from __future__ import annotations

from placer.exports.plan import Plan
from placer.exports.units import modules_of
from placer.schema.base import is_part


def copied_parameters(plan: Plan) -> list[tuple[str, ...]]:
    """Return the names of each parameter that layers on several devices use; needs the model.

    A parameter has several names if modules share it. It has one name if its module is called
    several times.
    """
    if plan.model is None:
        return []
    names: dict[int, list[str]] = {}
    for name, parameter in plan.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    devices: dict[str, set[str]] = {}
    for layer, device in plan.layer_devices.items():
        for path in modules_of(layer):
            devices.setdefault(path, set()).add(device)
    return [
        tuple(every)
        for every in names.values()
        if len({device for name in every for device in _devices_of(name, devices)}) > 1
    ]


def copy_notes(plan: Plan) -> list[str]:
    """Return what the user of the engine needs to do about each such parameter."""
    return [
        f"{' and '.join(map(repr, names))} {'are' if len(names) > 1 else 'is'} one parameter, of "
        "which several stages have a copy: sum its gradients over these stages in each step."
        for names in (copied_parameters(plan) if plan.training else [])
    ]


def _devices_of(parameter: str, devices: dict[str, set[str]]) -> set[str]:
    """Return the devices of the layers whose modules contain a parameter."""
    owner = parameter.rpartition(".")[0]
    return {device for path, on in devices.items() if is_part(owner, path) for device in on}
