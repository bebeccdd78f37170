from __future__ import annotations

import io

from rich.console import Console

from placer.report.refinement import refinement_table
from placer.schema import Layer, Placement, Profile
from placer.schema.refinement import Refinement, Round, StageTime


def test_every_stage_of_every_round_stands_beside_its_measurement() -> None:
    placement = Placement(
        status="feasible", objective="throughput", objective_value=5.0, model="Net", layer_devices={"a": "cpu:0"}
    )
    stage = StageTime(
        device="cpu:0",
        layers=("a",),
        predicted_forward_ms=1.0,
        predicted_backward_ms=3.0,
        forward_ms=2.0,
        backward_ms=3.0,
        loss_forward_ms=0.5,
    )
    refinement = Refinement(
        placement=placement,
        profile=Profile(model="Net", layers=(Layer(name="a", forward_ms={"cpu": 1.0}),)),
        rounds=(Round(placement=placement, stages=(stage,), predicted_value=4.0, measured_value=5.0),),
        ended="settled",
    )
    console = Console(file=io.StringIO(), width=120, no_color=True)
    with console.capture() as captured:
        console.print(refinement_table(refinement))
    text = captured.get()
    row = next(line for line in text.splitlines() if "cpu:0" in line)
    for cell in ("4.00 ms", "5.00 ms", "-20.0%", "0.500 ms"):
        assert cell in row
    assert "round 1     throughput: 4.00 ms predicted, 5.00 ms measured" in text
    assert "settled: solving again moves nothing" in text
