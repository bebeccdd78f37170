"""Routes of copies between devices: direct, or through the host where a link corrupts data.

    cuda:0 ──────────────────────────▶ cuda:1      direct: peer to peer
    cuda:0 ────▶ the host's memory ──▶ cuda:1      detour

Some machines corrupt peer-to-peer copies silently. A profile finds such links, and a placement made
with it lists them. This process then copies over none of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from placer.devices.names import parse
from placer.errors import InputError

HOST = torch.device("cpu")
"""The host's memory, which is not a stand-in."""

_detours: set[tuple[torch.device, torch.device]] = set()


def detour(source: torch.device, target: torch.device) -> None:
    """Route later copies from ``source`` to ``target`` through the host."""
    _detours.add((source, target))


def take_detours(links: Iterable[tuple[str, str]]) -> None:
    """Route later copies over these links through the host.

    Args:
        links: names of sources and targets, as in a placement; unknown devices are skipped.
    """
    for source, target in links:
        try:
            detour(parse(source), parse(target))
        except InputError:
            continue


def detours() -> frozenset[tuple[torch.device, torch.device]]:
    """Return the links whose copies go through the host."""
    return frozenset(_detours)


def set_detours(links: Iterable[tuple[torch.device, torch.device]]) -> None:
    """Route copies over these links, and over no others, through the host.

    Args:
        links: as returned by ``detours()``.
    """
    wanted = set(links)
    _detours.intersection_update(wanted)
    _detours.update(wanted)


def straight(source: torch.device, target: torch.device) -> None:
    """Route later copies from ``source`` to ``target`` directly again."""
    _detours.discard((source, target))


def has_detour(source: torch.device, target: torch.device) -> bool:
    """Return whether copies from ``source`` to ``target`` go through the host."""
    return bool(_detours) and (source, target) in _detours
