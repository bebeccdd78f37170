"""Moving a model's state to devices and back: the same Parameter objects, wherever their data is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from placer import devices
from placer.errors import PlacementError
from placer.executor.faults import clear_frames
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


class Whereabouts:
    """The device of every tensor of a model and of its optimizers, to bring them back to after a failure.

    Args:
        module: the model.
        optimizers: those that may hold state for its parameters.
    """

    def __init__(self, module: nn.Module, optimizers: Collection[torch.optim.Optimizer] = ()) -> None:
        self._module = module
        self._optimizers = list(optimizers)
        self._places = [(tensor, devices.location(tensor)) for tensor in named_state(module).values()]
        self._of_optimizers = [
            (state, {name: devices.location(value) for name, value in state.items() if isinstance(value, Tensor)})
            for optimizer in self._optimizers
            for state in optimizer.state.values()
        ]

    def restore(self) -> None:
        """Move back what has moved since."""
        moved = [(tensor, place) for tensor, place in self._places if not _is_at(tensor, place)]
        for tensor, place in reversed(moved):  # the device that was filled last is emptied first
            relocate(tensor, place, self._optimizers)
        for state, places in self._of_optimizers:
            state.update(
                {name: devices.copy(state[name], at) for name, at in places.items() if not _is_at(state[name], at)}
            )
        if moved:
            _compact_rnn_weights(self._module)


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
    before = Whereabouts(module, optimizers)
    try:
        has_moved = False
        for name, tensor in named_state(module).items():
            target = place_of(name)
            if target is not None and not _is_at(tensor, target):
                _refuse_without_data(name, tensor)
                _relocate_named(name, tensor, target, optimizers)
                has_moved = True
        if has_moved:
            _compact_rnn_weights(module)
    except BaseException:
        before.restore()
        raise


def _relocate_named(
    name: str, tensor: Tensor, target: torch.device, optimizers: Collection[torch.optim.Optimizer]
) -> None:
    """Move one tensor; where its device is full, raise an error that names both."""
    try:
        relocate(tensor, target, optimizers)
    except torch.OutOfMemoryError as error:
        clear_frames(error)  # they hold the copies for which there was room
        size = bytes_text(tensor.numel() * tensor.element_size())
        raise PlacementError(
            f"no room on {target} for {name!r} ({size}); the model was put back. "
            "Place fewer layers there, or give the placement a lower memory limit for it"
        ) from error


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
    """Move one tensor's data, its gradient and the optimizers' state for it; the object stays the same.

    After an error all of them are as before.
    """
    gradient = tensor.grad if tensor.is_leaf else None
    moved = _Contents(
        devices.copy(tensor, target),
        None if gradient is None else devices.copy(gradient, target),
        [
            (each.state[tensor], _moved_optimizer_state(tensor, target, each))
            for each in optimizers
            if tensor in each.state
        ],
    )
    before = _Contents(tensor.data, gradient, [(state, dict(state)) for state, _ in moved.states])
    try:
        moved.fill(tensor)
    except BaseException:
        before.fill(tensor)
        raise


@dataclass(frozen=True)
class _Contents:
    """What a tensor holds, its gradient, and the optimizers' state for it with what that is to hold."""

    data: Tensor
    gradient: Tensor | None
    states: list[tuple[dict[str, Any], dict[str, Any]]]

    def fill(self, tensor: Tensor) -> None:
        """Let the tensor hold all of this."""
        if tensor.is_leaf:
            tensor.grad = None  # one on another device than the data is refused
        tensor.data = self.data
        if self.gradient is not None:
            tensor.grad = self.gradient
        for state, contents in self.states:
            state.update(contents)


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


def _is_at(tensor: Tensor, place: torch.device) -> bool:
    return devices.same(devices.location(tensor), place)


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
