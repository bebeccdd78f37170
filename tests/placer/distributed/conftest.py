from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Four processes, joined by gloo."""
    pool = RankPool(4, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
