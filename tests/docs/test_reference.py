"""The generated sections of the reference."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from placer_server.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("write_reference")


@pytest.mark.parametrize("page", ["rest.md", "settings.md"])
def test_a_generated_section_is_the_present_one(writer: Any, page: str) -> None:
    text = (DOCS / "reference" / page).read_text()
    assert writer.with_section(text, writer.SECTIONS[page]()) == text, (
        "run: python docs/write_reference.py"
    )


def test_an_endpoint_has_its_parameters_its_body_and_its_answers(writer: Any) -> None:
    _, _, text = writer.endpoints().partition("### `POST /v1/placements`\n")
    part, _, _ = text.partition("\n### ")
    assert "| `wait` | query |" in part
    assert "Body: `PlacementRequest`." in part
    assert "200 `Placement`, 202 `Progress`" in part
    assert "429 (problem)" in part


def test_every_setting_has_a_row(writer: Any) -> None:
    rows = writer.settings().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [
        f"PLACER_{name.upper()}" for name in Settings.model_fields
    ]
    assert all(cell.strip() for row in rows for cell in row.split("|")[3:4])
