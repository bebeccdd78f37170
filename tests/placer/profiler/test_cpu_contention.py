"""How long threads waited for a core, by what the system counts for each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from placer.profiler import conditions
from placer.profiler.conditions import CoreWaits

SECOND = 10**9


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of threads in the place of the system's."""
    monkeypatch.setattr(conditions, "_TASKS", tmp_path)
    return tmp_path


def count(threads: Path, number: int, text: str) -> None:
    (threads / str(number)).mkdir(exist_ok=True)
    (threads / str(number) / "schedstat").write_text(text)


def test_the_thread_that_waited_most_tells_since_when_it_was_first_looked_at(threads: Path) -> None:
    count(threads, 1, f"{5 * SECOND} {9 * SECOND} 40")
    waits = CoreWaits()
    count(threads, 1, f"{8 * SECOND} {10 * SECOND} 50")
    count(threads, 2, f"{SECOND} {3 * SECOND} 10")
    assert waits.share() == 3 / 4


def test_a_thread_that_hardly_ran_tells_nothing(threads: Path) -> None:
    waits = CoreWaits()
    count(threads, 1, f"{SECOND} 0 40")
    count(threads, 2, f"1000 {SECOND // 20} 10")
    assert waits.share() == 0


def test_a_system_that_counts_nothing_or_something_else_is_never_called_busy(threads: Path) -> None:
    waits = CoreWaits()
    assert waits.share() == 0
    count(threads, 1, "no such counter")
    assert waits.share() == 0
