"""The assignment of a placement's devices to the processes that torchrun started.

    placement for several hosts             processes                    mapping
    host0/cuda:0  host0/cuda:1              rank 0, 1 on the first node  rank 0: cuda:0, 1: cuda:1
    host1/cuda:0  host1/cuda:1              rank 2, 3 on the second      rank 2: cuda:0, 3: cuda:1

A device is named ``HOST/DEVICE``, or ``DEVICE`` if there is one host. Hosts match nodes by name if
every host of the placement names a node. Otherwise they match in order: the first host by name (in
natural order) is the node with the lowest rank. On a node, the device with the lowest index belongs
to the process with the lowest rank. So if a placement uses all devices, rank and device agree as
torchrun users expect: ``cuda:LOCAL_RANK``. If only some of a node's processes run the pipeline and
others its replicas, each takes ``cuda:LOCAL_RANK``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from placer import devices as hardware
from placer.errors import PlacementError
from placer.utils.units import count_text

SEPARATOR = "/"
"""Separator of host and device: ``host0/cuda:1``."""


class Process(NamedTuple):
    """The location of a process.

    Attributes:
        host: the name of its machine.
        node: the number of its node, as torchrun counts; two nodes may share a machine.
        local_rank: its rank within the node.
    """

    host: str
    node: int
    local_rank: int

    @classmethod
    def here(cls, rank: int) -> Process:
        """Return this process, from torchrun's environment variables.

        Without torchrun, all processes of a machine form one node.
        """
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        return cls(hardware.host_name(), int(os.environ.get("GROUP_RANK", 0)), local_rank)


class Seat(NamedTuple):
    """The device of one process.

    Attributes:
        device: its name in the placement.
        local: torch's name of it on the process's machine.
    """

    device: str
    local: str


def host_of(device: str) -> str:
    """Return the host in a device's name; empty without one."""
    return device.rpartition(SEPARATOR)[0]


def seats(devices: Sequence[str], processes: Sequence[Process]) -> list[Seat]:
    """Return the device of every process, by rank.

    Args:
        devices: the distinct devices of a placement, in any order.
        processes: by rank.

    Raises:
        PlacementError: if the number of processes differs from the number of devices, in total or
            on a host.
    """
    _require_a_process_each(devices, processes)
    nodes = _nodes(processes)
    hosts = sorted({host_of(device) for device in devices}, key=_natural)
    if hosts == [""]:
        return _without_hosts(devices, processes, nodes)
    if "" in hosts:
        bare = next(device for device in devices if not host_of(device))
        raise PlacementError(
            f"the placement names the host of some devices, and none of {bare!r}: "
            f"name it as {hosts[-1]}{SEPARATOR}{bare}"
        )
    names = {ranks: processes[ranks[0]].host for ranks in nodes}
    # names decide only if they are unique: containers may share a host name
    by_name = set(hosts) == set(names.values()) and len(set(names.values())) == len(nodes)
    if not by_name and len(hosts) != len(nodes):
        raise PlacementError(
            f"the placement is made for {count_text(len(hosts), 'host')} ({', '.join(hosts[:8])}), "
            f"and the processes run on {count_text(len(nodes), 'node')} "
            f"({', '.join(names.values())}): start one torchrun for each host"
        )
    found: dict[int, Seat] = {}
    for host, ranks in zip(hosts, nodes, strict=True):
        there = next(node for node in nodes if names[node] == host) if by_name else ranks
        own = sorted((device for device in devices if host_of(device) == host), key=_natural)
        if len(own) != len(there):
            raise PlacementError(
                f"the placement uses {count_text(len(own), 'device')} of host {host!r} "
                f"({', '.join(own[:8])}), and node {processes[there[0]].node} has "
                f"{_processes(there)}: start as many there as devices are used"
            )
        found |= _on_a_node(own, there, processes)
    return [found[rank] for rank in range(len(processes))]


def refuse_missing_gpus(seated: Sequence[Seat], counts: Sequence[int]) -> None:
    """Raise a PlacementError, equal in every process, if one does not see its GPU.

    Args:
        seated: the device of every process.
        counts: number of GPUs that each process sees.
    """
    for rank, (seat, count) in enumerate(zip(seated, counts, strict=True)):
        kind, _, index = seat.local.partition(":")
        if kind == "cuda" and int(index or 0) >= count:
            raise PlacementError(
                f"process {rank} is given {seat.device!r}, its {seat.local}, and sees "
                f"{count_text(count, 'GPU')}: place on devices that are there, or let torchrun "
                "start processes on more nodes (CUDA_VISIBLE_DEVICES hides GPUs)"
            )


def _without_hosts(
    devices: Sequence[str], processes: Sequence[Process], nodes: Sequence[tuple[int, ...]]
) -> list[Seat]:
    """Return devices by index for processes by rank, counted through all nodes."""
    ordered = sorted(devices, key=_natural)
    if len(nodes) == 1:
        found = _on_a_node(ordered, nodes[0], processes)
        return [found[rank] for rank in range(len(processes))]
    return [
        Seat(device, _own(device, process))
        for device, process in zip(ordered, processes, strict=True)
    ]


def _on_a_node(
    devices: Sequence[str], ranks: Sequence[int], processes: Sequence[Process]
) -> dict[int, Seat]:
    """Return the devices of a host, by index, for the processes of a node."""
    # if some processes of the node are outside the pipeline, each uses cuda:LOCAL_RANK
    everyone = sorted(processes[rank].local_rank for rank in ranks) == list(range(len(ranks)))
    return {
        rank: Seat(
            device, device.rpartition(SEPARATOR)[2] if everyone else _own(device, processes[rank])
        )
        for rank, device in zip(ranks, devices, strict=True)
    }


def _own(device: str, process: Process) -> str:
    """Return the device of this kind that torchrun assigns to a process."""
    return f"{device.rpartition(SEPARATOR)[2].partition(':')[0]}:{process.local_rank}"


def _nodes(processes: Sequence[Process]) -> list[tuple[int, ...]]:
    """Return the ranks of each node, the node with the lowest rank first."""
    found: dict[tuple[int, str], list[int]] = {}
    for rank, process in enumerate(processes):
        found.setdefault((process.node, process.host), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _processes(found: Sequence[object]) -> str:
    return count_text(len(found), "process", "processes")


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key in natural order: ``host2`` before ``host10``."""
    return [
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]


def _require_a_process_each(devices: Sequence[str], processes: Sequence[Process]) -> None:
    if len(devices) != len(processes):
        raise PlacementError(
            f"the placement uses {count_text(len(devices), 'device')} ({', '.join(devices[:8])}), "
            f"and the group has {_processes(processes)}: start {len(devices)}, one for each "
            f"device, or give a process group of {len(devices)}"
        )
