"""What all tests share: no cache of measurements; tests marked ``gpu`` are skipped, visibly, without CUDA devices."""

from __future__ import annotations

import os

import pytest

os.environ["PLACER_CACHE"] = "off"  # for the processes that tests start, too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs CUDA devices"))
