"""The devices that a model is placed on, and the links between them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from placer.schema.base import (
    FIRST,
    MAX_DEVICES,
    Bytes,
    Name,
    Wire,
    refuse_duplicates,
    refuse_unknown,
)

Bandwidth = Annotated[float, Field(gt=0, le=1e18)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]


class Rate(Wire):
    """How fast bytes flow one way: n bytes take ``latency_s + n / bandwidth_bytes_per_s``."""

    bandwidth_bytes_per_s: Bandwidth
    latency_s: Seconds = 0.0


class Device(Wire):
    """One accelerator, or one CPU stand-in.

    Attributes:
        name: as torch names it: ``cuda:0``, ``cpu:1``.
        type: the key into a layer's times: ``NVIDIA H200``, ``cpu``.
        memory_bytes: the limit; what a placement may use is this less the reserve.
        reserve_bytes: kept free of the placement: context, library workspaces, other programs.
        host: the machine that the device is in.
        to_host: how fast bytes flow from the device to its host's memory; None where it was not
            measured, and for stand-ins, which are in that memory.
        from_host: the same from there to the device.
    """

    name: Name
    type: Name
    memory_bytes: Bytes
    reserve_bytes: Bytes = 0
    host: Annotated[str, StringConstraints(max_length=512)] = ""
    to_host: Rate | None = None
    from_host: Rate | None = None

    @property
    def usable_bytes(self) -> int:
        """What a placement may use, in bytes."""
        return self.memory_bytes - self.reserve_bytes

    @model_validator(mode="after")
    def _limit_above_reserve(self) -> Self:
        if self.memory_bytes < self.reserve_bytes:
            raise ValueError(
                f"device {self.name!r}: memory_bytes {self.memory_bytes} is below reserve_bytes "
                f"{self.reserve_bytes}"
            )
        return self


class Link(Wire):
    """A directed way between two devices: a transfer of n bytes takes ``latency_s + n /
    bandwidth_bytes_per_s``.

    Attributes:
        source: the device that sends.
        target: the device that receives.
        bandwidth_bytes_per_s: of one transfer alone.
        latency_s: of one transfer alone.
        both_ways: while as much flows the other way; None where it was not measured.
        computing: while both devices compute.
        both_ways_computing: while both is the case.
        route: ``direct``; or ``host``: by way of the host's memory, where a direct copy would
            change bytes.
        fault: what was found wrong with the direct way; empty where nothing was.
    """

    source: Name
    target: Name
    bandwidth_bytes_per_s: Bandwidth
    latency_s: Seconds = 0.0
    both_ways: Rate | None = None
    computing: Rate | None = None
    both_ways_computing: Rate | None = None
    route: Literal["direct", "host"] = "direct"
    fault: Annotated[str, StringConstraints(max_length=512)] = ""

    def transfer_ms(self, size_bytes: int) -> float:
        """The time that ``size_bytes`` take over this link, in milliseconds."""
        return 1e3 * (self.latency_s + size_bytes / self.bandwidth_bytes_per_s)


class Cluster(Wire):
    """The devices and the links between them; two devices without a link cannot exchange values."""

    devices: Annotated[tuple[Device, ...], Field(min_length=1, max_length=MAX_DEVICES), FIRST]
    links: Annotated[tuple[Link, ...], FIRST] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [device.name for device in self.devices]
        refuse_duplicates("device", names)
        known = set(names)
        for link in self.links:
            refuse_unknown(
                f"link {link.source!r} -> {link.target!r}",
                (link.source, link.target),
                known,
                "device",
            )
            if link.source == link.target:
                raise ValueError(
                    f"link {link.source!r} -> {link.target!r} joins a device with itself"
                )
        refuse_duplicates("link", [f"{link.source} -> {link.target}" for link in self.links])
        return self

    def link(self, source: str, target: str) -> Link | None:
        """The link from ``source`` to ``target``, or None where there is none."""
        return next(
            (link for link in self.links if (link.source, link.target) == (source, target)), None
        )


class Node(Wire):
    """A node that registered its devices at a service.

    Attributes:
        name: of the node.
        created_s: when it registered last, in seconds since 1970.
        devices: the names of its devices.
        types: their types, each once.
    """

    name: str
    created_s: float
    devices: tuple[str, ...]
    types: tuple[str, ...]


class NodeList(Wire):
    """The nodes that registered.

    Attributes:
        nodes: by name.
    """

    nodes: tuple[Node, ...]
