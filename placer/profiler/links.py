"""The links between devices, and between each device and its host: measured, or taken from the cache.

A link that changes bytes is never used: what would go over it goes by way of the host's memory, in this process from
now on, and wherever a placement is used that was made with this cluster. Its times are those of that way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import ValidationError

from placer import devices as hardware
from placer.errors import ProfilingError
from placer.profiler import ways
from placer.profiler.cache import Cache, key_of
from placer.profiler.conditions import conditions
from placer.profiler.progress import Step
from placer.schema import Link, Rate

_LOADS: dict[str, dict[str, bool]] = {
    "both_ways": {"both_ways": True},
    "computing": {"computing": True},
    "both_ways_computing": {"both_ways": True, "computing": True},
}
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
    """How many steps ``measure_links`` takes: each directed pair that is not cached, and each GPU's host.

    All pairs of stand-ins are one.
    """
    pairs = {_link_key(source, target): (source, target) for source in found for target in found if source != target}
    unknown = sum(_known(cache, source, target) is None for source, target in pairs.values())
    return unknown + (sum(device.type == "cuda" for device in found) if pairs else 0)


def measure_links(found: Sequence[torch.device], step: Step, cache: Cache | None = None) -> Connections:
    """Measure a link for each directed pair, and each GPU's ways to and from its host.

    All pairs of CPU stand-ins are one and the same memory, so their times are measured once; every pair is checked.

    Args:
        found: the devices.
        step: told what begins.
        cache: where links without a fault that were measured since the machine started are found, and kept.

    Raises:
        ProfilingError: bytes between a device and its host arrived changed, so that nothing is left to trust.
    """
    measured = Connections()
    if len(found) < 2:
        return measured
    for device in found:
        if device.type == "cuda":
            step(f"{device} <-> host")
            measured.ports[device] = _ports(device)
    rates: dict[tuple[str, str], dict[str, Any]] = {}
    for source in found:
        for target in found:
            if source != target:
                measured.links.append(_link(source, target, rates, measured.ports, step, cache))
    return measured


def _link(
    source: torch.device,
    target: torch.device,
    rates: dict[tuple[str, str], dict[str, Any]],
    ports: dict[torch.device, Ports],
    step: Step,
    cache: Cache | None,
) -> Link:
    key = _link_key(source, target)
    hardware.straight(source, target)
    try:
        known = rates.get(key) or _known(cache, source, target)
        if known is None:
            step(f"{key[0]} -> {key[1]}")
            known = _measure(source, target)
            _keep(cache, source, target, known)
        else:
            ways.check(source, target)
        rates[key] = known
        return Link(source=str(source), target=str(target), **known)
    except ways.Changed as changed:
        return _by_way_of_host(source, target, changed, ports)


def _measure(source: torch.device, target: torch.device) -> dict[str, Any]:
    """The fields of a link; under load only between GPUs: a stand-in's copies are its computations' own memory."""
    measured: dict[str, Any] = ways.rate(source, target).model_dump()
    if source.type == target.type == "cuda":
        for name, load in _LOADS.items():
            measured[name] = ways.rate(source, target, **load).model_dump()
    return measured


def _by_way_of_host(
    source: torch.device, target: torch.device, changed: ways.Changed, ports: dict[torch.device, Ports]
) -> Link:
    hardware.detour(source, target)
    _log.warning("link %s -> %s: %s; copies go by way of the host's memory instead", source, target, changed)
    there, on = (ports.get(device) for device in (source, target))
    legs = [there.to_host if there else None, on.from_host if on else None]
    known = [leg for leg in legs if leg is not None] or [ways.rate(hardware.HOST, hardware.HOST)] * 2
    whole = known[0] if len(known) == 1 else ways.through_host(*known)
    return Link(source=str(source), target=str(target), route="host", fault=str(changed), **whole.model_dump())


def _ports(device: torch.device) -> Ports:
    try:
        return Ports(ways.rate(device, hardware.HOST), ways.rate(hardware.HOST, device))
    except ways.Changed as changed:
        raise ProfilingError(
            f"between {device} and the host's memory, {changed}: nothing that runs there can be trusted; "
            "leave the device out"
        ) from changed


def _link_key(source: torch.device, target: torch.device) -> tuple[str, str]:
    """Pairs with one key share one measurement: all stand-ins are the same memory."""
    return tuple(device.type if device.type == hardware.CPU else str(device) for device in (source, target))  # type: ignore[return-value]


def _cache_key(source: torch.device, target: torch.device) -> str:
    """Of this pair in this machine, until it starts again: cards and settings of the bus may change then."""
    ends = [conditions(device) | {"place": hardware.place(device)} for device in (source, target)]
    return key_of(ends=ends, host=hardware.host_name(), boot=hardware.boot_id())


def _known(cache: Cache | None, source: torch.device, target: torch.device) -> dict[str, Any] | None:
    content = None if cache is None else cache.read("links", _cache_key(source, target))
    try:
        return None if content is None else _fields(Link(source="a", target="b", **content))
    except (ValidationError, TypeError):
        return None


def _keep(cache: Cache | None, source: torch.device, target: torch.device, known: dict[str, Any]) -> None:
    if cache is not None:
        cache.write("links", _cache_key(source, target), known)


def _fields(link: Link) -> dict[str, Any]:
    return link.model_dump(exclude={"source", "target"}, exclude_defaults=True)
