from __future__ import annotations

import io

from rich.console import Console

from placer.report.refinement import refinement_table
from placer.schema import Layer, Placement, Profile
from placer.schema.refinement import Refinement, Round, StageTime

STAGE = StageTime(
    device="cpu:0",
    layers=("a",),
    predicted_forward_ms=1.0,
    predicted_backward_ms=3.0,
    forward_ms=2.0,
    backward_ms=3.0,
    loss_forward_ms=0.5,
)


def _text(*stages: StageTime) -> str:
    placement = Placement(
        status="feasible",
        objective="throughput",
        objective_value=5.0,
        model="Net",
        layer_devices={"a": "cpu:0"},
    )
    refinement = Refinement(
        placement=placement,
        profile=Profile(model="Net", layers=(Layer(name="a", forward_ms={"cpu": 1.0}),)),
        rounds=(
            Round(placement=placement, stages=stages, predicted_value=4.0, measured_value=5.0),
        ),
        stop_reason="converged",
    )
    console = Console(file=io.StringIO(), width=120, no_color=True)
    with console.capture() as captured:
        console.print(refinement_table(refinement))
    return captured.get()


def test_every_stage_of_every_round_stands_beside_its_measurement() -> None:
    text = _text(STAGE)
    row = next(line for line in text.splitlines() if "cpu:0" in line)
    for cell in ("4.00 ms", "5.00 ms", "-20.0%", "0.500 ms"):
        assert cell in row
    assert "round 1     throughput: 4.00 ms predicted, 5.00 ms measured" in text
    assert "converged: solving again moves nothing" in text
    assert "compiled" not in text


def test_what_the_compiler_gained_is_told_and_why_it_did_not() -> None:
    faster = STAGE.model_copy(update={"compiled": "5 ms, 6 ms without"})
    slower = STAGE.model_copy(update={"device": "cpu:1", "not_compiled_because": "it is no faster"})
    text = _text(faster, slower)
    assert "cpu:0 compiled: 5 ms, 6 ms without" in text
    assert "cpu:1 not compiled: it is no faster" in text
