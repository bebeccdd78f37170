"""The one form of benchmark results, and the tables made of it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from placer.errors import InputError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def record():
    spec = importlib.util.spec_from_file_location("record", ROOT / "benchmarks" / "record.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def written(record, tmp_path):
    rows = [
        record.row("a", "time", "s", 1.5, spread=(1.0, 2.0), target=2.0, peers={"other": 3.0}),
        record.row("b", "rate", "1/s", 10.0, target=20.0, smaller_is_better=False),
        record.row("c", "time", "s", None, target=1.0),
    ]
    record.write("made", rows, tmp_path)
    return tmp_path


def test_the_tables_are_made_of_the_results():
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks", "tables", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr


def test_results_name_machine_versions_command_and_date(written):
    content = json.loads((written / "made.json").read_text())
    assert list(content) == ["machine", "versions", "command", "date", "rows"]
    assert content["command"] == "python -m benchmarks made"
    assert content["machine"]["cores"] >= 1 and "ortools" in content["versions"]


def test_the_command_has_what_the_environment_asked_for(record, tmp_path, monkeypatch):
    monkeypatch.setenv("PLACER_MADE_CASES", "one,two words")
    monkeypatch.setenv("PLACER_OTHER_CASES", "three")
    record.write("made", [], tmp_path)
    content = json.loads((tmp_path / "made.json").read_text())
    assert content["command"] == "PLACER_MADE_CASES='one,two words' python -m benchmarks made"


def test_of_results_made_in_parts_every_command_is_named_whose_rows_are_still_there(
    record, tmp_path, monkeypatch
):
    rows = {
        case: record.row(case, "time", "s", value)
        for case, value in {"one": 1.0, "two": 2.0}.items()
    }

    def run(*cases: str, again: float = 0.0) -> str:
        monkeypatch.setenv("PLACER_MADE_CASES", ",".join(cases))
        monkeypatch.setenv("PLACER_MADE_BUDGET_S", "5")
        rows.update(
            {case: record.row(case, "time", "s", rows[case]["value"] + again) for case in cases}
        )
        record.write("made", rows.values(), tmp_path)
        return json.loads((tmp_path / "made.json").read_text())["command"]

    assert run("one") == "PLACER_MADE_CASES=one python -m benchmarks made"
    assert run("two", again=1.0).split("; ") == [
        "PLACER_MADE_CASES=one python -m benchmarks made",
        "PLACER_MADE_CASES=two python -m benchmarks made",
    ]
    assert "; `python -m benchmarks made`, in 2 parts." in record.table("made", tmp_path)
    (tmp_path / "some.json").write_text((tmp_path / "made.json").read_text())
    assert "; `python -m benchmarks made`, in 2 parts." in record.table("some", tmp_path)
    assert run("one", "two", again=1.0) == "PLACER_MADE_CASES=one,two python -m benchmarks made"


@pytest.mark.parametrize(
    ("gpus", "name"),
    [
        ([], "made"),
        (["NVIDIA H100 80GB HBM3"] * 4, "made-4xH100"),
        (["NVIDIA H200"] * 2, "made-2xH200"),
        (["NVIDIA A100-SXM4-80GB"], "made-1xA100"),
        (["NVIDIA GeForce RTX 4090"], "made-1x4090"),
        (["Tesla T4"], "made-1xT4"),
        (["Unknown"], "made-1xGPU"),
    ],
)
def test_on_gpus_results_are_named_after_the_machine(record, tmp_path, monkeypatch, gpus, name):
    monkeypatch.setattr(record, "machine", lambda: {"cpu": "", "cores": 2, "gpus": gpus})
    assert record.write("made", [], tmp_path) == tmp_path / f"{name}.json"


def test_rows_that_are_not_measured_again_keep_their_date(record, tmp_path):
    old, new = (record.row(case, "time", "s", 1.0) for case in ("old", "new"))
    path = record.write("made", [old, new], tmp_path)
    assert all(record.FIGURES not in row for row in json.loads(path.read_text())["rows"])
    today = json.loads(path.read_text())["date"]
    path.write_text(path.read_text().replace(today, "2000-01-01"))
    for _ in range(2):  # also where the rows that are kept have a date each
        kept = [row for row in record.known("made", tmp_path) if row["case"] == "old"]
        record.write("made", [*kept, new], tmp_path)
        rows = json.loads(path.read_text())["rows"]
        assert [row[record.FIGURES][record.MEASURED] for row in rows] == ["2000-01-01", today]
    assert "| old | time | 1 s | 2000-01-01 |" in record.table("made", tmp_path, whole=True)


def test_a_target_is_met_from_its_side_and_never_without_a_value(written):
    rows = json.loads((written / "made.json").read_text())["rows"]
    assert [row["met"] for row in rows] == [True, False, False]


def test_a_row_of_another_form_is_refused(record, tmp_path):
    with pytest.raises(ValueError, match="'a' has the fields"):
        record.write("made", [{"case": "a", "value": 1}], tmp_path)


def test_a_table_shows_value_spread_target_and_peers(record, written):
    assert "| a | time | 1.5 s (1-2) | 2 s | yes | 3 s |" in record.table("made", written)
    assert "| c | time | - | 1 s | no |  |" in record.table("made", written)


def test_what_nothing_was_asked_for_is_counted_and_shown_when_the_whole_is_wanted(record, tmp_path):
    record.write(
        "made",
        [record.row("a", "time", "s", 1.5, target=2.0), record.row("b", "count", "", 3)],
        tmp_path,
    )
    assert "| b |" not in record.table("made", tmp_path)
    assert "in `benchmarks/results/made.json`: 1 more." in record.table("made", tmp_path)
    assert "| b | count | 3 |" in record.table("made", tmp_path, whole=True)
    assert "more" not in record.table("made", tmp_path, whole=True)


def test_figures_are_columns_beside_the_value(record, tmp_path):
    rows = [
        record.row("a", "time", "s", 1.5, figures={"gap, %": 2.5, "asked": "gap <= 3%"}, met=True)
    ]
    record.write("made", rows, tmp_path)
    table = record.table("made", tmp_path)
    assert "| value | gap, % | asked |" in table
    assert "| 1.5 s | 2.5 | gap <= 3% |" in table


def test_only_what_is_between_markers_is_rewritten(record, written):
    text = "before\n<!-- table made -->\nold\n<!-- end table made -->\nafter"
    renewed = record.with_tables(text, written)
    assert renewed.startswith("before\n") and renewed.endswith("\nafter") and "old" not in renewed
    assert record.with_tables(renewed, written) == renewed


def test_a_table_without_results_is_left_as_it_is(record, written):
    text = "<!-- table other -->\nnot measured\n<!-- end table other -->"
    assert record.with_tables(text, written) == text


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.name
)
def test_committed_results_have_the_one_form(record, path):
    content = json.loads(path.read_text())
    assert set(content) == {"machine", "versions", "command", "date", "rows"}
    assert all(set(row) - {record.FIGURES} == set(record.FIELDS) for row in content["rows"])


def test_seconds_of_the_environment_are_a_number(record, monkeypatch):
    assert record.seconds("PLACER_MADE_BUDGET_S", 4.0) == 4.0
    monkeypatch.setenv("PLACER_MADE_BUDGET_S", "2.5")
    assert record.seconds("PLACER_MADE_BUDGET_S", 4.0) == 2.5
    monkeypatch.setenv("PLACER_MADE_BUDGET_S", "abc")
    with pytest.raises(InputError, match="PLACER_MADE_BUDGET_S is 'abc'; give a number of seconds"):
        record.seconds("PLACER_MADE_BUDGET_S", 4.0)
