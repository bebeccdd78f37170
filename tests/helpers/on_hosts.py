"""What the tests of profiles over several hosts run in two processes, each of which plays a host of
its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import placer
from placer import devices
from placer.profiler import conditions
from placer.profiler.remote import gather

HOSTS = ("node7", "node9")


def play(rank: int, store: str, results: Any) -> None:
    """Be one process of a group, and let every script run in it; what they return, by name, goes
    into the queue."""
    os.environ["PLACER_CACHE"] = "off"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(HOSTS))
    found: dict[str, Any] = {}
    for script, hosts in SCRIPTS:
        devices.host_name = lambda hosts=hosts: hosts[rank]  # type: ignore[misc]
        try:
            found[script.__name__] = script(rank)
        except Exception as error:
            found[script.__name__] = f"{type(error).__name__}: {error}"
    results.put((rank, found))
    dist.destroy_process_group()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def unlike(rank: int) -> str:
    """Two hosts with devices of their own types."""
    kind = ("fast", "slow")[rank]
    from placer.profiler import profile
    from placer.profiler.links import cluster

    profile.type_name = cluster.hardware.type_name = conditions.devices.type_name = lambda device: (
        kind
    )  # type: ignore[assignment]
    return placer.gather_profile(lambda: _measured(2)).to_json()


def together(rank: int) -> tuple[int, str]:
    """How often this process has measured, and what it was given."""
    count = 0

    def measure() -> placer.Profile:
        nonlocal count
        count += 1
        return _measured(1)

    return (lambda text: (count, text))(placer.gather_profile(measure).to_json())


def failing(rank: int) -> str:
    """The second host cannot measure."""

    def measure() -> placer.Profile:
        if rank == 1:
            raise RuntimeError("no GPU left")
        return _measured(1)

    return placer.gather_profile(measure).to_json()


def spoilt(rank: int) -> str:
    """The second host receives other bytes than were sent."""
    if rank == 1:
        gather._changed = lambda received: 5
    return placer.gather_profile(lambda: _measured(1)).to_json()


def _measured(count: int) -> placer.Profile:
    return placer.profile(model(), torch.randn(4, 8), count, progress=False, repeats=1)


SCRIPTS: list[tuple[Callable[[int], Any], tuple[str, str]]] = [
    (failing, HOSTS),
    (together, ("node7", "node7")),
    (unlike, HOSTS),
    (spoilt, HOSTS),
]
"""In each process one after another; what the later ones change for good, the earlier do not see.
"""
