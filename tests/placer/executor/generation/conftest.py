from __future__ import annotations

from collections.abc import Iterator

import pytest

from placer.testing import logical_devices


@pytest.fixture
def two_stand_ins() -> Iterator[None]:
    """Stand-ins that refuse operations on tensors of two devices."""
    with logical_devices(2):
        yield
