"""The service's benchmark at its shortest: what it looks for is not there, and would be found."""

from __future__ import annotations

import importlib
from itertools import islice
from pathlib import Path

import pytest
from fastapi import FastAPI

from placer_server.app import background
from placer_server.observability.metrics import Metrics
from placer_server.problem import MAX_BYTES, Problem
from placer_server.serving import serve_in_thread
from placer_server.settings import Settings
from placer_server.web.validation import check, split

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


@pytest.fixture
def part(monkeypatch):
    """A module of the benchmark by its name."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.service.{name}")


def test_schemathesis_finds_nothing(part):
    pytest.importorskip(
        "schemathesis", reason="schemathesis is not installed: pip install 'torch-placer[test]'"
    )
    settings = Settings(port=0, database=":memory:", workers=1, default_wait_s=1, log_level="error")
    with background(settings) as url:
        found = part("contract").check(url, seconds=6, examples=3, phases="coverage")
    assert found.cases > 5
    assert not found.findings, found.log


def test_schemathesis_finds_what_breaks_the_document(part):
    pytest.importorskip(
        "schemathesis", reason="schemathesis is not installed: pip install 'torch-placer[test]'"
    )
    app = FastAPI()
    app.state.metrics = Metrics()

    @app.get("/number", response_model=None)
    def number(value: int = 0) -> str:
        return str(1 // value)

    with serve_in_thread(app, Settings(port=0, log_level="critical")) as url:
        assert part("contract").check(url, seconds=6, examples=5, phases="coverage").findings


def test_hostile_bodies_are_questions_or_small_problems(part):
    refused = 0
    for _, body in islice(part("bodies").bodies(seed=5), 4000):
        for read in (check, split):
            try:
                read(body)
            except Problem as problem:
                refused += 1
                assert problem.status < 500
                assert len(problem.content()) <= MAX_BYTES
    assert refused > 4000  # most are hostile indeed


def test_a_running_service_answers_hostile_bodies_without_5xx(part):
    found = part("hostile").send(250, seed=1)
    assert (found.sent, found.failures) == (250, 0)
    assert 0 < found.largest_bytes <= MAX_BYTES


def test_the_fuzzer_finds_nothing_in_a_few_thousand_bodies(part):
    pytest.importorskip(
        "atheris", reason="atheris is not installed: pip install 'torch-placer[test]'"
    )
    runs, findings = part("hostile").fuzz(3000)
    assert runs >= 3000
    assert findings == 0


def test_every_job_of_a_short_soak_is_answered_once(part):
    found = part("soak").soak(3.0)
    assert found.requests > 10
    assert found.accepted > 0
    assert (found.unanswered, found.failures) == (0, 0)


def test_calls_of_the_client_come_through_a_faulty_network_or_say_why(part):
    settings = Settings(
        port=0, database=":memory:", workers=1, queue=16, log_level="error", stop_grace_s=1.0
    )
    with background(settings) as url:
        caller = part("network").Caller(int(url.rpartition(":")[2]), seed=3)
        for _ in range(5):
            caller.call()
        assert caller.answered > 0
        assert (caller.unclear, caller.twice) == (0, 0)
        caller._through(lambda client: bool(client.health() and client.health()), once="GET ")
        caller._through(lambda client: 1 / 0)
    assert (caller.unclear, caller.twice) == (1, 1)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("a clock that jumps a day ahead and two back, 90 jobs", "faults"),
        ("300 calls of the client", "network"),
    ],
)
def test_a_row_is_known_to_be_of_its_part(part, case, name):
    service = importlib.import_module(part("hostile").__package__)
    assert service.part_of(case) == name


def test_the_parts_that_are_chosen_are_measured_and_the_rows_of_the_others_kept(
    part, monkeypatch, tmp_path
):
    service, record = part("hostile").__package__, importlib.import_module("benchmarks.record")
    service = importlib.import_module(service)
    every = {
        "rates": "placer serve",
        "faults": "kill -9 of workers, 5 jobs",
        "soak": "60 s of mixed load, 9 requests",
    }
    record.write("service", [record.row(case, "m", "", 1) for case in every.values()], tmp_path)
    monkeypatch.setenv("PLACER_SERVICE_CASES", "soak")
    monkeypatch.setitem(
        service.PARTS, "soak", lambda: [record.row("1800 s of mixed load, 10 requests", "m", "", 2)]
    )
    (rows,) = service.progress(tmp_path)
    assert [(row["case"], row["value"]) for row in rows] == [
        ("placer serve", 1),
        ("kill -9 of workers, 5 jobs", 1),
        ("1800 s of mixed load, 10 requests", 2),
    ]


def test_a_part_that_there_is_not_is_named(part, monkeypatch):
    service = importlib.import_module(part("hostile").__package__)
    monkeypatch.setenv("PLACER_SERVICE_CASES", "soak,rain")
    with pytest.raises(ValueError, match="rain"):
        next(service.progress())


def test_what_a_full_disk_refuses_is_not_accepted_and_what_is_accepted_is_answered(part):
    found = part("faults").disk_full()
    assert found.accepted > 10
    assert found.unanswered == 0
