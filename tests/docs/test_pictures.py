"""The pictures of README and the documentation."""

from __future__ import annotations

import importlib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from placer.schema import Profile

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("draw_pictures")


def test_the_picture_of_the_schedules_is_the_present_one(pictures: Any) -> None:
    assert (DOCS / "pictures" / "schedules.svg").read_text() == pictures.schedules_picture(), (
        "run: make pictures"
    )


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
