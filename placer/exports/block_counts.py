"""The base class of formats that count the blocks of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from placer.errors import InputError, PlacementError
from placer.exports.format import Format
from placer.exports.plan import Plan
from placer.exports.units import Unit, block_path, is_number, modules_of, units_in_order
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
            PlacementError: the model has no list of blocks, or several, or does not run the blocks
                in the list's order.
        """
        units = units_in_order(layers, block_path)
        lists = dict.fromkeys(_list_of(key) for unit in units for key in unit.keys)
        if len(lists) != 1:
            have = f"several, {', '.join(map(repr, lists))}" if lists else "none"
            raise PlacementError(
                f"{self.title} counts the blocks of one list, such as 'model.layers', and this "
                f"model has {have}: use a format that names modules, such as 'accelerate'"
            )
        for before, after in pairwise(units):
            if max(_indices(before)) > min(_indices(after)):
                raise PlacementError(
                    f"{self.title} counts blocks in the order of their numbers, and this model "
                    f"runs {after.keys[0]!r} after {before.keys[-1]!r}: use a format that names "
                    "modules, such as 'accelerate'"
                )
        return units

    def counts(self, plan: Plan) -> list[int]:
        """Return the number of blocks of each stage.

        Raises:
            PlacementError: the format cannot express the placement.
        """
        segments = self.segments(plan)
        sizes = self.sizes(plan, [unit for segment in segments for unit in segment.units])
        return [sum(sizes[unit] for unit in segment.units) for segment in segments]

    def sizes(self, plan: Plan, units: Sequence[Unit]) -> dict[Unit, int]:
        """Return the number of blocks of each unit.

        The units are all that have blocks, in execution order. Blocks without layers, which compute
        nothing, count for the unit before them.

        Raises:
            PlacementError: the model has no such list of blocks.
        """
        begins = [0, *(min(_indices(unit)) for unit in units[1:])]
        ends = [*begins[1:], self.block_count(plan, units)]
        return {unit: end - begin for unit, begin, end in zip(units, begins, ends, strict=True)}

    def block_count(self, plan: Plan, units: Sequence[Unit]) -> int:
        """Return the number of blocks of the model's list.

        Without the model, blocks after the last one that computes something are not known.

        Raises:
            PlacementError: the model has no such list.
        """
        known = known_blocks(units)
        if plan.model is None:
            return known
        path = _list_of(units[0].keys[0])
        try:
            blocks = plan.model.get_submodule(path)
            # other children of a module that has numbered ones are not blocks
            numbers = [int(name) for name, _ in blocks.named_children() if is_number(name)]
        except AttributeError as error:
            raise PlacementError(
                f"{type(plan.model).__name__} has no list of blocks {path!r}, which layers of the "
                "placement name; give the model that was placed"
            ) from error
        return max(known, *(number + 1 for number in numbers), 0)

    def placed(
        self, counts: Sequence[int], layers: Sequence[str], devices: Sequence[str]
    ) -> dict[str, str]:
        """Return the device of each layer from the number of blocks of each stage.

        Stage i is on device i.

        Raises:
            InputError: there are more stages than devices, the counts do not add up, or a stage
                ends inside a unit of several blocks.
        """
        self.refuse_more_stages(len(counts), devices)
        units = self.units(layers)
        total = known_blocks(units)
        if sum(counts) != total:
            raise InputError(
                f"{self.title} states {count_text(sum(counts), 'block')} in total, and the model "
                f"has {count_text(total, 'block')}; the counts must add up"
            )
        stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
        found = self.placed_blocks(units, [devices[stage] for stage in stages])
        # also if the first or the last stage has no block
        before, after = around_blocks(layers)
        found |= dict.fromkeys(before, devices[0])
        found |= dict.fromkeys(after, devices[len(counts) - 1])
        return found

    def placed_blocks(self, units: Sequence[Unit], on: Sequence[str]) -> dict[str, str]:
        """Return the device of each layer of units from the device of each block, by its number.

        Raises:
            InputError: the blocks of a unit are on several devices.
        """
        ordered = [Unit(tuple(sorted(unit.keys, key=_index)), unit.layers) for unit in units]
        return self.placed_whole(
            ordered, {key: on[_index(key)] for unit in units for key in unit.keys}
        )


def around_blocks(layers: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the layers before the first block and after the last one."""
    in_blocks = [
        index for index, layer in enumerate(layers) if any(map(block_path, modules_of(layer)))
    ]
    return layers[: in_blocks[0]], layers[in_blocks[-1] + 1 :]


def units_with_ends(
    blocks: Sequence[Unit], layers: Sequence[str], first: str, last: str
) -> list[Unit]:
    """Return units in which the layers around the blocks are units of their own.

    Args:
        blocks: the blocks; the first one also has the layers before it, and the last one the
            layers after it.
        layers: the names of all layers, in execution order.
        first: the name of the unit before the blocks.
        last: the name of the unit after them.
    """
    before, after = around_blocks(layers)
    found = list(blocks)
    found[0] = Unit(found[0].keys, found[0].layers[len(before) :])
    found[-1] = Unit(found[-1].keys, found[-1].layers[: len(found[-1].layers) - len(after)])
    ends = (Unit((first,), tuple(before)), Unit((last,), tuple(after)))
    return [unit for unit in (ends[0], *found, ends[1]) if unit.layers]


def known_blocks(units: Sequence[Unit]) -> int:
    """Return the number of blocks up to the last block that has layers."""
    return max(_indices(units[-1])) + 1


def _index(key: str) -> int:
    return int(key.rpartition(".")[2])


def _indices(unit: Unit) -> list[int]:
    return [_index(key) for key in unit.keys]


def _list_of(key: str) -> str:
    return key.rpartition(".")[0]
