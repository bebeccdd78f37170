"""The replicas of a placement's stages, with one process for each.

                 pipeline 0       pipeline 1
    stage 0      process 0 ◀────▶ process 2       sum their gradients, exchange weights
                     │                │
    stage 1      process 1 ◀────▶ process 3       and sum their losses

The processes are a ``DeviceMesh`` of pipelines and stages. Every pipeline takes its samples of each
micro-batch, and weights their loss as in the whole batch. So the gradients of the whole batch are
sums over the replicas. Each trained parameter belongs to one replica, which receives its gradient
and sends its value before the next step. Buffers, such as running statistics, come from pipeline 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
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

# The meshes of each model's pipelines, with the world that they are part of. Process groups hold
# memory on GPUs, so further pipelines of a model use the same ones.
_meshes: WeakKeyDictionary[nn.Module, dict[Any, tuple[Any, DeviceMesh]]] = WeakKeyDictionary()


class Replicas:
    """The processes that hold one stage.

    Args:
        group: these processes.
        ranks: their global ranks, by pipeline.
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
        """Return the nests of all replicas, by pipeline.

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


@dataclass(frozen=True)
class Pipelines:
    """The pipelines that share each micro-batch, as one process sees them.

    Attributes:
        samples: of a micro-batch, by pipeline.
        index: of this process's pipeline.
        seats: the devices of this pipeline's processes, by rank in their group. Empty without
            replicas: the seats then follow from the captured model.
        group: this pipeline's processes; None for all processes.
        replicas: the processes with this process's stage; None without replicas.
        rows: by pipeline, the global ranks of its processes, stage by stage; empty without
            replicas.
    """

    samples: tuple[int, ...] = (1,)
    index: int = 0
    seats: tuple[Seat, ...] = ()
    group: dist.ProcessGroup | None = None
    replicas: Replicas | None = None
    rows: Sequence[Sequence[int]] = ()

    @property
    def count(self) -> int:
        """The number of pipelines."""
        return len(self.samples)

    def holders(self, rank: int) -> tuple[int, ...]:
        """Return the processes that hold the stage of a process of this pipeline, by pipeline."""
        if not self.rows:
            return (rank,)
        stage = self.rows[self.index].index(rank)
        return tuple(row[stage] for row in self.rows)


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
    ranks = {seat.device: rank for rank, seat in enumerate(seated)}
    table = [[ranks[found[index]] for found in names.values()] for index in range(len(samples))]
    index, stage = next(
        (row, table[row].index(dist.get_rank()))
        for row in range(len(table))
        if dist.get_rank() in table[row]
    )
    mesh = _mesh(model, table, device)
    own = {ranks[found[index]]: name for name, found in names.items()}
    return Pipelines(
        samples=tuple(samples),
        index=index,
        seats=tuple(Seat(own[rank], seated[rank].local) for rank in sorted(own)),
        group=mesh.get_group("stage"),
        replicas=Replicas(mesh.get_group("replica"), [row[stage] for row in table], device),
        rows=table,
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


def _mesh(model: nn.Module, table: list[list[int]], device: torch.device) -> DeviceMesh:
    """Return the mesh of a model's pipelines; the same one for equal pipelines.

    Args:
        model: the model.
        table: the global ranks of each pipeline's processes.
        device: of this process.
    """
    known = _meshes.setdefault(model, {})
    world, mesh = known.get(str(table), (None, None))
    if mesh is None or world is not dist.group.WORLD:
        mesh = DeviceMesh(device.type, table, mesh_dim_names=("replica", "stage"))
        known[str(table)] = (dist.group.WORLD, mesh)
    return mesh
