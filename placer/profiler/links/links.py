"""Links between devices and between devices and hosts, measured or from the cache.

A link that corrupts bytes is never used. Its traffic goes through the host's memory, in this
process and wherever a placement made with this cluster is used. Its rates are the rates of the
detour.

Links between devices of equal types that differ by less than the measurement noise are averaged:
each gets their median rates. Otherwise a few microseconds of noise would decide which device gets
which stage.
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
    "bidirectional": {"bidirectional": True},
    "computing": {"computing": True},
    "bidirectional_computing": {"bidirectional": True, "computing": True},
}
# Relative repeatability of a transfer, by its size in bytes, on machines with other users.
_NOISE = {2**16: 0.5, 2**26: 0.25}

Fields = dict[str, Any]
_log = logging.getLogger(__name__)


@dataclass
class Ports:
    """The links between one GPU and its host's memory."""

    to_host: Rate
    from_host: Rate


@dataclass
class Connections:
    """The measured links.

    Attributes:
        links: one for each directed pair of devices.
        ports: for each GPU, its links to and from the host.
    """

    links: list[Link] = field(default_factory=list)
    ports: dict[torch.device, Ports] = field(default_factory=dict)


def links_to_measure(found: Sequence[torch.device], cache: Cache | None = None) -> int:
    """Return the number of steps of ``measure_links``.

    These are the uncached directed pairs, with all pairs of stand-ins counted as one, and the
    uncached host links of GPUs.
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
    """Measure a link for each directed pair, and each GPU's links to and from its host.

    All CPU stand-ins share the same memory, so their rates are measured once; every pair is
    verified.

    Args:
        found: the devices.
        step: called with a description when a measurement begins.
        cache: supplies and stores correct links measured since the machine started.

    Raises:
        ProfilingError: if bytes between a device and its host arrived corrupted, so that no data
            there can be trusted.
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
    """Return the links with measurement noise averaged out.

    Args:
        links: measured links. Links of one route between equal device types form a group if their
            small and large transfers differ by no more than the noise.
        types: the type of each device, by name.

    Returns:
        The links in the same order, with the median rates of their group.
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
    """Group links of similar speed, the fastest group first."""
    groups: list[list[Link]] = []
    # Each link is compared with the fastest of a group only, so that groups cannot grow step by
    # step over a wide range.
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
    """Return the median rate (bytes/s, s); None if one link was not measured."""
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
    # measure the direct route, even if an earlier profile set a detour
    hardware.straight(source, target)
    try:
        fields = rates.get(key) or known.get(source, target)
        if fields:
            link_probe.check(source, target)
        else:
            step(f"{key[0]} -> {key[1]}")
            fields = _measure(source, target)
            known.keep(source, target, fields)
        # further pairs of stand-ins reuse the measurement and are only verified
        rates[key] = fields
        return Link(source=str(source), target=str(target), **fields)
    except link_probe.Changed as changed:
        return _by_way_of_host(source, target, changed, ports)


def _measure(source: torch.device, target: torch.device) -> Fields:
    """Return the fields of a link.

    Rates under load are measured between GPUs only: on stand-ins, copies and computations use the
    same cores and memory.
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
    # a stand-in is in host memory already, so its leg is missing
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
    """Return a key of the measurement that a pair shares: all stand-ins are the same memory."""
    return tuple(
        device.type if device.type == hardware.CPU else str(device) for device in (source, target)
    )  # type: ignore[return-value]


class _Known:
    """Cached links of this machine since it started.

    Cards and buses may change while it is off.
    """

    def __init__(self, cache: Cache | None) -> None:
        self._cache = cache
        self._facts: dict[torch.device, Any] = {}

    def get(self, source: torch.device, target: torch.device) -> Fields:
        """Return the fields of a link without its ends; empty if it is unknown."""
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
        """Return the fields of the links to and from the host; empty unless both are known."""
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
