"""Small pipelines, and a second reading of their timelines."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from step_clock import StepClock

from placer.schedule import Pipeline, Transfer


@st.composite
def pipelines(draw, alone=False):
    """Up to 6 stages on up to 4 devices, with skips and missing gradients; whole times."""
    count = draw(st.integers(1, 6))
    places = (
        list(range(count))
        if alone
        else draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    )
    times = st.lists(st.integers(0, 6), min_size=count, max_size=count)
    weights = draw(times)
    pairs = [(a, b) for b in range(count) for a in range(b) if places[a] != places[b]]
    chosen = {(a, b) for a, b in pairs if b == a + 1} | set(
        draw(st.lists(st.sampled_from(pairs or [None]), max_size=3))
    )
    wait = st.integers(0, 5)
    transfers = [
        Transfer(*pair, draw(wait), draw(st.one_of(wait, wait, st.none())))
        for pair in sorted(chosen - {None})
    ]
    backward = [inputs + half for inputs, half in zip(draw(times), weights, strict=True)]
    optimizer = draw(st.one_of(st.just([]), times))
    return Pipeline(
        tuple(places),
        tuple(draw(times)),
        tuple(backward),
        tuple(weights),
        tuple(transfers),
        tuple(optimizer),
    )


@pytest.fixture(scope="session")
def clock():
    """``clock(pipeline, plan)``: how long the passes of a step take."""
    return lambda pipeline, plan: StepClock(replace(pipeline, optimizer_ms=()), plan).play()


@pytest.fixture(scope="session")
def ends_of():
    """``ends_of(pipeline, plan, steps)``: when each of several steps in a row ends."""

    def ends(pipeline, plan, steps):
        played = StepClock(pipeline, plan, steps)
        played.play()
        return tuple(played.ends)

    return ends


@pytest.fixture(scope="session")
def strategies():
    """Hypothesis strategies for pipelines."""
    return SimpleNamespace(pipelines=pipelines)
