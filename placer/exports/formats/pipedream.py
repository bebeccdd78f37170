"""PipeDream's configuration of stages: the stage of each module, and the ranks of each stage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import lcm
from typing import Any

from placer.errors import InputError
from placer.exports.format import Format
from placer.exports.plan import Plan
from placer.exports.python_data import whole_numbers
from placer.exports.stage_ranks import first_ranks, json_object
from placer.exports.units import Unit, units_in_order
from placer.schema.base import WHOLE
from placer.utils.units import count_text

MODULES, RANKS = "module_to_stage_map", "stage_to_rank_map"


class PipeDream(Format):
    """The file of ``--config_path``, for a list of one module for each layer and then the loss.

    ::

        {
            "module_to_stage_map": [0, 0, 1, 1],
            "stage_to_rank_map": {"0": [0, 1], "1": [2, 3]}
        }
    """

    name = "pipedream"
    title = "PipeDream's configuration of stages"
    source = (
        "runtime/runtime.py and optimizer/convert_graph_to_model.py of msr-fiddle/pipedream, at "
        "commit 7db6a1c3"
    )
    trains = True
    replicates = True
    replicates_by_stage = True
    states_replicas = True

    def units(self, layers: Sequence[str]) -> list[Unit]:
        """Return one unit for each module, with all of its calls."""
        return units_in_order(layers, lambda module: module or WHOLE)

    def text(self, plan: Plan) -> str:
        """Return the file's content; see ``Format.text``."""
        segments = self.segments(plan)
        stages = [stage for stage, segment in enumerate(segments) for _ in segment.units]
        ranks, begin = {}, 0
        for stage, segment in enumerate(segments):
            end = begin + len(plan.replicas.get(segment.device, [segment.device]))
            ranks[str(stage)] = list(range(begin, end))
            begin = end
        loss = stages[-1]
        return (
            f'{{\n    "{MODULES}": {json.dumps([*stages, loss])},\n'
            f'    "{RANKS}": {json.dumps(ranks)}\n}}\n'
        )

    def notes(self, plan: Plan) -> list[str]:
        """Return what the modules and the batch size mean; see ``Format.notes``."""
        modules = len(self.units(list(plan.layer_devices)))
        found = [
            f"The list of modules has {count_text(modules, 'module')}, in the order of the "
            "placement's layers, and then the loss."
        ]
        if plan.training:
            units = lcm(*plan.replicas_by_stage.values())
            found.append(
                f"The placement was solved for -b {plan.batch_size // units}; replicas of a stage "
                "take whole minibatches in turn."
            )
        return [*found, *super().notes(plan)]

    def read(self, text: str, layers: Sequence[str], devices: Sequence[str]) -> dict[str, str]:
        """Return the device of each layer; see ``Format.read``."""
        content = json_object(text, self.title, (MODULES, RANKS))
        units = self.units(layers)
        stages = _numbers(content[MODULES], MODULES)
        if len(stages) != len(units) + 1:
            raise InputError(
                f"{MODULES} has {count_text(len(stages), 'module')}; the model has "
                f"{count_text(len(units), 'layer')}, and the loss is one more: give the stages of "
                f"{len(units) + 1} modules, or profile the model with one layer for each module"
            )
        ranks = content[RANKS]
        if not isinstance(ranks, dict) or set(ranks) != set(map(str, stages)):
            named = ", ".join(map(str, sorted(set(stages))))
            raise InputError(
                f"{RANKS} is {json.dumps(ranks)!r:.80}; give the ranks of each stage, {named}"
            )
        first = first_ranks(
            {stage: _numbers(ranks[str(stage)], f"{RANKS}[{stage}]") for stage in set(stages)},
            len(devices),
            self.title,
        )
        return {
            layer: devices[first[stage]]
            for unit, stage in zip(units, stages, strict=False)
            for layer in unit.layers
        }


def _numbers(value: Any, name: str) -> list[int]:
    """Return a list of numbers from 0, as JSON gave it."""
    numbers = whole_numbers(value)
    if numbers is None or min(numbers, default=0) < 0:
        raise InputError(f"{name} is {json.dumps(value)!r:.80}; give a list of numbers from 0")
    return numbers
