from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from placer.utils.atomic_files import write_whole


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may have more than 10 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    # it was opened, and so emptied, before there was a byte to write
    path = tmp_path / "placement.json"
    path.write_text("before")
    with full_disk(), pytest.raises(OSError, match="too large"):
        write_whole(path, "x" * 100)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("folder", ["nowhere", "file"])
def test_a_folder_that_is_not_there_is_told_with_the_file_that_was_asked_for(
    tmp_path: Path, folder: str
) -> None:
    # the name told was that of the part beside it, which nobody had given
    (tmp_path / "file").touch()
    path = tmp_path / folder / "trace.json"
    with pytest.raises(OSError, match=r"trace\.json") as told:
        write_whole(path, "text")
    assert told.value.filename == str(path)


def test_a_file_keeps_its_permissions_and_a_new_one_has_those_of_others(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in ("old", "new", "other"))
    old.touch(0o640)
    write_whole(old, "after")
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    write_whole(new, "after")
    other.touch()
    assert new.stat().st_mode == other.stat().st_mode


def test_a_link_stays_one(tmp_path: Path) -> None:
    link, path = tmp_path / "link", tmp_path / "folder" / "file"
    path.parent.mkdir()
    link.symlink_to(path)
    for text in ("first", "second"):  # of which the first makes the file
        write_whole(link, text)
        assert link.is_symlink()
        assert path.read_text() == text


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "text")
    reader.join()
    assert read == ["text"]


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EACCES, errno.EROFS])
def test_a_file_that_nothing_can_be_moved_to_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "mounted"
    path.write_text("before")

    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refused)
    write_whole(path, "after")
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_may_not_be_written_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "protected"
    path.write_text("before")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may always
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("it is replaced"))
    write_whole(path, "after")
