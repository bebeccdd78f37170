"""torchgpipe's number of children on each device."""

from __future__ import annotations

from collections.abc import Sequence

from placer.errors import InputError
from placer.exports.child_counts import ChildCounts
from placer.exports.plan import Plan
from placer.exports.python_data import python_data, whole_numbers


class TorchGPipe(ChildCounts):
    """The argument ``balance`` of ``GPipe``: ``[2, 3, 1]``."""

    name = "torchgpipe"
    title = "balance of torchgpipe"
    source = "torchgpipe 0.0.7, torchgpipe/gpipe.py, GPipe and split_module"

    def text(self, plan: Plan) -> str:
        """Return the numbers of children as a list; see ``Format.text``."""
        return str(self.counts(plan))

    def notes(self, plan: Plan) -> list[str]:
        """Return the arguments that must go with it; see ``Format.notes``."""
        if not plan.training:
            return [f"Construct GPipe with chunks={plan.chunks}.", *super().notes(plan)]
        checkpoint = "always" if plan.recompute else "never"
        found = [f"Construct GPipe with chunks={plan.chunks}, checkpoint={checkpoint!r}."]
        if plan.schedule != "fill-drain":
            found.append(
                "GPipe holds all micro-batches in flight, and the memory of this placement was "
                f"computed for {plan.schedule}: solve with schedule='fill-drain'."
            )
        return [*found, *super().notes(plan)]

    def read(self, text: str, layers: Sequence[str], devices: Sequence[str]) -> dict[str, str]:
        """Return the device of each layer; see ``Format.read``."""
        counts = whole_numbers(python_data(text, self.title, "[2, 3, 1]"))
        if counts is None or min(counts, default=0) < 1:
            raise InputError(
                f"balance is {text.strip()!r:.80}; give the positive number of children of each "
                "device, such as [2, 3, 1]"
            )
        return self.placed(counts, layers, devices)
