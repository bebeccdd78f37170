"""The modules of each model part of torchtitan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from placer.errors import InputError, PlacementError
from placer.exports.copies import copy_notes
from placer.exports.format import Format
from placer.exports.path_table import PathTable
from placer.exports.plan import Plan
from placer.exports.python_data import python_data
from placer.exports.units import Unit, is_number, units_in_order

_SCHEDULES = {
    "fill-drain": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
}
_EXAMPLE = '[["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]'


class TorchTitan(Format):
    """The setting ``parallelism.module_fqns_per_model_part``: a list of modules for each stage.

    torchtitan copies the model for each stage, and removes the children that are not in the
    stage's list. It also removes elements of lists and dictionaries that are children, but nothing
    further inside:

        children   tok_embeddings   layers (a list)       norm   lm_head
        units      tok_embeddings   layers.0   layers.1   norm   lm_head
    """

    name = "torchtitan"
    title = "module_fqns_per_model_part of torchtitan"
    source = "torchtitan 0.3.0, torchtitan/distributed/pipeline_parallel.py, _split_module"
    trains = True
    replicates = True
    copies_shared = True

    def units(self, layers: Sequence[str]) -> list[Unit]:
        """Return children and elements of lists that are children; see ``Format.units``."""
        return units_in_order(layers, _part)

    def text(self, plan: Plan) -> str:
        """Return the modules of each stage, as JSON; see ``Format.text``."""
        found = self.segments(plan)
        parts = [[key for unit in segment.units for key in unit.keys] for segment in found]
        if not any(parts):
            raise PlacementError(
                f"{self.title} names the children of the model, and this model calls no modules"
            )
        if plan.model is not None:
            parts = _with_rest(parts, plan.model)
        return json.dumps(parts)

    def notes(self, plan: Plan) -> list[str]:
        """Return the settings that must go with it; see ``Format.notes``."""
        stages = len(self.segments(plan))
        found = [f"Set pipeline_parallel_degree to {stages}."]
        if plan.training:
            samples = plan.batch_size // plan.pipelines
            found.append(
                f"Set pipeline_parallel_microbatch_size to {samples}, local_batch_size to "
                f"{plan.chunks * samples}, and pipeline_parallel_schedule to "
                f"{_SCHEDULES[plan.schedule]!r}, for which the memory was computed."
            )
        return [*found, *super().notes(plan), *copy_notes(plan)]

    def read(self, text: str, layers: Sequence[str], devices: Sequence[str]) -> dict[str, str]:
        """Return the device of each layer; see ``Format.read``."""
        parts = python_data(text, self.title, _EXAMPLE)
        if not _is_valid(parts):
            raise InputError(
                f"{self.title} is {text.strip()!r:.80}; give a list of the modules of each stage, "
                f"such as {_EXAMPLE}"
            )
        self.refuse_more_stages(len(parts), devices)
        stage_of: dict[str, int] = {}
        for stage, names in enumerate(parts):
            for name in names:
                if stage_of.setdefault(name, stage) != stage:
                    raise InputError(
                        f"{self.title} has {name!r} on stages {stage_of[name]} and {stage}; keep "
                        "one of them"
                    )
        table = PathTable(stage_of, self.title)
        return {layer: devices[table.one_of(layer, "stage ")] for layer in layers}


def _part(module: str) -> str | None:
    """Return the child that contains a module, or its element if the child is a list."""
    child, _, inside = module.partition(".")
    element = inside.partition(".")[0]
    return (f"{child}.{element}" if is_number(element) else child) or None


def _is_valid(parts: Any) -> bool:
    return (
        isinstance(parts, list | tuple)
        and bool(parts)
        and all(
            isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
            for names in parts
        )
    )


def _with_rest(parts: Sequence[Sequence[str]], model: Any) -> list[list[str]]:
    """Return the parts with the modules that have no layers, in the model's order.

    Such a module is in the part of the module before it.

    Raises:
        PlacementError: the model has other modules, or torchtitan cannot take it apart.
    """
    part_of = {name: index for index, names in enumerate(parts) for name in names}
    modules = {
        name: next((each for each in (name, child) if each in part_of), None)
        for name, child in _modules(model)
    }
    if other := [name for name in part_of if name not in modules.values()]:
        child = other[0].partition(".")[0]
        raise PlacementError(
            f"{child!r} of the model is neither a ModuleList nor a ModuleDict, so torchtitan keeps "
            "it whole, and the placement has layers of parts of it: use a format that cuts inside, "
            "such as 'pipelining'"
            if child in modules
            else f"the placement has layers of {other[0]!r}, which is not a child of the model: "
            "give the model that was placed"
        )
    found: list[list[str]] = [[] for _ in parts]
    part = 0
    for name, known_as in modules.items():
        part = part if known_as is None else part_of[known_as]
        found[part].append(name)
    return found


def _modules(model: Any) -> Iterator[tuple[str, str]]:
    """Yield the parts of a model that torchtitan separates, each with the child that contains it.

    These are the children, and instead of a list or dictionary its elements.
    """
    for child, module in model.named_children():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if kinds.isdisjoint({"ModuleList", "ModuleDict"}):
            yield child, child
        else:
            yield from ((f"{child}.{element}", child) for element, _ in module.named_children())
