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

    Copies into a slot whose layer ran in the same piece are a part of the piece, in a branch of the
    recording. Others begin before it: in the beginning of the pass, or when the piece has run that
    read the slot last. So copies run while other devices compute between two pieces::

        outside   copy 1, copy 2 ──▶│                                  copy 4 ──▶│
        piece                       │ layer 1 ──┬─ layer 2 ── layer 3 ──│        │ layer 4
        branch                      │           └─ copy 3 ──────▶┘

    ``link`` joins the pieces of a device; a piece alone is linked already.

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
        self._before: dict[int, Mark] = {}
        # copies that begin with the pass, and behind this piece, by their pieces
        self._at_begin: list[tuple[RestingReplay, int]] = []
        self._at_end: list[tuple[RestingReplay, int]] = []
        self._is_last = True
        link([self])

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The lock to hold while the piece runs."""
        found: AbstractContextManager[Any] = self._slots.lock
        return found

    def begin(self) -> None:
        """Start the first copies of a pass, outside of the recording, in a device's first piece."""
        self._slots.acquire()
        self._slots.held = [None] * SLOTS
        self._start(self._at_begin)

    def _start(self, copies: Sequence[tuple[RestingReplay, int]]) -> None:
        """Start copies, each given by its piece and its number there."""
        for piece, place in copies:
            piece._before[place] = piece._units[place].copied()

    def wait(self) -> None:
        """Let the piece wait for the copies that began before it."""
        for mark in self._before.values():
            self._slots.wait(mark)

    def end(self) -> None:
        """Start copies into the slots that the piece has read, or note that it reads them last."""
        if self._is_last:
            self._slots.release()
        elif self._at_end:
            self._slots.follow()
            self._start(self._at_end)

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


def link(pieces: Sequence[RestingReplay]) -> None:
    """Let the pieces of a device follow one another in each pass.

    Args:
        pieces: in the order in which they run.
    """
    latest: dict[int, RestingReplay] = {}
    for piece in pieces:
        piece._at_begin, piece._at_end, piece._is_last = [], [], piece is pieces[-1]
        for place in piece._first:
            before = latest.get(piece._units[place].number)
            copies = pieces[0]._at_begin if before is None else before._at_end
            copies.append((piece, place))
        latest.update((unit.number, piece) for unit in piece._units)
