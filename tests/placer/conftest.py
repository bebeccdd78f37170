from __future__ import annotations

import functools
import gc
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from commands import Answer, Run, chain

from placer import cli

# Typer reads the signatures of all commands at every call, which users make once a process.
_built = functools.cache(typer.main.get_command)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.delenv("PLACER_URL", raising=False)
    monkeypatch.setattr(typer.main, "get_command", _built)

    def run(*arguments: str, stdin: str = "", terminal: bool = False) -> Answer:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
        with pytest.raises(SystemExit) as left:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Answer(int(left.value.code or 0), captured.out, captured.err)

    yield run
    gc.unfreeze()  # a command may freeze all objects, since its process ends


@pytest.fixture
def chain_file(tmp_path: Path) -> Path:
    file = tmp_path / "chain.json"
    file.write_text(chain([3.0, 1.0, 1.0, 1.0]).to_json())
    return file


@pytest.fixture
def one_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
