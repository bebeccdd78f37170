"""The replicas of a placement's stages, with one process for each.

                 pipeline 0       pipeline 1
    stage 0      process 0 ◀────▶ process 2       sum their gradients, exchange weights
                     │                │
    stage 1      process 1 ◀────▶ process 3       and sum their losses

The processes are a ``DeviceMesh`` of pipelines and stages. Every pipeline takes its samples of each
micro-batch, and weights their loss as in the whole batch. So the gradients of the whole batch are
sums over the replicas. Each trained parameter belongs to one replica, which receives its gradient
and sends its value before the next step. Buffers, such as running statistics, come from pipeline 0.

If stages have different numbers of replicas, some processes are part of several pipelines. There is
no mesh then, but a process group for each stage::

                 pipeline 0       pipeline 1
    stage 0      process 0 ◀────▶ process 1
                     │                │
    stage 1          └── process 2 ───┘           runs the units of both pipelines
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from placer import devices
from placer.capture.layers import tensor_bytes
from placer.capture.pytrees import flatten, outline
from placer.distributed.ranks import Seat
from placer.distributed.state.gradient_sums import BUCKET_BYTES, GradientSums
from placer.distributed.tensor_codec import as_bytes

# The process groups of each model's pipelines, with the world that they are part of. Process groups
# hold memory on GPUs, so further pipelines of a model use the same ones.
_groups: WeakKeyDictionary[nn.Module, dict[Any, tuple[Any, Groups]]] = WeakKeyDictionary()


class Replicas:
    """The processes that hold one stage.

    Args:
        group: these processes.
        ranks: their global ranks, in the order of the pipelines.
        device: of this process.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device
    ) -> None:
        self._group, self._ranks, self._device = group, tuple(ranks), device

    @torch.no_grad()
    def exchange(self, tensors: Iterable[Tensor], owners: Iterable[int | None]) -> None:
        """Overwrite tensors by their values in the replicas that own them.

        Args:
            tensors: equally many of the same shapes in every replica.
            owners: for each tensor, the global rank of its owner; None for pipeline 0.
        """
        by_owner: dict[int, list[Tensor]] = {}
        for tensor, owner in zip(tensors, owners, strict=True):
            parts = [part.detach() for part in devices.own_parts(tensor) if part.numel()]
            by_owner.setdefault(self._ranks[0] if owner is None else owner, []).extend(parts)
        for owner, parts in by_owner.items():
            for bucket in _buckets(parts):
                self._broadcast_bucket(bucket, owner)

    def _broadcast_bucket(self, bucket: Sequence[Tensor], owner: int) -> None:
        """Overwrite plain tensors by their values in another replica, in one call."""
        raw = [as_bytes(part) for part in bucket]
        packed = raw[0] if len(raw) == 1 else torch.cat(raw)
        dist.broadcast(packed, owner, group=self._group)
        if owner == dist.get_rank():
            return
        sizes = [part.numel() for part in raw]
        for part, own, arrived in zip(bucket, raw, packed.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            if arrived.data_ptr() != own.data_ptr():
                own.copy_(arrived)
            # the bytes of a tensor that is not contiguous are a copy
            if own.data_ptr() != part.data_ptr():
                part.copy_(own.view(part.dtype).view(part.shape))

    def gradient_sums(
        self, parameters: Sequence[Tensor], owners: Sequence[int], late: Collection[int]
    ) -> GradientSums:
        """Return the sums of gradients over all replicas; see ``GradientSums``."""
        return GradientSums(parameters, owners, late, self._group)

    @torch.no_grad()
    def total(self, number: Tensor) -> Tensor:
        """Return the sum of a number over all replicas."""
        # a device's own memory, which the backend can send
        total = number.detach().to(self._device, copy=True)
        dist.all_reduce(total, group=self._group)
        return total

    def exchanged(self, nests: Sequence[Any]) -> list[list[Any]]:
        """Return the nests of all replicas, in the order of the pipelines.

        Args:
            nests: nested tensors, such as the results of micro-batches.
        """
        flat = [flatten(nest) for nest in nests]
        here = [
            (outline(structure), [(leaf.shape, leaf.dtype) for leaf in leaves])
            for leaves, structure in flat
        ]
        everyone: list[Any] = [None] * len(self._ranks)
        dist.all_gather_object(everyone, (dist.get_rank(), here), group=self._group)
        there = dict(everyone)
        found = []
        for rank in self._ranks:
            if rank == dist.get_rank():
                for leaf in (leaf for leaves, _ in flat for leaf in leaves):
                    self._broadcast(leaf.detach().to(self._device).contiguous(), rank)
                found.append(list(nests))
            else:
                found.append(
                    [
                        flatten(empty)[1].unflatten([self._received(rank, *form) for form in forms])
                        for empty, forms in there[rank]
                    ]
                )
        return found

    def _received(self, rank: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._broadcast(tensor, rank)
        return tensor

    def _broadcast(self, tensor: Tensor, rank: int) -> None:
        """Send a contiguous tensor's bytes, whatever its type, to the other replicas.

        Args:
            tensor: in other processes, receives the bytes.
            rank: the global rank of the sender.
        """
        if tensor.numel():
            dist.broadcast(as_bytes(tensor), rank, group=self._group)


class Groups(NamedTuple):
    """The process groups of one process.

    Attributes:
        pipeline: the processes of its pipeline, or of all pipelines if it is part of several; None
            for all processes.
        replicas: the processes with its stage; None for this process alone.
    """

    pipeline: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None


@dataclass(frozen=True)
class Pipelines:
    """The pipelines that share each micro-batch, as one process sees them.

    Attributes:
        samples: of a micro-batch, by pipeline.
        own: the pipelines that this process is part of: one, or several consecutive ones.
        seat: this process's device, named as in the map; None until the captured model shows which
            devices have layers.
        processes: for each device of the map, the global rank of its process in each pipeline.
        group: the processes that this process sends to; None for all processes.
        replicas: the processes with this process's stage; None without others.
    """

    samples: tuple[int, ...] = (1,)
    own: tuple[int, ...] = (0,)
    seat: Seat | None = None
    processes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    group: dist.ProcessGroup | None = None
    replicas: Replicas | None = None

    @property
    def count(self) -> int:
        """The number of pipelines."""
        return len(self.samples)

    @property
    def are_shared(self) -> bool:
        """Whether some processes are part of several pipelines."""
        return any(len(set(ranks)) < len(ranks) for ranks in self.processes.values())

    def seated(self, seats: Sequence[Seat]) -> Pipelines:
        """Return the only pipeline of a placement without replicas, with its processes.

        Args:
            seats: the device of every process, by rank in the group.
        """
        ranks = dist.get_process_group_ranks(self.group)
        processes = {seat.device: (rank,) for seat, rank in zip(seats, ranks, strict=True)}
        return replace(self, seat=seats[dist.get_rank(self.group)], processes=processes)

    def parts(self, chunks: int) -> list[int]:
        """Return the parts of a batch that this process takes, in its order.

        The parts of a micro-batch follow one another, one for each pipeline.

        Args:
            chunks: micro-batches in a batch.
        """
        return [chunk * self.count + number for chunk in range(chunks) for number in self.own]

    def chains(self, devices: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return for each pipeline the global ranks of its processes.

        Args:
            devices: of the map, in the order of the ranks.
        """
        return tuple(zip(*(self.processes[name] for name in devices), strict=True))

    def holders(self, device: str) -> tuple[int, ...]:
        """Return the global ranks of the processes that hold what the map has on a device."""
        return tuple(dict.fromkeys(self.processes[device]))


def pipelines(
    model: nn.Module,
    names: Mapping[str, Sequence[str]],
    samples: Sequence[int],
    seated: Sequence[Seat],
    device: torch.device,
) -> Pipelines:
    """Return the pipelines of a placement with replicas. Every process must call it.

    Args:
        model: further pipelines of it use the same process groups.
        names: for each device of the map, the devices that hold its layers, by pipeline.
        samples: of a micro-batch, by pipeline.
        seated: the device of every process, by global rank.
        device: of this process.
    """
    here, ranks = dist.get_rank(), {seat.device: rank for rank, seat in enumerate(seated)}
    processes = {name: tuple(ranks[one] for one in held) for name, held in names.items()}
    own = next(name for name, held in processes.items() if here in held)
    found = Pipelines(
        samples=tuple(samples),
        own=tuple(number for number, rank in enumerate(processes[own]) if rank == here),
        seat=Seat(own, seated[here].local),
        processes=processes,
    )
    groups = _groups_of(model, found, device)
    return replace(
        found,
        group=groups.pipeline,
        replicas=Replicas(groups.replicas, found.holders(own), device) if groups.replicas else None,
    )


def _buckets(parts: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors in groups of at most ``BUCKET_BYTES``, or alone if they are larger."""
    bucket: list[Tensor] = []
    size = 0
    for part in parts:
        if bucket and size + tensor_bytes(part) > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(part)
        size += tensor_bytes(part)
    if bucket:
        yield bucket


def _groups_of(model: nn.Module, found: Pipelines, device: torch.device) -> Groups:
    """Return the process groups of a model's pipelines; the same ones for equal pipelines.

    Args:
        model: the model.
        found: the pipelines, without groups.
        device: of this process.
    """
    known = _groups.setdefault(model, {})
    world, groups = known.get(str(found.processes), (None, None))
    if groups is None or world is not dist.group.WORLD:
        groups = _new_groups(found, device)
        known[str(found.processes)] = (dist.group.WORLD, groups)
    return groups


def _new_groups(found: Pipelines, device: torch.device) -> Groups:
    if not found.are_shared:
        table = [list(chain) for chain in found.chains([*found.processes])]
        mesh = DeviceMesh(device.type, table, mesh_dim_names=("replica", "stage"))
        return Groups(mesh.get_group("stage"), mesh.get_group("replica"))
    here, own = dist.get_rank(), None
    for name in found.processes:
        holders = found.holders(name)
        # all processes take part in the making of each group
        group = dist.new_group(list(holders)) if len(holders) > 1 else None
        own = group if here in holders else own
    return Groups(None, own)
