"""What is asked: a profile, devices, an objective and constraints."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from placer.schema.base import (
    FIRST,
    IN_ORDER,
    MAX_DEVICES,
    MAX_LAYERS,
    SCHEMA_VERSION,
    Name,
    Objective,
    Recompute,
    ScheduleChoice,
    Steps,
    Transfers,
    Wire,
    refuse_duplicates,
    refuse_unknown,
)
from placer.schema.cluster import Cluster, Device
from placer.schema.profile import Edge, Profile
from placer.utils.units import count_text


class Constraints(Wire):
    """What a placement must respect, beside memory.

    Attributes:
        contiguous: each stage is a set of layers with no path that leaves it and comes back (the
            quotient graph over devices is acyclic). None: contiguous, unless a group of colocated
            layers would then pull the whole model onto one device, as tied embeddings do. Then all
            other layers are contiguous under objective ``throughput``, where that fits into memory,
            and else the placement is free.
        recompute: whether a device that holds layers keeps, in training, of micro-batches in flight
            only the values that come from other devices, and runs forwards once more before each
            backward pass: ``never``, ``always``, or ``auto``, if memory would not do otherwise. One
            word for all devices, or device -> word; a device of ``*`` stands for all others, which
            else never do. Where one always does, objective ``step`` has no free stages.
        pinned: layer -> the device that it must be on.
        forbidden: layer -> devices that it must not be on. A layer of ``*`` stands for every layer.
        colocated: groups of layers that must share a device, beside those of the profile.
        max_devices: use at most so many devices.
        min_devices: use at least so many; with as many ``max_devices``, exactly so many.
        max_layers: no device holds more layers.
    """

    contiguous: bool | None = None
    recompute: Recompute | Annotated[dict[Name, Recompute], IN_ORDER] = "never"
    pinned: Annotated[dict[Name, Name], IN_ORDER] = {}
    forbidden: Annotated[dict[Name, Annotated[tuple[Name, ...], FIRST]], IN_ORDER] = {}
    colocated: Annotated[tuple[Annotated[tuple[Name, ...], FIRST], ...], FIRST] = ()
    max_devices: Annotated[int, Field(ge=1, le=MAX_DEVICES)] | None = None
    min_devices: Annotated[int, Field(ge=1, le=MAX_DEVICES)] | None = None
    max_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None

    def recompute_on(self, device: str) -> Recompute:
        """Whether a device recomputes, by its name."""
        if isinstance(self.recompute, str):
            return self.recompute
        return self.recompute.get(device, self.recompute.get("*", "never"))


MOST_CHUNKS_OF_A_STEP = 10_000
"""Of more micro-batches the simulation of one device's step alone takes longer than a second."""


class PlacementRequest(Wire):
    """A question: where should the layers of this profile run?

    Attributes:
        profile: what was measured.
        cluster: the devices to place on; the profile's own if None.
        objective: what is made small, see ``Objective``.
        constraints: what must be respected.
        training: whether a training step or inference is placed; as profiled if None.
        profiles: objective ``step``: what was measured of the same layers at further micro-batch
            sizes, of which the answer takes one.
        batch_size: objective ``step``: samples in a whole batch; ``chunks`` micro-batches of
            ``profile`` if None.
        chunks: micro-batches in a batch; chosen under objective ``step``, which simulates each pass
            of at most 10,000.
        schedule: how micro-batches are ordered, which sets how many are in flight at a stage in
            training: all of them for ``fill-drain``, at most ``stages - stage`` for ``1f1b`` and
            ``interleaved``, and for ``zero-bubble`` as many as memory allows between that and ``2 *
            stages``, 1 for a single stage (contiguous placements; else all of them, or under
            objective ``step`` and ``interleaved`` what its order holds, which goes by the memory
            that there is). Objective ``step`` also knows ``auto``.
        steps: objective ``step``: whether the step that is made short is ``alone``, from idle
            devices to idle devices, or ``in-a-row``, one of many, each begun by a device when its
            own part of the one before is over.
        transfers: ``added``: a device computes and transfers one after the other; ``overlapped``:
            its load is the largest of its compute, its sends and its receives.
        time_limit_s: after this the best answer so far and its bound are returned.
        work_limit: ends the search as well, after so much work in CP-SAT's own measure, its
            deterministic time; the answer is then the same on every machine, unless the time runs
            out first. Not under objective ``step``.
        seed: of the solver's random choices.
        workers: cores that the solver may use.
        bottleneck_ms: objective ``devices``: no device may be busy longer for one micro-batch.
        break_ties: whether, of the placements with as small an objective, the one is looked for
            that transfers least, and of those the one whose devices' compute times differ least;
            under objective ``step``, of those with the micro-batches and the schedule of the best.
        explain: whether the answer says what limits it and what would help, by solving changed
            questions in what is left of the time.
    """

    schema_version: Literal["1"] = SCHEMA_VERSION
    profile: Profile
    profiles: Annotated[tuple[Profile, ...], Field(max_length=64), FIRST] = ()
    cluster: Cluster | None = None
    objective: Objective = "throughput"
    constraints: Constraints = Constraints()
    training: bool | None = None
    chunks: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    batch_size: Annotated[int, Field(ge=1, le=2**31)] | None = None
    schedule: ScheduleChoice = "1f1b"
    steps: Steps = "alone"
    transfers: Transfers = "added"
    time_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    work_limit: Annotated[float, Field(gt=0, le=86_400)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    workers: Annotated[int, Field(ge=1, le=256)] = 2
    bottleneck_ms: Annotated[float, Field(gt=0, le=1e9)] | None = None
    break_ties: bool = False
    explain: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        cluster = self.cluster or self.profile.cluster
        if cluster is None:
            raise ValueError(
                "neither the request nor its profile has a cluster: give the devices to place on"
            )
        if self.is_training and not self.profile.training:
            raise ValueError("training is asked for, but the profile was made with training=False")
        layers = {layer.name for layer in self.profile.layers}
        devices = {device.name for device in cluster.devices}
        rules = self.constraints
        refuse_unknown("constraints.pinned", rules.pinned, layers)
        refuse_unknown("constraints.pinned", rules.pinned.values(), devices, "device")
        refuse_unknown(
            "constraints.forbidden", (name for name in rules.forbidden if name != "*"), layers
        )
        for banned in rules.forbidden.values():
            refuse_unknown("constraints.forbidden", banned, devices, "device")
        for group in rules.colocated:
            refuse_unknown("constraints.colocated", group, layers)
        if isinstance(rules.recompute, dict):
            refuse_unknown(
                "constraints.recompute",
                (name for name in rules.recompute if name != "*"),
                devices,
                "device",
            )
        _refuse_unreachable(cluster)
        self._check_pins(cluster)
        self._check_numbers(len(devices), len(layers))
        for profile in (self.profile, *self.profiles):
            self._check_times(profile, cluster)
        self._check_sizes()
        if (self.bottleneck_ms is None) == (self.objective == "devices"):
            needs = "needs one (--bottleneck MS)" if self.objective == "devices" else "takes none"
            raise ValueError(
                f"bottleneck_ms is {self.bottleneck_ms}: objective {self.objective!r} {needs}"
            )
        return self

    def _check_sizes(self) -> None:
        """What only objective ``step`` knows, and that its profiles are of the same layers and fill
        a batch.
        """
        if self.objective != "step":
            only = {
                "profiles": self.profiles,
                "batch_size": self.batch_size,
                "schedule": self.schedule == "auto",
            }
            for name, given in {**only, "steps": self.steps != "alone"}.items():
                if given:
                    raise ValueError(
                        f"{name}: only objective 'step' chooses it; the objective is {self.objective!r}"
                    )
            return
        names = [layer.name for layer in self.profile.layers]
        for profile in self.profiles:
            if [
                layer.name for layer in profile.layers
            ] != names or profile.training != self.profile.training:
                raise ValueError(
                    f"profiles: the one of {profile.batch_size} samples has other layers than the profile"
                )
        sizes = [profile.batch_size for profile in (self.profile, *self.profiles)]
        refuse_duplicates("profiles: micro-batch of size", [str(size) for size in sizes])
        if not self.micro_batches():
            known = " or ".join(map(str, sorted(sizes)))
            raise ValueError(
                f"batch_size: {self.whole_batch_size} samples are no whole number of micro-batches of {known};"
                " give a multiple, or a profile of another size"
            )
        profile, chunks = self.micro_batches()[-1]  # the most of them
        if chunks > MOST_CHUNKS_OF_A_STEP:
            raise ValueError(
                f"chunks: a batch is {chunks:,} micro-batches of {count_text(profile.batch_size, 'sample')}, stages x"
                f" {chunks:,} passes forwards; objective 'step' simulates no more than {MOST_CHUNKS_OF_A_STEP:,} of a"
                " stage: give larger micro-batches"
            )

    def _check_pins(self, cluster: Cluster) -> None:
        """No pin contradicts another rule by itself: a ban, a group, or a value that has no way to
        where it is read.
        """
        rules, everywhere = self.constraints, self.constraints.forbidden.get("*", ())
        pinned = rules.pinned
        for layer, device in pinned.items():
            if device in (*rules.forbidden.get(layer, ()), *everywhere):
                raise ValueError(
                    f"constraints.pinned: layer {layer!r} is pinned to {device!r}, which is forbidden for it"
                )
        for group in (*self.profile.colocated, *rules.colocated) if pinned else ():
            ends = {pinned[layer]: layer for layer in group if layer in pinned}
            if len(ends) > 1:
                pins = " and ".join(
                    f"{layer!r} to {device!r}" for device, layer in list(ends.items())[:2]
                )
                raise ValueError(f"constraints.pinned: colocated layers are pinned apart, {pins}")
        linked = (
            {(link.source, link.target) for link in cluster.links} if len(pinned) > 1 else set()
        )
        for edge in self.profile.edges if len(pinned) > 1 else ():
            self._check_way(edge, linked)

    def _check_way(self, edge: Edge, linked: set[tuple[str, str]]) -> None:
        """A value between pinned layers has a link, and so has its gradient."""
        pinned = self.constraints.pinned
        for target in edge.targets if edge.source in pinned else ():
            here, there = pinned[edge.source], pinned.get(target, pinned[edge.source])
            back = self.is_training and edge.gradient_bytes > 0
            for way in ((here, there), (there, here))[: 1 + back] if here != there else ():
                if way not in linked:
                    raise ValueError(
                        f"constraints.pinned: {edge.source!r} on {here!r} makes a value that {target!r} reads on "
                        f"{there!r}, but cluster.links has no link from {way[0]!r} to {way[1]!r}"
                    )

    def _check_numbers(self, devices: int, layers: int) -> None:
        """No more devices are demanded than there are, may be used, or can hold a layer each."""
        least, most = self.constraints.min_devices, self.constraints.max_devices
        there = {
            "there are": devices,
            "constraints.max_devices is": most,
            "the number of layers is": layers,
        }
        for what, number in there.items():
            if least is not None and number is not None and least > number:
                raise ValueError(f"constraints.min_devices is {least}, but {what} {number}")

    def _check_times(self, profile: Profile, cluster: Cluster) -> None:
        trains = self.is_training
        for kind in {device.type for device in cluster.devices}:
            for layer in profile.layers:
                if kind not in layer.forward_ms:
                    raise ValueError(
                        f"layer {layer.name!r} has no forward_ms for device type {kind!r}"
                    )
                if trains and kind not in layer.backward_ms:
                    raise ValueError(
                        f"layer {layer.name!r} has no backward_ms for device type {kind!r}"
                    )

    @property
    def is_training(self) -> bool:
        """Whether a training step is placed."""
        return self.profile.training if self.training is None else self.training

    @property
    def whole_batch_size(self) -> int:
        """Samples in a whole batch."""
        return self.batch_size or self.chunks * self.profile.batch_size

    def micro_batches(self) -> list[tuple[Profile, int]]:
        """The profiles whose micro-batches fill the whole batch, and how many of each do, the
        fewest first.
        """
        whole = self.whole_batch_size
        profiles = sorted((self.profile, *self.profiles), key=lambda profile: -profile.batch_size)
        return [
            (profile, whole // profile.batch_size)
            for profile in profiles
            if whole % profile.batch_size == 0
        ]

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices to place on."""
        return self.placed_on.devices

    @property
    def placed_on(self) -> Cluster:
        """The cluster to place on: the request's, else the profile's."""
        cluster = self.cluster or self.profile.cluster
        assert cluster is not None  # the validator refused it
        return cluster

    def content_hash(self) -> str:
        """The same for the same question, whatever the order or spelling of its JSON: 32
        hexadecimal digits.
        """
        return hashlib.sha256(self.__pydantic_serializer__.to_json(self)).hexdigest()[:32]


def _refuse_unreachable(cluster: Cluster) -> None:
    """Raises ValueError for the first of several devices that has no link."""
    linked = {end for link in cluster.links for end in (link.source, link.target)}
    for device in cluster.devices if len(cluster.devices) > 1 else ():
        if device.name not in linked:
            raise ValueError(
                f"cluster.links: device {device.name!r} has no link with any other device, so no value can reach it; "
                "give its links, or leave it out"
            )
