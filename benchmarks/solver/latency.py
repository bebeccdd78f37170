"""The latency inputs of Tarnawski et al., NeurIPS 2020, with their own objective.

The inputs are by Microsoft, under the MIT licence.

Each accelerator runs at most one subgraph, whose nodes fit in its memory; no path may leave it and
come back. It starts when all its inputs are there. Then it takes its nodes' times one after another
and the transfer of each value that enters or leaves; all its values are there at its end. All other
nodes run on CPU cores, without a limit on their number, as soon as their inputs are there. The
latency is the last end.

A placement request cannot describe such devices (see ``placer.solver.costs`` for its latency), so
these inputs have a search of their own: ``latency_bound.py`` proves bounds, ``latency_search.py``
finds assignments.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from placer.schema import Placement
from placer.solver.components import topological_order

WORKLOADS = Path(__file__).parent.parent / "workloads" / "neurips20" / "latency"
CPU = -1
PROVEN_GAP = 1e-6
PROOF_SHARE = 0.4
"""How much of the time the proof may take; what is left is for the search."""

BEST = {
    "layer_bert24_inference": 100.219,
    "layer_gnmt_inference": 225.648,
    "layer_inceptionv3_inference": 1282.97,
    "layer_resnet50_inference": 1156.88,
    "operator_bert3_inference": 408.474,
    "operator_bert6_inference": 438.063,
    "operator_resnet50_inference": 651.121,
    "operator_bert12_inference": 729.567,
}
"""The best known, by a minute of CP-SAT each, apart from this code; the first and fifth are
optimal."""


@dataclass(frozen=True)
class Graph:
    """An input by index, its nodes in a topological order.

    Attributes:
        ids: the input's node ids.
        cpu_ms: by node, its time on a core.
        accelerator_ms: by node, its time on an accelerator; infinite if accelerators cannot run it.
        size: by node, its bytes.
        transfer_ms: by node, the time to move its value to or from an accelerator.
        readers: by node, the nodes that read its value.
        sources: by node, the nodes that it reads.
        classes: sets of two or more nodes that must be together.
        accelerators: the number of accelerators.
        memory: the memory of each accelerator in bytes.
    """

    ids: tuple[int, ...]
    cpu_ms: tuple[float, ...]
    accelerator_ms: tuple[float, ...]
    size: tuple[float, ...]
    transfer_ms: tuple[float, ...]
    readers: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[int, ...], ...]
    classes: tuple[tuple[int, ...], ...]
    accelerators: int
    memory: float

    @cached_property
    def siblings(self) -> tuple[tuple[int, ...], ...]:
        """Return, by node, all nodes of its class."""
        found: list[tuple[int, ...]] = [(node,) for node in range(len(self.ids))]
        for group in self.classes:
            for node in group:
                found[node] = group
        return tuple(found)

    def duration_ms(self, nodes: frozenset[int]) -> float:
        """Return an accelerator's time for a subgraph, with transfers."""
        outside = {source for node in nodes for source in self.sources[node]} - nodes
        leaving = [node for node in nodes if not nodes.issuperset(self.readers[node])]
        transfers = sum(self.transfer_ms[node] for node in [*outside, *leaving])
        return transfers + sum(self.accelerator_ms[node] for node in nodes)


def load(name: str) -> dict[str, Any]:
    """Return an input as published."""
    content: dict[str, Any] = json.loads((WORKLOADS / f"{name}.json").read_text())
    return content


def graph(given: Mapping[str, Any]) -> Graph:
    """Return an input by index."""
    nodes = {node["id"]: node for node in given["nodes"]}
    number = {node: index for index, node in enumerate(nodes)}
    arcs = [(number[edge["sourceId"]], number[edge["destId"]]) for edge in given["edges"]]
    ids = [list(nodes)[index] for index in topological_order(len(nodes), arcs)]
    place = {node: index for index, node in enumerate(ids)}
    readers: list[list[int]] = [[] for _ in ids]
    sources: list[list[int]] = [[] for _ in ids]
    transfer = [0.0] * len(ids)
    for edge in given["edges"]:
        source, reader = place[edge["sourceId"]], place[edge["destId"]]
        readers[source].append(reader)
        sources[reader].append(source)
        transfer[source] = edge["cost"]
    classes: dict[int, list[int]] = defaultdict(list)
    for index, node in enumerate(ids):
        if nodes[node].get("colorClass") is not None:
            classes[nodes[node]["colorClass"]].append(index)
    return Graph(
        ids=tuple(ids),
        cpu_ms=tuple(nodes[node]["cpuLatency"] for node in ids),
        accelerator_ms=tuple(
            nodes[node]["fpgaLatency"] if nodes[node]["supportedOnFpga"] else inf for node in ids
        ),
        size=tuple(nodes[node].get("size", 0.0) for node in ids),
        transfer_ms=tuple(transfer),
        readers=tuple(tuple(sorted(set(found))) for found in readers),
        sources=tuple(tuple(sorted(set(found))) for found in sources),
        classes=tuple(tuple(group) for group in classes.values() if len(group) > 1),
        accelerators=int(given["maxFPGAs"]),
        memory=given["maxSizePerFPGA"],
    )


def finish_ms(read: Graph, where: Sequence[int]) -> float | None:
    """Return the latency of an assignment, or None if it breaks a rule.

    ``where`` has each node's accelerator or ``CPU``.
    """
    found = longest_way(read, where)
    return None if found is None else found[0]


def longest_way(read: Graph, where: Sequence[int]) -> tuple[float, list[int]] | None:
    """Return the latency and the units that determine it.

    A unit is a CPU node, given by its index, or an accelerator, given by the number of nodes plus
    its own number.
    """
    blocks: dict[int, list[int]] = defaultdict(list)
    for node, device in enumerate(where):
        if device != CPU:
            blocks[device].append(node)
    if len(blocks) > read.accelerators or any(
        len({where[node] for node in group}) > 1 for group in read.classes
    ):
        return None
    if any(sum(read.size[node] for node in nodes) > read.memory for nodes in blocks.values()):
        return None
    if any(read.accelerator_ms[node] == inf for nodes in blocks.values() for node in nodes):
        return None
    took = {device: read.duration_ms(frozenset(nodes)) for device, nodes in blocks.items()}
    return _last_end(read, where, took)


def _last_end(
    read: Graph, where: Sequence[int], took: Mapping[int, float]
) -> tuple[float, list[int]] | None:
    """Return the longest path through the units, or None if they form a cycle.

    A unit is a subgraph or a node on the CPU.
    """
    count = len(where)
    unit = [node if device == CPU else count + device for node, device in enumerate(where)]
    time = {
        unit[node]: read.cpu_ms[node] if where[node] == CPU else took[where[node]]
        for node in range(count)
    }
    after: dict[int, set[int]] = defaultdict(set)
    for node, readers in enumerate(read.readers):
        after[unit[node]].update(unit[reader] for reader in readers if unit[reader] != unit[node])
    waits: dict[int, int] = dict.fromkeys(time, 0)
    for units in after.values():
        for other in units:
            waits[other] += 1
    start = dict.fromkeys(time, 0.0)
    ready = [one for one, left in waits.items() if not left]
    done, last, way = 0, 0.0, [ready[0]] if ready else []
    before: dict[int, int] = {}
    while ready:
        one = ready.pop()
        done += 1
        end = start[one] + time[one]
        if end > last:
            last, way = end, [one]
        for other in after[one]:
            if end > start[other]:
                start[other], before[other] = end, one
            waits[other] -= 1
            if not waits[other]:
                ready.append(other)
    while way and way[-1] in before:
        way.append(before[way[-1]])
    return (last, way) if done == len(time) else None


def latency_ms(given: Mapping[str, Any], layer_devices: Mapping[str, str]) -> float:
    """Return the latency of a placement, computed from the input; raise if it breaks a rule."""
    read = graph(given)
    names = [layer_devices[str(node)] for node in read.ids]
    found = finish_ms(
        read, [CPU if name == "cpu" else int(name.partition(":")[2]) for name in names]
    )
    if found is None:
        raise ValueError(
            "the subgraphs break a rule: classes, memory, accelerators, or values that go round"
        )
    return found


def solve(given: Mapping[str, Any], limit_s: float) -> Placement:
    """Return the best assignment found in ``limit_s`` seconds, with its bound."""
    from .latency_bound import path_bound
    from .latency_search import improved

    began = monotonic()
    read = graph(given)
    proof = path_bound(read, began + PROOF_SHARE * limit_s)
    where, value = improved(read, proof, began + limit_s)
    gap = max(0.0, (value - proof.bound) / value)
    return Placement(
        status="optimal" if gap <= PROVEN_GAP else "feasible",
        objective="latency",
        objective_value=value,
        bound=min(proof.bound, value),
        gap=gap,
        layer_devices={
            str(node): "cpu" if device == CPU else f"accelerator:{device}"
            for node, device in zip(read.ids, where, strict=True)
        },
    )
