"""Moving a model's state to devices and back: the same Parameter objects, wherever their data is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from placer import devices
from placer.capture.layers import LayerGraph, attached_state, attachments, named_state, tensor_bytes
from placer.errors import PlacementError
from placer.executor.stage_errors import clear_frames
from placer.utils.units import bytes_text


class Home:
    """Where a model's state was, and which of it required a gradient, before anything was moved."""

    def __init__(self, module: nn.Module) -> None:
        state = named_state(module) | attached_state(module)
        self._places = {name: devices.location(tensor) for name, tensor in state.items()}
        for name, place in list(self._places.items()):
            for around in _surroundings(name):
                self._places.setdefault(around, place)
        self._gradients = {
            name: parameter.requires_grad for name, parameter in module.named_parameters()
        }

    def restore(self, module: nn.Module, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """Bring the state back, and the flags; what was added meanwhile goes where its surroundings
        were.
        """
        move_state(module, self._place_of, optimizers)
        for name, parameter in module.named_parameters():
            if name in self._gradients:
                parameter.requires_grad_(self._gradients[name])

    def _place_of(self, name: str) -> torch.device | None:
        return next(
            (
                self._places[known]
                for known in (name, *_surroundings(name))
                if known in self._places
            ),
            None,
        )


def _surroundings(name: str) -> Iterator[str]:
    """The modules around what has this name, the innermost first; the model itself is last, and has
    no name.
    """
    while name:
        name = name.rpartition(".")[0]
        yield name


class Whereabouts:
    """The device of every tensor of a model and of its optimizers, to bring them back to after a
    failure.

    Args:
        module: the model.
        optimizers: those that may hold state for its parameters.
    """

    def __init__(
        self, module: nn.Module, optimizers: Collection[torch.optim.Optimizer] = ()
    ) -> None:
        self._module = module
        self._optimizers = list(optimizers)
        self._places = [
            (value, _location(value)) for own in _by_module(module).values() for _, value in own
        ]
        self._of_optimizers = [
            (
                state,
                {
                    name: devices.location(value)
                    for name, value in state.items()
                    if isinstance(value, Tensor)
                },
            )
            for optimizer in self._optimizers
            for state in optimizer.state.values()
        ]

    def restore(self) -> None:
        """Move back what has moved since."""
        moved = [
            (value, place)
            for value, place in self._places
            if not devices.same(_location(value), place)
        ]
        # the device that was filled last is emptied first
        for value, place in reversed(moved):
            _move(value, place, self._optimizers)
        for state, places in self._of_optimizers:
            state.update(
                {
                    name: devices.copy(state[name], at)
                    for name, at in places.items()
                    if not _is_at(state[name], at)
                }
            )
        if moved:
            _compact_rnn_weights(self._module)


def move_state(
    module: nn.Module,
    place_of: Callable[[str], torch.device | None],
    optimizers: Collection[torch.optim.Optimizer] = (),
) -> None:
    """Move parameters, gradients, buffers and optimizer state; all of them or, after an error,
    none.

    What parameters wrap and what is attached to them moves along, and so do tensors in objects that
    modules have, unless modules on several devices share the object: what it holds is copied where
    it is used.

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
        shared = _shared_by_devices(module, place_of)
        for own in _by_module(module).values():
            # for one module: the memory that it is for lives until the module has moved
            known = devices.Known()
            for name, value in own:
                target = place_of(name)
                if target is not None and not _is_at(value, target) and id(value) not in shared:
                    _move_named(name, value, target, optimizers, known)
                    has_moved = True
        if has_moved:
            _compact_rnn_weights(module)
    except BaseException:
        before.restore()
        raise


def _by_module(module: nn.Module) -> dict[str, list[tuple[str, Any]]]:
    """By the path of each module its parameters and buffers, and its objects with tensors in them,
    with their names.
    """
    found: dict[str, list[tuple[str, Any]]] = {}
    for name, tensor in named_state(module).items():
        found.setdefault(name.rpartition(".")[0], []).append((name, tensor))
    for path, _, attribute, value in attachments(module):
        found.setdefault(path, []).append((f"{path}.{attribute}".lstrip("."), value))
    return found


def _shared_by_devices(
    module: nn.Module, place_of: Callable[[str], torch.device | None]
) -> set[int]:
    """The ``id`` of each object with tensors in it that modules on several devices have."""
    users: dict[int, set[torch.device | None]] = {}
    for path, _, attribute, value in attachments(module):
        users.setdefault(id(value), set()).add(place_of(f"{path}.{attribute}".lstrip(".")))
    return {key for key, places in users.items() if len(places) > 1}


def _move_named(
    name: str,
    value: Any,
    target: torch.device,
    optimizers: Collection[torch.optim.Optimizer],
    known: devices.Known,
) -> None:
    """Move a tensor, or what an object holds; where the device is full, raise an error that names
    both.
    """
    if isinstance(value, Tensor):
        _refuse_without_data(name, value)
    try:
        _move(value, target, optimizers, known)
    except torch.OutOfMemoryError as error:
        clear_frames(error)  # they hold the copies for which there was room
        size = bytes_text(sum(map(tensor_bytes, _tensors(value))))
        raise PlacementError(
            f"no room on {target} for {name!r} ({size}); the model was put back. "
            "Place fewer layers there, or give the placement a lower memory limit for it"
        ) from error


def _move(
    value: Any,
    target: torch.device,
    optimizers: Collection[torch.optim.Optimizer],
    known: devices.Known | None = None,
) -> None:
    if isinstance(value, Tensor):
        relocate(value, target, optimizers, known)
        return
    with torch.inference_mode(False):
        devices.take_over_object(value, devices.copied_object(value, target, known))


def settle(
    graph: LayerGraph,
    places: Sequence[torch.device],
    optimizers: Collection[torch.optim.Optimizer],
    settled: set[str],
) -> None:
    """Move state whose layer was not known before the capture (a root's own parameters) to its
    first layer.

    Args:
        graph: the layers.
        places: the device of each.
        optimizers: those that may hold state for the parameters.
        settled: names of what stays, as another graph of the model has it where it is; this graph's
            are added.
    """
    for layer, place in zip(graph.layers, places, strict=True):
        for name in layer.state:
            if name in settled or name in graph.constants:
                continue
            settled.add(name)
            if not _is_at(graph.state[name], place):
                relocate(graph.state[name], place, optimizers)


@torch.inference_mode(False)  # inside it, what is made could not be trained later
def relocate(
    tensor: Tensor,
    target: torch.device,
    optimizers: Collection[torch.optim.Optimizer] = (),
    known: devices.Known | None = None,
) -> None:
    """Move one tensor's data, its gradient and the optimizers' state for it; the object stays the
    same.

    After an error all of them are as before.

    Args:
        tensor: a parameter or buffer; what it wraps and what is attached to it moves along.
        target: where to.
        optimizers: those that may hold state for it.
        known: copies made before; what shares memory with the tensor does so afterwards, too.
    """
    gradient = tensor.grad if tensor.is_leaf else None
    moved = _Contents(
        devices.copy(tensor, target, known),
        None if gradient is None else devices.copy(gradient, target),
        [
            (each.state[tensor], _moved_optimizer_state(tensor, target, each))
            for each in optimizers
            if tensor in each.state
        ],
    )
    data = tensor.data if devices.is_plain(tensor) else devices.rebuilt(tensor, _same)
    before = _Contents(data, gradient, [(state, dict(state)) for state, _ in moved.states])
    try:
        moved.fill(tensor)
    except BaseException:
        before.fill(tensor)
        raise


def _same(part: Tensor) -> Tensor:
    return part


@dataclass(frozen=True)
class _Contents:
    """What a tensor holds, its gradient, and the optimizers' state for it with what that is to
    hold.
    """

    data: Tensor
    gradient: Tensor | None
    states: list[tuple[dict[str, Any], dict[str, Any]]]

    def fill(self, tensor: Tensor) -> None:
        """Let the tensor hold all of this."""
        if tensor.is_leaf:
            tensor.grad = None  # one on another device than the data is refused
        devices.take_over(tensor, self.data)
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


def _moved_optimizer_state(
    tensor: Tensor, target: torch.device, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """What the optimizer keeps for a parameter, on its new device; ``step`` stays with the host, as
    torch has it.
    """
    group: Mapping[str, Any] = next(
        (
            group
            for group in optimizer.param_groups
            if any(own is tensor for own in group["params"])
        ),
        {},
    )
    on_device = group.get("capturable") or group.get("fused")
    return {
        key: devices.copy(value, target)
        for key, value in optimizer.state[tensor].items()
        if isinstance(value, Tensor)
        and (key != "step" or on_device)
        and not devices.same(devices.location(value), target)
    }


def _is_at(value: Any, place: torch.device) -> bool:
    return all(devices.is_at(tensor, place) for tensor in _tensors(value))


def _location(value: Any) -> torch.device:
    return devices.location(_tensors(value)[-1])


def _tensors(value: Any) -> list[Tensor]:
    """A tensor, or the tensors in an object."""
    return (
        [value]
        if isinstance(value, Tensor)
        else [tensor for _, tensor in devices.named_tensors(value)]
    )


def _refuse_without_data(name: str, tensor: Tensor) -> None:
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        raise PlacementError(
            f"{name!r} is not initialised; run the model once (lazy modules need an input) and "
            "place then"
        )
    if tensor.is_meta:
        raise PlacementError(
            f"{name!r} is on meta and has no data; load weights into the model (to_empty) and "
            "place then"
        )


def _compact_rnn_weights(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, nn.RNNBase):
            child.flatten_parameters()
