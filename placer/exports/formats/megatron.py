"""Megatron-LM's layout of embedding, decoder layers and loss over pipeline stages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from placer.errors import InputError, PlacementError
from placer.exports.block_counts import BlockCounts, known_blocks, units_with_ends
from placer.exports.plan import Plan
from placer.exports.units import Unit, block_path, modules_of
from placer.utils.units import count_text

EMBEDDING, MTP, LOSS = "embedding", "MTP layers", "output layer"
"""Names of the units that are not decoder layers."""
SYMBOLS = {EMBEDDING: "E", MTP: "m", LOSS: "L"}
LONGEST = 100_000
"""Most symbols of a layout, so that a mistyped repetition does not fill the memory."""

_GROUP = re.compile(r"\(([^)]+)\)\*(\d+)")
_SYMBOL = re.compile(r"(.)\*(\d+)")


class Megatron(BlockCounts):
    """The option ``--pipeline-model-parallel-layout``: ``Et*3|t*4|t*4L``.

    ``E`` is the embedding with all that runs before the first block, ``t`` a block, ``m`` a layer
    for multi-token prediction (of a list of blocks in a module ``mtp``), and ``L`` all that runs
    after the last block. Stage i is on rank ``i % ranks``::

        E t|t t|t|t L  on 2 ranks      rank 0: E t, t      rank 1: t t, t L
    """

    name = "megatron"
    title = "--pipeline-model-parallel-layout of Megatron-LM"
    source = (
        "megatron/core/transformer/pipeline_parallel_layer_layout.py of NVIDIA/Megatron-LM, at "
        "commit d98e8a64"
    )
    replicates = True
    copies_shared = True

    def units(self, layers: Sequence[str]) -> list[Unit]:
        """Return the embedding, blocks, MTP layers and output layer; see ``BlockCounts.units``."""
        begin = next((i for i, layer in enumerate(layers) if _mtp_blocks(layer)), len(layers))
        end = max((i + 1 for i, layer in enumerate(layers) if _mtp_blocks(layer)), default=begin)
        found = units_with_ends(super().units(layers[:begin]), layers[:begin], EMBEDDING, LOSS)
        if begin == len(layers):
            return found
        if found[-1].keys == (LOSS,):
            # Megatron-LM then has the last norm on the stage of the last block
            norm = found.pop()
            found[-1] = Unit(found[-1].keys, (*found[-1].layers, *norm.layers))
        ends = (Unit((MTP,), tuple(layers[begin:end])), Unit((LOSS,), tuple(layers[end:])))
        return [*found, *(unit for unit in ends if unit.layers)]

    def text(self, plan: Plan) -> str:
        """Return the layout; devices with several segments have virtual stages.

        See ``Format.text``.
        """
        return "|".join(map(_shortened, self._stages(plan)))

    def notes(self, plan: Plan) -> list[str]:
        """Return the options that must go with it; see ``Format.notes``."""
        ranks = len(set(plan.layer_devices.values()))
        found = [f"Start Megatron-LM with --pipeline-model-parallel-size {ranks}."]
        if plan.training:
            micro = plan.batch_size // plan.pipelines
            found.append(
                f"The placement was solved for --micro-batch-size {micro} and --global-batch-size "
                f"{plan.batch_size * plan.chunks}."
            )
        if (virtual := len(self._stages(plan)) // ranks) > 1:
            found.append(
                f"The layout has {virtual} virtual stages on each rank, so Megatron-LM runs its "
                "interleaved schedule."
            )
        return [*found, *super().notes(plan)]

    def read(self, text: str, layers: Sequence[str], devices: Sequence[str]) -> dict[str, str]:
        """Return the device of each layer; see ``Format.read``.

        The text may have spaces, commas and repetitions. There is a device for each pipeline rank.
        If there are fewer stages than devices, the first ones are used, and otherwise stage i is on
        device ``i % len(devices)``.
        """
        stages = _parsed(text)
        ranks = min(len(devices), len(stages))
        if len(stages) % ranks:
            raise InputError(
                f"{self.title} {text.strip()!r:.80} has {count_text(len(stages), 'stage')}, which "
                f"{count_text(ranks, 'device')} cannot share evenly; give as many devices as "
                "--pipeline-model-parallel-size"
            )
        _refuse_order(text, stages, ranks)
        on = {symbol: _devices_of(symbol, stages, devices[:ranks]) for symbol in "EtmL"}
        units = self.units(layers)
        blocks = [unit for unit in units if unit.keys[0] not in SYMBOLS]
        for symbol, what, known in (
            ("t", "decoder layer", known_blocks(blocks)),
            ("m", "MTP layer", _mtp_count(layers)),
        ):
            if len(on[symbol]) != known:
                raise InputError(
                    f"{self.title} {text.strip()!r:.80} states "
                    f"{count_text(len(on[symbol]), what)}, and the model has "
                    f"{count_text(known, what)}; the numbers must be equal"
                )
        found = self.placed_blocks(blocks, on["t"])
        for unit in units:
            if unit not in blocks:
                found |= dict.fromkeys(unit.layers, on[SYMBOLS[unit.keys[0]]][0])
        return {layer: found[layer] for layer in layers}

    def _stages(self, plan: Plan) -> list[str]:
        """Return the symbols of each stage, virtual ones included.

        A segment is on the next stage of its rank, so stages between may be empty.
        """
        placed = self.placed_units(plan)
        blocks = [unit for unit, _ in placed if unit.keys[0] not in SYMBOLS]
        sizes = self.sizes(plan, blocks)
        mtp = _mtp_count(list(plan.layer_devices))
        segments = [
            (device, "".join(_symbols(unit, sizes, mtp) for unit, _ in units))
            for device, units in groupby(placed, key=lambda placed: placed[1])
        ]
        first, last = segments[0][0], segments[-1][0]
        # the last stage calculates the loss, and it is on the last rank
        ranks = [*(device for device, _ in segments if device != last), last]
        ranks = list(dict.fromkeys(ranks))
        if first == last and len(ranks) > 1:
            raise PlacementError(
                f"{self.title} has the embedding on the first rank and the loss on the last one, "
                f"and this placement gives {first} both ends of the model: {self.advice}"
            )
        stages: list[str] = []
        for device, symbols in segments:
            while len(stages) % len(ranks) != ranks.index(device):
                stages.append("")
            stages.append(symbols)
        stages[0] = stages[0] if stages[0].startswith("E") else f"E{stages[0]}"
        stages[-1] = stages[-1] if stages[-1].endswith("L") else f"{stages[-1]}L"
        return stages


def _mtp_blocks(layer: str) -> set[str]:
    """Return the blocks for multi-token prediction that a layer's name contains."""
    return {
        path
        for module in modules_of(layer)
        if "mtp" in module.split(".") and (path := block_path(module)) is not None
    }


def _mtp_count(layers: Sequence[str]) -> int:
    return len({path for layer in layers for path in _mtp_blocks(layer)})


def _symbols(unit: Unit, sizes: dict[Unit, int], mtp: int) -> str:
    """Return the symbols of a unit."""
    if unit in sizes:
        return "t" * sizes[unit]
    symbol = SYMBOLS[unit.keys[0]]
    return symbol * mtp if symbol == "m" else symbol


def _shortened(stage: str) -> str:
    """Return the symbols of a stage with repetitions: ``Et*3``."""
    runs = [(symbol, len(list(run))) for symbol, run in groupby(stage)]
    return "".join(symbol if count == 1 else f"{symbol}*{count}" for symbol, count in runs)


def _parsed(text: str) -> list[str]:
    """Return the symbols of each stage.

    Raises:
        InputError: the text has another symbol, or is too long.
    """
    symbols = re.sub(r"[\s,]", "", text.strip().strip("\"'"))
    for pattern in (_GROUP, _SYMBOL):
        count = sum(len(each[1]) * int(each[2][:9]) for each in pattern.finditer(symbols))
        if count > LONGEST:
            raise InputError(
                f"--pipeline-model-parallel-layout {text.strip()!r:.80} repeats {count:,} symbols; "
                f"give at most {LONGEST:,}"
            )
        symbols = pattern.sub(lambda each: each[1] * int(each[2]), symbols)
    if other := re.search(r"[^EtmL|]", symbols):
        raise InputError(
            f"--pipeline-model-parallel-layout {text.strip()!r:.80} contains {other[0]!r}; give "
            "stages of E, t, m and L, separated by |, such as Et*3|t*4|t*4L"
        )
    return symbols.split("|")


def _devices_of(symbol: str, stages: Sequence[str], ranks: Sequence[str]) -> list[str]:
    """Return the device of each occurrence of a symbol, in order."""
    return [
        ranks[index % len(ranks)]
        for index, stage in enumerate(stages)
        for each in stage
        if each == symbol
    ]


def _refuse_order(text: str, stages: Sequence[str], ranks: int) -> None:
    """Raise an InputError where ``validate_layer_layout`` of Megatron-LM refuses the layout.

    That function does not look at the stages of E and L. Megatron-LM builds the embedding on the
    first stage and the output layer on the last one, wherever the layout has them.
    """
    symbols = "".join(stages)
    with_mtp = [index for index, stage in enumerate(stages) if "m" in stage]
    faults = {
        "E must be the first symbol of the first stage, once": (
            stages[0][:1] != "E" or symbols.count("E") != 1
        ),
        "L must be the last symbol of the last stage, once": (
            stages[-1][-1:] != "L" or symbols.count("L") != 1
        ),
        "every t must be before the first m": "m" in symbols and "t" in symbols.partition("m")[2],
        "all m must be in one stage": len(with_mtp) > 1,
        "m must be in the last stage of its rank": any(
            index < len(stages) - ranks for index in with_mtp
        ),
    }
    for rule, broken in faults.items():
        if broken:
            raise InputError(f"--pipeline-model-parallel-layout is {text.strip()!r:.80}; {rule}")
