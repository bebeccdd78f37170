"""Shell completion of the command ``placer``."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from placer.cli.command import app

SHELLS = ("bash", "zsh", "fish")


def test_the_help_offers_to_install_and_to_show_the_completion() -> None:
    # Completion was turned off: the shell completed file names only.
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert "--install-completion" in text and "--show-completion" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("placer so", {"solve", "solve-together"}),
        ("placer s", {"solve", "solve-together", "suggest", "show", "serve"}),
        ("placer solve --time-l", {"--time-limit"}),
    ],
)
@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_is_given_the_commands_and_options_that_fit(
    shell: str, words: str, expected: set[str]
) -> None:
    incomplete = words.rpartition(" ")[2]
    environment = {
        "_PLACER_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    result = CliRunner().invoke(app, [], prog_name="placer", env=environment)
    names = {
        word.strip('("')
        for line in result.output.splitlines()
        for word in line.replace(":", " ").split()
    }
    assert {name for name in names if name.startswith(incomplete)} == expected, result.output
