"""Moving a model's state to devices and back: the same Parameter objects, wherever their data is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from placer import devices
from placer.errors import PlacementError
from placer.graph.layers import LayerGraph, named_state
from placer.units import bytes_text


class Home:
    """Where a model's state was, and which of it required a gradient, before anything was moved."""

    def __init__(self, module: nn.Module) -> None:
        self._places = {name: devices.location(tensor) for name, tensor in named_state(module).items()}
        for name, place in list(self._places.items()):
            for around in _surroundings(name):
                self._places.setdefault(around, place)
        self._gradients = {name: parameter.requires_grad for name, parameter in module.named_parameters()}

    def restore(self, module: nn.Module, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """Bring the state back, and the flags; what was added meanwhile goes where its surroundings were."""
        move_state(module, self._place_of, optimizers)
        for name, parameter in module.named_parameters():
            if name in self._gradients:
                parameter.requires_grad_(self._gradients[name])

    def _place_of(self, name: str) -> torch.device | None:
        return next((self._places[known] for known in (name, *_surroundings(name)) if known in self._places), None)


def _surroundings(name: str) -> Iterator[str]:
    """The modules around what has this name, the innermost first; the model itself is last, and has no name."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def move_state(
    module: nn.Module,
    place_of: Callable[[str], torch.device | None],
    optimizers: Collection[torch.optim.Optimizer] = (),
) -> None:
    """Move parameters, gradients, buffers and optimizer state; all of them or, after an error, none.

    Args:
        module: whose state is moved.
        place_of: name of a parameter or buffer -> its device; None to leave it where it is.
        optimizers: those that may hold state for the parameters.

    Raises:
        PlacementError: a tensor has no data, or a device has no room for it.
    """
    moved: list[tuple[Tensor, torch.device]] = []
    for name, tensor in named_state(module).items():
        target, source = place_of(name), devices.location(tensor)
        if target is None or devices.same(source, target):
            continue
        try:
            _refuse_without_data(name, tensor)
            relocate(tensor, target, optimizers)
        except Exception as error:
            for done, back in reversed(moved):
                relocate(done, back, optimizers)
            if isinstance(error, torch.OutOfMemoryError):
                size = bytes_text(tensor.numel() * tensor.element_size())
                raise PlacementError(
                    f"no room on {target} for {name!r} ({size}); the model was put back. "
                    "Place fewer layers there, or give the placement a lower memory limit for it"
                ) from error
            raise
        moved.append((tensor, source))
    if moved:
        _compact_rnn_weights(module)


def settle(
    graph: LayerGraph,
    places: Sequence[torch.device],
    optimizers: Collection[torch.optim.Optimizer],
    settled: set[str],
) -> None:
    """Move state whose layer was not known before the capture (a root's own parameters) to its first layer.

    Args:
        graph: the layers.
        places: the device of each.
        optimizers: those that may hold state for the parameters.
        settled: names of what stays, as another graph of the model has it where it is; this graph's are added.
    """
    for layer, place in zip(graph.layers, places, strict=True):
        for name in layer.state:
            if name in settled or name in graph.constants:
                continue
            settled.add(name)
            if not devices.same(devices.location(graph.state[name]), place):
                relocate(graph.state[name], place, optimizers)


@torch.inference_mode(False)  # inside it, what is made could not be trained later
def relocate(tensor: Tensor, target: torch.device, optimizers: Collection[torch.optim.Optimizer] = ()) -> None:
    """Move one tensor's data, its gradient and the optimizers' state for it; the object stays the same."""
    gradient = tensor.grad if tensor.is_leaf else None
    data = devices.copy(tensor, target)
    moved_gradient = None if gradient is None else devices.copy(gradient, target)
    moved_state = [(each, _moved_optimizer_state(tensor, target, each)) for each in optimizers if tensor in each.state]
    if gradient is not None:
        tensor.grad = None
    tensor.data = data
    if moved_gradient is not None:
        tensor.grad = moved_gradient
    for optimizer, state in moved_state:
        optimizer.state[tensor].update(state)


@torch.inference_mode(False)
def bring_state(optimizer: torch.optim.Optimizer) -> None:
    """Move what an optimizer keeps for parameters to where these are now."""
    for parameter in list(optimizer.state):
        if isinstance(parameter, Tensor):
            state = _moved_optimizer_state(parameter, devices.location(parameter), optimizer)
            optimizer.state[parameter].update(state)


def _moved_optimizer_state(tensor: Tensor, target: torch.device, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer keeps for a parameter, on its new device; ``step`` stays with the host, as torch has it."""
    group: Mapping[str, Any] = next(
        (group for group in optimizer.param_groups if any(own is tensor for own in group["params"])), {}
    )
    on_device = group.get("capturable") or group.get("fused")
    return {
        key: devices.copy(value, target)
        for key, value in optimizer.state[tensor].items()
        if isinstance(value, Tensor)
        and (key != "step" or on_device)
        and not devices.same(devices.location(value), target)
    }


def _refuse_without_data(name: str, tensor: Tensor) -> None:
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        raise PlacementError(
            f"{name!r} is not initialised; run the model once (lazy modules need an input) and place then"
        )
    if tensor.is_meta:
        raise PlacementError(
            f"{name!r} is on meta and has no data; load weights into the model (to_empty) and place then"
        )


def _compact_rnn_weights(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, nn.RNNBase):
            child.flatten_parameters()
