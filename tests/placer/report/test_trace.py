"""The trace keeps the rules of the Trace Event Format, and holds what the timelines hold."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from placer.report.timeline import Measurement, Row, from_first_start
from placer.schedule import Pipeline, Transfer, plan, simulate

DEVICES = ("cuda:0", "cuda:1", "cuda:2")


def _rows(schedule: str = "1f1b") -> tuple[Row, ...]:
    """A simulated training step of three stages with a skip from the first to the last."""
    transfers = (Transfer(0, 1, 0.5, 0.5), Transfer(0, 2, 0.25, 0.25), Transfer(1, 2, 0.5, 0.5))
    pipeline = Pipeline((0, 1, 2), (1.0, 2.0, 1.5), (2.0, 3.0, 2.5), (1.0, 1.5, 1.25), transfers)
    timeline = simulate(pipeline, plan(schedule, (0, 1, 2), 3))  # type: ignore[arg-type]
    rows = [Row(DEVICES[t.stage], t.phase, t.stage, None, *t[2:5]) for t in timeline.tasks]
    for source, target, phase, number, start, end in timeline.transfers:
        kind = "gradients" if phase == "backward" else "values"
        rows.append(
            Row(f"{DEVICES[source]} → {DEVICES[target]}", kind, source, target, number, start, end)
        )
    return from_first_start(rows)


def _measured() -> tuple[Row, ...]:
    """Later and slower than predicted, with what comes in and goes out."""
    rows = [
        row._replace(start_ms=1.5 * row.start_ms + 0.1, end_ms=1.5 * row.end_ms + 0.1)
        for row in _rows()
    ]
    rows.append(Row("cpu → cuda:0", "inputs", None, 0, 0, 0.0, 0.1))
    last = max(row.end_ms for row in rows)
    rows.append(Row("cuda:2 → cuda:0", "results", 2, None, 2, last, last + 0.1))
    return from_first_start(rows)


@pytest.fixture
def trace(tmp_path: Path) -> list[dict[str, Any]]:
    Measurement("a step", DEVICES, _measured(), _rows()).save_trace(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    assert set(content) == {"traceEvents", "displayTimeUnit"}
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


def _named(trace: list[dict[str, Any]], what: str) -> dict[Any, str]:
    key = (lambda e: e["pid"]) if what == "process_name" else (lambda e: (e["pid"], e["tid"]))
    return {key(event): event["args"]["name"] for event in trace if event["name"] == what}


def test_every_event_has_the_fields_that_its_phase_asks_for(trace: list[dict[str, Any]]) -> None:
    assert {event["ph"] for event in trace} == {"M", "X", "s", "t", "f"}
    for event in trace:
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        assert ("dur" in event) == (event["ph"] == "X")
        assert ("id" in event) == (event["ph"] in "stf")
        assert event.get("dur", 0) >= 0
        assert (event.get("bp") == "e") == (event["ph"] == "f")


def test_measured_and_predicted_are_processes_and_every_device_and_link_is_a_thread(
    trace: list[dict[str, Any]],
) -> None:
    processes, threads = _named(trace, "process_name"), _named(trace, "thread_name")
    assert sorted(processes.values()) == ["measured", "predicted"]
    for process, name in processes.items():
        there = {thread for (pid, _), thread in threads.items() if pid == process}
        links = {"cuda:0 → cuda:1 values", "cuda:0 → cuda:2 values", "cuda:2 → cuda:0 gradients"}
        assert set(DEVICES) | links <= there
        assert ("cpu → cuda:0 inputs" in there) == (name == "measured")
    used = {(event["pid"], event["tid"]) for event in trace if event["ph"] != "M"}
    assert used == set(threads)


def test_slices_have_the_times_of_the_timelines_in_microseconds(
    trace: list[dict[str, Any]],
) -> None:
    processes = _named(trace, "process_name")
    for process, rows in (("measured", _measured()), ("predicted", _rows())):
        slices = [e for e in trace if e["ph"] == "X" and processes[e["pid"]] == process]
        given = sorted((1e3 * row.start_ms, 1e3 * (row.end_ms - row.start_ms)) for row in rows)
        for (start, duration), (ts, dur) in zip(
            given, sorted((e["ts"], e["dur"]) for e in slices), strict=True
        ):
            assert (ts, dur) == pytest.approx((start, duration))


def test_slices_of_a_thread_do_not_overlap(trace: list[dict[str, Any]]) -> None:
    by_thread = defaultdict(list)
    for event in trace:
        if event["ph"] == "X":
            by_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_thread.values():
        for (_, end), (start, _) in pairwise(sorted(spans)):
            assert start >= end - 1e-6


def test_every_arrow_has_one_start_and_one_end_and_runs_forwards_in_one_process(
    trace: list[dict[str, Any]],
) -> None:
    arrows = defaultdict(list)
    for event in trace:
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
    assert len(arrows) == sum(e["ph"] == "X" and e["cat"] in _TRANSFERS for e in trace)
    for events in arrows.values():
        assert "".join(event["ph"] for event in events) in ("sf", "stf")
        assert len({(event["pid"], event["name"], event["cat"]) for event in events}) == 1
        assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)


_TRANSFERS = ("inputs", "values", "gradients", "results")


def test_arrows_stand_on_the_passes_that_make_and_read_what_a_transfer_carries(
    trace: list[dict[str, Any]],
) -> None:
    slices = [event for event in trace if event["ph"] == "X"]

    def under(event: dict[str, Any]) -> dict[str, Any]:
        (found,) = [
            item
            for item in slices
            if (item["pid"], item["tid"]) == (event["pid"], event["tid"])
            and item["ts"] <= event["ts"] <= item["ts"] + item["dur"]
        ]
        return found

    arrows = defaultdict(list)
    for event in trace:
        if event["ph"] in "stf":
            arrows[event["id"]].append(under(event))
    for stations in arrows.values():
        (carried,) = [item for item in stations if item["cat"] in _TRANSFERS]
        passes = [item for item in stations if item is not carried]
        phase = "backward" if carried["cat"] == "gradients" else "forward"
        assert {item["cat"] for item in passes} == {phase}
        ends = [carried["args"]["stage"], carried["args"]["to stage"]]
        assert [item["args"]["stage"] for item in passes] == [
            stage for stage in ends if stage is not None
        ]
        assert {item["args"]["micro-batch"] for item in stations} == {
            carried["args"]["micro-batch"]
        }


def test_without_a_prediction_there_is_one_process(tmp_path: Path) -> None:
    Measurement("a step", DEVICES, _measured()).save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert list(_named(events, "process_name").values()) == ["measured"]


def test_the_table_has_busy_and_idle_of_each_device_measured_and_predicted() -> None:
    measurement = Measurement("a step", DEVICES, _measured(), _rows(), ("a note",))
    predicted = simulate(
        Pipeline(
            (0, 1, 2),
            (1.0, 2.0, 1.5),
            (2.0, 3.0, 2.5),
            (1.0, 1.5, 1.25),
            (Transfer(0, 1, 0.5, 0.5), Transfer(0, 2, 0.25, 0.25), Transfer(1, 2, 0.5, 0.5)),
        ),
        plan("1f1b", (0, 1, 2), 3),
    )
    assert measurement.predicted_ms == pytest.approx(predicted.step_ms)
    assert measurement.measured_ms == pytest.approx(1.5 * predicted.step_ms)
    for index, device in enumerate(DEVICES):
        assert measurement.busy_ms(device, predicted=True) == pytest.approx(
            predicted.busy_ms[index]
        )
        assert measurement.busy_ms(device) == pytest.approx(1.5 * predicted.busy_ms[index])
    lines = measurement.table().splitlines()
    line = next(line for line in lines if "cuda:1" in line)
    # 3 (2 + 3), and 1.5 times that
    assert "22.50 ms" in line and "15.00 ms" in line and "1.50" in line
    assert lines[0].startswith("a step") and "a note" in lines


def test_without_a_prediction_the_table_has_no_column_of_it() -> None:
    text = Measurement("a step", DEVICES, _measured()).table()
    assert "busy" in text and "predicted" not in text


def test_rows_set_each_pass_beside_its_prediction() -> None:
    measurement = Measurement("a step", DEVICES, _measured(), _rows())
    assert len(measurement.rows) == 3 * 3 * 2
    for row in measurement.rows:
        assert row.predicted_start_ms is not None and row.predicted_end_ms is not None
        assert row.end_ms - row.start_ms == pytest.approx(
            1.5 * (row.predicted_end_ms - row.predicted_start_ms)
        )
    alone = Measurement("a step", DEVICES, _measured()).rows
    assert {row.predicted_start_ms for row in alone} == {None}
