"""The parameters and buffers of one process, under the model's own names.

A parameter that layers in several processes use (tied weights) belongs to the process of its first layer. The others
hold copies: before a step the owner sends its data, after it they send their gradients, and the owner adds them up. An
optimizer knows the owner's alone.

    owner   ──data──▶  copy          step          owner  ◀──gradient──  copy
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from placer import devices
from placer.errors import PlacementError
from placer.executor.apply import relocate
from placer.graph.layers import LayerGraph


@dataclass(frozen=True)
class Sharing:
    """Who uses each tensor of the model.

    Attributes:
        users: name -> the positions in the line of devices that use it, the owner first.
    """

    users: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, graph: LayerGraph, position_of: Iterable[int]) -> Sharing:
        """Who uses what; what no layer uses belongs to the first device.

        Args:
            graph: the layers.
            position_of: of each layer's device in the line.

        Raises:
            PlacementError: layers on several devices use a buffer that one of them changes.
        """
        users: dict[str, dict[int, str]] = {name: {} for name in graph.state if name not in graph.constants}
        mutated = {name for layer in graph.layers for name in layer.mutated}
        for layer, position in zip(graph.layers, position_of, strict=True):
            for name in layer.state:
                if name in users:
                    users[name].setdefault(position, layer.name)
        for name in mutated & users.keys():
            if len(users[name]) > 1:
                raise PlacementError(
                    f"layers {', '.join(map(repr, users[name].values()))} use the buffer {name!r}, which the model "
                    "changes while it runs; place them on one device"
                )
        return cls({name: tuple(there) or (0,) for name, there in users.items()})

    def owned(self, position: int) -> list[str]:
        """What belongs to a device."""
        return [name for name, users in self.users.items() if users[0] == position]

    def shared(self) -> dict[str, tuple[int, ...]]:
        """What several devices use."""
        return {name: users for name, users in self.users.items() if len(users) > 1}


class Weights:
    """What one process holds.

    Args:
        graph: the layers, with the model's own tensors.
        sharing: who uses what.
        position: of this process's device in the line.
        ranks: global rank of each position.
        device: of this process.
        group: the processes of the pipeline.

    Attributes:
        own: tensors by the model's names for them, moved here; the same objects, unless the model was on meta.
        copies: of parameters that belong to other processes.
        empty: whether the model was on meta, so that what is here has no values yet.
    """

    def __init__(
        self,
        graph: LayerGraph,
        sharing: Sharing,
        position: int,
        ranks: tuple[int, ...],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._position, self._ranks, self._group = position, ranks, group
        self.own = {name: _settle(graph.state[name], device) for name in sharing.owned(position)}
        self.empty = any(graph.state[name].is_meta for name in self.own)
        self._shared = {
            name: users for name, users in sharing.shared().items() if isinstance(graph.state[name], nn.Parameter)
        }
        self.copies = {
            name: _copy(graph.state[name], device)
            for name, users in self._shared.items()
            if position in users and users[0] != position
        }
        self._before: dict[str, Tensor | None] = {}

    def get(self, name: str) -> Tensor:
        """The tensor of that name, or the copy of it, that is used here."""
        return self.own[name] if name in self.own else self.copies[name]

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring copies up to date."""
        operations = []
        for name, (owner, *others) in self._shared.items():
            if owner == self._position:
                data = self.own[name].detach().contiguous()
                operations += [self._operation(dist.isend, data, other) for other in others]
            elif self._position in others:
                operations.append(self._operation(dist.irecv, self.copies[name].detach(), owner))
        _run(operations)

    def begin(self) -> None:
        """Set gradients apart that earlier steps left: only this step's are sent."""
        for name, copy in self.copies.items():
            copy.grad = torch.zeros_like(copy) if self._trains(name) else None
        self._before = {}
        for name in self._shared:
            if name in self.own and self._trains(name):
                self._before[name], self.own[name].grad = self.own[name].grad, None

    @torch.no_grad()
    def reduce(self) -> None:
        """Add the gradients of copies to the owner's, and to what earlier steps left."""
        operations, arrived = [], []
        for name, (owner, *others) in self._shared.items():
            if not self._trains(name):
                continue
            if owner == self._position:
                for other in others:
                    arrived.append((name, torch.zeros_like(self.own[name], memory_format=torch.contiguous_format)))
                    operations.append(self._operation(dist.irecv, arrived[-1][1], other))
            elif self._position in others:
                gradient = self.copies[name].grad
                assert gradient is not None
                operations.append(self._operation(dist.isend, gradient.contiguous(), owner))
        _run(operations)
        for name, gradient in [*arrived, *self._before.items()]:
            if gradient is not None:
                parameter = self.own[name]
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._before = {}

    def _trains(self, name: str) -> bool:
        return name in self._shared and (name in self.own or name in self.copies) and self.get(name).requires_grad

    def _operation(self, kind: object, tensor: Tensor, position: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._ranks[position], self._group)  # type: ignore[arg-type]


def _settle(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on its device: the same object, but for one on meta, in whose place comes one without values."""
    if not tensor.is_meta:
        if not devices.same(tensor.device, device):
            relocate(tensor, device)
        return tensor
    return _like(tensor, device)


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    data = torch.empty_like(tensor, device=device, memory_format=torch.contiguous_format)
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.is_meta:
        return _like(tensor, device)
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    copied.copy_(tensor.detach())
    return nn.Parameter(copied, tensor.requires_grad)


def _run(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
