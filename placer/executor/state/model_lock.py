"""The lock of a model: one thread at a time, or several that are in ``flow.applied()``.

    calls, steps, update_flow   with lock: ...            alone, once all blocks are over
    flow.applied()              with lock.block(flow): ... together with other blocks of the flow
      a pass in such a block    with lock: ...            one block at a time: its turn

A thread in a block has the model only during its passes, so that generations interleave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Lock, get_ident
from types import TracebackType


class ModelLock:
    """A reentrant lock with blocks, whose threads take turns."""

    def __init__(self) -> None:
        # locks of C are left in one step, which no interrupt divides; a Condition's way out is not
        self._mutex = Lock()
        self._changed = Condition(self._mutex)
        self._owner: int | None = None
        self._depth = 0
        # threads that wait for their turn, in the order in which they came
        self._queue: deque[int] = deque()
        # by thread in a block: how many blocks are around each other
        self._blocks: dict[int, int] = {}
        self._flow: object = None
        self._busy: set[int] = set()

    def __enter__(self) -> ModelLock:
        me = get_ident()
        if self._owner == me:
            self._depth += 1
            return self
        with self._mutex:
            self._queue.append(me)
            self._changed.notify_all()  # a thread in ``is_alone`` may wait for this one
            try:
                self._changed.wait_for(lambda: self._is_next(me))
            finally:
                self._queue.remove(me)
            self._owner, self._depth = me, 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        me, is_left, interrupt = self._owner, False, None
        # An interrupt may come at any call below; the lock has to be free before it goes on.
        while not is_left:
            try:
                with self._mutex:
                    if self._owner == me:  # otherwise another thread has its turn already
                        self._owner, self._depth = None, 0
                    self._changed.notify_all()
                is_left = True
            except BaseException as found:
                interrupt = found
        if interrupt is not None:
            raise interrupt

    def _is_next(self, me: int) -> bool:
        if self._owner is not None:
            return False
        if me in self._blocks:
            return next(one for one in self._queue if one in self._blocks) == me
        return not self._blocks and self._queue[0] == me

    @contextmanager
    def block(self, flow: object, is_guest: bool = False) -> Iterator[None]:
        """Keep threads outside of blocks waiting, and let blocks of the same flow in.

        A thread that waits outside comes before blocks that begin later, so it waits for the
        present ones only.

        Args:
            flow: whose devices the model's layers are on.
            is_guest: begin before waiting threads if other blocks are open, because one of these
                waits for this block.
        """
        me = get_ident()

        def is_open() -> bool:
            if me in self._blocks or self._owner == me:
                return True
            if self._blocks and self._flow is not flow:
                return False
            if self._blocks and is_guest:
                return True
            # A thread that waits outside of all blocks comes first, and so does an owner outside.
            is_free = self._owner is None or self._owner in self._blocks
            return is_free and all(one in self._blocks for one in self._queue)

        with self._changed:
            self._changed.wait_for(is_open)
            if not self._blocks:
                self._flow = flow
            self._blocks[me] = self._blocks.get(me, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._blocks[me] -= 1
                if not self._blocks[me]:
                    del self._blocks[me]
                    self._busy.discard(me)
                if not self._blocks:
                    self._flow = None
                self._changed.notify_all()

    @property
    def is_in_block(self) -> bool:
        """Return whether this thread is in a block."""
        return get_ident() in self._blocks

    @property
    def has_other_blocks(self) -> bool:
        """Return whether another thread is in a block."""
        return len(self._blocks) > self.is_in_block

    def note_busy(self) -> None:
        """Note in its turn that this thread is busy between its passes until its block ends."""
        self._busy.add(get_ident())

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Note that this thread works for the model between its passes, too."""
        me = get_ident()
        if me in self._busy:
            yield
            return
        with self:  # no thread becomes busy while another one is alone
            self._busy.add(me)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(me)
                self._changed.notify_all()

    def is_alone(self, patience_s: float) -> bool:
        """Wait until all busy threads wait for their turn, which this thread has.

        They do nothing then until it ends.

        Args:
            patience_s: maximum time to wait, in seconds.

        Returns:
            Whether they do; otherwise at least one was busy elsewhere for the whole time.
        """
        me = get_ident()
        with self._changed:
            return self._changed.wait_for(
                lambda: all(one == me or one in self._queue for one in self._busy), patience_s
            )
