from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pretrained_folders import saved


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a tiny Llama, with a tokenizer."""
    return saved("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of measurements for the tests of this folder, which are of few models."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True, scope="module")
def shared_measurements(cache_folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLACER_CACHE", str(cache_folder))
        yield
