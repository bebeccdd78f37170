"""The parameters and buffers of one process, under the model's own names.

A parameter that layers in several processes use (tied weights) belongs to the process of its first
layer. The others hold copies: before a step the owner sends its data, after it they send their
gradients, and the owner adds them up. An optimizer knows the owner's alone.

    owner   ──data──▶  copy          step          owner  ◀──gradient──  copy

What belonged to a process in the first pipeline of a model does so in later ones, wherever its
layers are there: only that process has what training made of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from placer import devices
from placer.capture.layers import LayerGraph
from placer.distributed.stage_line import Line
from placer.errors import InputError, PlacementError
from placer.executor.state.state_moves import relocate

# Of models that pipelines were built of: the global rank of the process that each tensor belongs
# to.
_owners: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()


def owners_of(model: nn.Module) -> dict[str, int]:
    """The global ranks of those whom its tensors belong to, by name, as far as this process knows
    of any.
    """
    return dict(_owners.get(model, {}))


def keep_owners(model: nn.Module, owners: Mapping[str, int]) -> None:
    """Note whom the tensors of a model belong to from now on."""
    _owners[model] = {**owners, **_owners.get(model, {})}


@dataclass(frozen=True)
class Sharing:
    """Who uses each tensor of the model.

    Attributes:
        users: name -> the positions in the line of devices that use it, the owner first.
        changed: what the model changes while it runs.
        unused: what no layer uses; it belongs to the first device.
        kept: what belongs to a device that does not use it first, since it did before.
    """

    users: Mapping[str, tuple[int, ...]]
    changed: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()

    @classmethod
    def of(cls, graph: LayerGraph, cut: Line, chunks: int) -> Sharing:
        """Who uses what; what no layer uses belongs to the first device.

        Args:
            graph: the layers.
            cut: the stages that they run in.
            chunks: micro-batches in a batch.

        Raises:
            PlacementError: layers on several devices use a buffer or plain tensor that one of them
                changes; or layers in several stages of one device do, where the next micro-batch is
                in the first while one is on its way to the last.
        """
        stage_of = {
            layer: index for index, stage in enumerate(cut.stages) for layer in stage.layers
        }
        users: dict[str, dict[int, str]] = {name: {} for name in graph.state}
        mutated = {name for layer in graph.layers for name in layer.mutated}
        for index, layer in enumerate(graph.layers):
            for name in layer.state:
                users[name].setdefault(stage_of[index], layer.name)
        there = {
            name: tuple(dict.fromkeys(stage % len(cut.devices) for stage in stages))
            for name, stages in users.items()
        }
        for name in sorted(mutated & users.keys()):
            layers = ", ".join(map(repr, users[name].values()))
            if len(there[name]) > 1:
                raise PlacementError(
                    f"layers {layers} use {_kind(name, graph)} {name!r}, which the model changes "
                    "while it runs; place them on one device"
                )
            if len(users[name]) > 1 and chunks > 1:
                raise PlacementError(
                    f"layers {layers} use {_kind(name, graph)} {name!r}, which the model changes "
                    f"while it runs, and other devices run layers between them, so that {chunks} "
                    "micro-batches would change it in another order; place those on "
                    f"{cut.devices[there[name][0]]} too, or give chunks=1"
                )
        there = {
            name: positions for name, positions in there.items() if name not in graph.constants
        }
        unused = frozenset(name for name, positions in there.items() if not positions)
        return cls(
            {name: positions or (0,) for name, positions in there.items()},
            frozenset(mutated),
            unused,
        )

    def with_owners(self, known: Mapping[str, int], ranks: Sequence[int]) -> Sharing:
        """The same, but for what belongs to somebody else since an earlier pipeline of the model.

        Args:
            known: the global rank of the owner of each tensor, by name.
            ranks: of each position.

        Raises:
            InputError: an owner is not part of the pipeline, or has a buffer that layers elsewhere
                change.
        """
        users, kept = dict(self.users), set()
        for name, used in self.users.items():
            rank = known.get(name, ranks[used[0]])
            if rank == ranks[used[0]]:
                continue
            way_out = "place its layers there, or load full_state_dict() into a new model"
            if rank not in ranks:
                raise InputError(
                    f"{name!r} belongs to process {rank} since an earlier pipeline of this model, "
                    f"and that has no part in this one: {way_out}"
                )
            if name in self.changed and name not in self.unused:
                raise InputError(
                    f"{name!r} changes while the model runs, and belongs to process {rank} since "
                    f"an earlier pipeline of this model: {way_out}"
                )
            owner = ranks.index(rank)
            users[name] = (
                owner,
                *(position for position in used if position != owner and name not in self.unused),
            )
            kept.add(name)
        return replace(self, users=users, kept=frozenset(kept))

    def owned(self, position: int) -> list[str]:
        """What belongs to a device."""
        return [name for name, users in self.users.items() if users[0] == position]

    def shared(self) -> dict[str, tuple[int, ...]]:
        """What several devices use."""
        return {name: users for name, users in self.users.items() if len(users) > 1}


def _kind(name: str, graph: LayerGraph) -> str:
    return "the plain tensor" if name in graph.constants else "the buffer"


class Weights:
    """What one process holds.

    Args:
        graph: the layers, with the model's own tensors.
        sharing: who uses what.
        position: of this process's device in the line.
        ranks: global rank of each position.
        device: of this process.
        group: the processes of the pipeline.
        lost: the names of buffers that are part of no state_dict.

    Attributes:
        own: tensors by the model's names for them, moved here; the same objects, unless the model
            was on meta.
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
        lost: Collection[str] = (),
    ) -> None:
        self._position, self._ranks, self._group = position, ranks, group
        self.own = {name: _settle(graph.state[name], device) for name in sharing.owned(position)}
        self.empty = any(graph.state[name].is_meta for name in self.own)
        self._unset = {
            name: self.own[name]._version
            for name in self.own
            if graph.state[name].is_meta and name in lost
        }
        self._shared = {
            name: users
            for name, users in sharing.shared().items()
            if isinstance(graph.state[name], nn.Parameter) or name in sharing.kept
        }
        self.copies = {
            name: _copy(graph.state[name], device)
            for name, users in self._shared.items()
            if position in users and users[0] != position
        }
        self._trained = [name for name in self._shared if graph.state[name].requires_grad]
        _refuse_hooks({name: graph.state[name] for name in self._trained})
        self._before: dict[str, Tensor | None] = {}

    def get(self, name: str) -> Tensor:
        """The tensor of that name, or the copy of it, that is used here."""
        return self.own[name] if name in self.own else self.copies[name]

    def refuse_hooks(self) -> None:
        """Refuse hooks on weights that several processes use."""
        _refuse_hooks({name: self.own[name] for name in self._trained if name in self.own})

    def unset(self) -> str | None:
        """A buffer that was on meta, that no state_dict has, and that nobody has written to since."""
        return next(
            (name for name, version in self._unset.items() if self.own[name]._version == version),
            None,
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring copies up to date."""
        operations = []
        for name, (owner, *others) in self._shared.items():
            if owner == self._position:
                data = [part.detach().contiguous() for part in devices.own_parts(self.own[name])]
                operations += [
                    self._operation(dist.isend, part, other) for other in others for part in data
                ]
            elif self._position in others:
                parts = devices.own_parts(self.copies[name])
                operations += [self._operation(dist.irecv, part.detach(), owner) for part in parts]
        _run(operations)

    def begin(self) -> None:
        """Set gradients apart that earlier steps left: only this step's are sent."""
        for copy in self.copies.values():
            copy.grad = None
        self._before = {name: self.own[name].grad for name in self._trained if name in self.own}
        for name in self._before:
            self.own[name].grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Add the gradients of copies to the owner's, and to what earlier steps left."""
        operations = []
        arrived: list[tuple[str, Tensor, Tensor]] = []
        for name in self._trained:
            owner, *others = self._shared[name]
            if owner == self._position:
                for other in others:
                    like = torch.zeros_like(self.own[name], memory_format=torch.contiguous_format)
                    arrived.append((name, like, torch.zeros(1, device=like.device)))
                    operations += [
                        self._operation(dist.irecv, tensor, other) for tensor in arrived[-1][1:]
                    ]
            elif self._position in others:
                operations += [
                    self._operation(dist.isend, tensor, owner)
                    for tensor in _told(self.copies[name])
                ]
        _run(operations)
        for name, gradient, came in arrived:
            # The device is asked where there is no other gradient alone: zeros would be one, and it
            # would wait for us.
            other = self.own[name].grad is not None or self._before[name] is not None
            if self.own[name].requires_grad and (other or came.item()):
                self._add(name, gradient)
        self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Give back the gradients that earlier steps left."""
        for name, gradient in self._before.items():
            if gradient is not None:
                self._add(name, gradient)
        self._before = {}

    def _add(self, name: str, gradient: Tensor) -> None:
        parameter = self.own[name]
        if parameter.grad is None or parameter.grad.is_sparse:
            gradient = gradient if parameter.grad is None else gradient + parameter.grad
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)

    def _operation(self, kind: object, tensor: Tensor, position: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._ranks[position], self._group)  # type: ignore[arg-type]


def _settle(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on its device: the same object, but for one on meta, in whose place comes one
    without values.
    """
    if not tensor.is_meta:
        if not devices.same(tensor.device, device):
            relocate(tensor, device)
        return tensor
    return _like(tensor, device)


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same kind on a device, without values."""

    def empty(part: Tensor) -> Tensor:
        return torch.empty_like(part, device=device, memory_format=torch.contiguous_format)

    data = devices.rebuilt(tensor, empty)
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, which others are received into."""
    if tensor.is_meta:
        return _like(tensor, device)
    copied = devices.rebuilt(
        tensor, lambda part: part.to(device, copy=True, memory_format=torch.contiguous_format)
    )
    return (
        nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
    )


def is_hooked(tensor: Tensor) -> bool:
    """Whether something watches the gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def _refuse_hooks(shared: Mapping[str, Tensor]) -> None:
    """Refuse hooks on weights that several processes use.

    Raises:
        InputError: there is one: each process would show it its own part of the gradient.
    """
    for name, tensor in shared.items():
        if is_hooked(tensor):
            raise InputError(
                f"parameter {name!r} has a hook on its gradient, and layers on several devices use "
                "it, each of which has a part of that; place them on one device, or change "
                "parameter.grad after pipeline.step()"
            )


def _told(copy: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of a copy, and whether there is one."""
    gradient = copy.grad
    if gradient is None:
        return torch.zeros_like(copy, memory_format=torch.contiguous_format), torch.zeros(
            1, device=copy.device
        )
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.contiguous(), torch.ones(1, device=copy.device)


def _run(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
