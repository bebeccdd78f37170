"""The check that pages load nothing from other hosts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    return importlib.import_module("check_offline")


@pytest.mark.parametrize(
    "element",
    [
        '<script src="https://host/x.js"></script>',
        '<script src="//host/x.js"></script>',
        '<link rel="stylesheet" href="https://host/x.css">',
        '<link href="https://host" rel="preconnect">',
        '<img src="http://host/x.png">',
        '<img srcset="https://host/x.png 2x">',
        '<iframe src="https://host"></iframe>',
        "<style>@font-face{src:url(https://host/x.woff2)}</style>",
        '<style>@import "https://host/x.css"</style>',
        '<p style="background:url(//host/x.png)">',
        '<pre class="mermaid">graph TD</pre>',
    ],
)
def test_an_address_that_a_browser_loads_by_itself_is_found(check: Any, element: str) -> None:
    (address,) = check.loads(f"<html><body>{element}</body></html>")
    assert "//" in address


@pytest.mark.parametrize(
    "element",
    [
        '<a href="https://host">a link</a>',
        '<link rel="canonical" href="https://host/page.html">',
        '<script src="assets/x.js"></script>',
        '<img src="../pictures/x.svg">',
        "<code>url(https://host/x.png)</code>",
    ],
)
def test_a_link_or_a_file_of_the_site_is_not_found(check: Any, element: str) -> None:
    assert check.loads(f"<html><body>{element}</body></html>") == []


def test_the_check_fails_for_a_style_sheet_and_names_it(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "index.html").write_text("<html></html>")
    monkeypatch.setattr(sys, "argv", ["check_offline.py", str(tmp_path)])
    assert check.main() == 0
    (tmp_path / "x.css").write_text("body{background:url('https://host/x.png')}")
    assert check.main() == 1
    assert "x.css loads https://host/x.png" in capsys.readouterr().err


def test_a_folder_without_a_site_is_refused(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["check_offline.py", str(tmp_path)])
    assert check.main() == 2
