"""Which way bytes go between two devices: straight, or, where a link corrupts them, through the
host's memory.

    cuda:0 ──────────────────────────▶ cuda:1      straight: peer to peer
    cuda:0 ────▶ the host's memory ──▶ cuda:1      a detour

Some machines corrupt copies between peers silently. A profile finds such links, and a placement
made with it tells
which: this process then copies over none of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from placer.devices.names import parse
from placer.errors import InputError

HOST = torch.device("cpu")
"""The host's memory, and no stand-in."""

_detours: set[tuple[torch.device, torch.device]] = set()


def detour(source: torch.device, target: torch.device) -> None:
    """From now on, let what goes from ``source`` to ``target`` go through the host's memory."""
    _detours.add((source, target))


def take_detours(links: Iterable[tuple[str, str]]) -> None:
    """Let what goes over these links go through the host's memory.

    Args:
        links: names of sources and targets, as in a placement; those of devices elsewhere make no
            difference here.
    """
    for source, target in links:
        try:
            detour(parse(source), parse(target))
        except InputError:
            continue


def detours() -> frozenset[tuple[torch.device, torch.device]]:
    """Return the links over which copies go through the host's memory."""
    return frozenset(_detours)


def set_detours(links: Iterable[tuple[torch.device, torch.device]]) -> None:
    """Let copies over these links, and over no others, go through the host's memory.

    Args:
        links: as ``detours()`` returned them.
    """
    wanted = set(links)
    _detours.intersection_update(wanted)
    _detours.update(wanted)


def straight(source: torch.device, target: torch.device) -> None:
    """From now on, let it go straight again."""
    _detours.discard((source, target))


def has_detour(source: torch.device, target: torch.device) -> bool:
    """Whether what goes from ``source`` to ``target`` goes through the host's memory."""
    return bool(_detours) and (source, target) in _detours
