"""The guide's program that generates text runs, and its tokens come from recorded passes."""

from __future__ import annotations

import pytest
from documentation import blocks
from model_list import transformers

from placer.testing import logical_devices

GUIDE = "docs/guides/inference.md"


def test_the_guides_program_generates_text(capsys: pytest.CaptureFixture[str]) -> None:
    transformers()
    (text,) = (
        block.text
        for block in blocks()
        if block.page == GUIDE and "from transformers import" in block.text
    )
    with logical_devices(2):
        exec(compile(text, GUIDE, "exec"), {})
    assert "torch.Size([1, 32]) 17 ('cpu:0', 'cpu:1'" in capsys.readouterr().out
