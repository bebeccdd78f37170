"""The guide's programs that generate text run, and their tokens come from recorded passes."""

from __future__ import annotations

from typing import Any

import pytest
from documentation import blocks
from model_list import transformers

from placer.testing import logical_devices

GUIDE = "docs/guides/generation.md"
PLACING = "docs/guides/generation-placement.md"


def _programs(page: str) -> list[str]:
    """Return the programs of a page, which need transformers."""
    transformers()
    return [block.text for block in blocks() if (block.page, block.kind) == (page, "python")]


@pytest.mark.integration
def test_the_guides_programs_generate_text(capsys: pytest.CaptureFixture[str]) -> None:
    one, many = _programs(GUIDE)
    names: dict[str, object] = {}
    with logical_devices(2):
        exec(compile(one, GUIDE, "exec"), names)
        assert "torch.Size([1, 32]) 17 ('cpu:0', 'cpu:1'" in capsys.readouterr().out
        exec(compile(many, GUIDE, "exec"), names)
        assert capsys.readouterr().out == "torch.Size([2, 32])\n" * 6


@pytest.mark.integration
def test_the_guides_placement_for_generation_has_room_for_the_cache_of_decoding() -> None:
    (placed,) = _programs(PLACING)
    found: dict[str, Any] = {}
    with logical_devices(2):
        exec(compile(placed, PLACING, "exec"), found)
    capacity = found["flow"].generation_report.capacity
    assert capacity == 64
    # of 2 sequences and 2 layers, keys and values of 64 numbers for each token, in float32
    cached = [load.memory.cache_bytes for load in found["placement"].devices]
    assert sum(cached) == 2 * 2 * 2 * 64 * capacity * 4
