"""Stages in a line: what each runs, what arrives at it and what leaves it.

torch.distributed.pipelining sends from each stage to the next alone. A value that skips stages goes
through them:

    x ─▶ stage 0 ─(a, skip)─▶ stage 1 ─(b, skip)─▶ stage 2        stage 1 does not read skip, and hands it on

Stage ``i`` runs in process ``i % processes`` of the pipeline. Where the layers of a device cannot be one stage, the
line goes round the devices more than once, and a device that has nothing to run in a round hands on what passes::

    layers on    d0  d1  d0  d2        stages   d0  d1  -   d0  -   d2        d2 hands on in the first round,
                                                └──round 1─┘└──round 2─┘       d1 in the second
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
        layers: positions in the graph's layers, in execution order; none where it only hands on.
        arrives: the values that it is sent, in order.
        leaves: the values that it sends on, in order; of the last stage, what the model returns.
    """

    device: str
    layers: tuple[int, ...]
    arrives: tuple[str, ...]
    leaves: tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """A model as stages in a line.

    Attributes:
        devices: in the order of the line: stage ``i`` is on ``devices[i % len(devices)]``.
        stages: from the inputs to the outputs.
        reordered: whether layers run in another order than in the model, so that a value that is
            written to in place might be sent only afterwards: what is sent must then be copied when
            it is made.
    """

    devices: tuple[str, ...]
    stages: tuple[LineStage, ...]
    reordered: bool

    @property
    def rounds(self) -> int:
        """How often the line goes round the devices: stages on each device."""
        return len(self.stages) // len(self.devices)


def line(graph: LayerGraph, places: Sequence[str]) -> Line:
    """Cut a layer graph into stages in a line.

    Args:
        graph: the layers, in execution order.
        places: the device of each.
    """
    runs = [
        (device, tuple(run)) for device, run in groupby(range(len(places)), key=places.__getitem__)
    ]
    devices = tuple(dict.fromkeys(places))
    reordered = False
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
    """An order of the devices in which every value runs forwards; None where there is none."""
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
    """The runs with empty stages between them, so that stage ``i`` is on ``devices[i %
    len(devices)]``.
    """
    stages: list[tuple[str, tuple[int, ...]]] = []
    for device, run in runs:
        while devices[len(stages) % len(devices)] != device:
            stages.append((devices[len(stages) % len(devices)], ()))
        stages.append((device, run))
    while len(stages) % len(devices):
        stages.append((devices[len(stages) % len(devices)], ()))
    return stages


def _with_values(
    graph: LayerGraph, runs: Sequence[tuple[str, tuple[int, ...]]]
) -> tuple[LineStage, ...]:
    """Every value is on its way from the stage that makes it to the last one that reads it."""
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
