"""The pictures of README and the documentation."""

from __future__ import annotations

import importlib
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from placer.schema import Profile

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("draw_pictures")


@pytest.mark.parametrize("name", ["schedules", "zero_bubble", "steps", "architecture"])
def test_a_picture_is_the_present_one(pictures: Any, name: str) -> None:
    drawn = getattr(pictures, f"{name}_picture")()
    assert (DOCS / "pictures" / f"{name}.svg").read_text() == drawn, "run: make pictures"


def packages_imported_by(folder: Path) -> set[str]:
    """Return the packages of the project that the files in a folder import, as paths."""
    text = "\n".join(path.read_text() for path in folder.rglob("*.py"))
    found = set(re.findall(r"^ *from placer(?:\.| import )(\w+)", text, re.MULTILINE))
    return {f"placer/{name}" for name in found}


def test_the_architecture_has_every_package_once(pictures: Any) -> None:
    drawn = [package.path for package in pictures.PACKAGES]
    small = {"placer/utils", "placer/zoo"}  # helpers without an interface, and example models
    folders = {f"placer/{path.parent.name}" for path in (ROOT / "placer").glob("*/__init__.py")}
    assert sorted(drawn) == sorted((folders - small) | {"client", "server"})


def test_a_package_of_the_architecture_imports_only_packages_below_it(pictures: Any) -> None:
    row_of = {package.path: package.y for package in pictures.PACKAGES}
    last = max(row_of.values())
    for path, row in row_of.items():
        imported = packages_imported_by(ROOT / path) & set(row_of) - {path}
        above = {other for other in imported if row_of[other] <= min(row, last - 1)}
        # The record of storages, in the devices, follows operations that hold a graph of their own.
        assert above <= ({"placer/capture"} if path == "placer/devices" else set()), path


@pytest.mark.integration
def test_the_picture_of_the_placement_has_every_pass_of_the_step(pictures: Any) -> None:
    profile = Profile.model_validate_json((DOCS / "pictures" / "resnet50_profile.json").read_text())
    drawn = pictures.placement_picture(profile)
    names = [
        title.text or ""
        for title in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}title")
    ]
    devices = [device.name for device in profile.cluster.devices]
    for device in devices:
        forward = [name for name in names if name.startswith(f"{device}: forward")]
        assert [name.split()[2] for name in forward] == [str(number) for number in range(1, 9)]
    assert f"ResNet-50 on {len(devices)} devices" in drawn


def test_the_pictures_load_nothing(pictures: Any) -> None:
    for path in (DOCS / "pictures").glob("*.svg"):
        text = path.read_text()
        assert text.count("http") == text.count('xmlns="http://www.w3.org/2000/svg"')
