"""The boundaries of the stages of DeepSpeed's ``PipelineModule``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from placer.errors import InputError
from placer.exports.child_counts import ChildCounts
from placer.exports.copies import copied_parameters
from placer.exports.plan import Plan
from placer.exports.python_data import python_data, whole_numbers


class DeepSpeed(ChildCounts):
    """The attribute ``PipelineModule.parts``: ``[0, 2, 5, 6]`` for stages of 2, 3 and 1 layers.

    ``partition_method`` offers no boundaries, so users override the method that sets ``parts``. A
    ``TiedLayerSpec`` copies tied parameters to several stages.
    """

    name = "deepspeed"
    title = "parts of DeepSpeed's PipelineModule"
    source = "DeepSpeed 0.19.8, deepspeed/runtime/pipe/module.py, PipelineModule._partition_layers"
    trains = True
    replicates = True
    copies_shared = True

    def text(self, plan: Plan) -> str:
        """Return the first layer of each stage, and the number of layers; see ``Format.text``."""
        return str([0, *accumulate(self.counts(plan))])

    def notes(self, plan: Plan) -> list[str]:
        """Return the settings that must go with it; see ``Format.notes``."""
        stages = len(self.counts(plan))
        found = [
            f"Construct PipelineModule with num_stages={stages}, and set "
            f"gradient_accumulation_steps to {plan.chunks} in the configuration."
        ]
        found += [
            f"{' and '.join(map(repr, names))} are one parameter, which several stages use: make "
            "their layers with TiedLayerSpec and the same key."
            for names in copied_parameters(plan)
        ]
        return [*found, *super().notes(plan)]

    def read(self, text: str, layers: Sequence[str], devices: Sequence[str]) -> dict[str, str]:
        """Return the device of each layer; see ``Format.read``."""
        parts = whole_numbers(python_data(text, self.title, "[0, 2, 5, 6]"))
        if (
            parts is None
            or len(parts) < 2
            or parts[0] != 0
            or any(begin > end for begin, end in pairwise(parts))
        ):
            raise InputError(
                f"parts is {text.strip()!r:.80}; give 0, the first layer of each further stage, "
                "and the number of layers, such as [0, 2, 5, 6]"
            )
        return self.placed([end - begin for begin, end in pairwise(parts)], layers, devices)
