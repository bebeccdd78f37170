"""Workflows, templates, hooks and metadata of the project: readable, in agreement, and with few
permissions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from documentation import ROOT
from project_files import WORKFLOWS, parsed, project, workflow

GITHUB = ROOT / ".github"
EVERY_WORKFLOW = sorted(WORKFLOWS.iterdir())
EVERY_JOB = [
    pytest.param(job, id=f"{path.stem}-{name}")
    for path in EVERY_WORKFLOW
    for name, job in workflow(path)["jobs"].items()
]
PERMISSIONS = {
    ("docs.yml", "deploy"): {"pages": "write", "id-token": "write"},
    ("release.yml", "publish"): {"id-token": "write"},
}
"""The jobs that may do more than read the repository, and what they may do."""


def steps(job: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = job["steps"]
    return found


def test_there_are_workflows_for_tests_documentation_and_release() -> None:
    assert [path.name for path in EVERY_WORKFLOW] == ["docs.yml", "release.yml", "tests.yml"]


@pytest.mark.parametrize("path", EVERY_WORKFLOW, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_unless_a_job_needs_more(path: Path) -> None:
    content = workflow(path)
    assert content["permissions"] == {"contents": "read"}
    granted = {
        (path.name, name): job["permissions"]
        for name, job in content["jobs"].items()
        if "permissions" in job
    }
    assert granted == {key: value for key, value in PERMISSIONS.items() if key[0] == path.name}


@pytest.mark.parametrize("path", EVERY_WORKFLOW, ids=lambda path: path.stem)
def test_a_workflow_groups_its_runs_and_uses_no_secret(path: Path) -> None:
    assert "github.ref" in workflow(path)["concurrency"]["group"]
    assert "secrets." not in path.read_text()


@pytest.mark.parametrize("job", EVERY_JOB)
def test_a_job_ends_in_time_and_pins_its_actions(job: dict[str, Any]) -> None:
    assert 0 < job["timeout-minutes"] <= 90
    for step in steps(job):
        assert re.fullmatch(
            r"[\w.-]+/[\w.-]+@(v\d+|release/v\d+)", step.get("uses", "none/none@v0")
        ), step


@pytest.mark.parametrize("job", EVERY_JOB)
def test_a_job_leaves_no_token_in_its_checkout(job: dict[str, Any]) -> None:
    checkouts = [
        step for step in steps(job) if step.get("uses", "").startswith("actions/checkout@")
    ]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


@pytest.mark.parametrize("job", EVERY_JOB)
def test_a_job_runs_targets_of_make_and_files_that_exist(job: dict[str, Any]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = "\n".join(step.get("run", "") for step in steps(job))
    assert set(re.findall(r"^make (?:-C \S+ )?([a-z-]+)", commands, re.MULTILINE)) <= targets
    assert all(
        (ROOT / name).exists() for name in re.findall(r"^(\.ci/\w+)", commands, re.MULTILINE)
    )


def test_a_release_is_built_and_tested_before_it_is_published() -> None:
    content = workflow(WORKFLOWS / "release.yml")
    assert content["on"] == {"push": {"tags": ["v*"]}}
    build, publish = content["jobs"]["build"], content["jobs"]["publish"]
    assert publish["needs"] == "build"
    assert publish["environment"] == "pypi"
    commands = [step["run"] for step in steps(build) if "run" in step]
    assert "make dist" in commands and 'make -C "$RUNNER_TEMP/sdist" test' in commands[-1]


def test_the_citation_agrees_with_the_metadata() -> None:
    citation, metadata = parsed(ROOT / "CITATION.cff"), project()
    assert (
        citation["cff-version"] == "1.2.0" and citation["message"] and citation["title"] == "Placer"
    )
    for key in ("version", "license", "authors", "keywords"):
        assert citation[key] == metadata[key], key


@pytest.mark.parametrize(
    "path", sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.stem
)
def test_an_issue_form_has_a_name_and_fields_with_labels(path: Path) -> None:
    form = parsed(path)
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert fields and all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)


def commit_subject() -> re.Pattern[str]:
    hooks = {
        hook["id"]: hook
        for repo in parsed(ROOT / ".pre-commit-config.yaml")["repos"]
        for hook in repo["hooks"]
    }
    return re.compile(hooks["commit-subject"]["entry"], re.MULTILINE)


def test_hooks_run_the_tools_of_the_environment() -> None:
    hooks = [
        hook for repo in parsed(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]
    ]
    commands = {hook["entry"] for hook in hooks if hook["language"] == "system"}
    assert commands == {
        ".venv/bin/ruff check --fix",
        ".venv/bin/ruff format",
        ".venv/bin/codespell",
    }


@pytest.mark.parametrize(("length", "refused"), [(1, False), (72, False), (73, True), (200, True)])
def test_the_hook_refuses_commit_subjects_over_72_characters(length: int, refused: bool) -> None:
    message = "x" * length + "\n\n" + "A body may have longer lines. " * 5 + "\n"
    assert bool(commit_subject().search(message)) == refused


def test_the_project_has_the_files_that_contributors_look_for() -> None:
    names = (
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CODE_OF_CONDUCT.md",
        "CITATION.cff",
        "LICENSE",
        "CHANGELOG.md",
    )
    assert [name for name in names if not (ROOT / name).is_file()] == []
    assert (GITHUB / "PULL_REQUEST_TEMPLATE.md").is_file()


def test_every_yaml_file_of_the_project_can_be_read() -> None:
    for path in [ROOT / ".pre-commit-config.yaml", *GITHUB.rglob("*.yml")]:
        assert isinstance(yaml.safe_load(path.read_text()), dict), path
