"""Comparison of an optimizer's memory with the placement's assumption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.layers import tensor_bytes
from placer.errors import PlacerError
from placer.optimizers import OptimizerState
from placer.schema import Placement
from placer.schema.placement import DeviceLoad
from placer.utils.units import bytes_text, count_text
from placer.utils.user_warnings import warn

# Accepted difference between needed and assumed memory, as a share of the larger one.
_TOLERANCE = 0.05


def warn_of_other_memory(
    assumed: Placement,
    optimizers: Sequence[Any],
    module: nn.Module,
    place_of: Callable[[str], torch.device],
) -> None:
    """Warn if optimizers need more or less memory on a device than the placement assumed.

    Their needs are measured by real steps on small tensors. So the warning comes before the first
    training step, which may run out of memory.

    Args:
        assumed: the flow's placement; its profile was measured with some optimizer or none.
        optimizers: of the training step; only torch's are considered.
        module: the model.
        place_of: returns the device of a parameter, by name.
    """
    known = [optimizer for optimizer in optimizers if isinstance(optimizer, torch.optim.Optimizer)]
    if not known or not assumed.training:
        return
    by_device = _stepped_by_device(known, module, place_of)
    # names without hosts, since a flow runs on one host
    loads = {load.device.rpartition("/")[2]: load for load in assumed.devices}
    places = {str(place): place for place in by_device}
    if not loads.keys() >= places.keys():
        return  # the placement is for other devices
    state = OptimizerState(known if len(known) > 1 else known[0])
    try:
        with devices.unobserved():
            told = [
                _difference(
                    load,
                    assumed,
                    state,
                    by_device[places[name]] if name in places else [],
                    places.get(name),
                )
                for name, load in loads.items()
            ]
    except PlacerError:  # the optimizer does not support a trial step
        return
    differing = sorted(filter(None, told), key=lambda found: -abs(found[0]))
    if not differing:
        return
    count = len(differing) - 1
    others = (
        f", and {count_text(count, 'more device differs', 'more devices differ')}" if count else ""
    )
    warn(
        f"the optimizer of this training step, {state.name}, needs other memory than the placement "
        f"assumed: {differing[0][1]}{others}. Give profile the optimizer that is used, "
        "profile(..., optimizer=optimizer), and place the model again"
    )


def _difference(
    load: DeviceLoad,
    assumed: Placement,
    state: OptimizerState,
    parameters: Sequence[Tensor],
    device: torch.device | None,
) -> tuple[int, str] | None:
    """Return the additional bytes that a device needs, with a description.

    Args:
        load: the placement's assumption for the device.
        assumed: the placement.
        state: of the optimizers.
        parameters: the parameters that are stepped on the device.
        device: the device; None if it has no such parameters.

    Returns:
        None if needs and assumption agree.
    """
    kept, kept_then = sum(map(state.bytes, parameters)), load.memory.optimizer_bytes
    passing, passing_then = 0, int(assumed.optimizer_workspace_ratio * load.memory.grad_bytes)
    # CPUs step parameters one by one. Placements of earlier versions do not state temporaries.
    if (
        device is not None
        and devices.counts_bytes(device)
        and (assumed.optimizer is not None or not kept_then)
    ):
        passing = int(state.step_share(parameters, device) * sum(map(tensor_bytes, parameters)))
    beyond = kept + passing - kept_then - passing_then
    if abs(beyond) <= _TOLERANCE * max(kept + passing, kept_then + passing_then):
        return None
    text = f"on {load.device} {bytes_text(kept)} of state"
    if passing or passing_then:
        text += f" and {bytes_text(passing)} of temporaries"
    text += f", where {bytes_text(kept_then)}"
    if passing or passing_then:
        text += f" and {bytes_text(passing_then)}"
    return beyond, f"{text} were assumed{f' for {assumed.optimizer}' if assumed.optimizer else ''}"


def _stepped_by_device(
    optimizers: Sequence[torch.optim.Optimizer],
    module: nn.Module,
    place_of: Callable[[str], torch.device],
) -> dict[torch.device, list[Tensor]]:
    """Return by device the trained parameters that the optimizers step."""
    stepped = {
        id(parameter)
        for one in optimizers
        for group in one.param_groups
        for parameter in group["params"]
    }
    by_device: dict[torch.device, list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) in stepped:
            by_device.setdefault(place_of(name), []).append(parameter)
    return by_device
