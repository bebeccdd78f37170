"""Timelines of placements whose layers are all pinned, so that only schedules and costs count."""

from __future__ import annotations

from typing import Any

from public_api import BRANCHES, CHAIN, MIB, Service, question, timeline

SCHEDULES = ("fill-drain", "1f1b", "zero-bubble", "interleaved")


def on(*devices: int, **rules: Any) -> dict[str, Any]:
    """Return constraints that pin layer by layer to the device of that number."""
    pinned = {f"l{index}": f"d{device}" for index, device in enumerate(devices)}
    return {"pinned": pinned, **rules}


PLACED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "three stages": (
        SCHEDULES,
        question(chunks=5, constraints=on(0, 0, 0, 1, 1, 2, 2, 2)),
    ),
    "unlike devices and slow links": (
        SCHEDULES,
        question(
            edges=BRANCHES,
            chunks=4,
            kinds=("a", "b", "c"),
            size=8 * MIB,
            devices={"unlike_links": True},
            constraints=on(0, 0, 1, 1, 0, 0, 2, 2),
        ),
    ),
    "several stages on a device": (
        SCHEDULES,
        question(
            edges=CHAIN,
            chunks=4,
            kinds=("a", "a"),
            constraints=on(0, 0, 1, 1, 0, 0, 1, 1, contiguous=False),
        ),
    ),
    "recompute on one device": (
        ("1f1b", "zero-bubble"),
        question(chunks=4, constraints=on(1, 1, 1, 0, 0, 0, 2, 2, recompute={"d0": "always"})),
    ),
    "inference": (
        ("1f1b",),
        question(edges=BRANCHES, training=False, chunks=6, constraints=on(0, 0, 1, 1, 0, 0, 2, 2)),
    ),
}


def shown(name: str, service: Service) -> dict[str, Any]:
    """Return the timeline of a placement under each of its schedules."""
    schedules, content = PLACED[name]
    return {schedule: timeline(service, content | {"schedule": schedule}) for schedule in schedules}
