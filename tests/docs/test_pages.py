"""Links, names and the structure of README and the documentation."""

from __future__ import annotations

import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from documentation import PAGES, README, ROOT, anchors, blocks, links, prose

import placer
from placer.cli.command import app
from placer_server.app import create_app
from placer_server.settings import Settings

COMMUNITY = tuple(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"))
LINKED = (*PAGES, *COMMUNITY, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md")
WRITTEN_BY_COMMANDS = {"tests/gpu-record.json", "tests/integration-record.json"}
"""Files that a page may name before a command has written them."""
MOST_README_WORDS = 700
MOST_CHANGELOG_WORDS = 800


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name_of(page)} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES[1:], ids=name_of)
def test_pages_link_only_to_pages_of_the_site(page: Path) -> None:
    for target in links(page):
        linked = (page.parent / target.partition("#")[0]).resolve()
        assert linked.is_relative_to(ROOT / "docs"), (
            f"{name_of(page)} links to {target}, which the site does not have"
        )


@pytest.mark.parametrize("page", (*PAGES, *COMMUNITY), ids=name_of)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    folders = "benchmarks|client|docker|docs|examples|placer|server|tests"
    for path in re.findall(rf"[` ]((?:{folders})/[\w./-]*\w/?)", prose(page)):
        assert path in WRITTEN_BY_COMMANDS or (ROOT / path).exists(), (
            f"{name_of(page)} names {path}"
        )


@pytest.mark.parametrize("page", (*PAGES, *COMMUNITY), ids=name_of)
def test_every_target_of_make_that_a_page_names_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE)) <= targets


def test_the_navigation_has_every_page_once() -> None:
    def flat(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        values = entry.values() if isinstance(entry, dict) else entry
        return [page for value in values for page in flat(value)]  # type: ignore[attr-defined]

    shown = flat(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(shown) == [str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]]


def test_every_block_names_its_language() -> None:
    assert [block.place for block in blocks() if block.kind not in ("python", "sh", "text")] == []


def test_every_fence_is_part_of_a_block() -> None:
    assert [name_of(page) for page in PAGES if "```" in prose(page)] == []


@cache
def documented() -> list[object]:
    """Return what mkdocstrings is asked for, and the public members of each module among it."""
    paths = [
        path
        for page in PAGES
        for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    found = [pkgutil.resolve_name(path) for path in paths]
    return found + [
        getattr(given, name) for given in found for name in getattr(given, "__all__", ())
    ]


@pytest.mark.parametrize("name", sorted(placer.__all__))
def test_the_reference_describes_everything_public(name: str) -> None:
    assert any(getattr(placer, name) is given for given in documented())


def test_the_documentation_names_every_command() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    names = [command.name or command.callback.__name__ for command in app.registered_commands]  # type: ignore[union-attr]
    assert names and [name for name in names if f"| `placer {name}" not in page] == []


def test_the_documentation_names_every_endpoint_and_setting() -> None:
    reference = ROOT / "docs" / "reference"
    paths = create_app(Settings(database=":memory:")).openapi()["paths"]
    endpoints = [
        f"{method.upper()} {path}" for path, methods in paths.items() for method in methods
    ]
    page = (reference / "rest.md").read_text()
    assert [endpoint for endpoint in endpoints if f"`{endpoint}" not in page] == []
    assert "::: placer_server.settings.Settings" in (reference / "settings.md").read_text()
    assert [
        name
        for name in Settings.model_fields
        if f"\n    {name}: " not in (inspect.getdoc(Settings) or "")
    ] == []


def test_readme_and_changelog_stay_short() -> None:
    assert len(README.read_text().split()) <= MOST_README_WORDS
    assert len((ROOT / "CHANGELOG.md").read_text().split()) <= MOST_CHANGELOG_WORDS
