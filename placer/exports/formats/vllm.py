"""vLLM's number of blocks of each pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence

from placer.errors import InputError
from placer.exports.block_counts import BlockCounts
from placer.exports.plan import Plan


class VLLM(BlockCounts):
    """The environment variable ``VLLM_PP_LAYER_PARTITION``: ``8,9,9,6``.

    The first rank also has the embedding, and the last rank the norm and the output layer. If these
    share parameters, the last rank has a copy.
    """

    name = "vllm"
    title = "VLLM_PP_LAYER_PARTITION of vLLM"
    source = "vllm/distributed/utils.py, get_pp_indices, at commit 5a6541db"
    trains = False
    copies_shared = True

    def text(self, plan: Plan) -> str:
        """Return the numbers of blocks, separated by commas; see ``Format.text``."""
        return ",".join(map(str, self.counts(plan)))

    def notes(self, plan: Plan) -> list[str]:
        """Return the option that must go with it; see ``Format.notes``."""
        stages = len(self.counts(plan))
        return [f"Start vLLM with --pipeline-parallel-size {stages}.", *super().notes(plan)]

    def read(self, text: str, layers: Sequence[str], devices: Sequence[str]) -> dict[str, str]:
        """Return the device of each layer; see ``Format.read``.

        The text is the value, or ``VLLM_PP_LAYER_PARTITION=`` and the value.
        """
        value = text.strip().removeprefix("VLLM_PP_LAYER_PARTITION=").strip("\"'")
        try:
            counts = [int(count) for count in value.split(",")]
        except ValueError:
            counts = [-1]
        if min(counts) < 0:
            raise InputError(
                f"VLLM_PP_LAYER_PARTITION is {value!r:.80}; give the blocks of each rank, such as "
                "8,9,9,6"
            )
        return self.placed(counts, layers, devices)
