"""Measured profiles of PipeDream (MIT licence, Microsoft), as placement requests.

A line is a layer or, after a tab, an edge. ``node4 -- Conv2d(...) -- forward_compute_time=ms,
backward_compute_time=ms, activation_size=bytes or [bytes; bytes], parameter_size=bytes`` is a
layer, ``node4 -- node5`` an edge.
"""

import re
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

from placer.schema import Cluster, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver.components import topological_order

WORKLOADS = Path(__file__).parent.parent / "workloads" / "pipedream"
NAMES = ("densenet121", "gnmt_large", "nasnetamobile", "resnet101", "vgg16")

_LAYER = re.compile(
    r"(\w+) -- (.*) -- forward_compute_time=([\d.]+), backward_compute_time=([\d.]+), "
    r"activation_size=(\[.*\]|[\d.]+), parameter_size=([\d.]+)"
)


class _Line(NamedTuple):
    """The fields of a layer's line."""

    text: str
    forward_ms: str = "0"
    backward_ms: str = "0"
    activation_bytes: str = "0"
    parameter_bytes: str = "0"


def request(
    name: str, devices: int, *, memory_bytes: int = 2**40, **asked: object
) -> PlacementRequest:
    """Return a training request for a published profile on alike devices with links of 10 GB/s.

    Args:
        name: the name of the profile.
        devices: the number of devices.
        memory_bytes: the memory of each device.
        asked: further fields of the request.
    """
    names = [f"device:{index}" for index in range(devices)]
    cluster = Cluster(
        devices=tuple(
            Device(name=device, type="published", memory_bytes=memory_bytes) for device in names
        ),
        links=tuple(
            Link(source=a, target=b, bandwidth_bytes_per_s=10e9) for a, b in permutations(names, 2)
        ),
    )
    return PlacementRequest.model_validate({"profile": profile(name), "cluster": cluster, **asked})


def profile(name: str) -> Profile:
    """Return a published profile.

    All successors of a layer read the one value that it makes; its gradient is as large.
    """
    layers, edges = _read(WORKLOADS / f"{name}.txt")
    numbers = {label: index for index, label in enumerate(layers)}
    labels = list(layers)
    order = [
        labels[i]
        for i in topological_order(len(labels), [(numbers[a], numbers[b]) for a, b in edges])
    ]
    readers: dict[str, list[str]] = {label: [] for label in order}
    for source, target in edges:
        readers[source].append(target)
    return Profile(
        model=name,
        training=True,
        layers=tuple(_layer(label, layers[label]) for label in order),
        edges=tuple(
            Edge(
                source=label,
                targets=tuple(readers[label]),
                bytes=_bytes(layers[label].activation_bytes),
                gradient_bytes=_bytes(layers[label].activation_bytes),
                saved_by=tuple(readers[label]),
            )
            for label in order
            if readers[label]
        ),
    )


def _read(path: Path) -> tuple[dict[str, _Line], list[tuple[str, str]]]:
    layers: dict[str, _Line] = {}
    edges: list[tuple[str, str]] = []
    for line in path.read_text().splitlines():
        if line.startswith("\t"):
            source, _, target = line.strip().split()
            edges.append((source, target))
        elif match := _LAYER.fullmatch(line):
            label, *rest = match.groups()
            layers[label] = _Line(*rest)
        elif line.strip():
            label, text = line.split(" -- ")[:2]
            layers[label] = _Line(text)
    return layers, edges


def _layer(label: str, line: _Line) -> Layer:
    size = round(float(line.parameter_bytes))
    return Layer(
        name=label,
        module=line.text[:512],
        forward_ms={"published": float(line.forward_ms)},
        backward_ms={"published": float(line.backward_ms)},
        param_bytes=size,
        grad_bytes=size,
        optimizer_bytes=2 * size,
    )


def _bytes(activation: str) -> int:
    return sum(round(float(part)) for part in activation.strip("[]").split(";"))
