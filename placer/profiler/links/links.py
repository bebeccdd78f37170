"""The links between devices, and between each device and its host: measured, or taken from the
cache.

A link that changes bytes is never used: what would go over it goes by way of the host's memory, in
this process from now on, and wherever a placement is used that was made with this cluster. Its
times are those of that way.

Links between devices of the same types that differ by less than measurements do are one and the
same: each gets the medians of all. Which device takes which stage would else hang on the noise of a
few microseconds.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose
from typing import Any

import torch

from placer import devices as hardware
from placer.errors import InputError, ProfilingError
from placer.profiler.cache.file_cache import Cache, key_of
from placer.profiler.conditions import conditions
from placer.profiler.links import link_probe
from placer.profiler.progress import Step
from placer.profiler.timing import significant
from placer.schema import Link, Rate

_LOADS: dict[str, dict[str, bool]] = {
    "both_ways": {"both_ways": True},
    "computing": {"computing": True},
    "both_ways_computing": {"both_ways": True, "computing": True},
}
# Measured again, on machines that others use too, a transfer of so many bytes takes up to this
# share more or less.
_NOISE = {2**16: 0.5, 2**26: 0.25}

Fields = dict[str, Any]
_log = logging.getLogger(__name__)


@dataclass
class Ports:
    """The ways between one GPU and its host's memory."""

    to_host: Rate
    from_host: Rate


@dataclass
class Connections:
    """What was measured between devices.

    Attributes:
        links: one for each directed pair.
        ports: by GPU, its ways to and from the host.
    """

    links: list[Link] = field(default_factory=list)
    ports: dict[torch.device, Ports] = field(default_factory=dict)


def links_to_measure(found: Sequence[torch.device], cache: Cache | None = None) -> int:
    """How many steps ``measure_links`` takes: each directed pair that is not cached, and each GPU's
    host.

    All pairs of stand-ins are one.
    """
    known = _Known(cache)
    pairs = {
        _link_key(source, target): (source, target)
        for source in found
        for target in found
        if source != target
    }
    ports = [device for device in found if device.type == "cuda"]
    return sum(not known.get(*pair) for pair in pairs.values()) + sum(
        not known.ports(device) for device in ports
    )


def measure_links(
    found: Sequence[torch.device], step: Step, cache: Cache | None = None
) -> Connections:
    """Measure a link for each directed pair, and each GPU's ways to and from its host.

    All pairs of CPU stand-ins are one and the same memory, so their times are measured once; every
    pair is checked.

    Args:
        found: the devices.
        step: told what begins.
        cache: where links without a fault that were measured since the machine started are found,
            and kept.

    Raises:
        ProfilingError: bytes between a device and its host arrived changed, so that nothing is left
            to trust.
    """
    measured, known = Connections(), _Known(cache)
    for device in found:
        if device.type == "cuda":
            measured.ports[device] = _ports(device, step, known)
    rates: dict[tuple[str, str], Fields] = {}
    for source in found:
        for target in found:
            if source != target:
                measured.links.append(_link(source, target, rates, measured.ports, step, known))
    return measured


def evened(links: Sequence[Link], types: Mapping[str, str]) -> list[Link]:
    """Links with the noise of their measurement taken out.

    Args:
        links: as they were measured; those of one route between the same types of devices are alike
            where transfers, small and large, differ by no more than the noise.
        types: by name, each device's.

    Returns:
        The same links in the same order; those that are alike have the medians of their rates.
    """
    kinds: dict[Any, list[Link]] = {}
    for link in links:
        kinds.setdefault(
            (types[link.source], types[link.target], link.route, link.fault), []
        ).append(link)
    medians: dict[tuple[str, str], Link] = {}
    for alike in (group for kind in kinds.values() for group in _groups(kind)):
        rates = {name: _median([getattr(link, name) for link in alike]) for name in _LOADS}
        own = _median(alike)
        assert own is not None
        medians |= {
            (link.source, link.target): link.model_copy(update=rates | dict(own)) for link in alike
        }
    return [medians[link.source, link.target] for link in links]


def _groups(links: Sequence[Link]) -> list[list[Link]]:
    """Links as fast as one another, the fastest first."""
    groups: list[list[Link]] = []
    for link in sorted(links, key=lambda link: (-link.bandwidth_bytes_per_s, link.latency_s)):
        fitting = (group for group in groups if _is_alike(group[0], link))
        group = next(fitting, None)
        if group is None:
            groups.append([link])
        else:
            group.append(link)
    return groups


def _is_alike(one: Link, other: Link) -> bool:
    return all(
        isclose(one.transfer_ms(size), other.transfer_ms(size), rel_tol=share)
        for size, share in _NOISE.items()
    )


def _median(rates: Sequence[Link | Rate | None]) -> Rate | None:
    """Of rates in bytes per second and latencies in seconds; None where one was not measured."""
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return None
    return Rate(
        bandwidth_bytes_per_s=significant(
            statistics.median(rate.bandwidth_bytes_per_s for rate in known)
        ),
        latency_s=significant(statistics.median(rate.latency_s for rate in known)),
    )


def _link(
    source: torch.device,
    target: torch.device,
    rates: dict[tuple[str, str], Fields],
    ports: dict[torch.device, Ports],
    step: Step,
    known: _Known,
) -> Link:
    key = _link_key(source, target)
    hardware.straight(source, target)
    try:
        fields = rates.get(key) or known.get(source, target)
        if fields:
            link_probe.check(source, target)
        else:
            step(f"{key[0]} -> {key[1]}")
            fields = _measure(source, target)
            known.keep(source, target, fields)
        rates[key] = fields
        return Link(source=str(source), target=str(target), **fields)
    except link_probe.Changed as changed:
        return _by_way_of_host(source, target, changed, ports)


def _measure(source: torch.device, target: torch.device) -> Fields:
    """The fields of a link; under load only between GPUs: a stand-in's copies are its computations'
    own memory.
    """
    measured: Fields = link_probe.rate(source, target).model_dump()
    if source.type == target.type == "cuda":
        for name, load in _LOADS.items():
            measured[name] = link_probe.rate(source, target, **load).model_dump()
    return measured


def _by_way_of_host(
    source: torch.device,
    target: torch.device,
    changed: link_probe.Changed,
    ports: dict[torch.device, Ports],
) -> Link:
    hardware.detour(source, target)
    _log.warning(
        "link %s -> %s: %s; copies go by way of the host's memory instead", source, target, changed
    )
    there, on = (ports.get(device) for device in (source, target))
    legs = [there.to_host if there else None, on.from_host if on else None]
    known = [leg for leg in legs if leg is not None] or [
        link_probe.rate(hardware.HOST, hardware.HOST)
    ] * 2
    whole = known[0] if len(known) == 1 else link_probe.through_host(*known)
    return Link(
        source=str(source),
        target=str(target),
        route="host",
        fault=str(changed),
        **whole.model_dump(),
    )


def _ports(device: torch.device, step: Step, known: _Known) -> Ports:
    ends = (device, hardware.HOST), (hardware.HOST, device)
    try:
        if fields := known.ports(device):
            for source, target in ends:
                link_probe.check(source, target)
        else:
            step(f"{device} <-> host")
            fields = [link_probe.rate(source, target).model_dump() for source, target in ends]
            for (source, target), rate in zip(ends, fields, strict=True):
                known.keep(source, target, rate)
        return Ports(*(Rate(**rate) for rate in fields))
    except link_probe.Changed as changed:
        raise ProfilingError(
            f"between {device} and the host's memory, {changed}: nothing that runs there can be "
            "trusted; leave the device out"
        ) from changed


def _link_key(source: torch.device, target: torch.device) -> tuple[str, str]:
    """Pairs with one key share one measurement: all stand-ins are the same memory."""
    return tuple(
        device.type if device.type == hardware.CPU else str(device) for device in (source, target)
    )  # type: ignore[return-value]


class _Known:
    """Links that were measured before in this machine, until it starts again: cards and the bus may
    change then.
    """

    def __init__(self, cache: Cache | None) -> None:
        self._cache = cache
        self._facts: dict[torch.device, Any] = {}

    def get(self, source: torch.device, target: torch.device) -> Fields:
        """The fields of a link beside its ends; none where it is not known."""
        content = (
            None if self._cache is None else self._cache.read("links", self._key(source, target))
        )
        try:
            found = Link(source="a", target="b", **content) if content else None
        except (InputError, TypeError):
            return {}
        return (
            found.model_dump(exclude={"source", "target"}, exclude_defaults=True) if found else {}
        )

    def ports(self, device: torch.device) -> list[Fields]:
        """The fields of the ways to the host and from it; none unless both are known."""
        both = [self.get(device, hardware.HOST), self.get(hardware.HOST, device)]
        return both if all(both) else []

    def keep(self, source: torch.device, target: torch.device, fields: Fields) -> None:
        if self._cache is not None:
            self._cache.write("links", self._key(source, target), fields)

    def _of(self, device: torch.device) -> Any:
        if device not in self._facts:
            self._facts[device] = _facts(device)
        return self._facts[device]

    def _key(self, source: torch.device, target: torch.device) -> str:
        ends = [self._of(device) for device in (source, target)]
        return key_of(ends=ends, host=hardware.host_name(), boot=hardware.boot_id())


def _facts(device: torch.device) -> Any:
    of_device = conditions(device)
    return [
        hardware.place(device),
        *(of_device.get(name) for name in ("type", "device", "versions", "measured_by")),
    ]
