"""Piper's result: the nodes of each stage, and its degrees of parallelism."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from placer.errors import InputError
from placer.exports.format import Format
from placer.exports.plan import Plan
from placer.exports.stage_ranks import first_ranks, json_object
from placer.exports.units import Unit
from placer.schema.base import MAX_DEVICES, MAX_LAYERS
from placer.utils.units import count_text

NODES, DATA, TENSOR, CHOICES = "nodes", "dataParallelDegree", "tensorParallelDegree", "TMPCids"
KEPT, RECOMPUTED = "vanilla", "activation recomp"
"""How Piper's published inputs name the choice of a node without and with recomputation."""


class Piper(Format):
    """Stages of nodes, whose numbers are the positions of layers in execution order.

    ::

        {"stages": [{"nodes": [0, 1], "dataParallelDegree": 2, "tensorParallelDegree": 1,
                     "TMPCids": [[0, "vanilla"], [1, "vanilla"]]}, ...]}
    """

    name = "piper"
    title = "Piper's result"
    source = "algo.cpp, to_json of Result, of msr-fiddle/piper, at commit d7fc8cf9"
    in_segments = False
    contiguous = True
    trains = True
    replicates = True
    states_replicas = True

    def units(self, layers: Sequence[str]) -> list[Unit]:
        """Return each layer by itself."""
        return [Unit((layer,), (layer,)) for layer in layers]

    def text(self, plan: Plan) -> str:
        """Return the JSON, with one stage on each line; see ``Format.text``."""
        if not plan.contiguous:
            self.segments(plan)  # refuses a device that a value may come back to
        stages = []
        for device in plan.stages or dict.fromkeys(plan.layer_devices.values()):
            choice = RECOMPUTED if device in plan.recompute else KEPT
            nodes = [node for node, on in enumerate(plan.layer_devices.values()) if on == device]
            stage = {
                NODES: nodes,
                DATA: len(plan.replicas.get(device, [device])),
                TENSOR: 1,
                CHOICES: [[node, choice] for node in nodes],
            }
            stages.append(json.dumps(stage))
        return '{"stages": [\n' + ",\n".join(stages) + "\n]}\n"

    def notes(self, plan: Plan) -> list[str]:
        """Return what the numbers of nodes are; see ``Format.notes``."""
        return [
            "Node i is the layer at position i of the placement, from 0.",
            *super().notes(replace(plan, recompute=())),  # the text says it
        ]

    def read(self, text: str, layers: Sequence[str], devices: Sequence[str]) -> dict[str, str]:
        """Return the device of each layer; see ``Format.read``.

        Node i is layer i. Stages take the devices in order, one for each replica.
        """
        stages = json_object(text, self.title, ("stages",))["stages"]
        if not isinstance(stages, list) or not all(map(_is_stage, stages)):
            raise InputError(
                f"the stages of {self.title} are {json.dumps(stages)!r:.80}; give a list of "
                f"objects with {NODES} (a list of numbers), {DATA} and {TENSOR} (numbers from 1)"
            )
        if wide := [stage[TENSOR] for stage in stages if stage.get(TENSOR, 1) != 1]:
            raise InputError(
                f"{TENSOR} is {wide[0]}, and Placer places whole layers; give stages with 1"
            )
        nodes = [node for stage in stages for node in stage[NODES]]
        if sorted(nodes) != list(range(len(layers))):
            raise InputError(
                f"{self.title} has {count_text(len(nodes), 'node')}, and the model has "
                f"{count_text(len(layers), 'layer')}; give each number from 0 to "
                f"{len(layers) - 1} once"
            )
        ends = [0, *accumulate(stage.get(DATA, 1) for stage in stages)]
        ranks = {index: range(*pair) for index, pair in enumerate(pairwise(ends))}
        first = first_ranks(ranks, len(devices), self.title)
        stage_of = {node: index for index, stage in enumerate(stages) for node in stage[NODES]}
        return {layer: devices[first[stage_of[node]]] for node, layer in enumerate(layers)}


def _is_stage(stage: Any) -> bool:
    return (
        isinstance(stage, dict)
        and isinstance(stage.get(NODES), list)
        and all(_is_number(node, 0, MAX_LAYERS) for node in stage[NODES])
        and all(_is_number(stage.get(degree, 1), 1, MAX_DEVICES) for degree in (DATA, TENSOR))
    )


def _is_number(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
