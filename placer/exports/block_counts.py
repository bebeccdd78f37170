"""The base class of formats that count the blocks of each stage."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from placer.errors import InputError, PlacementError
from placer.exports.format import Format
from placer.exports.plan import Plan
from placer.exports.units import Unit, block_path, units_in_order
from placer.utils.units import count_text


class BlockCounts(Format):
    """A format that says how many blocks of a model's only list of blocks each stage has.

    Layers before the first block are on the first stage, and layers after the last block on the
    last stage.

        embed  layers.0  layers.1  layers.2  norm  head
        stage 0: 2 blocks         | stage 1: 1 block
    """

    def units(self, layers: Sequence[str]) -> list[Unit]:
        """Return the blocks; see ``Format.units``.

        Raises:
            PlacementError: the model has no list of blocks, or several.
        """
        units = units_in_order(layers, block_path)
        lists = dict.fromkeys(key.rpartition(".")[0] for unit in units for key in unit.keys)
        if len(lists) != 1:
            have = f"several, {', '.join(map(repr, lists))}" if lists else "none"
            raise PlacementError(
                f"{self.title} counts the blocks of one list, such as 'model.layers', and this "
                f"model has {have}: use a format that names modules, such as 'accelerate'"
            )
        return units

    def counts(self, plan: Plan) -> list[int]:
        """Return the number of blocks of each stage.

        Raises:
            PlacementError: the format cannot express the placement.
        """
        return [sum(len(unit.keys) for unit in segment.units) for segment in self.segments(plan)]

    def placed(
        self, counts: Sequence[int], layers: Sequence[str], devices: Sequence[str]
    ) -> dict[str, str]:
        """Return the device of each layer from the number of blocks of each stage.

        Args:
            counts: the number of blocks of each stage.
            layers: the names of all layers, in execution order.
            devices: the names of the devices; stage i is on device i.

        Raises:
            InputError: there are more stages than devices, the counts do not add up, or a stage
                ends inside a unit of several blocks.
        """
        if len(counts) > len(devices):
            raise InputError(
                f"{self.title} states {count_text(len(counts), 'stage')}, and there are "
                f"{count_text(len(devices), 'device')}; give as many devices as stages"
            )
        units = self.units(layers)
        blocks = [(unit, key) for unit in units for key in unit.keys]
        if sum(counts) != len(blocks):
            raise InputError(
                f"{self.title} states {count_text(sum(counts), 'block')} in total, and the model "
                f"has {count_text(len(blocks), 'block')}; the counts must add up"
            )
        stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
        found: dict[str, str] = {}
        for (unit, key), stage in zip(blocks, stages, strict=True):
            for layer in unit.layers:
                if found.setdefault(layer, devices[stage]) != devices[stage]:
                    raise InputError(
                        f"{self.title} cuts before {key!r}, which shares calls with "
                        f"{unit.keys[0]!r}; move the cut"
                    )
        return found

    @abstractmethod
    def text(self, plan: Plan) -> str:
        """See ``Format.text``."""
