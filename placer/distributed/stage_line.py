"""The stages of a pipeline as a line: layers, received values and sent values.

torch.distributed.pipelining sends only to the next stage. A value that skips stages passes through
them:

    x ─▶ stage 0 ─(a, skip)─▶ stage 1 ─(b, skip)─▶ stage 2        stage 1 only forwards skip

Stage ``i`` runs in process ``i % processes``. If the layers of a device cannot form one stage, the
line visits the devices in several rounds. A device without layers in a round forwards values::

    layers on    d0  d1  d0  d2        stages   d0  d1  -   d0  -   d2      d2 only forwards in
                                                └──round 1─┘└──round 2─┘    round 1, d1 in round 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import networkx

from placer.capture.layers import LayerGraph


@dataclass(frozen=True)
class LineStage:
    """One stage of the line.

    Attributes:
        device: where it runs.
        layers: positions in the graph's layers, in execution order; empty if it only forwards
            values.
        arrives: the received values, in order.
        leaves: the sent values, in order; in the last stage, the model's outputs.
    """

    device: str
    layers: tuple[int, ...]
    arrives: tuple[str, ...]
    leaves: tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """A model as a line of stages.

    Attributes:
        devices: in the order of the line: stage ``i`` is on ``devices[i % len(devices)]``.
        stages: from the inputs to the outputs.
        reordered: whether layers run in another order than in the model. A value could then be
            written in place before it is sent, so sent values are copied when they are made.
    """

    devices: tuple[str, ...]
    stages: tuple[LineStage, ...]
    reordered: bool

    @property
    def rounds(self) -> int:
        """Return the number of stages on each device."""
        return len(self.stages) // len(self.devices)


def line(graph: LayerGraph, places: Sequence[str]) -> Line:
    """Divide a layer graph into a line of stages.

    Args:
        graph: the layers, in execution order.
        places: the device of each layer.
    """
    runs = [
        (device, tuple(run)) for device, run in groupby(range(len(places)), key=places.__getitem__)
    ]
    devices = tuple(dict.fromkeys(places))
    reordered = False
    # some device has several runs: try one stage per device in another order, else several rounds
    if len(runs) > len(devices):
        order = _one_stage_each(graph, places, devices)
        if order is not None:
            devices, reordered = order, True
            runs = [
                (device, tuple(i for i, place in enumerate(places) if place == device))
                for device in devices
            ]
        else:
            runs = _rounds(runs, devices)
    return Line(devices, _with_values(graph, runs), reordered)


def _one_stage_each(
    graph: LayerGraph, places: Sequence[str], devices: Sequence[str]
) -> tuple[str, ...] | None:
    """Return an order of the devices in which every value flows forward; None without one."""
    device_of = {
        name: place
        for layer, place in zip(graph.layers, places, strict=True)
        for name in layer.writes
    }
    network = networkx.DiGraph()
    network.add_nodes_from(devices)
    for layer, place in zip(graph.layers, places, strict=True):
        network.add_edges_from(
            (device_of[name], place) for name in layer.reads if name in device_of
        )
    network.remove_edges_from(list(networkx.selfloop_edges(network)))
    if not networkx.is_directed_acyclic_graph(network):
        return None
    return tuple(networkx.lexicographical_topological_sort(network, key=list(devices).index))


def _rounds(
    runs: Sequence[tuple[str, tuple[int, ...]]], devices: Sequence[str]
) -> list[tuple[str, tuple[int, ...]]]:
    """Insert empty stages, so that stage ``i`` is on ``devices[i % len(devices)]``."""
    stages: list[tuple[str, tuple[int, ...]]] = []
    for device, run in runs:
        # empty stages until the turn of this device
        while devices[len(stages) % len(devices)] != device:
            stages.append((devices[len(stages) % len(devices)], ()))
        stages.append((device, run))
    while len(stages) % len(devices):
        stages.append((devices[len(stages) % len(devices)], ()))
    return stages


def _with_values(
    graph: LayerGraph, runs: Sequence[tuple[str, tuple[int, ...]]]
) -> tuple[LineStage, ...]:
    """Return the stages with the values between them.

    A value travels from the stage that makes it to the last stage that reads it.
    """
    made = dict.fromkeys(graph.inputs, -1)
    needed = dict.fromkeys(graph.outputs, len(runs) - 1)
    for index, (_, run) in enumerate(runs):
        for layer in (graph.layers[i] for i in run):
            made.update(dict.fromkeys(layer.writes, index))
            for name in layer.reads:
                needed[name] = max(needed.get(name, 0), index)
    borders = [graph.inputs]
    for index in range(1, len(runs)):
        borders.append(
            tuple(name for name, source in made.items() if source < index <= needed.get(name, -1))
        )
    borders.append(graph.outputs)
    return tuple(
        LineStage(device, run, borders[index], borders[index + 1])
        for index, (device, run) in enumerate(runs)
    )
