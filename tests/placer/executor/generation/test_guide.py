"""The guide's programs that generate text run, and their tokens come from recorded passes."""

from __future__ import annotations

import pytest
from documentation import blocks
from model_list import transformers

from placer.testing import logical_devices

GUIDE = "docs/guides/inference.md"


def test_the_guides_programs_generate_text(capsys: pytest.CaptureFixture[str]) -> None:
    transformers()
    one, many = (
        block.text
        for block in blocks()
        if block.page == GUIDE
        and ("from transformers import" in block.text or "flow.generate_many(" in block.text)
    )
    names: dict[str, object] = {}
    with logical_devices(2):
        exec(compile(one, GUIDE, "exec"), names)
        assert "torch.Size([1, 32]) 17 ('cpu:0', 'cpu:1'" in capsys.readouterr().out
        exec(compile(many, GUIDE, "exec"), names)
        assert capsys.readouterr().out == "torch.Size([2, 32])\n" * 6
