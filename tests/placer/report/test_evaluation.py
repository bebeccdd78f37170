"""The verdict about a map, in one line."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from placer.report.evaluation import evaluation_table, verdict
from placer.schema import Best, Evaluation, Fault, Infeasibility, Placement
from placer.schema.export import Export


def judged(value: float, best_value: float, text: str = "3,2", **changes: Any) -> Evaluation:
    """Return the evaluation of a map for vLLM, with a better placement."""
    placement = Placement(
        status=changes.pop("status", "optimal"),
        objective=changes.get("objective", "throughput"),
        objective_value=best_value,
        layer_devices={"l0": "cuda:0"},
    )
    timed = placement.objective == "throughput"
    fields: dict[str, Any] = {
        "valid": True,
        "faults": (),
        "objective": "throughput",
        "objective_value": value,
        "best_value": best_value,
        "bound": 0.9 * best_value,
        "above_best": value / best_value - 1,
        "format": "vllm",
        "best": Best(
            placement=placement,
            export=Export(format="vllm", text=text, notes=("Do this.",)),
            speedup=value / best_value if timed else None,
        ),
    }
    return Evaluation(**fields | changes)


def nothing(status: str, **changes: Any) -> Best:
    return Best(placement=Placement(status=status, objective="throughput", **changes))


def printed(found: Evaluation) -> str:
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as captured:
        console.print(evaluation_table(found))
    return captured.get()


FAULT = Fault(kind="out-of-memory", detail="'cuda:0' needs 9.0 GiB")


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (
            judged(12.1, 10.9),
            "valid: bottleneck per micro-batch 12.10 ms; the best placement for vllm, '3,2', takes"
            " 10.90 ms (1.11x faster)",
        ),
        (
            judged(10.93, 10.9),
            "valid: bottleneck per micro-batch 10.93 ms; the best placement for vllm, '3,2', takes"
            " 10.90 ms",
        ),
        (
            judged(12.1, 10.9, format=None, best=None),
            "valid: bottleneck per micro-batch 12.10 ms",
        ),
        (
            judged(10.9, 10.9),
            "valid: bottleneck per micro-batch 10.90 ms; no placement for vllm is better",
        ),
        (
            judged(10.9, 11.0, status="feasible"),
            "valid: bottleneck per micro-batch 10.90 ms; no better placement for vllm was found in"
            " time, and the proven bound is 9.90 ms",
        ),
        (
            judged(12.1, 10.9, valid=False, faults=(FAULT, FAULT)),
            "not valid: 'cuda:0' needs 9.0 GiB (and 1 more); the best placement for vllm, '3,2',"
            " takes 10.90 ms",
        ),
        (
            judged(12.1, 10.9, text="a\nb"),
            "valid: bottleneck per micro-batch 12.10 ms; the best placement for vllm takes"
            " 10.90 ms (1.11x faster)",
        ),
        (
            judged(4 * 2**30, 3 * 2**30, objective="memory"),
            "valid: largest memory use 4.0 GiB; the best placement for vllm, '3,2', needs 3.0 GiB"
            " (25% less)",
        ),
        (
            judged(
                12.1,
                10.9,
                valid=False,
                faults=(FAULT,),
                best=nothing("infeasible", infeasible=Infeasibility(reason="too large")),
            ),
            "not valid: 'cuda:0' needs 9.0 GiB; no placement for vllm is possible: too large",
        ),
        (
            judged(12.1, 10.9, best=nothing("unknown", solve_time_s=2.0)),
            "valid: bottleneck per micro-batch 12.10 ms; no placement for vllm was found in 2.0 s",
        ),
    ],
)
def test_the_verdict_has_the_value_or_the_fault_and_the_gain(found: Evaluation, line: str) -> None:
    assert verdict(found) == line


def test_every_fault_and_a_text_of_several_lines_follow_the_verdict() -> None:
    other = FAULT.model_copy(update={"detail": "'cuda:1' needs 8.0 GiB"})
    text = printed(judged(12.1, 10.9, text="a\nb", valid=False, faults=(FAULT, other)))
    assert text.splitlines()[1:] == [
        "fault       'cuda:0' needs 9.0 GiB",
        "fault       'cuda:1' needs 8.0 GiB",
        "Do this.",
        "The best placement for vllm:",
        "a",
        "b",
    ]
