"""The record of integrations, and the choice of the cases that ``make test`` runs."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import covering
import pytest
import run_record
from module_hashes import Sources

ROOT = Path(__file__).parent.parent

PYPROJECT = """
[tool.setuptools]
packages = ["shop", "shop.deep"]
[tool.pytest.ini_options]
pythonpath = ["tests/helpers"]
markers = ["integration", "exhaustive", "covering"]
"""
TESTS = """
import pytest
def test_runs_in_make_test(): assert False
@pytest.mark.integration
def test_passes(): ...
@pytest.mark.exhaustive
def test_fails(): assert 1 == 2, "one is not two"
@pytest.mark.integration
def test_is_skipped(): pytest.skip("why")
"""
FILES = {
    "pyproject.toml": PYPROJECT,
    "shop/__init__.py": "",
    "shop/deep/__init__.py": "x = 1",
    "tests/shop/deep/test_deep.py": TESTS,
    "tests/shop/test_plain.py": "def test_plain(): ...",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "project"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the program that runs and checks integrations."""
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    # of the process that runs this test
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    # Importing all plugins takes half of the time of so small a run.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return importlib.import_module("integrations")


def outdated(program: Any, project: Path) -> list[str]:
    sources = Sources(project, program.MARKERS)
    return program.outdated(run_record.read(project / program.FILE), sources)


def test_a_run_records_the_tests_that_make_test_leaves_out(project: Path, program: Any) -> None:
    sources = Sources(project, program.MARKERS)
    assert outdated(program, project) == ["tests/shop/deep: has no record"]
    assert program.run(sources, sources.marked_tests, 1) == 1
    (found,) = run_record.read(project / program.FILE).values()
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert found["seconds"] > 0 and found["torch"] and found["python"]
    assert outdated(program, project) == ["tests/shop/deep: has 1 failure"]


def test_a_record_speaks_for_the_code_that_its_folder_covers(project: Path, program: Any) -> None:
    folder, sources = "tests/shop/deep", Sources(project, program.MARKERS)
    entry = {**run_record.code(folder, sources), "failed": 0}
    program.record_folder(project, folder, entry)
    assert outdated(program, project) == []
    (project / "shop/deep/__init__.py").write_text("x = 1  # as before")
    assert outdated(program, project) == []
    (project / "shop/deep/__init__.py").write_text("x = 2")
    assert outdated(program, project) == [f"{folder}: belongs to other code"]


def test_a_folder_without_such_tests_is_not_recorded(project: Path, program: Any) -> None:
    program.record_folder(project, "tests/shop", {"hash": "", "text": "", "failed": 0})
    assert outdated(program, project)[0] == (
        "tests/shop: has a record, but no such tests; remove it from tests/integration-record.json"
    )


PRODUCT = [
    {"model": model, "schedule": schedule, "chunks": chunks}
    for model, schedule, chunks in itertools.product("abc", ["1f1b", "fill-drain"], [1, True, 2])
]


def test_chosen_cases_hold_every_value_and_those_of_equal_kind_are_told_apart() -> None:
    chosen = [PRODUCT[place] for place in covering.choose(PRODUCT)]
    assert len(chosen) == 3
    for name in PRODUCT[0]:
        assert {repr(case[name]) for case in chosen} == {repr(case[name]) for case in PRODUCT}


def test_chosen_cases_hold_every_combination_of_the_named_parameters() -> None:
    chosen = [PRODUCT[place] for place in covering.choose(PRODUCT, ("model", "schedule"))]
    assert len(chosen) == 6
    assert {(case["model"], case["schedule"]) for case in chosen} == set(
        itertools.product("abc", ["1f1b", "fill-drain"])
    )


def test_a_parameter_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="'models'"):
        covering.choose(PRODUCT, ("models",))


def test_values_that_cannot_be_hashed_are_compared_by_their_text() -> None:
    assert covering.choose([{"sizes": [1]}, {"sizes": [1]}, {"sizes": [2]}]) == [0, 2]


def test_further_values_of_a_parameter_are_exhaustive_and_the_others_have_their_names() -> None:
    cases = covering.named({"one": 1, "two": 2, "pair": (3, 4)}, further=["two"])
    assert [(case.id, case.values) for case in cases] == [
        ("one", (1,)),
        ("two", (2,)),
        ("pair", (3, 4)),
    ]
    assert [[mark.name for mark in case.marks] for case in cases] == [[], ["exhaustive"], []]
    with pytest.raises(ValueError, match="'three'"):
        covering.named({"one": 1}, further=["three"])
