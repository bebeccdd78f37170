"""Orders that devices find for themselves: whenever one is free, it takes the most urgent pass that
is ready.

The most urgent is a backward pass (a stage waits for its input half), then a forward pass where
there is room for another micro-batch, then a weight half (nobody waits for it). So unlike stages
are balanced as well as they can be without foresight. Of several stages of one device, the one that
is nearest to the end goes first.

Or the most urgent is the pass with the longest way to the end of the step: a device that has the
first stage and the last, as tied embeddings make one, then leaves to the end what nobody waits for.

Where no stage waits for gradients, as none does for the first one's, a weight half goes before a
backward pass: it makes room for a micro-batch, and while it runs gradients may come later than they
are said to.

A stage may also have memory for fewer input-gradient passes than it has room for micro-batches:
then such a pass waits until the weight-gradient pass of an earlier micro-batch has freed that
memory.

Transfers take the time that they are said to take, and a stage as many buffers as it has room, as
in the simulation: a pass is ready when what it reads has come, and that may leave when there is a
buffer for it. Of a micro-batch the stages of one device run in their order, as what passes between
them is no transfer.

Times are counted in whole ticks, so that their sums are exact. Stages of equal layers come to equal
times by sums in another order; in floating point the order of passes would hang on the last digit
of one of them, and who adds up otherwise, as the referee does, would find another step.

It never gets stuck: micro-batches keep their order, and the first that is not done has room
everywhere.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024; the greedy rule here in place of
their fixed orders.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import pairwise

from placer.schedule.passes import Lane, Pass, Phase, Transfer

PHASES: tuple[Phase, ...] = ("forward", "backward", "weights")

URGENT: tuple[Phase, ...] = ("backward", "forward", "weights")

URGENT_AT_THE_END: tuple[Phase, ...] = ("forward", "weights", "backward")
"""Where gradients come to their end."""

IDLE = -1
"""Wakes a device that has run a pass, in place of the urgency of one that is ready."""

TICKS_PER_MS = 2**20
"""About a nanosecond each. As a power of two it leaves no time of few decimals half-way between two
ticks."""


def greedy(
    places: Sequence[int],
    times: dict[Phase, Sequence[float]],
    chunks: int,
    room: Sequence[int],
    transfers: Sequence[Transfer] = (),
    longest_first: bool = False,
    put_off: Sequence[int] | None = None,
) -> list[Pass]:
    """The passes of a step, by their start.

    Args:
        places: by stage, its device.
        times: by phase, then stage, in milliseconds; with phase ``weights`` backward passes are in
            two halves.
        chunks: micro-batches in a batch, at least 1.
        room: by stage, for how many micro-batches at once, at least 1.
        transfers: between the stages; if empty they are a chain, and what passes takes no time.
        longest_first: whether the most urgent pass is the one with the longest way to the end of
            the step.
        put_off: by stage, how many weight-gradient passes may wait at once; as many as there is
            room for if left out.
    """
    return _Greedy(
        places,
        times,
        chunks,
        room,
        transfers or _chain(len(places)),
        longest_first,
        put_off or room,
    ).run()


def _ticks(time_ms: float) -> int:
    return round(time_ms * TICKS_PER_MS)


class _Greedy:
    def __init__(
        self,
        places: Sequence[int],
        times: dict[Phase, Sequence[float]],
        chunks: int,
        room: Sequence[int],
        transfers: Sequence[Transfer],
        longest_first: bool,
        put_off: Sequence[int],
    ) -> None:
        # by first stage: of devices that are ready at once, which goes first is no chance
        number: dict[int, int] = {}
        self._places = [number.setdefault(place, len(number)) for place in places]
        self._chunks, self._room, self._put_off = chunks, room, put_off
        self._times = {
            phase: [_ticks(time_ms) for time_ms in each] for phase, each in times.items()
        }
        self._split = "weights" in times
        self._ends: dict[Phase, list[list[int]]] = {phase: [[] for _ in places] for phase in PHASES}
        self._through = self._ends["weights" if self._split else "backward"]
        # When a micro-batch's values have come, and its gradients, and when its weight half may
        # run.
        self._ready: dict[Phase, list[list[int]]] = {
            phase: [[] for _ in places] for phase in PHASES
        }
        self._inputs: list[list[tuple[int, int, int | None]]] = [[] for _ in places]
        self._targets: list[list[int]] = [[] for _ in places]
        self._senders = [0] * len(places)  # how many send gradients back
        self._lanes: dict[Lane, int] = {}
        self._arrived: dict[tuple[int, int], list[int]] = {}
        for source, target, there_ms, back_ms in transfers:
            self._inputs[target].append(
                (source, _ticks(there_ms), None if back_ms is None else _ticks(back_ms))
            )
            self._targets[source].append(target)
            self._senders[source] += back_ms is not None
        self._waiting_for_the_loss = [
            stage for stage, senders in enumerate(self._senders) if not senders
        ]
        self._stages: dict[int, list[int]] = {}
        for stage in reversed(range(len(places))):
            self._stages.setdefault(self._places[stage], []).append(stage)
        # By stage, the one before it on its device, whose passes it needs, and the one behind it,
        # which needs its own: of a micro-batch they run in this order, as one may read what the
        # other made, or received.
        self._needs: dict[Phase, list[int | None]] = {
            phase: [None] * len(places) for phase in PHASES
        }
        self._behind: dict[Phase, list[int | None]] = {
            phase: [None] * len(places) for phase in PHASES
        }
        for stages in self._stages.values():
            for behind, before in pairwise(stages):
                self._needs["forward"][behind], self._needs["backward"][before] = before, behind
                self._behind["forward"][before], self._behind["backward"][behind] = behind, before
        order = self._longest_first() if longest_first else self._most_urgent_first
        self._urgent = {device: order(stages) for device, stages in self._stages.items()}
        self._urgency = {
            one: place for urgent in self._urgent.values() for place, one in enumerate(urgent)
        }
        # heaps of what is ready, by urgency
        self._open: dict[int, list[int]] = {device: [] for device in self._stages}
        # when, which device, and what may be ready there, by its urgency
        self._wake: list[tuple[int, int, int]] = []

    def _most_urgent_first(self, stages: Sequence[int]) -> list[tuple[Phase, int]]:
        sends = any(back is not None for stage in stages for _, _, back in self._inputs[stage])
        phases = URGENT if sends or not self._split else URGENT_AT_THE_END
        return [(phase, stage) for phase in phases for stage in stages]

    def _longest_first(self) -> Callable[[Sequence[int]], list[tuple[Phase, int]]]:
        """What orders a device's passes by what follows them, to the end of the micro-batch's way."""
        count = len(self._places)
        forward, backward = [0] * count, [0] * count
        for stage in range(count):
            ways = [
                ticks + backward[source]
                for source, _, ticks in self._inputs[stage]
                if ticks is not None
            ]
            backward[stage] = self._times["backward"][stage] + max(ways, default=0)
        behind = [0] * count
        for stage in reversed(range(count)):
            forward[stage] = self._times["forward"][stage] + max(
                behind[stage], backward[stage], backward[-1]
            )
            for source, ticks, _ in self._inputs[stage]:
                behind[source] = max(behind[source], ticks + forward[stage])
        ways_of: dict[Phase, Sequence[int]] = {
            "forward": forward,
            "backward": backward,
            "weights": [0] * count,
        }

        def order(stages: Sequence[int]) -> list[tuple[Phase, int]]:
            phases = PHASES if self._split else PHASES[:2]
            every: list[tuple[Phase, int]] = [
                (phase, stage) for phase in phases for stage in stages
            ]
            return sorted(every, key=lambda one: -ways_of[one[0]][one[1]])

        return order

    def run(self) -> list[Pass]:
        """Play the step."""
        free = dict.fromkeys(self._stages, 0)
        for stage in range(len(self._places)):
            self._bring_values(stage)
        begun: list[tuple[int, int, Pass]] = []
        while self._wake:
            now, device, urgency = heapq.heappop(self._wake)
            ready = self._open[device]
            if urgency != IDLE:
                heapq.heappush(ready, urgency)
            is_told_more = self._wake and self._wake[0][:2] == (now, device)
            if is_told_more or not ready or now < free[device]:
                continue
            phase, stage = self._urgent[device][heapq.heappop(ready)]
            ends = self._ends[phase][stage]
            end = free[device] = now + self._times[phase][stage]
            begun.append((now, end, Pass(stage, phase, len(ends))))
            ends.append(end)
            heapq.heappush(self._wake, (end, device, IDLE))
            self._hand_on(stage, phase, len(ends) - 1, end)
        return [item for _, _, item in sorted(begun, key=lambda task: task[:2])]

    def _hand_on(self, stage: int, phase: Phase, number: int, end: int) -> None:
        """Tell who waits for a pass."""
        behind = self._behind[phase][stage]
        if behind is not None and number < len(self._ready[phase][behind]):
            self._open_at(max(end, self._ready[phase][behind][number]), phase, behind)
        freed_for = number + self._put_off[stage]
        if phase == "weights" and freed_for < len(self._ready["backward"][stage]):
            self._open_at(max(end, self._ready["backward"][stage][freed_for]), "backward", stage)
        if phase == "forward":
            for target in self._targets[stage]:
                self._bring_values(target)
            for other in self._waiting_for_the_loss if stage == len(self._places) - 1 else (stage,):
                self._note_loss(other)
        elif phase == "backward":
            self._bring_gradients(stage, number, end)
            if self._split:
                self._note("weights", stage, end)
        if self._through is self._ends[phase]:
            self._bring_values(stage)

    def _note_loss(self, stage: int) -> None:
        """A stage that gets no gradients waits for the loss, and for its own forward pass, which
        that may not need.
        """
        if not self._senders[stage]:
            loss, own, ready = (
                self._ends["forward"][-1],
                self._ends["forward"][stage],
                self._ready["backward"][stage],
            )
            for number in range(len(ready), min(len(loss), len(own))):
                self._note("backward", stage, max(loss[number], own[number]))

    def _bring_values(self, stage: int) -> None:
        """Let the values of the next micro-batches come, as far as they are made and there is room."""
        ends, through = self._ends["forward"], self._through[stage]
        for number in range(len(self._ready["forward"][stage]), self._chunks):
            before = number - self._room[stage]
            if before >= len(through) or any(
                number >= len(ends[source]) for source, _, _ in self._inputs[stage]
            ):
                return
            room = came = through[before] if before >= 0 else 0
            for source, ticks, _ in self._inputs[stage]:
                lane: Lane = self._places[source], self._places[stage], "forward"
                came = max(came, self._carry(lane, max(room, ends[source][number]), ticks))
            self._note("forward", stage, came)

    def _bring_gradients(self, stage: int, number: int, end: int) -> None:
        """Send gradients back."""
        for source, _, ticks in self._inputs[stage]:
            if ticks is None:
                continue
            arrived = self._arrived.setdefault((source, number), [])
            lane: Lane = self._places[stage], self._places[source], "backward"
            arrived.append(self._carry(lane, end, ticks))
            if len(arrived) == self._senders[source]:
                self._note("backward", source, max(arrived))

    def _carry(self, lane: Lane, ready: int, ticks: int) -> int:
        """When a transfer that may leave at some time has come."""
        self._lanes[lane] = max(ready, self._lanes.get(lane, 0)) + ticks
        return self._lanes[lane]

    def _note(self, phase: Phase, stage: int, ready: int) -> None:
        """The next micro-batch of a stage is, or will be, ready for a pass; never before the one
        before it.
        """
        number, need = len(self._ready[phase][stage]), self._needs[phase][stage]
        self._ready[phase][stage].append(ready)
        if (
            self._split
            and phase == "backward"
            and number >= self._put_off[stage] + len(self._ends["weights"][stage])
        ):
            return  # the weight-gradient pass that frees its memory has yet to run
        if need is None or number < len(self._ends[phase][need]):
            self._open_at(ready, phase, stage)

    def _open_at(self, time: int, phase: Phase, stage: int) -> None:
        """From then on a stage's device may run one more of its passes."""
        heapq.heappush(self._wake, (time, self._places[stage], self._urgency[phase, stage]))


def _chain(stages: int) -> list[Transfer]:
    return [Transfer(stage, stage + 1, 0.0, 0.0) for stage in range(stages - 1)]
