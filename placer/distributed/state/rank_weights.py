"""The parameters and buffers of one process, under the model's names.

A parameter that layers in several processes use (tied weights) belongs to the process of its first
layer. The others hold copies. Before a step the owner sends its data; after the step they send
their gradients, which the owner adds up. Only the owner's optimizer updates it.

    owner   ──data──▶  copy          step          owner  ◀──gradient──  copy

If stages have replicas, each pipeline has such a process. A pipeline that trains divides the
parameters of a stage among them: one replica owns a parameter, and its optimizer alone updates it.
It receives the sum of the gradients, and sends its data before the next step, too. If the stages of
a tied weight have different numbers of replicas, each copy has one replica of the owner as partner.

The owner in the first pipeline of a model stays the owner in later ones, wherever the layers are,
because only that process has the trained values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from placer import devices
from placer.capture.layers import LayerGraph
from placer.distributed.replicas import Replicas
from placer.distributed.stage_line import Line
from placer.distributed.state.gradient_sums import GradientSums
from placer.errors import InputError, PlacementError
from placer.executor.state.parameter_hooks import has_hooks
from placer.executor.state.replication import Replication, owners
from placer.executor.state.state_moves import relocate

Holders = tuple[int, ...]
"""The global ranks of the processes that hold a tensor's values: one for each replica."""

# The holders of each tensor, by name, of each model with pipelines.
_holders: WeakKeyDictionary[nn.Module, dict[str, Holders]] = WeakKeyDictionary()

# Of each parameter that replicas divide among them, by name, the global rank of its owner. All
# pipelines of a model share the table, and so read what the owner has trained.
_divided: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()


def holders_of(model: nn.Module) -> dict[str, Holders]:
    """Return the holders of a model's tensors, as known to this process."""
    return dict(_holders.get(model, {}))


def keep_holders(model: nn.Module, holders: Mapping[str, Holders]) -> None:
    """Record the holders of a model's tensors; known holders stay."""
    _holders[model] = {**holders, **_holders.get(model, {})}


def division_of(model: nn.Module) -> dict[str, int]:
    """Return the table of a model's divided parameters, which its pipelines share."""
    return _divided.setdefault(model, {})


@dataclass(frozen=True)
class Sharing:
    """The devices that use each tensor of the model.

    Attributes:
        users: by tensor name, the positions in the line of the devices that use it, the owner
            first.
        changed: tensors that the model changes while it runs.
        unused: tensors that no layer uses; the first device owns them.
        kept: tensors whose owner is not their first user, because it owned them in an earlier
            pipeline.
    """

    users: Mapping[str, tuple[int, ...]]
    changed: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()

    @classmethod
    def from_graph(cls, graph: LayerGraph, cut: Line, chunks: int) -> Sharing:
        """Return the users of each tensor; the first device owns unused tensors.

        Args:
            graph: the layers.
            cut: the stages that they run in.
            chunks: micro-batches in a batch.

        Raises:
            PlacementError: if layers on several devices, or in several stages of one device, use a
                buffer or plain tensor that one of them changes. Micro-batches would change it in
                another order.
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
            _refuse_shared_changes(name, [*users[name].values()], there[name], graph, cut, chunks)
        there = {
            name: positions for name, positions in there.items() if name not in graph.constants
        }
        unused = frozenset(name for name, positions in there.items() if not positions)
        return cls(
            {name: positions or (0,) for name, positions in there.items()},
            frozenset(mutated),
            unused,
        )

    def with_owners(self, known: Mapping[str, Holders], holders: Sequence[Holders]) -> Sharing:
        """Return the same users with the owners of earlier pipelines.

        Args:
            known: the holders of each tensor, by name.
            holders: the processes of each position.

        Raises:
            InputError: if the holders of a tensor are not the processes of a position, or hold a
                buffer that layers elsewhere change.
        """
        users, kept = dict(self.users), set()
        for name, used in self.users.items():
            there = known.get(name, holders[used[0]])
            if there == holders[used[0]]:
                continue
            way_out = "place its layers there, or load full_state_dict() into a new model"
            if there not in holders:
                raise InputError(
                    f"{name!r} belongs to {process_text(there)} since an earlier pipeline of this "
                    f"model, and this one has no stage with the same processes: {way_out}"
                )
            if name in self.changed and name not in self.unused:
                raise InputError(
                    f"{name!r} changes while the model runs, and belongs to {process_text(there)} "
                    f"since an earlier pipeline of this model: {way_out}"
                )
            owner = holders.index(there)
            users[name] = (
                owner,
                *(position for position in used if position != owner and name not in self.unused),
            )
            kept.add(name)
        return replace(self, users=users, kept=frozenset(kept))

    def division(
        self,
        model: nn.Module,
        names: Sequence[str],
        replication: Replication,
        holders: Sequence[Holders],
    ) -> dict[str, int]:
        """Return the global rank of the replica that owns each trained parameter, by name.

        ``DataFlow`` divides parameters in the same way, which predictions assume.

        Args:
            model: the whole model.
            names: the device of each position.
            replication: the pipelines, with names of devices in place of devices.
            holders: the processes of each position.
        """
        places = cast(Sequence[torch.device], names)
        positions = {name: users[0] for name, users in self.users.items()}
        found = owners(model, lambda name: places[positions[name]], replication)
        # in the order of the holders
        members = {place: list(dict.fromkeys(replication.of(place))) for place in places}
        return {
            name: holders[positions[name]][members[places[positions[name]]].index(owner)]
            for name, owner in found.items()
        }

    def owned(self, position: int) -> list[str]:
        """Return the tensors that a device owns."""
        return [name for name, users in self.users.items() if users[0] == position]

    def copied(self, graph: LayerGraph) -> dict[str, tuple[int, ...]]:
        """Return the users of the tensors of which the owner sends copies to other devices."""
        return {
            name: users
            for name, users in self.users.items()
            if len(users) > 1 and (isinstance(graph.state[name], nn.Parameter) or name in self.kept)
        }


def process_text(holders: Holders) -> str:
    """Return processes as text."""
    return f"process{'es' if len(holders) > 1 else ''} {' and '.join(map(str, holders))}"


def _kind(name: str, graph: LayerGraph) -> str:
    return "the plain tensor" if name in graph.constants else "the buffer"


class Weights:
    """The tensors of one process.

    Args:
        graph: the layers, with the model's tensors.
        sharing: the users of each tensor.
        position: of this process's device in the line.
        chains: for each pipeline, the global rank of each position.
        device: of this process.
        group: the processes that this process sends to.
        lost: the names of buffers that are in no state_dict.
        replicas: the processes with the same stage; None without replicas.
        division: the table of the model's divided parameters.

    Attributes:
        own: the tensors that this process or a replica of it owns, by name, moved here; the same
            objects, unless the model was on meta.
        copies: copies of parameters of other stages.
        empty: whether the model was on meta, so the tensors have no values yet.
        sums: of gradients over the replicas, after ``divide``; None before.
    """

    def __init__(
        self,
        graph: LayerGraph,
        sharing: Sharing,
        position: int,
        chains: Sequence[tuple[int, ...]],
        device: torch.device,
        group: dist.ProcessGroup | None,
        lost: Collection[str] = (),
        replicas: Replicas | None = None,
        division: dict[str, int] | None = None,
    ) -> None:
        self._position, self._chains, self._group = position, chains, group
        self._replicas = replicas
        self.own = {name: _settle(graph.state[name], device) for name in sharing.owned(position)}
        without_data = [name for name in self.own if graph.state[name].is_meta]
        self.empty = bool(without_data)
        # pipelines of a model on meta have tensors of their own
        self._division: dict[str, int] = {} if self.empty or division is None else division
        self._unset = {name: self.own[name]._version for name in without_data if name in lost}
        self._shared = sharing.copied(graph)
        self.copies = {
            name: _copy(graph.state[name], device)
            for name, (_, *others) in self._shared.items()
            if position in others
        }
        trained = [name for name, tensor in graph.state.items() if tensor.requires_grad]
        self._trained = [name for name in trained if name in self._shared]
        self._partial = [
            name for name in trained if name in self._shared or self._has_replicas(sharing, name)
        ]
        self.sums: GradientSums | None = None
        self._changed = [name for name in self.own if name in sharing.changed]
        self._refuse_hooks({name: graph.state[name] for name in self._partial})
        # All replicas begin with the values of the first one, or of the owners in earlier
        # pipelines. Weights without data have none yet.
        if replicas is not None and not self.empty:
            replicas.exchange(self.own.values(), map(self._division.get, self.own))
        self._before: dict[str, Tensor | None] = {}

    def get(self, name: str) -> Tensor:
        """Return the tensor of this name, or its copy, that is used here."""
        return self.own[name] if name in self.own else self.copies[name]

    def divide(self, owners: Mapping[str, int]) -> None:
        """Let each replica own some of the trained parameters, and receive their gradients.

        Args:
            owners: the global rank of the owner of each trained parameter, by name. Owners that an
                earlier pipeline of the model has stay.
        """
        assert self._replicas is not None
        for name, rank in owners.items():
            self._division.setdefault(name, rank)
        # the order of the graph, which is the same in every replica
        trained = [name for name, tensor in self.own.items() if tensor.requires_grad]
        late = {id(self.own[name]) for name in self._trained if name in self.own}
        self.sums = self._replicas.gradient_sums(
            [self.own[name] for name in trained], [self._division[name] for name in trained], late
        )

    def owned(self, divided: bool = False) -> dict[str, Tensor]:
        """Return the tensors of ``own`` without parameters that another replica owns.

        Args:
            divided: whether to leave out tensors that belong to every replica.
        """
        here = dist.get_rank()
        otherwise = None if divided else here
        return {
            name: tensor
            for name, tensor in self.own.items()
            if self._division.get(name, otherwise) == here
        }

    def refuse_hooks(self) -> None:
        """Raise an InputError for hooks on weights that several processes use."""
        self._refuse_hooks({name: self.own[name] for name in self._partial if name in self.own})

    def unset(self) -> str | None:
        """Return an uninitialised buffer that no state_dict holds; None without one."""
        return next(
            (name for name, version in self._unset.items() if self.own[name]._version == version),
            None,
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Send owned data to replicas, and then to all copies."""
        if self._replicas is not None:
            divided = {name: item for name, item in self.own.items() if name in self._division}
            self._replicas.exchange(divided.values(), map(self._division.get, divided))
        operations = []
        for name, (owner, *others) in self._shared.items():
            if owner == self._position:
                data = [part.detach().contiguous() for part in devices.own_parts(self.own[name])]
                operations += [
                    self._operation(dist.isend, part, rank)
                    for other in others
                    for rank in self._copying(owner, other)
                    for part in data
                ]
            elif self._position in others:
                parts, rank = devices.own_parts(self.copies[name]), self._partner(owner)
                operations += [self._operation(dist.irecv, part.detach(), rank) for part in parts]
        _run(operations)

    def begin(self) -> None:
        """Set earlier gradients aside, so that only this step's gradients are sent."""
        # gradients of copies were sent after the last step
        for copy in self.copies.values():
            copy.grad = None
        self._before = {name: self.own[name].grad for name in self._partial if name in self.own}
        for name in self._before:
            self.own[name].grad = None
        if self.sums is not None:
            self.sums.begin()

    @torch.no_grad()
    def reduce(self) -> None:
        """Add up the gradients of copies, then of replicas, then of earlier steps.

        Of replicas, only the owner of a parameter then has its gradient.
        """
        operations = []
        arrived: list[tuple[str, Tensor, Tensor]] = []
        # Every process goes through the names in the same order, so that sends meet their receives.
        for name in self._trained:
            owner, *others = self._shared[name]
            if owner == self._position:
                for rank in (rank for other in others for rank in self._copying(owner, other)):
                    like = torch.zeros_like(self.own[name], memory_format=torch.contiguous_format)
                    arrived.append((name, like, torch.zeros(1, device=like.device)))
                    operations += [
                        self._operation(dist.irecv, tensor, rank) for tensor in arrived[-1][1:]
                    ]
            elif self._position in others:
                operations += [
                    self._operation(dist.isend, tensor, self._partner(owner))
                    for tensor in _gradient_and_flag(self.copies[name])
                ]
        _run(operations)
        for name, gradient, has_gradient in arrived:
            # Read the flag, which synchronises with the device, only if there is no other gradient.
            # Zeros may be added to an existing gradient without harm, but must not become one.
            other = self.own[name].grad is not None or self._before[name] is not None
            if self.own[name].requires_grad and (other or has_gradient.item()):
                self._add(name, gradient)
        if self.sums is not None:
            self.sums.finish()
        self.restore()

    def take_buffers(self) -> None:
        """Overwrite buffers that the layers change by the first replica's buffers."""
        if self._replicas is not None:
            changed = [self.own[name] for name in self._changed]
            self._replicas.exchange(changed, [None] * len(changed))

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the gradients that ``begin`` set aside."""
        for name, gradient in self._before.items():
            if gradient is not None:
                self._add(name, gradient)
        self._before = {}

    def _refuse_hooks(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise an InputError for hooks on weights that several processes use.

        Each process would show the hook only its own part of the gradient.
        """
        for name, tensor in tensors.items():
            if has_hooks(tensor):
                users = "layers on several devices use it"
                way_out = "place them on one device, or change"
                if name not in self._shared:
                    users, way_out = "replicas of its stage share each batch", "change"
                raise InputError(
                    f"parameter {name!r} has a hook on its gradient, and {users}, each of which "
                    f"has a part of that; {way_out} parameter.grad after pipeline.step()"
                )

    def _add(self, name: str, gradient: Tensor) -> None:
        parameter = self.own[name]
        if parameter.grad is None or parameter.grad.is_sparse:
            gradient = gradient if parameter.grad is None else gradient + parameter.grad
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)

    def _has_replicas(self, sharing: Sharing, name: str) -> bool:
        """Return whether several processes hold the owner's stage."""
        return len({chain[sharing.users[name][0]] for chain in self._chains}) > 1

    def _partner(self, owner: int) -> int:
        """Return the global rank of the owner's replica that sends to a copy in this process.

        Args:
            owner: the position of the owner.
        """
        here = dist.get_rank()
        return next(chain[owner] for chain in self._chains if chain[self._position] == here)

    def _copying(self, owner: int, position: int) -> list[int]:
        """Return the global ranks of the processes whose copies this process sends to.

        Args:
            owner: the position of the owner, which is this process's position.
            position: of the copies.
        """
        partners: dict[int, int] = {}
        for chain in self._chains:
            partners.setdefault(chain[position], chain[owner])
        return [rank for rank, partner in partners.items() if partner == dist.get_rank()]

    def _operation(self, kind: object, tensor: Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, rank, self._group)  # type: ignore[arg-type]


def _settle(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on its device: the same object, or an empty one for a tensor on meta."""
    if not tensor.is_meta:
        if not devices.same(tensor.device, device):
            relocate(tensor, device)
        return tensor
    return _like(tensor, device)


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return an uninitialised tensor of the same kind on a device."""

    def empty(part: Tensor) -> Tensor:
        return torch.empty_like(part, device=device, memory_format=torch.contiguous_format)

    data = devices.rebuilt(tensor, empty)
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on a device, into which other copies are received."""
    if tensor.is_meta:
        return _like(tensor, device)
    copied = devices.rebuilt(
        tensor, lambda part: part.to(device, copy=True, memory_format=torch.contiguous_format)
    )
    return (
        nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
    )


def _gradient_and_flag(copy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of a copy, and a flag for its presence."""
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


def _refuse_shared_changes(
    name: str,
    users: Sequence[str],
    there: Sequence[int],
    graph: LayerGraph,
    cut: Line,
    chunks: int,
) -> None:
    """Raise a PlacementError if a changed tensor is used on several devices or out of order.

    Args:
        name: the tensor, which the model changes.
        users: one layer of each stage that uses it.
        there: the positions of the devices of these stages.
        graph: the layers.
        cut: the stages that they run in.
        chunks: micro-batches in a batch.
    """
    layers = ", ".join(map(repr, users))
    if len(there) > 1:
        raise PlacementError(
            f"layers {layers} use {_kind(name, graph)} {name!r}, which the model changes "
            "while it runs; place them on one device"
        )
    if len(users) > 1 and chunks > 1:
        raise PlacementError(
            f"layers {layers} use {_kind(name, graph)} {name!r}, which the model changes "
            f"while it runs, and other devices run layers between them, so that {chunks} "
            "micro-batches would change it in another order; place those on "
            f"{cut.devices[there[0]]} too, or give chunks=1"
        )
