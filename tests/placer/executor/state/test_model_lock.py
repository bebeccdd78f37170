"""The lock of a model: alone, or in blocks whose threads take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from placer.executor.state.model_lock import ModelLock

SOON_S = 0.05
LATE_S = 30.0


@pytest.fixture
def start() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


@pytest.fixture
def lock() -> ModelLock:
    return ModelLock()


class _Block:
    """A thread that is in a block until it may leave."""

    def __init__(self, lock: ModelLock, start: Any, flow: object = "flow") -> None:
        self.entered, self.leave = threading.Event(), threading.Event()
        self.result = start(self._run, lock, flow)

    def _run(self, lock: ModelLock, flow: object) -> None:
        with lock.block(flow):
            self.entered.set()
            assert self.leave.wait(LATE_S)


def _turn(lock: ModelLock) -> str:
    with lock, lock:
        return "turn"


def test_a_thread_outside_waits_until_all_blocks_are_over(lock: ModelLock, start: Any) -> None:
    blocks = [_Block(lock, start), _Block(lock, start)]
    assert all(block.entered.wait(LATE_S) for block in blocks)
    outside = start(_turn, lock)
    blocks[0].leave.set()
    blocks[0].result.result(LATE_S)
    with pytest.raises(TimeoutError):
        outside.result(SOON_S)
    blocks[1].leave.set()
    assert outside.result(LATE_S) == "turn"


def test_a_thread_in_a_block_takes_its_turn_while_others_are_in_theirs(
    lock: ModelLock, start: Any
) -> None:
    other = _Block(lock, start)
    assert other.entered.wait(LATE_S)
    with lock.block("flow"):
        assert _turn(lock) == "turn"
        assert lock.has_other_blocks
    other.leave.set()
    assert not lock.is_in_block


class _Interrupted:
    """A method that raises a KeyboardInterrupt at its first call.

    Args:
        method: what it does at later calls.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method, self._is_first = method, True

    def __call__(self, *args: Any) -> Any:
        if self._is_first:
            self._is_first = False
            raise KeyboardInterrupt
        return self._method(*args)


class _Mutex:
    """A lock during whose wait an interrupt comes."""

    def __init__(self, lock: Any) -> None:
        self._lock, self._enter = lock, _Interrupted(lock.__enter__)

    def __enter__(self) -> Any:
        return self._enter()

    def __exit__(self, *error: Any) -> None:
        self._lock.__exit__(*error)


@pytest.mark.parametrize("moment", ["it waits for the mutex", "it notifies the others"])
def test_an_interrupt_while_a_turn_ends_frees_the_lock(
    lock: ModelLock, start: Any, moment: str
) -> None:
    with pytest.raises(KeyboardInterrupt), lock:
        waiting = start(_turn, lock)
        with pytest.raises(TimeoutError):
            waiting.result(SOON_S)
        if moment == "it waits for the mutex":
            lock._mutex = _Mutex(lock._mutex)  # type: ignore[assignment]
        else:
            lock._changed.notify_all = _Interrupted(lock._changed.notify_all)  # type: ignore[method-assign]
    assert waiting.result(LATE_S) == "turn"
    assert start(_turn, lock).result(LATE_S) == "turn"


def test_a_block_of_another_flow_waits(lock: ModelLock, start: Any) -> None:
    with lock.block("flow"):
        other = _Block(lock, start, "another flow")
        assert not other.entered.wait(SOON_S)
    assert other.entered.wait(LATE_S)
    other.leave.set()


def test_a_thread_that_waits_outside_comes_before_later_blocks(lock: ModelLock, start: Any) -> None:
    first = _Block(lock, start)
    assert first.entered.wait(LATE_S)
    outside = start(_turn, lock)
    while not lock._queue:
        pass
    later = _Block(lock, start)
    assert not later.entered.wait(SOON_S)
    first.leave.set()
    assert outside.result(LATE_S) == "turn" and later.entered.wait(LATE_S)
    later.leave.set()


def test_a_guest_does_not_wait_for_a_thread_that_waits_for_its_host(
    lock: ModelLock, start: Any
) -> None:
    def guest() -> str:
        with lock.block("flow", is_guest=True):
            return _turn(lock)

    with lock.block("flow"):
        outside = start(_turn, lock)
        while not lock._queue:
            pass
        assert start(guest).result(LATE_S) == "turn"
    assert outside.result(LATE_S) == "turn"


def test_a_thread_is_alone_when_busy_ones_wait_for_their_turn(lock: ModelLock, start: Any) -> None:
    works, done = threading.Event(), threading.Event()

    def busy() -> None:
        with lock.block("flow"), lock.busy():
            works.set()
            assert done.wait(LATE_S)
            _turn(lock)

    other = start(busy)
    assert works.wait(LATE_S)
    with lock.block("flow"), lock:
        assert not lock.is_alone(SOON_S)
        done.set()
        assert lock.is_alone(LATE_S)
        with pytest.raises(TimeoutError):
            other.result(SOON_S)
    other.result(LATE_S)
