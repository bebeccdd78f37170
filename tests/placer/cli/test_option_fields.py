"""Command-line options that are made from options objects."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import pytest
import typer
from commands import Run
from pydantic import ConfigDict, Field
from typer.testing import CliRunner

from placer.cli.measuring import refine
from placer.cli.option_fields import SPELLED, Words, expanded
from placer.cli.profiling import profile
from placer.cli.solving import solve, suggest
from placer.schema import Constraints, ProfileOptions, RefineOptions, SolveOptions, SuggestOptions
from placer.schema.base import Wire


class Small(Wire):
    model_config = ConfigDict(use_attribute_docstrings=True)

    limit_s: Annotated[float, Field(gt=0)] = 2.0
    """Seconds to wait.

    More about it."""

    count: Annotated[int, Field(ge=1)] | None = None
    """How many."""

    quick: bool = False
    """Whether to hurry."""


def small_app(seen: list[Small]) -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @expanded(Small)
    def run(*, words: Words[Small]) -> None:
        seen.append(words.read())

    return app


def test_a_field_becomes_an_option_with_its_type_its_default_and_its_first_sentence() -> None:
    seen: list[Small] = []
    app = small_app(seen)
    assert CliRunner().invoke(app, ["--limit", "3", "--count", "2", "--quick"]).exit_code == 0
    assert CliRunner().invoke(app, []).exit_code == 0
    assert seen == [Small(limit_s=3.0, count=2, quick=True), Small()]
    assert seen[1].model_fields_set == set()
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120", "TERM": "dumb"}).output
    assert "seconds to wait" in text and "2.0" in text and "More about it" not in text
    assert CliRunner().invoke(app, ["--count", "0"]).exit_code == 2


def test_an_error_names_the_option_instead_of_the_field() -> None:
    result = CliRunner().invoke(small_app([]), ["--limit", "0"])
    assert str(result.exception) == "--limit: should be greater than 0, not 0.0"


@pytest.mark.parametrize(
    ("command", "kind", "left_out"),
    [
        (profile, ProfileOptions, set()),
        (refine, RefineOptions, set()),
        (solve, SolveOptions, set()),
        (suggest, SuggestOptions, {"profile_on_server"}),
    ],
)
def test_every_field_is_an_option_of_its_command(
    command: Any, kind: type[Wire], left_out: set[str]
) -> None:
    options = set(inspect.signature(command).parameters)
    fields = set(kind.model_fields) - left_out - {"constraints"}
    if "constraints" in kind.model_fields:
        fields |= set(Constraints.model_fields)
    for name in fields:
        spelled = SPELLED.get(name, name)
        if spelled is not None:
            expected = {name} if isinstance(spelled, str) else set(spelled.options)
            assert expected <= options, name


def test_only_fields_that_no_command_can_state_are_no_options() -> None:
    assert {name for name, spelled in SPELLED.items() if spelled is None} == {"colocated", "timer"}


def test_batch_options_are_given_as_json(run: Run) -> None:
    toy = ("placer.zoo.toy:ToyModel", "--input", "4x10", "--devices", "2")
    answer = run("profile", *toy, "--batch-options", '{"reduction": "sum"}')
    assert answer.code == 0, answer.err
    assert answer.profile.batch_options.reduction == "sum"
    wrong = run("profile", *toy, "--batch-options", '{"reduced": "sum"}')
    assert (wrong.code, "did you mean 'reduction'" in wrong.err) == (2, True)


def test_inference_can_be_placed_with_a_profile_of_training(run: Run) -> None:
    toy = ("placer.zoo.toy:ToyModel", "--input", "4x10", "--devices", "1")
    measured = run("profile", *toy).out
    assert run("solve", "-", stdin=measured).placement.training
    assert not run("solve", "-", "--inference", stdin=measured).placement.training
