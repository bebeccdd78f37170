from __future__ import annotations

from collections.abc import Iterator

import pytest
from warm_python import WarmPython


@pytest.fixture(scope="session")
def python() -> Iterator[str]:
    """The path of a Python that has imported torch already; what users start first is tested with a
    cold one too."""
    warm = WarmPython()
    yield warm.path
    warm.close()
