from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import TOY, Run

from placer.schema import Placement, PlacementRequest, Profile
from placer.schema.refinement import Refinement

MODEL = TOY[:3]  # without the devices, which the placement says


@pytest.fixture
def solved(run: Run, tmp_path: Path) -> tuple[Path, Path]:
    """Files of a profile, and of its placement on two devices."""
    profile, placement = tmp_path / "profile.json", tmp_path / "placement.json"
    assert run("profile", *TOY, "-o", profile).code == 0
    assert run("solve", profile, "--min-devices", "2", "-o", placement).code == 0
    return profile, placement


def test_each_round_has_its_prediction_and_its_measurement(
    run: Run, solved: tuple[Path, Path]
) -> None:
    profile, placement = solved
    answer = run(
        "refine", *MODEL, placement, "--profile", profile, "--rounds", "1", "--repeats", "1"
    )
    assert answer.code == 0, answer.err
    found = Refinement.model_validate_json(answer.out)
    before = Profile.model_validate_json(profile.read_text())
    (only,) = found.rounds
    # both are of one type
    said = sum(time_ms for layer in before.layers for time_ms in layer.forward_ms.values())
    assert sum(stage.predicted_forward_ms for stage in only.stages) == pytest.approx(said)
    assert all(stage.forward_ms > 0 and stage.backward_ms > 0 for stage in only.stages)
    assert (
        found.placement.layer_devices
        == Placement.model_validate_json(placement.read_text()).layer_devices
    )


def test_people_get_a_table_and_files_the_refinement_and_its_placement(
    run: Run, solved: tuple[Path, Path], tmp_path: Path
) -> None:
    profile, placement = solved
    refinement, best = tmp_path / "refinement.json", tmp_path / "best.json"
    files = ("-o", refinement, "--save-placement", best)
    answer = run(
        "refine", *MODEL, placement, "--profile", profile, "--rounds", "1", *files, terminal=True
    )
    assert answer.code == 0, answer.err
    assert "Refinement of ToyModel" in answer.out
    assert "predicted" in answer.out and "measured" in answer.out
    found = Refinement.model_validate_json(refinement.read_text())
    assert Placement.model_validate_json(best.read_text()) == found.placement
    assert "Refinement of ToyModel" in run("show", refinement).out
    assert run("show", refinement, "--svg", tmp_path / "x.svg").code == 0
    assert run("measure", *MODEL, refinement).code == 0


def test_the_loss_is_the_one_that_is_named(
    run: Run, solved: tuple[Path, Path], tmp_path: Path
) -> None:
    profile, placement = solved
    request = PlacementRequest(profile=Profile.model_validate_json(profile.read_text()), chunks=1)
    question = tmp_path / "request.json"
    question.write_text(request.model_dump_json())
    loss = ("--loss", "torch.nn.functional:mse_loss", "--target", "4x5")
    answer = run(
        "refine", *MODEL, placement, "--profile", question, "--rounds", "1", "--repeats", "1", *loss
    )
    assert answer.code == 0, answer.err
    (only,) = json.loads(answer.out)["rounds"]
    assert [stage["loss_backward_ms"] > 0 for stage in only["stages"]] == [False, True]


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["PROFILE"], "holds a profile; a placement is needed"),
        (
            ["PLACEMENT", "--profile", "PLACEMENT"],
            "holds a placement; a profile or a request is needed",
        ),
        (["PLACEMENT", "--target", "4x5"], "goes with --loss"),
        (
            ["PLACEMENT", "--profile", "PROFILE", "--loss", "mse_loss"],
            "'mse_loss' names no function; write",
        ),
        (
            ["PLACEMENT", "--profile", "PROFILE", "--loss", "math:pi"],
            "'math:pi' is a float; name a function",
        ),
    ],
)
def test_what_cannot_be_refined_is_exit_code_2(
    run: Run, solved: tuple[Path, Path], arguments: list[str], message: str
) -> None:
    files = {"PROFILE": solved[0], "PLACEMENT": solved[1]}
    answer = run("refine", *MODEL, *(files.get(word, word) for word in arguments))
    assert answer.code == 2
    assert message in " ".join(answer.err.split())
