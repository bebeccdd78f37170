"""The common order of passes of stages with different numbers of replicas."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count
from math import lcm

import pytest

from placer.distributed.schedules import SCHEDULES, Turn, Units, splits
from placer.schedule import plan


def every_process(
    schedule: str, counts: Sequence[int], chunks: int, rounds: int, training: bool
) -> list[list[Turn]]:
    """What each process does, by rank; ranks count through the replicas, stage by stage."""
    units, ranks = lcm(*counts), count()
    held = [[next(ranks) for _ in range(number)] for number in counts]
    chains = [[some[unit * len(some) // units] for some in held] for unit in range(units)]
    return [
        Units(schedule, chains, rank, chunks, rounds).turns(training) for rank in range(sum(counts))
    ]


def run(processes: Sequence[Sequence[Turn]], counts: Sequence[int], rounds: int) -> None:
    """Run all processes; a message leaves only while its receiver waits, and no two at a time.

    Messages of a chunk between two stages differ by their unit of the micro-batch.
    """
    units, stages = lcm(*counts), len(counts) * rounds
    share = [units // number for number in counts for _ in range(number)]
    first = [replica * (units // number) for number in counts for replica in range(number)]

    def unit(rank: int, part: int) -> tuple[int, int]:
        return part // share[rank], first[rank] + part % share[rank]

    # a process does one thing after another, and so do its messages
    work = [deque(turns) for turns in processes]
    lines: list[deque[tuple[object, ...]]] = [deque() for _ in processes]
    here: set[tuple[int, object]] = set()
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, turns in enumerate(work):
            while turns:
                turn = turns[0]
                message = (turn.phase, turn.stage, *unit(rank, turn.part))
                step = {"forward": 1, "backward": -1, "weights": stages}[turn.phase]
                if turn.receives:
                    lines[rank].append(message)
                elif 0 <= turn.stage - step < stages and (rank, message) not in here:
                    break
                elif 0 <= turn.stage + step < stages:
                    lines[rank].append((turn.phase, turn.stage + step, *message[2:]))
                turns.popleft()
                is_moving = True
        heads = {line[0]: rank for rank, line in enumerate(lines) if line}
        for rank, line in enumerate(lines):
            other = heads.get(line[0], rank) if line else rank
            if other != rank:
                here |= {(one, line[0]) for one in (rank, other)}
                lines[other].popleft()
                line.popleft()
                is_moving = True
                break
    assert not any(work) and not any(lines)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "counts", [(3, 1), (1, 3), (1, 2, 1), (2, 3), (3, 2), (4, 6, 1), (2, 1, 3, 1)]
)
def test_no_process_waits_for_a_message_that_another_one_sends_later(
    schedule: str, counts: tuple[int, ...]
) -> None:
    for chunks in (1, 2, 5, 8):
        for rounds in (2,) if schedule == "interleaved" else (1, 2):
            for training in (True, False):
                run(every_process(schedule, counts, chunks, rounds, training), counts, rounds)


@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("counts", [(3, 1), (2, 3), (1, 2, 1)])
def test_each_replica_runs_its_units_in_the_order_of_the_schedule(
    schedule: str, counts: tuple[int, ...]
) -> None:
    chunks, shares = 4, [lcm(*counts) // number for number in counts]
    expected = plan(schedule, range(len(counts)), chunks, forward_ms=shares)  # type: ignore[arg-type]
    processes = iter(every_process(schedule, counts, chunks, 1, True))
    for stage, number in enumerate(counts):
        for _ in range(number):
            passes = [turn for turn in next(processes) if not turn.receives]
            assert [(turn.phase, turn.part) for turn in passes] == [
                (phase, chunk * shares[stage] + part)
                for _, phase, chunk in expected.by_device()[stage]
                for part in range(shares[stage])
            ]


def test_a_process_holds_no_more_micro_batches_than_the_placement_has_room_for() -> None:
    chains, chunks, units = [[0, 2], [1, 2]], 6, 2
    for room in (1, 2, 4):
        turns = Units("zero-bubble", chains, 2, chunks, 1, (2, room)).turns(True)
        held = most = 0
        for turn in turns:
            if not turn.receives:
                held += (turn.phase == "forward") - (turn.phase == "weights")
                most = max(most, held)
        assert most == room * units


@pytest.mark.parametrize("schedule", ["fill-drain", "interleaved", "zero-bubble"])
def test_a_split_backward_pass_has_its_weight_pass_in_every_round(schedule: str) -> None:
    for turns in every_process(schedule, (2, 1), 4, 2, True):
        passes = [(turn.phase, turn.stage, turn.part) for turn in turns if not turn.receives]
        backward = {one[1:] for one in passes if one[0] == "backward"}
        assert len(backward) == len({turn.part for turn in turns}) * 2
        weights = {one[1:] for one in passes if one[0] == "weights"}
        assert weights == (backward if splits(schedule) else set())
