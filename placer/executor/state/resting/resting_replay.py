"""What recorded passes do for parameters that rest on the host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from placer.devices import Mark
from placer.executor.state.resting.weight_slots import SLOTS, Unit


@dataclass(eq=False)
class Action:
    """Something that a pass does for resting weights, in the place of an operation in a trace.

    Attributes:
        unit: the parameters.
        is_entry: whether they are read from now on; otherwise they are not read any more.
    """

    unit: Unit
    is_entry: bool

    def __call__(self) -> None:
        """Wait for the unit's copy, or fill the slot again, in a pass that is not recorded."""
        if self.is_entry:
            self.unit.enter()
        else:
            self.unit.leave()


class RestingReplay:
    """The copies of a recorded piece of a pass, on one device.

    The first copy into each slot begins before the piece; the others are a part of it, in a branch
    of the recording::

        outside   copy 1, copy 2 ──▶│
        piece                       │ layer 1 ──┬─ layer 2 ──┬─ layer 3 ── layer 4
        branch                      │           └─ copy 3 ───┼──▶┘ copy 4 ──▶┘

    Args:
        actions: of the piece, in their order.
    """

    def __init__(self, actions: Sequence[Action]) -> None:
        self._slots = actions[0].unit.slots
        # what is copied: the modules of a layer read one copy, and so does no other call of them
        self._units: list[Unit] = []
        self.restart()
        for action in actions:
            if self._is_new(action):
                self._units.append(action.unit)
        # by number of a copy: the next one into the same slot
        self._first: list[int] = []
        self._next: dict[int, int] = {}
        latest: dict[int, int] = {}
        for place, unit in enumerate(self._units):
            if unit.number in latest:
                self._next[latest[unit.number]] = place
            else:
                self._first.append(place)
            latest[unit.number] = place
        self._before: list[Mark] = []

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The lock to hold while the piece runs."""
        found: AbstractContextManager[Any] = self._slots.lock
        return found

    def begin(self) -> None:
        """Start the first copies, outside of the recording."""
        self._slots.acquire()
        self._slots.held = [None] * SLOTS
        self._before = [self._units[place].copied() for place in self._first]

    def wait(self) -> None:
        """Let the piece wait for the first copies."""
        for mark in self._before:
            self._slots.wait(mark)

    def end(self) -> None:
        """Note that the piece is the latest that reads the slots."""
        self._slots.release()

    def restart(self) -> None:
        """Begin at the piece's first action again."""
        self._place, self._entered = -1, 0
        self._latest: Unit | None = None
        self._marks: dict[int, Mark] = {}

    def _is_new(self, action: Action) -> bool:
        """Count an action; return whether a unit begins to be read."""
        if not action.is_entry:
            return False
        if action.unit is self._latest and self._entered < action.unit.parts:
            self._entered += 1
            return False
        self._latest, self._entered, self._place = action.unit, 1, self._place + 1
        return True

    def act(self, action: Action) -> None:
        """Do an action, as a part of the piece."""
        if self._is_new(action) and self._place in self._marks:
            self._slots.wait(self._marks[self._place])
        following = self._next.get(self._place)
        is_over = not action.is_entry and self._entered == action.unit.parts
        if is_over and following is not None:
            self._slots.follow()
            self._marks[following] = self._units[following].copied()
