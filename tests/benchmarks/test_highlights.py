"""The few results that README and the documentation show."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def highlights(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    return importlib.import_module("benchmarks.highlights")


def test_of_several_peers_the_best_is_shown_whichever_way_the_unit_goes(highlights: Any) -> None:
    assert (
        highlights._best_peer(
            {"unit": "1/s", "measure": "rate", "peers": {"a": 5.0, "b": 100.0, "c": None}}
        )
        == "100 1/s (b)"
    )
    assert (
        highlights._best_peer({"unit": "ms", "measure": "time", "peers": {"a": 5.0, "b": 100.0}})
        == "5 ms (a)"
    )
    ratio = {"unit": "x", "measure": "speed-up", "peers": {"a": 0.9, "b": 1.1}}
    assert highlights._best_peer(ratio) == "1.1 x (b)"
    assert highlights._best_peer({"unit": "x", "measure": "speed-up", "peers": {}}) == ""
    own = {"unit": "ms", "measure": "time", "peers": {"ours, compiled": 1.0, "a": 5.0}}
    assert highlights._best_peer(own) == "5 ms (a)"


@pytest.mark.parametrize(
    "text",
    ["no markers", "<!-- highlights --> begun", "<!-- end highlights --><!-- highlights -->"],
)
def test_a_text_without_its_markers_is_refused_and_not_cut_off(highlights: Any, text: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        highlights.renewed(text, "a table")


def test_a_row_that_is_not_there_is_named(
    highlights: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "made.json").write_text(json.dumps({"rows": []}))
    monkeypatch.setattr(highlights, "ROWS", [("made", "a case", "a measure")])
    with pytest.raises(ValueError, match=r"no made\*\.json has a row 'a case', 'a measure'"):
        highlights.tables(tmp_path)


def test_of_several_machines_the_latest_measurement_is_shown_with_its_machine_and_date(
    highlights: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write(name: str, date: str, gpus: int, value: float, **figures: str) -> None:
        row = highlights.record.row(
            "a case", "time", "s", value, target=9.0, figures=figures or None
        )
        content = {"machine": {"gpus": ["H100"] * gpus, "cores": 2}, "date": date, "rows": [row]}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))

    write("made", "2026-01-01", 0, 1.0)
    write("made-2xH100", "2026-01-03", 2, 2.0, measured="2026-01-02")
    write("made-4xH100", "2026-01-01", 4, 3.0)
    monkeypatch.setattr(highlights, "ROWS", [("made", "a case", "time")])
    monkeypatch.setattr(highlights, "IF_MEASURED", [("absent", "a case", "time")])
    table = highlights.tables(tmp_path)
    assert "| a case | time | 2 s | 9 s |  |  | 2 x H100 | 2026-01-02 |" in table
    assert "absent" not in table


def test_the_short_table_shows_a_row_under_its_short_name(
    highlights: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = highlights.record.row("a long case", "time", "s", 2.0, peers={"other": 1.0})
    content = {"machine": {"gpus": ["H100"], "cores": 2}, "date": "2026-01-01", "rows": [row]}
    (tmp_path / "made.json").write_text(json.dumps(content))
    monkeypatch.setattr(highlights, "SHORT_ROWS", [("short", ("made", "a long case", "time"))])
    assert "| short | 2 s | 1 s (other) | 1 x H100 |" in highlights.short_table(tmp_path)
    monkeypatch.setattr(highlights, "SHORT_ROWS", [("short", ("made", "another case", "time"))])
    with pytest.raises(ValueError, match="'another case', 'time'; correct SHORT_ROWS"):
        highlights.short_table(tmp_path)


def test_the_texts_around_the_markers_stay(highlights: Any) -> None:
    text = "before <!-- highlights -->old<!-- end highlights --> after"
    assert (
        highlights.renewed(text, "new")
        == "before <!-- highlights -->\nnew\n<!-- end highlights --> after"
    )
