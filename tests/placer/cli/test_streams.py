from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Run, chain

from placer import cli
from placer.schema import Placement, PlacementRequest, Profile

Ask = Callable[..., int]


class Terminal(io.TextIOWrapper):
    """A stream that people are at."""

    def isatty(self) -> bool:
        return True


def accented() -> Profile:
    profile = chain([1.0, 2.0])
    return profile.model_copy(update={"model": "Modèle"})


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Run a command with the streams that are given; its exit code."""

    def ask(*arguments: str, **streams: object) -> int:
        for name, stream in streams.items():
            monkeypatch.setattr(sys, name, stream)
        with pytest.raises(SystemExit) as left:
            cli.main(list(arguments))
        return int(left.value.code or 0)

    return ask


def test_pipes_are_utf8_whatever_the_locale(ask: Ask) -> None:
    # stdin was decoded by the locale, files never: one profile had other names by the way that it
    # came.
    request = PlacementRequest(profile=accented()).model_dump_json()
    stdin = io.TextIOWrapper(io.BytesIO(request.encode()), encoding="latin-1")
    stdout = io.TextIOWrapper(written := io.BytesIO(), encoding="ascii")
    assert ask("show", "-", stdin=stdin, stdout=stdout) == 0
    assert "Profile of Modèle" in written.getvalue().decode()


def test_bytes_that_are_no_utf8_are_bad_input(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b'{"layers": "\xe9"}'), encoding="latin-1")
    assert ask("show", "-", stdin=stdin) == 2
    assert "cannot read stdin: 'utf-8' codec can't decode byte 0xe9" in capsys.readouterr().err


def test_a_terminal_that_lacks_characters_shows_the_others(ask: Ask, tmp_path: Path) -> None:
    # ended in a UnicodeEncodeError.
    (tmp_path / "profile.json").write_text(accented().to_json())
    stdout = Terminal(written := io.BytesIO(), encoding="ascii")
    assert ask("show", str(tmp_path / "profile.json"), stdout=stdout) == 0
    assert "Profile of Mod?le" in written.getvalue().decode("ascii")


def test_closed_streams_are_told_as_such(
    ask: Ask, chain_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Python has None for them: "'NoneType' object has no attribute 'read'".
    assert ask("show", "-", stdin=None) == 2
    assert "stdin is closed; name a file instead of -" in capsys.readouterr().err
    assert ask("show", str(chain_file), stdout=None) == 2
    assert "stdout is closed; open it" in capsys.readouterr().err


def test_a_command_that_writes_a_file_needs_no_streams(
    ask: Ask, chain_file: Path, tmp_path: Path
) -> None:
    placed = tmp_path / "placed.json"
    assert (
        ask("solve", str(chain_file), "-o", str(placed), stdin=None, stdout=None, stderr=None) == 0
    )
    assert Placement.model_validate_json(placed.read_text()).status == "optimal"


@pytest.mark.parametrize("arguments", [("compare", "-", "-"), ("solve", "-", "--cluster", "-")])
def test_stdin_is_given_once(run: Run, chain_file: Path, arguments: tuple[str, ...]) -> None:
    # what was read first was said to be no JSON.
    answer = run(*arguments, stdin=chain_file.read_text())
    assert answer.code == 2
    assert "- is given twice, but stdin holds one input; name a file for the other" in answer.err


FULL = Path("/dev/full")
"""A device on which no space is ever left."""
with_full = pytest.mark.skipif(not FULL.exists(), reason="the system has no such device")


def ended(command: str) -> tuple[int, str]:
    """The exit code and the messages of a command in a shell."""
    result = subprocess.run(
        f"{sys.executable} -P -m placer {command}",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return result.returncode, result.stderr


@with_full
@pytest.mark.parametrize("command", ["solve {}", "show {}", "--version"])
def test_an_answer_that_finds_the_disk_full_is_one_line(chain_file: Path, command: str) -> None:
    # ended in "OSError: [Errno 28] No space left on device (PLACER_DEBUG=1 shows where)".
    code, message = ended(f"{command.format(chain_file)} > {FULL}")
    assert code == 2
    assert message == (
        "error: cannot write to stdout: No space left on device; send the output elsewhere\n"
    )


@with_full
def test_messages_that_find_the_disk_full_are_lost_and_the_answer_is_not(
    chain_file: Path, tmp_path: Path
) -> None:
    # showing the error raised again: a traceback, and exit code 1.
    assert ended(f"show nofile 2> {FULL}")[0] == 2
    # the note about what the format cannot say raised.
    placed, exported = tmp_path / "placed.json", tmp_path / "piper.json"
    assert ended(f"solve {chain_file} -o {placed}")[0] == 0
    assert ended(f"export {placed} --to piper -o {exported} 2> {FULL}")[0] == 0
