"""Copies into the slots and the work that reads them are ordered, whatever the lanes' speed.

A CPU stand-in works synchronously, so a missing wait would not show. Here lanes have vector clocks:
what one lane knows of another is what it has waited for.
"""

from __future__ import annotations

import gc
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn

from placer.executor.state.resting import resting_weights, weight_slots
from placer.executor.state.resting.resting_replay import Action, RestingReplay, link
from placer.executor.state.resting.weight_slots import Slots, Unit, in_turn

Clock = Counter[str]


class World:
    """All lanes with their clocks, and what has happened to each slot."""

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {}
        self.caller = "compute"
        self.copies: dict[int, tuple[Unit, Clock]] = {}
        self.reads: dict[int, list[Clock]] = {0: [], 1: []}
        self.read_count = 0

    def now(self, lane: str) -> Clock:
        return self.clocks.setdefault(lane, Counter())

    def tick(self, lane: str) -> Clock:
        """Do something in a lane; return the time at its end."""
        self.now(lane)[lane] += 1
        return Counter(self.now(lane))

    def copy(self, unit: Unit) -> None:
        before = self.now("copy")
        for read in self.reads[unit.number]:
            assert read <= before, "a copy may overwrite what is still read"
        self.reads[unit.number] = []
        self.copies[unit.number] = unit, self.tick("copy")

    def read(self, unit: Unit) -> None:
        held, copied = self.copies[unit.number]
        assert held is unit, "the slot holds other parameters"
        assert copied <= self.now(self.caller), "the copy may not be over"
        self.reads[unit.number].append(self.tick(self.caller))
        self.read_count += 1


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    found = World()

    class Lane:
        def __init__(self, device: Any, caller: bool = False, recorded: bool = False) -> None:
            assert caller != recorded
            self.name = found.caller if caller else "copy"

        def wait(self, *marks: Clock | None) -> None:
            for mark in marks:
                found.now(self.name).update(
                    {
                        lane: max(0, at - found.now(self.name)[lane])
                        for lane, at in (mark or {}).items()
                    }
                )

        def mark(self) -> Clock:
            return Counter(found.now(self.name))

    def copied(unit: Unit) -> Clock:
        found.copy(unit)
        return unit.slots.lane.mark()

    monkeypatch.setattr(weight_slots, "Lane", Lane)
    monkeypatch.setattr(weight_slots, "_idle_lanes", defaultdict(list))
    monkeypatch.setattr(Unit, "copied", copied)
    return found


class LateCopy(Future[Any]):
    """A copy that is issued when somebody waits for it, after all copies before it."""

    def __init__(self, reader: LateReader, issue: Callable[[], Clock]) -> None:
        super().__init__()
        self._reader, self.issue = reader, issue

    def result(self, timeout: float | None = None) -> Clock:
        while not self.done():
            first = self._reader.waiting.pop(0)
            first.set_result(first.issue())
        found: Clock = super().result()
        return found


class LateReader:
    """A reader of files that issues copies as late as it may."""

    def __init__(self) -> None:
        self.waiting: list[LateCopy] = []

    def submit(self, issue: Callable[[], Clock]) -> LateCopy:
        self.waiting.append(LateCopy(self, issue))
        return self.waiting[-1]

    def drain(self) -> None:
        if self.waiting:
            self.waiting[-1].result()


def units(count: int, is_late: bool = False) -> list[Unit]:
    reader: Any = LateReader() if is_late else None
    slots = Slots(torch.device("cpu"), 512, reader=reader)
    found = [Unit([nn.Parameter(torch.ones(2))], slots, n % 2) for n in range(count)]
    in_turn(found)
    return found


def test_slots_that_are_gone_leave_their_lane_to_others(world: World) -> None:
    first = Slots(torch.device("cpu"), 512)
    lane = first.lane
    assert Slots(torch.device("cpu"), 512).lane is not lane
    del first
    gc.collect()
    assert Slots(torch.device("cpu"), 512).lane is lane


def run(world: World, order: list[Unit]) -> None:
    """Run a pass that is not recorded, of these units in this order."""
    for unit in order:
        world.tick(world.caller)
        unit.enter()
        world.read(unit)
        unit.leave()


def passes(own: list[Unit]) -> Any:
    """Return a context for a pass, as ``RestingWeights`` opens it."""
    slots = own[0].slots
    resting = object.__new__(resting_weights.RestingWeights)
    resting._module, resting._ids = nn.Identity(), set()
    resting.lock = slots.lock
    resting._slots, resting._units = {slots.device: slots}, {slots.device: own}  # type: ignore[assignment]
    return resting.reading


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_passes_in_several_streams_share_the_slots(world: World, count: int, is_late: bool) -> None:
    own = units(count, is_late)
    reading = passes(own)
    for caller in ("compute", "other", "compute", "third"):
        world.caller = caller
        with reading():
            run(world, own)
    assert world.read_count == 4 * count


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_an_unexpected_order_copies_what_is_missing(world: World, seed: int, is_late: bool) -> None:
    draw = random.Random(seed)
    own = units(5, is_late)
    reading = passes(own)
    for _ in range(3):
        with reading():
            run(world, [draw.choice(own) for _ in range(draw.randrange(9))])


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_threads_that_call_parts_of_the_model_share_the_slots(
    world: World, seed: int, is_late: bool
) -> None:
    draw = random.Random(seed)
    own = units(5, is_late)
    reading = passes(own)
    for _ in range(12):
        world.caller = draw.choice(["compute", "other", "third"])
        if draw.random() < 0.2:
            with reading():
                run(world, own[: draw.randrange(6)])
        else:
            run(world, [draw.choice(own)])


def test_no_copy_is_left_to_issue_after_a_pass_that_failed(world: World) -> None:
    own = units(4, is_late=True)
    with pytest.raises(RuntimeError), passes(own)():
        run(world, own[:1])
        raise RuntimeError
    assert own[0].slots.reader.waiting == []  # type: ignore[union-attr]


def replayed(world: World, pieces: list[list[Unit]]) -> list[RestingReplay]:
    """Return the copies of pieces that read these units."""
    found = [
        RestingReplay([one for unit in piece for one in (Action(unit, True), Action(unit, False))])
        for piece in pieces
    ]
    link(found)
    found[0].begin()
    for replay, piece in zip(found, pieces, strict=True):
        play(world, replay, piece)
    return found


def play(world: World, replay: RestingReplay, piece: list[Unit]) -> None:
    replay.wait()
    replay.restart()
    for unit in piece:
        replay.act(Action(unit, True))
        world.read(unit)
        replay.act(Action(unit, False))
    replay.end()


@pytest.mark.parametrize("cut", [[6], [2, 6], [1, 3, 6]])
def test_recorded_pieces_take_turns_with_passes_of_other_streams(
    world: World, cut: list[int]
) -> None:
    own = units(6)
    pieces = [own[first:last] for first, last in zip([0, *cut], cut, strict=False)]
    reading = passes(own)
    for caller in ("compute", "other", "compute"):
        world.caller = caller
        replayed(world, pieces)
        with reading():
            run(world, own)
    assert world.read_count == 3 * 2 * 6


@pytest.mark.parametrize("seed", range(20))
def test_recorded_pieces_read_the_right_parameters_in_any_order(world: World, seed: int) -> None:
    draw = random.Random(seed)
    own = units(5)
    order = [draw.choice(own) for _ in range(8)]
    replayed(world, [order[:3], order[3:]])
    assert world.read_count == 8
