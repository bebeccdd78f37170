"""The split points of torch.distributed.pipelining."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from placer.errors import InputError
from placer.exports.copies import copy_notes
from placer.exports.format import Format
from placer.exports.path_table import MAX_DEPTH
from placer.exports.plan import Plan
from placer.exports.python_data import python_data
from placer.exports.units import Unit, modules_of
from placer.schema.base import is_part, paths_around
from placer.schema.faults import nearest
from placer.utils.units import count_text

_SCHEDULES = {
    "fill-drain": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
}
_EXAMPLE = '{"blocks.4": "beginning"}'


class Pipelining(Format):
    """The argument ``split_spec`` of ``pipeline``: ``{"blocks.4": "beginning"}``.

    ``pipeline`` cuts before or after each call of a module. So a module that is called several
    times marks no single boundary. The text has the boundaries before modules.

        layers   embed   blocks.0   blocks.1   relu   norm   relu@1   head
        units   [embed] [blocks.0] [blocks.1   relu] [norm   relu@1] [head]
    """

    name = "pipelining"
    title = "split_spec of torch.distributed.pipelining"
    source = "torch 2.13, torch/distributed/pipelining/_IR.py, annotate_split_points"
    replicates = True
    copies_shared = True

    def units(self, layers: Sequence[str]) -> list[Unit]:
        """Return the layers between modules that are called once; see ``Format.units``."""
        calls = _calls(layers)
        begins = [
            index for index, layer in enumerate(layers) if not index or calls[_first(layer)] == 1
        ]
        ends = [*begins[1:], len(layers)]
        return [
            Unit((_first(layers[begin]),), tuple(layers[begin:end]))
            for begin, end in zip(begins, ends, strict=True)
            if end
        ]

    def text(self, plan: Plan) -> str:
        """Return the first module of each stage but the first, as JSON; see ``Format.text``."""
        cuts = [segment.units[0].keys[0] for segment in self.segments(plan)[1:]]
        return json.dumps(dict.fromkeys(cuts, "beginning"))

    def notes(self, plan: Plan) -> list[str]:
        """Return the schedule and the tied parameters; see ``Format.notes``."""
        found = super().notes(plan)
        if plan.training:
            found.append(
                f"Run {count_text(plan.chunks, 'micro-batch', 'micro-batches')} with "
                f"{_SCHEDULES[plan.schedule]}, for which the memory was computed."
            )
        return [*found, *copy_notes(plan)]

    def read(self, text: str, layers: Sequence[str], devices: Sequence[str]) -> dict[str, str]:
        """Return the device of each layer; see ``Format.read``."""
        spec = python_data(text, self.title, _EXAMPLE)
        if not isinstance(spec, dict):
            raise InputError(
                f"{self.title} is {text.strip()!r:.80}; give a dictionary from modules to split "
                f"points, such as {_EXAMPLE}"
            )
        runs = _Runs(layers, [str(path) for path in spec])
        begins = {runs.boundary(str(path), point) for path, point in spec.items()}
        if len(begins) >= len(devices):
            raise InputError(
                f"{self.title} makes {len(begins) + 1} stages, and there are {len(devices)} "
                "devices; give as many devices as stages"
            )
        stage = 0
        found: dict[str, str] = {}
        for index, layer in enumerate(layers):
            stage += index in begins
            found[layer] = devices[stage]
        return found


def _first(layer: str) -> str:
    """Return the module that a layer calls first."""
    return modules_of(layer)[0]


def _calls(layers: Iterable[str]) -> Counter[str]:
    return Counter(path for layer in layers for path in modules_of(layer))


class _Runs:
    """Where in the execution order each module runs."""

    def __init__(self, layers: Sequence[str], paths: Sequence[str]) -> None:
        self._layers = layers
        self._calls = _calls(layers)
        # by path, the layers that have parts of it
        self._inside: dict[str, list[int]] = {path: [] for path in paths}
        for index, layer in enumerate(layers):
            around = {
                path
                for module in modules_of(layer)
                for path in (module, *paths_around(module, MAX_DEPTH))
            }
            for path in around & self._inside.keys():
                self._inside[path].append(index)

    def boundary(self, path: str, point: Any) -> int:
        """Return the index of the layer before which a split point cuts.

        Raises:
            InputError: the split point is not valid, or is not between two layers.
        """
        word = str(point).lower()
        if word not in ("beginning", "end"):
            raise InputError(
                f"split_spec[{path!r}] is {point!r:.80}; give SplitPoint.BEGINNING or "
                'SplitPoint.END, or "beginning" or "end"'
            )
        inside = self._inside[path]
        if not inside:
            raise InputError(f"split_spec names {path!r}, {self._absence(path)}")
        # The module's layers are consecutive unless layers of others run between them.
        if self._calls[path] > 1 or len(inside) <= inside[-1] - inside[0]:
            raise InputError(
                f"split_spec names {path!r}, which is called several times or between whose layers "
                "others run; name a module that is called once"
            )
        begin = word == "beginning"
        edge = self._layers[inside[0] if begin else inside[-1]]
        if not is_part(modules_of(edge)[0 if begin else -1], path):
            raise InputError(
                f"split_spec names {path!r}, and a cut there is inside layer {edge!r}; move it"
            )
        cut = inside[0] if begin else inside[-1] + 1
        if not 0 < cut < len(self._layers):
            raise InputError(
                f"split_spec cuts at the {word} of {path!r}, where the model "
                f"{'begins' if begin else 'ends'}, which leaves a stage without layers; remove it"
            )
        return cut

    def _absence(self, path: str) -> str:
        """Return why no layer is part of a module, and what to do."""
        for layer in self._layers:
            if any(is_part(path, module) for module in modules_of(layer)):
                return f"which is inside layer {layer!r}; profile with a finer granularity"
        return (
            f"which has no layer{nearest(path, list(self._calls))}; name a module that the model "
            "calls"
        )
