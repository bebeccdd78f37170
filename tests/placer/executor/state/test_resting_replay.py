"""The copies of a recorded piece: one for each time that a layer's modules run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from placer.executor.state.resting.resting_replay import Action, RestingReplay, link


class _Slots:
    """Slots without memory, which note nothing."""

    held: Any = ()

    def acquire(self) -> None:
        """Do nothing."""

    def follow(self) -> None:
        """Do nothing."""

    def wait(self, mark: Any) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


def _unit(name: str, number: int, parts: int, copies: list[str]) -> Any:
    return SimpleNamespace(
        slots=_Slots(), number=number, parts=parts, copied=lambda: copies.append(name)
    )


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_layer_that_runs_again_at_once_is_copied_again(parts: int) -> None:
    copies: list[str] = []
    layer = _unit("layer", 0, parts, copies)
    actions: list[Action] = [Action(layer, True), Action(layer, False)] * parts * 3
    replay = RestingReplay(actions)
    replay.begin()
    assert copies == ["layer"]
    replay.restart()
    for action in actions:
        replay.act(action)
    assert copies == ["layer"] * 3


def test_each_slot_gets_the_next_layer_when_its_layer_has_run() -> None:
    copies: list[str] = []
    layers = [_unit(name, place % 2, 1, copies) for place, name in enumerate("abcde")]
    actions = [action for one in layers for action in (Action(one, True), Action(one, False))]
    replay = RestingReplay(actions)
    replay.begin()
    replay.restart()
    seen = []
    for action in actions:
        replay.act(action)
        seen.append("".join(copies))
    # after a begins, a ends, b begins, b ends, ...
    assert seen == ["ab", "abc", "abc", "abcd", "abcd", *["abcde"] * 5]


def test_copies_of_a_later_piece_begin_when_their_slot_is_free() -> None:
    """So they run while other devices compute between the pieces."""
    copies: list[str] = []
    layers = [_unit(name, place % 2, 1, copies) for place, name in enumerate("abcdef")]
    pieces = [layers[:1], layers[1:2], layers[2:5], layers[5:]]
    replays = [
        RestingReplay([one for unit in piece for one in (Action(unit, True), Action(unit, False))])
        for piece in pieces
    ]
    link(replays)
    replays[0].begin()
    seen = ["".join(copies)]
    for replay, piece in zip(replays, pieces, strict=True):
        replay.wait()
        replay.restart()
        for unit in piece:
            replay.act(Action(unit, True))
            replay.act(Action(unit, False))
        seen.append("".join(copies))
        replay.end()
        seen.append("".join(copies))
    # at the beginning, then when a piece has run, and behind it
    assert seen == ["ab", "ab", "abc", "abc", "abcd", "abcde", "abcdef", "abcdef", "abcdef"]
