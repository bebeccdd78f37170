"""The zero-bubble schedule against the rules that any schedule must keep, and against closed forms."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placer.errors import InputError
from placer.zero_bubble import Task, zero_bubble

times = st.floats(0.1, 10.0)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[float], list[float], list[float], int, list[int], float]:
    stages = draw(st.integers(1, 5))
    row = st.lists(times, min_size=stages, max_size=stages)
    held = draw(st.lists(st.integers(1, 9), min_size=stages, max_size=stages))
    return draw(row), draw(row), draw(row), draw(st.integers(1, 10)), held, draw(st.floats(0.0, 2.0))


def _by_pass(tasks: list[Task]) -> dict[tuple[int, str, int], Task]:
    return {(task.stage, task.phase, task.micro_batch): task for task in tasks}


@given(pipelines())
def test_every_pass_runs_once_and_after_all_that_it_waits_for(
    pipeline: tuple[list[float], list[float], list[float], int, list[int], float],
) -> None:
    forward, backward, weights, chunks, held, transfer = pipeline
    stages = len(forward)
    tasks = zero_bubble(forward, backward, weights, chunks, held, transfer)
    done = _by_pass(tasks)
    assert len(tasks) == len(done) == 3 * stages * chunks
    for (stage, phase, chunk), task in done.items():
        if phase == "forward" and stage > 0:
            assert task.start_ms >= done[stage - 1, "forward", chunk].end_ms + transfer - 1e-9
        if phase == "backward":
            assert task.start_ms >= done[stage, "forward", chunk].end_ms - 1e-9
            if stage < stages - 1:
                assert task.start_ms >= done[stage + 1, "backward", chunk].end_ms + transfer - 1e-9
        if phase == "weights":
            assert task.start_ms >= done[stage, "backward", chunk].end_ms - 1e-9


@given(pipelines())
def test_a_stage_runs_one_pass_at_a_time_and_holds_no_more_than_it_may(
    pipeline: tuple[list[float], list[float], list[float], int, list[int], float],
) -> None:
    forward, backward, weights, chunks, held, transfer = pipeline
    tasks = zero_bubble(forward, backward, weights, chunks, held, transfer)
    for stage in range(len(forward)):
        mine = [task for task in tasks if task.stage == stage]
        for before, after in pairwise(mine):
            assert after.start_ms >= before.end_ms - 1e-9
        begun = 0
        for task in mine:
            begun += {"forward": 1, "backward": 0, "weights": -1}[task.phase]
            assert begun <= held[stage]


def test_one_stage_alone_never_waits() -> None:
    tasks = zero_bubble([2.0], [3.0], [1.0], 5, [5])
    assert max(task.end_ms for task in tasks) == 5 * 6.0


@pytest.mark.parametrize(("stages", "chunks"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_equal_stages_with_room_lose_no_more_than_filling_the_pipeline(stages: int, chunks: int) -> None:
    """With room for 2 S - 1 the last stage waits for S - 1 forward passes and then for nothing."""
    tasks = zero_bubble([1.0] * stages, [1.0] * stages, [1.0] * stages, chunks, [2 * stages - 1] * stages)
    assert max(task.end_ms for task in tasks) == 3 * chunks + stages - 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([], [], [], 1, []), "needs a stage"),
        (([1.0], [1.0], [1.0], 0, [1]), "room for one"),
        (([1.0], [1.0], [1.0], 1, [0]), "room for one"),
        (([1.0], [1.0, 1.0], [1.0], 1, [1]), "one entry a stage"),
    ],
)
def test_arguments_that_make_no_pipeline_are_named(arguments: tuple[list[float], ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        zero_bubble(*arguments)  # type: ignore[arg-type]
