from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from placer.errors import InputError
from placer.profiler.cache.file_cache import Cache, key_of, open_cache


def test_what_is_written_is_read(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "new" / "folder")
    assert cache.read("layers", "abc") is None
    cache.write("layers", "abc", {"a": [1, 2.5, None]})
    assert cache.read("layers", "abc") == {"a": [1, 2.5, None]}
    assert cache.read("links", "abc") is None


def test_an_entry_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    cache.write("layers", "abc", 1)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            cache.write("layers", "abc", 2)
    assert cache.read("layers", "abc") == 1
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["abc.json"]


def test_a_key_does_not_depend_on_the_order_of_its_facts() -> None:
    assert key_of(a=1, b={"c": 2, "d": 3}) == key_of(b={"d": 3, "c": 2}, a=1)
    assert key_of(a=1, b=2) != key_of(a=2, b=1)


def test_clearing_leaves_other_files_alone(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for key in ("aa1", "aa2", "bb1"):
        cache.write("links", key, {})
    (tmp_path / "notes.json").write_text("mine")
    (tmp_path / "links" / "mine.txt").write_text("mine")
    assert cache.size()[0] == 3
    assert cache.clear() == 3
    assert cache.size() == (0, 0)
    assert (
        (tmp_path / "notes.json").read_text()
        == (tmp_path / "links" / "mine.txt").read_text()
        == "mine"
    )


def test_only_what_is_older_is_cleared_where_that_is_asked_for(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.write("layers", "old", 1)
    cache.write("layers", "new", 1)
    long_ago = time.time() - 10 * 86_400
    os.utime(next(path for path in cache.entries() if path.stem == "old"), (long_ago, long_ago))
    assert cache.clear(older_than_days=5) == 1
    assert [path.stem for path in cache.entries()] == ["new"]


def test_the_environment_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLACER_CACHE", str(tmp_path))
    found = open_cache(True)
    assert found is not None and found.folder == tmp_path


@pytest.mark.parametrize("off", ["", "off", "0", "No"])
def test_the_environment_turns_it_off(monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    monkeypatch.setenv("PLACER_CACHE", off)
    assert open_cache(True) is None


def test_it_is_in_the_users_cache_folder_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PLACER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = open_cache()
    assert found is not None and found.folder.name == "placer"
    if os.name == "posix" and os.uname().sysname == "Linux":
        assert found.folder == tmp_path / "placer"


def test_a_given_folder_counts_more_than_the_environment(tmp_path: Path) -> None:
    found = open_cache(tmp_path / "own")
    assert found is not None and found.folder == tmp_path / "own"


def test_what_names_no_folder_is_refused() -> None:
    with pytest.raises(
        InputError, match="cache=3: give a folder, True for the usual one, or False for none"
    ):
        open_cache(3)  # type: ignore[arg-type]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file; name a folder"):
        open_cache(tmp_path / "file")
