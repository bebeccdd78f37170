"""A second reading of the timeline: time passes tick by tick, devices and lanes take what is next when they can."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st

from placer.schedule import Pipeline, Transfer


class Ticks:
    """One step in whole units of time, without any formula for starts or ends."""

    def __init__(self, pipeline, plan):
        self.pipeline, self.plan = pipeline, plan
        self.last = "weights" if plan.split else "backward"
        self.finished, self.arrived = set(), set()
        self.queue = {device: list(order) for device, order in plan.by_device().items()}
        self.lanes = self.lane_queues()
        self.running = {}

    def lane_queues(self):
        """By lane, what goes through it, in order."""
        lanes = defaultdict(list)
        for device, order in self.queue.items():
            for stage, phase, batch in order:
                for t in sorted(self.pipeline.transfers):
                    other = self.pipeline.places[t.source]
                    if t.target == stage and phase == "forward":
                        lanes[other, device, "values"].append(("values", t, batch))
                    if t.target == stage and phase == "backward" and t.gradient_ms is not None:
                        lanes[device, other, "gradients"].append(("gradients", t, batch))
        return lanes

    def may_start(self, item):
        stage, phase, batch = item
        mine = [t for t in self.pipeline.transfers if t.target == stage]
        if phase == "forward":
            return all(("values", t, batch) in self.arrived for t in mine)
        if phase == "weights":
            return (stage, "backward", batch) in self.finished
        back = [t for t in self.pipeline.transfers if t.source == stage and t.gradient_ms is not None]
        if not back:
            return (len(self.pipeline.places) - 1, "forward", batch) in self.finished
        return all(("gradients", t, batch) in self.arrived for t in back)

    def may_leave(self, item):
        kind, t, batch = item
        if kind == "gradients":
            return (t.target, "backward", batch) in self.finished
        before = batch - self.plan.in_flight[t.target]
        room = before < 0 or not self.plan.training or (t.target, self.last, before) in self.finished
        return room and (t.source, "forward", batch) in self.finished

    def duration(self, item):
        if item[0] == "values":
            return item[1].forward_ms
        if item[0] == "gradients":
            return item[1].gradient_ms
        stage, phase, _ = item
        p = self.pipeline
        if phase == "backward" and self.plan.split:
            return p.backward_ms[stage] - p.weights_ms[stage]
        return {"forward": p.forward_ms, "backward": p.backward_ms, "weights": p.weights_ms}[phase][stage]

    def play(self):
        """When the last pass ends."""
        now = 0
        while any(self.queue.values()) or any(isinstance(key, int) for key in self.running):
            while self.change(now):
                pass
            now += 1
            assert now < 10_000
        return now - 1

    def change(self, now):
        """End what ends now and start what may; whether anything did."""
        for key, (item, end) in list(self.running.items()):
            if end == now:
                del self.running[key]
                (self.arrived if item[0] in ("values", "gradients") else self.finished).add(tuple(item))
                return True
        for key, waiting in [*self.queue.items(), *self.lanes.items()]:
            ready = self.may_start if isinstance(key, int) else self.may_leave
            if waiting and key not in self.running and ready(waiting[0]):
                self.running[key] = (waiting[0], now + self.duration(waiting[0]))
                waiting.pop(0)
                return True
        return False


@st.composite
def pipelines(draw, alone=False):
    """Up to 6 stages on up to 4 devices, with skips and missing gradients; whole times."""
    count = draw(st.integers(1, 6))
    places = list(range(count)) if alone else draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    times = st.lists(st.integers(0, 6), min_size=count, max_size=count)
    weights = draw(times)
    pairs = [(a, b) for b in range(count) for a in range(b) if places[a] != places[b]]
    chosen = {(a, b) for a, b in pairs if b == a + 1} | set(
        draw(st.lists(st.sampled_from(pairs or [None]), max_size=3))
    )
    wait = st.integers(0, 5)
    transfers = [
        Transfer(*pair, draw(wait), draw(st.one_of(wait, wait, st.none()))) for pair in sorted(chosen - {None})
    ]
    backward = [inputs + half for inputs, half in zip(draw(times), weights, strict=True)]
    return Pipeline(tuple(places), tuple(draw(times)), tuple(backward), tuple(weights), tuple(transfers))


@pytest.fixture(scope="session")
def ticks():
    """``ticks(pipeline, plan)``: how long the step takes."""
    return lambda pipeline, plan: Ticks(pipeline, plan).play()


@pytest.fixture(scope="session")
def strategies():
    """Hypothesis strategies for pipelines."""
    return SimpleNamespace(pipelines=pipelines)
