"""The programs and commands of the guides run with a small checkpoint."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from commands import Run
from documentation import Block, blocks

from placer.estimator import checkpoints

GUIDES = ("docs/guides/run.md", "docs/guides/offloading.md")
MOST_LINES = 9
"""From a checkpoint folder to streamed text takes under ten lines."""


def parts(kind: str) -> list[Block]:
    """Return the blocks of a kind, in the order of the guides; of GPUs only where there are any."""
    return [
        block
        for guide in GUIDES
        for block in blocks()
        if (block.page, block.kind) == (guide, kind)
        and ("cuda" not in block.text or torch.cuda.is_available())
    ]


@pytest.mark.integration
def test_the_programs_and_commands_of_the_guides_stream_text(
    run: Run,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "checkpoint").symlink_to(llama)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoints, "DEFAULT_TOKENS", 64)  # as other tests of this folder measure
    first, *others = parts("python")
    assert len(first.text.splitlines()) <= MOST_LINES
    names: dict[str, object] = {}
    exec(compile(first.text, first.page, "exec"), names)
    assert capsys.readouterr().out.strip()
    for block in others:
        exec(compile(block.text, block.page, "exec"), names)
        assert capsys.readouterr().out.strip()
    for command in (block for block in parts("sh") if block.text.startswith("placer run")):
        answer = run(*shlex.split(command.text)[1:])
        assert answer.code == 0 and answer.out.strip(), answer.err
        assert "tokens/s" in answer.err.splitlines()[-1]
