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
    """A transfer rate: n bytes take ``latency_s + n / bandwidth_bytes_per_s``."""

    bandwidth_bytes_per_s: Bandwidth
    latency_s: Seconds = 0.0


class Device(Wire):
    """An accelerator or a CPU stand-in.

    Attributes:
        name: torch's name: ``cuda:0``, ``cpu:1``.
        type: the key of a layer's times: ``NVIDIA H200``, ``cpu``.
        memory_bytes: the limit; a placement may use it minus the reserve.
        reserve_bytes: not available to the placement: contexts, library workspaces, other programs.
        host: the machine of the device.
        to_host: the rate from the device to its host's memory; None if not measured, and for
            stand-ins, which use that memory.
        from_host: the rate from the host's memory to the device; None likewise.
        from_disk: the rate from the disk of the host to its memory; None if not measured.
    """

    name: Name
    type: Name
    memory_bytes: Bytes
    reserve_bytes: Bytes = 0
    host: Annotated[str, StringConstraints(max_length=512)] = ""
    to_host: Rate | None = None
    from_host: Rate | None = None
    from_disk: Rate | None = None

    @property
    def usable_bytes(self) -> int:
        """Return the bytes that a placement may use."""
        return self.memory_bytes - self.reserve_bytes

    @property
    def is_host(self) -> bool:
        """Return whether it is the CPU of its host, whose memory is the host's.

        A CPU stand-in with ``from_host`` copies parameters as an accelerator does.
        """
        kind = self.name.rpartition("/")[2].partition(":")[0]
        return kind == "cpu" and self.from_host is None

    @model_validator(mode="after")
    def _limit_above_reserve(self) -> Self:
        if self.memory_bytes < self.reserve_bytes:
            raise ValueError(
                f"device {self.name!r}: memory_bytes {self.memory_bytes} is below reserve_bytes "
                f"{self.reserve_bytes}; give more memory_bytes, or a smaller reserve_bytes"
            )
        return self


class Link(Wire):
    """A directed link between two devices.

    A transfer of n bytes takes ``latency_s + n / bandwidth_bytes_per_s``.

    Attributes:
        source: the device that sends.
        target: the device that receives.
        bandwidth_bytes_per_s: of an isolated transfer.
        latency_s: of an isolated transfer.
        bidirectional: the rate during an equal transfer in the other direction; None if not
            measured.
        computing: the rate while both devices compute.
        bidirectional_computing: the rate under both loads.
        route: ``direct``; or ``host``, through the host's memory, if direct copies corrupt bytes.
        fault: the fault of the direct route; empty for none.
    """

    source: Name
    target: Name
    bandwidth_bytes_per_s: Bandwidth
    latency_s: Seconds = 0.0
    # rates under load, measured between GPUs only
    bidirectional: Rate | None = None
    computing: Rate | None = None
    bidirectional_computing: Rate | None = None
    # set if the direct route corrupts data
    route: Literal["direct", "host"] = "direct"
    fault: Annotated[str, StringConstraints(max_length=512)] = ""

    def transfer_ms(self, size_bytes: int) -> float:
        """Return the transfer time of ``size_bytes`` over this link, in milliseconds."""
        return 1e3 * (self.latency_s + size_bytes / self.bandwidth_bytes_per_s)


class Cluster(Wire):
    """Devices and links; devices without a link between them cannot exchange values."""

    devices: Annotated[tuple[Device, ...], Field(min_length=1, max_length=MAX_DEVICES), FIRST]
    links: Annotated[tuple[Link, ...], FIRST] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [device.name for device in self.devices]
        refuse_duplicates("device", names)
        # every end of a link is looked up, and 1,024 devices may have a million links
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
                    f"link {link.source!r} -> {link.target!r} joins a device with itself; leave "
                    "it out"
                )
        refuse_duplicates("link", [f"{link.source} -> {link.target}" for link in self.links])
        return self

    def link(self, source: str, target: str) -> Link | None:
        """Return the link from ``source`` to ``target``, or None."""
        return next(
            (link for link in self.links if (link.source, link.target) == (source, target)), None
        )


class Node(Wire):
    """A node whose devices are registered at a service.

    Attributes:
        name: of the node.
        created_s: time of the last registration, in seconds since 1970.
        devices: the names of its devices.
        types: the distinct types of its devices.
    """

    name: str
    created_s: float
    devices: tuple[str, ...]
    types: tuple[str, ...]


class NodeList(Wire):
    """The registered nodes.

    Attributes:
        nodes: ordered by name.
    """

    nodes: tuple[Node, ...]
