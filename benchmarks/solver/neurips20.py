"""The throughput inputs of Tarnawski et al., NeurIPS 2020 (MIT licence, Microsoft).

Their objective differs from a placement request in two ways. A value that is cut costs each
accelerator that it touches once, and its source too, however many others read it
(``Problem.multicast``). Contiguity orders only forward nodes (``Value.ordered``); backward nodes
follow their colour class. So the search gets these inputs as a ``Problem`` instead of a request.
The CPU that the inputs allow in addition to the accelerators pays for no transfer
(``Problem.untaxed``), and has room for everything. ``bottleneck`` is an independent referee.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver.components import topological_order
from placer.solver.problem import Problem

WORKLOADS = Path(__file__).parent.parent / "workloads" / "neurips20" / "throughput"

OPTIMA = {
    "layer_bert24_inference": 17.789906,
    "layer_bert24_training": 41.745812,
    "layer_gnmt_inference": 32.910658,
    "layer_gnmt_training": 107.004414,
    "layer_inceptionv3_inference": 51.551864,
    "layer_inceptionv3_training": 122.761616,
    "layer_resnet50_inference": 33.774666,
    "layer_resnet50_training": 78.631812,
    "operator_bert3_inference": 27.918568,
    "operator_bert3_training": 65.303149,
    "operator_bert6_inference": 29.579506,
    "operator_bert6_training": 72.864966,
    "operator_bert12_inference": 147.477984,
    "operator_bert12_training": 437.997638,
    "operator_resnet50_inference": 124.348850,
    "operator_resnet50_training": 255.194416,
}
"""The contiguous optima, each found by two methods apart from this solver (an exact DP over ideals,
and CP-SAT)."""

OPTIMA_ON_16 = {
    "layer_bert24_inference": 7.195906,
    "layer_bert24_training": 16.792812,
    "layer_gnmt_inference": 24.788104,
    "layer_gnmt_training": 76.849414,
    "layer_inceptionv3_inference": 21.763945,
    "layer_inceptionv3_training": 46.010260,
    "layer_resnet50_inference": 18.997889,
    "layer_resnet50_training": 31.979293,
    "operator_bert3_inference": 27.918568,
    "operator_bert3_training": 65.303149,
    "operator_bert6_inference": 27.918568,
    "operator_bert6_training": 65.303149,
    "operator_bert12_inference": 79.976987,
    "operator_bert12_training": 173.193273,
    "operator_resnet50_inference": 124.348850,
    "operator_resnet50_training": 253.586554,
}
"""The same on 16 accelerators instead of the 3 or 6 published."""

OPTIMA_WHEN_TIGHT = {
    "layer_bert24_inference": 18.025906,
    "layer_bert24_training": 42.007812,
    "layer_gnmt_inference": 32.910658,
    "layer_gnmt_training": 107.011109,
    "layer_inceptionv3_inference": 62.656917,
    "layer_inceptionv3_training": 131.224552,
    "layer_resnet50_inference": 42.299814,
    "layer_resnet50_training": 94.123516,
    "operator_bert3_inference": 189.142191,
    "operator_bert3_training": 387.265709,
    "operator_bert6_inference": 29.579506,
    "operator_bert6_training": 72.864966,
    "operator_bert12_inference": 159.490700,
    "operator_bert12_training": 444.766328,
    "operator_resnet50_inference": 159.077134,
    "operator_resnet50_training": 264.807052,
}
"""The same where an accelerator holds little more than its share, as ``tight`` sets it."""

BEST_WHEN_FREE = {
    "layer_bert24_inference": 17.714719,
    "layer_bert24_training": 39.789539,
    "layer_gnmt_inference": 31.687311,
    "layer_gnmt_training": 88.462242,
    "layer_inceptionv3_inference": 51.331285,
    "layer_inceptionv3_training": 117.475135,
    "layer_resnet50_inference": 33.355406,
    "layer_resnet50_training": 76.605141,
    "operator_bert3_inference": 21.908376,
    "operator_bert3_training": 54.207407,
    "operator_bert6_inference": 28.332191,
    "operator_bert6_training": 72.471674,
    "operator_bert12_inference": 135.629990,
    "operator_bert12_training": 418.323605,
    "operator_resnet50_inference": 124.348850,
    "operator_resnet50_training": 255.194416,
}
"""The best known without contiguity, by local search and a minute of CP-SAT each, apart from this
solver.

The values of BERT-24, GNMT, BERT-3 and operator ResNet-50 are optimal. For most other models this
solver finds smaller values, which meet the target easily.
"""

BYTES_PER_MS = 10**12


def load(name: str) -> dict[str, Any]:
    """Return an input as published."""
    content: dict[str, Any] = json.loads((WORKLOADS / f"{name}.json").read_text())
    return content


def on_16(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the input with 16 accelerators."""
    return {**given, "maxFPGAs": 16}


def tight(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the input with little memory.

    Each accelerator gets 1.1 times an equal share, or the memory of the largest colour class.
    """
    sizes: dict[Any, float] = defaultdict(float)
    for node in given["nodes"]:
        colour = node.get("colorClass")
        sizes[("node", node["id"]) if colour is None else colour] += node.get("size", 0)
    limit = max(1.1 * sum(sizes.values()) / given["maxFPGAs"], 1.0001 * max(sizes.values()))
    return {**given, "maxSizePerFPGA": limit}


def problem(given: Mapping[str, Any], time_limit_s: float) -> Problem:
    """Return an input as a problem of the solver."""
    nodes = {node["id"]: node for node in given["nodes"]}
    order = _execution_order(given, list(nodes))
    place = {node: index for index, node in enumerate(order)}
    values = _values(given)
    classes: dict[int, list[str]] = defaultdict(list)
    for node in order:
        if nodes[node].get("colorClass") is not None:
            classes[nodes[node]["colorClass"]].append(str(node))
    request = PlacementRequest(
        profile=Profile(
            training=True,
            layers=tuple(
                Layer(
                    name=str(node),
                    forward_ms={
                        "accelerator": nodes[node]["fpgaLatency"],
                        "cpu": nodes[node]["cpuLatency"],
                    },
                    backward_ms={"accelerator": 0.0, "cpu": 0.0},
                    param_bytes=int(nodes[node].get("size", 0)),
                )
                for node in order
            ),
            edges=tuple(
                Edge(
                    source=str(source),
                    targets=tuple(map(str, readers)),
                    bytes=round(cost * BYTES_PER_MS),
                )
                for source, (readers, cost) in values.items()
            ),
            colocated=tuple(tuple(group) for group in classes.values() if len(group) > 1),
        ),
        cluster=_cluster(given),
        constraints=Constraints(contiguous=True),
        time_limit_s=time_limit_s,
    )
    return _with_published_rules(Problem.from_request(request), nodes, order, place)


def _cluster(given: Mapping[str, Any]) -> Cluster:
    """Return accelerators with a memory limit, and processors; all pairs have a link."""
    names = [f"accelerator:{index}" for index in range(int(given["maxFPGAs"]))]
    cpus = [f"cpu:{index}" for index in range(int(given["maxCPUs"]))]
    return Cluster(
        devices=(
            *(
                Device(name=name, type="accelerator", memory_bytes=int(given["maxSizePerFPGA"]))
                for name in names
            ),
            *(Device(name=name, type="cpu", memory_bytes=2**60) for name in cpus),
        ),
        links=tuple(
            Link(source=a, target=b, bandwidth_bytes_per_s=1e3 * BYTES_PER_MS)
            for a, b in permutations([*names, *cpus], 2)
        ),
    )


def _with_published_rules(
    indexed: Problem, nodes: Mapping[int, Any], order: list[int], place: dict[int, int]
) -> Problem:
    forward = {place[node] for node in order if not nodes[node]["isBackwardNode"]}
    values = []
    for value in indexed.values:
        ahead = tuple(
            reader for reader in value.readers if value.source in forward and reader in forward
        )
        values.append(replace(value, ordered=False, weightless=True))
        # a control edge: it has no bytes, and links have no latency, so it costs nothing
        if ahead:
            values.append(replace(value, readers=ahead, bytes=0))
    cpus = frozenset(index for index, device in enumerate(indexed.devices) if device.type == "cpu")
    return replace(indexed, values=tuple(values), multicast=True, untaxed=cpus)


def _values(given: Mapping[str, Any]) -> dict[int, tuple[list[int], float]]:
    values: dict[int, tuple[list[int], float]] = {}
    for edge in given["edges"]:
        readers, _ = values.get(edge["sourceId"], ([], 0.0))
        values[edge["sourceId"]] = ([*readers, edge["destId"]], edge["cost"])
    return values


def _execution_order(given: Mapping[str, Any], ids: list[int]) -> list[int]:
    number = {node: index for index, node in enumerate(ids)}
    arcs = [(number[edge["sourceId"]], number[edge["destId"]]) for edge in given["edges"]]
    return [ids[index] for index in topological_order(len(ids), arcs)]


def bottleneck(
    given: Mapping[str, Any], where: Mapping[str, str], *, contiguous: bool = True
) -> float:
    """Return the largest load of an assignment, computed from the input alone.

    It raises if the assignment breaks a rule.
    """
    load: dict[str, float] = defaultdict(float)
    size: dict[str, float] = defaultdict(float)
    colour: dict[int, str] = {}
    for node in given["nodes"]:
        device = where[str(node["id"])]
        on_cpu = device.startswith("cpu")
        load[device] += node["cpuLatency" if on_cpu else "fpgaLatency"]
        size[device] += 0.0 if on_cpu else node.get("size", 0.0)
        if (
            node.get("colorClass") is not None
            and colour.setdefault(node["colorClass"], device) != device
        ):
            raise ValueError(f"colour class {node['colorClass']} is on several devices")
    if max(size.values()) > given["maxSizePerFPGA"]:
        raise ValueError("an accelerator holds more than it can")
    for source, (readers, cost) in _values(given).items():
        devices = {where[str(reader)] for reader in readers} | {where[str(source)]}
        if len(devices) > 1:
            for device in devices:
                load[device] += 0.0 if device.startswith("cpu") else cost
    if contiguous:
        _refuse_cycle(given, where)
    return max(load.values())


def _refuse_cycle(given: Mapping[str, Any], where: Mapping[str, str]) -> None:
    backward = {node["id"] for node in given["nodes"] if node["isBackwardNode"]}
    feeds = {
        (where[str(edge["sourceId"])], where[str(edge["destId"])])
        for edge in given["edges"]
        if edge["sourceId"] not in backward and edge["destId"] not in backward
    }
    left = {device for pair in feeds for device in pair}
    while left:
        first = {d for d in left if not any(other != d and (other, d) in feeds for other in left)}
        if not first:
            raise ValueError(f"values go round between {sorted(left)}")
        left -= first
