"""The base class of formats that count the children of an ``nn.Sequential`` on each stage."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from placer.errors import InputError, PlacementError
from placer.exports.format import Format
from placer.exports.plan import Plan
from placer.exports.units import Unit, is_number, units_in_order
from placer.utils.units import count_text


class ChildCounts(Format):
    """A format that says how many children of a model, which call one another in turn, a stage has.

    children   0    1          2        3
    layers     0    1.fc 1.act          3        (child 2 has no operation)
    stages     2 children  |  2 children
    """

    def units(self, layers: Sequence[str]) -> list[Unit]:
        """Return the children of the model; see ``Format.units``."""
        return units_in_order(layers, _child)

    def counts(self, plan: Plan) -> list[int]:
        """Return the number of children of each stage.

        A child without layers is on the stage of the child before it.

        Raises:
            PlacementError: the format cannot express the placement, or the model is not a sequence
                of the children that the placement names.
        """
        found = self.segments(plan)
        children = self._children(plan)
        stage_of = {
            key: stage
            for stage, segment in enumerate(found)
            for unit in segment.units
            for key in unit.keys
        }
        counts = [0] * len(found)
        stage = 0
        for child in children:
            stage = stage_of.get(child, stage)
            counts[stage] += 1
        return counts

    def notes(self, plan: Plan) -> list[str]:
        """Return what is assumed without the model; see ``Format.notes``."""
        found = super().notes(plan)
        if plan.model is None:
            last = _numbered(self._keys(list(plan.layer_devices)))[-1]
            found.append(
                f"This assumes an nn.Sequential whose last child is {last!r}; export with the "
                "model to check this, and to count children without operations, such as "
                "nn.Identity."
            )
        return found

    def placed(
        self, counts: Sequence[int], layers: Sequence[str], devices: Sequence[str]
    ) -> dict[str, str]:
        """Return the device of each layer from the number of children of each stage.

        Stage i is on device i. The counts may include children without layers at the end.

        Raises:
            InputError: there are more stages than devices, the counts do not add up, or a stage
                ends inside a unit of several children.
        """
        self.refuse_more_stages(len(counts), devices)
        children = _numbered(self._keys(layers))
        if sum(counts) < len(children):
            raise InputError(
                f"{self.title} states {count_text(sum(counts), 'child', 'children')} in total, and "
                f"the model has at least {len(children)}; the counts must add up"
            )
        ends = list(accumulate(counts))
        device_of = {
            child: devices[bisect_right(ends, index)] for index, child in enumerate(children)
        }
        return self.placed_whole(self.units(layers), device_of)

    def _keys(self, layers: Sequence[str]) -> list[str]:
        """Return the children that have layers, in execution order.

        Raises:
            PlacementError: the only layer is the model itself.
        """
        found = list(dict.fromkeys(key for unit in self.units(layers) for key in unit.keys))
        if not found:
            raise PlacementError(
                f"{self.title} counts the children of an nn.Sequential, and this model calls no "
                "modules: wrap it in an nn.Sequential"
            )
        return found

    def _children(self, plan: Plan) -> list[str]:
        """Return the names of all children, from the model or else from those with layers.

        Raises:
            PlacementError: the model is not a sequence of the children that the placement names.
        """
        keys, model = self._keys(list(plan.layer_devices)), plan.model
        if model is None:
            return _numbered(keys)
        if "Sequential" not in [kind.__name__ for kind in type(model).__mro__]:
            raise PlacementError(
                f"{self.title} counts the children of an nn.Sequential, and the model is a "
                f"{type(model).__name__}: give the nn.Sequential that was placed, or use a format "
                "that names modules, such as 'pipelining'"
            )
        children = list(model._modules)  # a module under two names counts twice
        if other := [key for key in keys if key not in children]:
            raise PlacementError(
                f"the placement has layers of {other[0]!r}, which is not a child of the model: "
                "give the model that was placed"
            )
        return children


def _child(module: str) -> str | None:
    """Return the name of the model's child that contains a module; None for the model itself."""
    return module.partition(".")[0] or None


def _numbered(keys: Sequence[str]) -> list[str]:
    """Return the children of a sequence from those that have layers: also the numbers between."""
    if all(map(is_number, keys)):
        return [str(number) for number in range(max(map(int, keys)) + 1)]
    return list(keys)
