"""The exchange between the devices that use one parameter: values out, gradients back.

The owner of a parameter is the device that it is on. Other devices have replicas::

    owner      parameters ──pack──▶ packed ─┐           landing ──add──▶ gradients
                                            │ copy      ▲
    replica                                 ▼           │ copy
               values, which the aliases are views of   gradients, likewise

What goes from one device to another at one moment is one tensor, a bucket: one copy of many
megabytes takes a fraction of the time of hundreds of small ones. Gradients go as soon as the last
backward pass of their stage has been issued, while earlier stages still compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices
from placer.devices import Courier, Lane, Mark

_ALIGNMENT = 512
"""Bytes: tensors in a bucket begin at multiples of it, like tensors from torch's allocator."""

_LANDINGS = 2
"""Buckets that may arrive from one device at one time: one is added while the next one comes."""


@dataclass(frozen=True)
class Shared:
    """A trained parameter that layers of further devices than its own use.

    Attributes:
        name: of the parameter.
        parameter: the model's own.
        aliases: by device.
        users: by device, the numbers of the stages that use it, in order.
    """

    name: str
    parameter: nn.Parameter
    aliases: Mapping[torch.device, Tensor]
    users: Mapping[torch.device, Sequence[int]]

    @property
    def owner(self) -> torch.device:
        """The device of the parameter."""
        return devices.location(self.parameter)

    @property
    def own(self) -> Tensor | None:
        """The alias on the owner; None if no layer there uses it."""
        return next(
            (one for place, one in self.aliases.items() if devices.same(place, self.owner)), None
        )

    @property
    def own_users(self) -> Sequence[int]:
        """The stages on the owner that use it."""
        return next(
            (some for place, some in self.users.items() if devices.same(place, self.owner)), ()
        )

    def replicas(self) -> Iterable[torch.device]:
        """Return the devices of its replicas."""
        return [place for place in self.aliases if not devices.same(place, self.owner)]


@dataclass(eq=False)
class _Packed:
    """Parameters on their owner, packed to be sent to replicas.

    Attributes:
        owner: the device.
        parameters: the parameters.
        whole: one tensor with all of them.
        parts: of it, for each parameter.
        ready: a mark behind the packing for the batch; None before it.
        is_ready: whether it is packed for the batch.
    """

    owner: torch.device
    parameters: list[Tensor]
    whole: Tensor
    parts: list[Tensor]
    ready: Mark = None
    is_ready: bool = False


@dataclass(eq=False)
class _Landing:
    """Memory on an owner in which gradients arrive, of one bucket after another.

    Attributes:
        memory: as large as the largest bucket.
        free: a mark after which it may be overwritten.
    """

    memory: Tensor
    free: Mark = None


@dataclass(eq=False)
class _Total:
    """The gradients of the parameters of one owner that one stage uses first.

    Attributes:
        owner: the device.
        names: of the parameters.
        whole: one tensor with all gradients.
        parts: of it, for each parameter.
    """

    owner: torch.device
    names: list[str]
    whole: Tensor
    parts: list[Tensor]


@dataclass(eq=False)
class _Bucket:
    """The parameters of one owner that a stage on another device uses first.

    Attributes:
        owner: the device of the parameters.
        place: the device of the replicas.
        packed: the parameters, to be sent.
        values: their replicas.
        gradients: of the replicas.
        landing: where the gradients arrive on the owner.
        totals: what they are added to: one tensor, or one for each parameter.
        arrived: their part of ``landing``, for each total.
        reader: the first stage that uses the replicas.
        writers: the stages that add to ``gradients``.
        others: the stages that add to ``totals``.
    """

    owner: torch.device
    place: torch.device
    packed: _Packed
    values: Tensor
    gradients: Tensor
    landing: _Landing
    totals: list[Tensor]
    arrived: list[Tensor]
    reader: int
    writers: frozenset[int]
    others: frozenset[int]

    @property
    def stages(self) -> frozenset[int]:
        """The stages whose last backward pass has to be over before gradients are added."""
        return self.writers | self.others


@dataclass
class Exchange:
    """The buckets of a model's parameters; empty if no parameter has replicas.

    On every device, two lanes run during the passes::

        outgoing    pack 0   pack 1   ...            parameters, just before their stage reads them
        incoming    clear gradients        add 1   add 0     gradients, behind their stage's passes

    Attributes:
        gradients: by parameter that has replicas, the sum of all gradients, on its owner.
        homes: the owners.
        cleared: by device, the mark that its first backward pass of a batch waits for.
    """

    gradients: dict[str, Tensor] = field(default_factory=dict)
    homes: frozenset[torch.device] = frozenset()
    cleared: dict[torch.device, Mark] = field(default_factory=dict)
    _totals: list[_Total] = field(default_factory=list)
    _buckets: list[_Bucket] = field(default_factory=list)
    _read_by: dict[int, list[_Bucket]] = field(default_factory=dict)
    _written_by: dict[int, list[_Bucket]] = field(default_factory=dict)
    _outgoing: dict[torch.device, Lane] = field(default_factory=dict)
    _incoming: dict[torch.device, Lane] = field(default_factory=dict)
    _begun: Mapping[torch.device, Mark] = field(default_factory=dict)
    _unread: set[int] = field(default_factory=set)
    _done: dict[int, Mark] = field(default_factory=dict)
    _left: list[tuple[torch.device, Mark]] = field(default_factory=list)
    _courier: Courier | None = None

    @classmethod
    def between(cls, shared: Sequence[Shared], pieces: int) -> Exchange:
        """Return the exchange of parameters that have replicas.

        Their gradients, and the replicas' values, get other memory.

        Args:
            shared: the parameters.
            pieces: stages of one pipeline. Stages at one position in their pipelines run about at
                the same time, and what they exchange is one bucket for each pair of devices.
        """
        made = cls(homes=frozenset(one.owner for one in shared))
        groups: dict[Any, list[Shared]] = {}
        for one in shared:
            users = one.own_users or min(one.users.values(), key=min)
            key = users[0] % pieces, str(one.owner), str(one.parameter.dtype)
            groups.setdefault(key, []).append(one)
        landings = _landings(groups.values())
        for key in sorted(groups):
            made._add_group(groups[key], pieces, key[0], landings)
        places = {bucket.place for bucket in made._buckets} | made.homes
        for place in sorted(places, key=str):
            made._outgoing[place], made._incoming[place] = Lane(place), Lane(place)
        for bucket in made._buckets:
            made._read_by.setdefault(bucket.reader, []).append(bucket)
            for stage in bucket.stages:
                made._written_by.setdefault(stage, []).append(bucket)
        return made

    def _add_group(
        self,
        group: Sequence[Shared],
        pieces: int,
        position: int,
        landings: Mapping[Any, Sequence[_Landing]],
    ) -> None:
        """Add the buckets of parameters of one owner, which are used at one position first."""
        owner = group[0].owner
        whole = self._add_total(group, owner)
        packed: dict[tuple[str, ...], _Packed] = {}
        for place, some in _by_reader(group, pieces):
            names, own = tuple(one.name for one in some), [one.parameter for one in some]
            # Devices that read the same parameters share one packed copy on the owner.
            if names not in packed:
                packed[names] = _Packed(owner, list(own), *_room(own, owner))
            landing = landings[owner, place, own[0].dtype][position % _LANDINGS]
            landed = landing.memory[: _layout(own)[1]]
            # A device that reads the whole group takes one addition for all of its gradients.
            is_whole = len(some) == len(group)
            values, gradients = _replicas(some, place)
            self._buckets.append(
                _Bucket(
                    owner,
                    place,
                    packed[names],
                    values,
                    gradients,
                    landing,
                    [whole] if is_whole else [self.gradients[one.name] for one in some],
                    [landed] if is_whole else _parts(landed, own),
                    some[0].users[place][0],
                    frozenset(stage for one in some for stage in one.users[place]),
                    frozenset(stage for one in some for stage in one.own_users),
                )
            )

    def _add_total(self, group: Sequence[Shared], owner: torch.device) -> Tensor:
        """Add the gradients of parameters of one owner, and return the tensor that has them all."""
        whole, parts = _room([one.parameter for one in group], owner)
        self._totals.append(_Total(owner, [one.name for one in group], whole, parts))
        for one, part in zip(group, parts, strict=True):
            self.gradients[one.name] = part
            if one.own is not None:
                one.own.grad = part
        return whole

    @torch.no_grad()
    def begin(
        self,
        begun: Mapping[torch.device, Mark],
        prepared: Mapping[torch.device, Mark],
        fresh: Set[str],
        courier: Courier,
    ) -> None:
        """Clear gradients at the beginning of a batch.

        Args:
            begun: by device, when the caller's work there is done: parameters are up to date, and
                nothing reads replicas.
            prepared: by owner, when nobody else reads the gradients of the batch before.
            fresh: the names of the parameters whose gradients begin at zero.
            courier: for all copies of the batch.
        """
        self._begun, self._courier = begun, courier
        self._done, self._left = {}, []
        self._unread = {*self._read_by}
        for bucket in self._buckets:
            bucket.packed.is_ready = False
        gradients: dict[torch.device, list[Tensor]] = {}
        for total in self._totals:
            gradients.setdefault(total.owner, []).extend(
                [total.whole]
                if fresh >= set(total.names)
                else [
                    part
                    for name, part in zip(total.names, total.parts, strict=True)
                    if name in fresh
                ]
            )
        for bucket in self._buckets:
            gradients.setdefault(bucket.place, []).append(bucket.gradients)
        for place, lane in self._incoming.items():
            lane.wait(begun[place], prepared.get(place))
            if gradients.get(place):
                with lane:
                    torch._foreach_zero_(gradients[place])
            self.cleared[place] = lane.mark()
            self._outgoing[place].wait(begun[place])

    def values_for(self, stage: int) -> list[Mark]:
        """Bring the replicas up to date that a stage is the first to use.

        Args:
            stage: whose first forward pass of the batch is next.

        Returns:
            What the pass has to wait for.
        """
        if stage not in self._unread:
            return []
        self._unread.remove(stage)
        return [self._send_values(bucket) for bucket in self._read_by[stage]]

    @torch.no_grad()
    def _send_values(self, bucket: _Bucket) -> Mark:
        """Copy parameters to a device of their replicas, and return a mark behind the copy."""
        assert self._courier is not None
        packed = bucket.packed
        if not packed.is_ready:
            lane = self._outgoing[packed.owner]
            with lane:
                torch._foreach_copy_(packed.parts, packed.parameters)
            packed.ready, packed.is_ready = lane.mark(), True
        label = (min(bucket.others, default=bucket.reader), bucket.reader, "forward", 0)
        free = self._begun[bucket.place]
        return self._courier.send(
            packed.whole, packed.ready, bucket.values, free, "parameters", label
        )

    def finished(self, stage: int, mark: Mark) -> None:
        """Send the gradients for which this was the last stage to go backwards.

        Args:
            stage: whose last backward pass of the batch has been issued.
            mark: behind it.
        """
        self._done[stage] = mark
        for bucket in self._written_by.get(stage, ()):
            if bucket.stages <= self._done.keys():
                self._reduce(bucket)

    @torch.no_grad()
    def _reduce(self, bucket: _Bucket) -> None:
        """Add the gradients of replicas to the totals on the owner."""
        assert self._courier is not None
        label = (bucket.reader, min(bucket.others, default=bucket.reader), "backward", 0)
        landing = bucket.landing
        arrived = self._courier.send(
            bucket.gradients,
            self._latest(bucket.writers),
            landing.memory[: bucket.gradients.numel()],
            landing.free,
            "gradients",
            label,
        )
        self._left.append((bucket.place, arrived))
        lane = self._incoming[bucket.owner]
        lane.wait(arrived, *([self._latest(bucket.others)] if bucket.others else ()))
        with lane:
            torch._foreach_add_(bucket.totals, bucket.arrived)
        landing.free = lane.mark()

    def _latest(self, stages: frozenset[int]) -> Mark:
        """Return the mark of the stage, of one device, that finished last."""
        return next(mark for stage, mark in reversed(self._done.items()) if stage in stages)

    def finish(self, callers: Mapping[torch.device, Lane]) -> None:
        """Let the caller's own work wait for the copies and the sums.

        Args:
            callers: the lanes of it, by device.
        """
        for place, mark in self._left:
            callers[place].wait(mark)
        for owner, lane in self._incoming.items():
            callers[owner].wait(lane.mark())


def _by_reader(group: Sequence[Shared], pieces: int) -> Iterator[tuple[torch.device, list[Shared]]]:
    """Yield for each device and position of the first stage that reads there its parameters.

    Args:
        group: parameters of one owner.
        pieces: stages of one pipeline.
    """
    found: dict[tuple[torch.device, int], list[Shared]] = {}
    for one in group:
        for place in one.replicas():
            found.setdefault((place, one.users[place][0] % pieces), []).append(one)
    for (place, _), some in found.items():
        yield place, some


@torch.no_grad()
def _replicas(shared: Sequence[Shared], place: torch.device) -> tuple[Tensor, Tensor]:
    """Move replicas on a device, and their gradients, into two tensors, and return these."""
    like = [one.parameter for one in shared]
    values, parts = _room(like, place)
    aliases = [one.aliases[place] for one in shared]
    torch._foreach_copy_(parts, [alias.detach() for alias in aliases])
    for alias, part in zip(aliases, parts, strict=True):
        alias.grad = None
        alias.data = part
    gradients, parts = _room(like, place)
    for alias, part in zip(aliases, parts, strict=True):
        alias.grad = part
    return values, gradients


def _landings(
    groups: Iterable[Sequence[Shared]],
) -> dict[tuple[torch.device, torch.device, torch.dtype], list[_Landing]]:
    """Return memory in which gradients arrive: by owner, device of the replicas, and type.

    It is used in turn, so that each has room for the largest of its buckets.
    """
    sizes: dict[tuple[torch.device, torch.device, torch.dtype], int] = {}
    for group in groups:
        size = _layout([one.parameter for one in group])[1]
        for place in dict.fromkeys(place for one in group for place in one.replicas()):
            key = group[0].owner, place, group[0].parameter.dtype
            sizes[key] = max(size, sizes.get(key, 0))
    return {
        key: [_Landing(torch.zeros(size, dtype=key[2], device=key[0])) for _ in range(_LANDINGS)]
        for key, size in sizes.items()
    }


def _room(like: Sequence[Tensor], place: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return a tensor of zeros, and its parts for tensors like these, of one type."""
    whole = torch.zeros(_layout(like)[1], dtype=like[0].dtype, device=place)
    return whole, _parts(whole, like)


def _parts(whole: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return parts of a tensor for tensors like these.

    The parts have the strides of new tensors, so that kernels run as on these.
    """
    starts, _ = _layout(like)
    return [
        whole.as_strided(tensor.shape, _strides(tensor), whole.storage_offset() + start)
        for tensor, start in zip(like, starts, strict=True)
    ]


def _layout(like: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where tensors like these begin in one tensor, and its size, in elements."""
    step = max(1, _ALIGNMENT // like[0].element_size())
    ends = list(accumulate((-(-tensor.numel() // step) * step for tensor in like), initial=0))
    return ends[:-1], max(1, ends[-1])


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return torch.empty_like(tensor, device="meta", requires_grad=False).stride()
