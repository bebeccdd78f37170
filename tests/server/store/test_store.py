from __future__ import annotations

import sqlite3

import pytest

from placer_server.store import store as module
from placer_server.store.database import StoreError
from placer_server.store.store import Answer, Store, StoredQuestion

FEASIBLE, OPTIMAL = (
    b'{"status": "%s", "objective_value": %%d}' % status for status in (b"feasible", b"optimal")
)
UNKNOWN = b'{"status": "unknown"}'


def answer(text=b"{}", complete=True):
    return Answer(text, complete, "1")


def full(work):
    raise StoreError("the disk is full")


def test_what_was_put_is_got_by_the_next_store_of_the_file(database):
    first = Store(database, keep=10)
    first.put("a", answer(b'{"x": 1}', complete=False))
    first.close()
    assert Store(database, keep=10).get("a") == answer(b'{"x": 1}', complete=False)


def test_what_was_never_put_is_none(database):
    assert Store(database, keep=10).get("a") is None


def test_the_oldest_answers_go_when_there_are_more_than_keep(database):
    store = Store(database, keep=2)
    for key in "abc":
        store.put(key, answer())
    store.close()
    again = Store(database, keep=2)
    assert [again.get(key) is not None for key in "abc"] == [False, True, True]


def test_a_new_answer_replaces_the_old(database):
    store = Store(database, keep=10)
    store.put("a", answer(b"1"))
    store.put("a", answer(b"2"))
    store.close()
    assert Store(database, keep=10).get("a") == answer(b"2")


@pytest.mark.covering
@pytest.mark.parametrize(
    ("before", "after", "version", "kept"),
    [
        (FEASIBLE % 2, FEASIBLE % 3, "1", "before"),
        (FEASIBLE % 2, UNKNOWN, "1", "before"),
        (OPTIMAL % 2, FEASIBLE % 1, "1", "before"),
        (FEASIBLE % 2, FEASIBLE % 2, "1", "after"),
        (FEASIBLE % 2, FEASIBLE % 1, "1", "after"),
        (FEASIBLE % 2, OPTIMAL % 2, "1", "after"),
        (UNKNOWN, UNKNOWN, "1", "after"),
        (FEASIBLE % 2, UNKNOWN, "2", "before"),
        (OPTIMAL % 2, FEASIBLE % 3, "2", "after"),
    ],
)
def test_the_better_answer_is_kept_with_its_question(database, before, after, version, kept):
    store = Store(database, keep=10)
    answers = {"before": Answer(b"before", False, "1"), "after": Answer(b"after", False, version)}
    store.put("a", answers["before"], before, StoredQuestion("p", b"{}", b'{"seed": 1}'))
    assert (
        store.put("a", answers["after"], after, StoredQuestion("p", b"{}", b'{"seed": 2}'))
        == answers[kept]
    )
    assert store.get("a") == answers[kept]
    assert b'"seed": %d' % (1 if kept == "before" else 2) in store.request("a")
    store.close()
    assert Store(database, keep=10).get("a") == answers[kept]


def test_a_worse_answer_that_had_all_its_time_spares_the_next_solve(database):
    store = Store(database, keep=10)
    store.put("a", answer(b"better", complete=False), FEASIBLE % 2)
    store.put("a", answer(b"worse"), FEASIBLE % 3)
    assert store.get("a") == answer(b"better", complete=True)


def test_what_was_kept_in_memory_is_no_worse_than_the_store_once_it_is_written(tmp_path):
    store = Store(str(tmp_path / "p.db"), keep=10)
    store.put("a", answer(b"better", complete=False), FEASIBLE % 2)
    real, store.database.write = store.database.write, full
    with pytest.raises(StoreError):
        store.put("a", answer(b"worse", complete=False), FEASIBLE % 3)
    store.database.write = real
    assert store.retry_unwritten() == 0
    assert store.get("a") == answer(b"better", complete=False)


def test_the_file_is_in_wal_mode(tmp_path):
    database = str(tmp_path / "placements.db")
    Store(database, keep=1).close()
    assert sqlite3.connect(database).execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_an_answer_that_cannot_be_written_is_kept_in_memory(tmp_path):
    store = Store(str(tmp_path / "placements.db"), keep=10)
    store.close()  # stands in for a disk that takes no more
    with pytest.raises(StoreError):
        store.put("a", answer())
    assert store.get("a") == answer()


def test_memory_holds_no_more_than_its_limit(database, monkeypatch):
    monkeypatch.setattr(module, "MEMORY_BYTES", 100)
    store = Store(database, keep=10)
    for key in "abc":
        store.put(key, answer(b"x" * 40))
    assert [store._recent.get(key) is not None for key in "abc"] == [False, True, True]
    assert store.get("a") is not None
