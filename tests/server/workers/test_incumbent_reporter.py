"""Reports of incumbents, one at a time."""

from __future__ import annotations

import threading

import pytest

from placer.errors import InputError
from placer.schema import Placement
from placer.solver.search import Incumbent
from placer_server.workers import incumbent_reporter
from placer_server.workers.incumbent_reporter import IncumbentReporter


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(incumbent_reporter, "INTERVAL_S", 0.0)


def found(value):
    placement = Placement(
        status="feasible", objective="throughput", objective_value=value, method=f"{value:g}"
    )
    return Incumbent(value, bound=0.0, time_s=0.0, placement=lambda: placement)


def refused(value):
    def placement():
        raise InputError("a device would be busy for too long")

    return Incumbent(value, bound=0.0, time_s=0.0, placement=placement)


class Line:
    """Receiver that blocks the sender until ``free`` is called."""

    def __init__(self):
        self.sent, self._free, self._there = [], threading.Event(), threading.Event()

    def __call__(self, content):
        self.sent.append(float(Placement.model_validate_json(content).method))
        self._there.set()
        self._free.wait(20)

    def wait(self):
        assert self._there.wait(20)
        self._there.clear()

    def free(self):
        self._free.set()


def test_of_what_is_found_while_one_is_sent_the_last_is_sent_and_no_other():
    line = Line()
    reporter = IncumbentReporter(line)
    reporter.report(found(5000.0))
    line.wait()
    for value in range(4000, 3000, -1):
        reporter.report(found(float(value)))
    line.free()
    line.wait()
    assert line.sent == [5000.0, 3001.0]


def test_one_of_which_no_placement_can_be_made_is_left_out():
    line = Line()
    line.free()
    reporter = IncumbentReporter(line)
    made = threading.Event()
    cannot = refused(9.0)
    reporter.report(Incumbent(9.0, 0.0, 0.0, lambda: (made.set(), cannot.placement())[1]))
    assert made.wait(20)
    reporter.report(found(8.0))
    line.wait()
    assert line.sent == [8.0]
