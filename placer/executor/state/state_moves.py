"""Moving a model's state between devices while Parameters stay the same objects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from placer import devices
from placer.capture.layers import LayerGraph, attached_state, attachments, named_state, tensor_bytes
from placer.errors import PlacementError
from placer.executor.stage_errors import clear_frames
from placer.executor.state.replication import Replication
from placer.schema.base import Tier, paths_around
from placer.utils.units import bytes_text

# Optimizers whose state rests on the host, wherever their parameters are.
_on_host: WeakSet[torch.optim.Optimizer] = WeakSet()


class Home:
    """The original devices and gradient flags of a model's state."""

    def __init__(self, module: nn.Module) -> None:
        state = named_state(module) | attached_state(module)
        self._places = {name: devices.location(tensor) for name, tensor in state.items()}
        for name, place in list(self._places.items()):
            for around in paths_around(name):
                self._places.setdefault(around, place)
        self._gradients = {
            name: parameter.requires_grad for name, parameter in module.named_parameters()
        }

    def restore(self, module: nn.Module, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """Restore devices and flags; added state goes to the device of its surroundings."""
        move_state(module, self._place_of, optimizers)
        for name, parameter in module.named_parameters():
            if name in self._gradients:
                parameter.requires_grad_(self._gradients[name])

    def _place_of(self, name: str) -> torch.device | None:
        return next(
            (self._places[known] for known in (name, *paths_around(name)) if known in self._places),
            None,
        )


class Whereabouts:
    """The devices of all tensors of a model and its optimizers, to restore after a failure.

    Args:
        module: the model.
        optimizers: may hold state for its parameters.
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
        """Move back everything that has moved since."""
        moved = [
            (value, place)
            for value, place in self._places
            if not devices.same(_location(value), place)
        ]
        # in reverse order, because the device that was filled last is the fullest
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
            _finish(self._module)


def move_state(
    module: nn.Module,
    place_of: Callable[[str], torch.device | None],
    optimizers: Collection[torch.optim.Optimizer] = (),
) -> None:
    """Move parameters, gradients, buffers and optimizer state: all, or none after an error.

    Wrapped and attached tensors move along, as do tensors in objects of modules. If modules on
    several devices share an object, its tensors stay and are copied where they are used.

    Args:
        module: whose state is moved.
        place_of: a function from the name of a parameter or buffer to its device; None to leave it.
        optimizers: may hold state for the parameters.

    Raises:
        PlacementError: if a tensor has no data, or a device lacks memory.
    """
    before = Whereabouts(module, optimizers)
    try:
        has_moved = False
        shared = _shared_by_devices(module, place_of)
        for own in _by_module(module).values():
            # per module: it keeps the old memory alive until the module has moved
            known = devices.Known()
            for name, value in own:
                target = place_of(name)
                if target is not None and not _is_at(value, target) and id(value) not in shared:
                    _move_named(name, value, target, optimizers, known)
                    has_moved = True
        if has_moved:
            _finish(module)
    except BaseException:
        before.restore()
        raise


def rest(module: nn.Module, tiers: Mapping[str, Tier], folder: Any = None) -> set[str]:
    """Move parameters on the host to where they rest: pinned memory, or a mapped file.

    A parameter that is mapped from a file, as of a checkpoint, rests on the disk there.

    Args:
        module: the model.
        tiers: where parameters rest, by name.
        folder: for files; None for the usual one.

    Returns:
        The names of the parameters that have moved.

    Raises:
        PlacementError: the host lacks memory, or a file cannot be written.
    """
    own = dict(module.named_parameters())
    pinned = [own[name] for name, tier in tiers.items() if tier == "host"]
    blocks = devices.PinnedBlocks(sum(map(devices.aligned_bytes, pinned)))
    files = devices.MappedFiles()
    moved = set()
    with torch.inference_mode(False), torch.no_grad():
        for name, tier in tiers.items():
            data = own[name].detach()
            if tier == "host":
                own[name].data = blocks.copied(data)
            elif files.of(data) is None:
                own[name].data = devices.stored(data, devices.disk_folder(folder))
            else:
                continue
            moved.add(name)
    return moved


def own_memory(module: nn.Module, names: Collection[str]) -> None:
    """Give parameters on the host ordinary memory of their own, after ``rest``.

    Args:
        module: the model.
        names: of parameters, wherever they are.
    """
    own = dict(module.named_parameters())
    with torch.inference_mode(False), torch.no_grad():
        for name in names:
            if name in own and devices.location(own[name]) == devices.HOST:
                own[name].data = own[name].detach().clone()


def _by_module(module: nn.Module) -> dict[str, list[tuple[str, Any]]]:
    """Return for each module path its named parameters, buffers and objects with tensors."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for name, tensor in named_state(module).items():
        found.setdefault(name.rpartition(".")[0], []).append((name, tensor))
    for path, _, attribute, value in attachments(module):
        found.setdefault(path, []).append((f"{path}.{attribute}".lstrip("."), value))
    return found


def _shared_by_devices(
    module: nn.Module, place_of: Callable[[str], torch.device | None]
) -> set[int]:
    """Return the ``id`` of objects with tensors that modules on several devices share."""
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
    """Move a tensor or an object's tensors; name both tensor and device if memory runs out."""
    if isinstance(value, Tensor):
        _refuse_without_data(name, value)
    try:
        _move(value, target, optimizers, known)
    except torch.OutOfMemoryError as error:
        clear_frames(error)  # the frames hold the copies that did fit
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
    replication: Replication,
    resting: Collection[int] = (),
) -> None:
    """Move state that the map did not cover to its first layer's device.

    Before a capture, the layers of a root's own parameters are unknown.

    Args:
        graph: the layers.
        places: the device of each.
        optimizers: may hold state for the parameters.
        settled: names that stay, because another graph of the model uses them; extended by this
            graph's.
        replication: the further devices that hold the same layers, and may own their parameters.
        resting: the ``id`` of each parameter that rests on the host.
    """
    has_moved = False
    for layer, place in zip(graph.layers, places, strict=True):
        for name in layer.state:
            if name in settled or name in graph.constants:
                continue
            settled.add(name)
            if id(graph.state[name]) in resting:
                continue
            if not any(_is_at(graph.state[name], own) for own in replication.of(place)):
                relocate(graph.state[name], place, optimizers)
                has_moved = True
    if has_moved:
        devices.synchronise_all()


@torch.inference_mode(False)  # tensors created in inference mode could not be trained later
def relocate(
    tensor: Tensor,
    target: torch.device,
    optimizers: Collection[torch.optim.Optimizer] = (),
    known: devices.Known | None = None,
) -> None:
    """Move a tensor's data, gradient and optimizer state; the object stays the same.

    An error leaves all of them unchanged.

    Args:
        tensor: a parameter or buffer; wrapped and attached tensors move along.
        target: the device.
        optimizers: may hold state for it.
        known: earlier copies, so that tensors that share memory share it afterwards, too.
    """
    # reading ``grad`` of a tensor that is not a leaf would warn
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
    """A tensor's data, gradient, and new optimizer state."""

    data: Tensor
    gradient: Tensor | None
    states: list[tuple[dict[str, Any], dict[str, Any]]]

    def fill(self, tensor: Tensor) -> None:
        """Give all of this to the tensor."""
        if tensor.is_leaf:
            tensor.grad = None  # a gradient on another device than the data is rejected
        devices.take_over(tensor, self.data)
        if self.gradient is not None:
            tensor.grad = self.gradient
        for state, contents in self.states:
            state.update(contents)


def keep_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer's state stay where it is when parameters move, until ``bring_state``."""
    _on_host.add(optimizer)


def is_kept_on_host(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's state rests on the host."""
    return optimizer in _on_host


@torch.inference_mode(False)
def bring_state(optimizer: torch.optim.Optimizer) -> None:
    """Move an optimizer's state to the devices of its parameters."""
    _on_host.discard(optimizer)
    for parameter in list(optimizer.state):
        if isinstance(parameter, Tensor):
            state = _moved_optimizer_state(parameter, devices.location(parameter), optimizer)
            optimizer.state[parameter].update(state)


def _moved_optimizer_state(
    tensor: Tensor, target: torch.device, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Return a parameter's optimizer state on its new device, unless it rests on the host."""
    if optimizer in _on_host:
        return {}
    return {
        key: devices.copy(value, target)
        for key, value in state_on_its_device(tensor, optimizer).items()
        if not devices.same(devices.location(value), target)
    }


def state_on_its_device(tensor: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of a parameter's state that an optimizer reads on the parameter's device.

    Args:
        tensor: the parameter.
        optimizer: holds state for it.
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
    # As in ``load_state_dict``, a ``step`` on the host stays there unless the optimizer is
    # capturable or fused. ASGD creates it on the parameter's device, and then it follows.
    return {
        key: value
        for key, value in optimizer.state[tensor].items()
        if isinstance(value, Tensor)
        and (key != "step" or on_device or devices.location(value) != devices.HOST)
    }


def _is_at(value: Any, place: torch.device) -> bool:
    return all(devices.is_at(tensor, place) for tensor in _tensors(value))


def _location(value: Any) -> torch.device:
    return devices.location(_tensors(value)[-1])


def _tensors(value: Any) -> list[Tensor]:
    """Return a tensor itself as a list, or the tensors in an object."""
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
            f"{name!r} is on meta and has no data; load a checkpoint into the model with "
            "placer.load, and place then"
        )


def _finish(module: nn.Module) -> None:
    """Complete a move of state.

    The copies are waited for: whoever dropped a moved tensor and freed memory while the copy into
    it is in flight would break all work off; see ``placer.devices.release_cache``.
    """
    compact_rnn_weights(module)
    devices.synchronise_all()


def compact_rnn_weights(module: nn.Module) -> None:
    """Let the weights of each recurrent layer be one block of memory again, as cuDNN needs them.

    Args:
        module: whose weights were moved or replaced.
    """
    for child in module.modules():
        if isinstance(child, nn.RNNBase):
            child.flatten_parameters()
