"""Orders that devices find for themselves: whenever one is free, it takes the most urgent pass that is ready.

The most urgent is a backward pass (a stage waits for its input half), then a forward pass where there is room for
another micro-batch, then a weight half (nobody waits for it). So unlike stages are balanced as well as they can be
without foresight. Of several stages of one device, the one that is nearest to the end goes first.

Transfers take no time here: they are the simulation's, and the order is one that does not know of them.

Times are counted in whole ticks, so that their sums are exact. Stages of equal layers come to equal times by sums in
another order; in floating point the order of passes would hang on the last digit of one of them, and who adds up
otherwise, as the referee does, would find another step.

It never gets stuck: micro-batches keep their order, and the first that is not done has room everywhere.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024; the greedy rule here in place of their fixed orders.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from placer.schedule.passes import Pass, Phase

PHASES: tuple[Phase, ...] = ("forward", "backward", "weights")

TICKS_PER_MS = 2**20
"""About a nanosecond each. As a power of two it leaves no time of few decimals half-way between two ticks."""


def greedy(places: Sequence[int], times: dict[Phase, Sequence[float]], chunks: int, room: Sequence[int]) -> list[Pass]:
    """The passes of a step through a chain of stages, by their start.

    Args:
        places: by stage, its device.
        times: by phase, then stage, in milliseconds; with phase ``weights`` backward passes are in two halves.
        chunks: micro-batches in a batch, at least 1.
        room: by stage, for how many micro-batches at once, at least 1.
    """
    return _Greedy(places, times, chunks, room).run()


class _Greedy:
    def __init__(
        self, places: Sequence[int], times: dict[Phase, Sequence[float]], chunks: int, room: Sequence[int]
    ) -> None:
        number: dict[int, int] = {}  # by first stage: of devices that are ready at once, which goes first is no chance
        self._places = [number.setdefault(place, len(number)) for place in places]
        self._room = room
        self._ticks = {phase: [round(time_ms * TICKS_PER_MS) for time_ms in each] for phase, each in times.items()}
        self._split = "weights" in times
        self._done: dict[Phase, list[int]] = {phase: [0] * len(places) for phase in PHASES}
        self._through = self._done["weights" if self._split else "backward"]
        self._there: dict[Phase, list[list[int]]] = {phase: [[] for _ in places] for phase in PHASES}
        self._there["forward"][0] = [0] * chunks
        self._stages: dict[int, list[int]] = {}
        for stage in reversed(range(len(places))):
            self._stages.setdefault(self._places[stage], []).append(stage)

    def run(self) -> list[Pass]:
        """Play the step."""
        free = dict.fromkeys(self._stages, 0)
        wake = [(0, device) for device in free]
        heapq.heapify(wake)
        begun: list[tuple[int, int, Pass]] = []
        while wake:
            now, device = heapq.heappop(wake)
            chosen = self._most_urgent(device, now) if now >= free[device] else None
            if chosen is None:
                continue
            stage, phase, _ = chosen
            end = free[device] = now + self._ticks[phase][stage]
            self._done[phase][stage] += 1
            begun.append((now, end, chosen))
            heapq.heappush(wake, (end, device))
            for woken in self._hand_on(stage, phase, end):
                heapq.heappush(wake, woken)
        return [item for _, _, item in sorted(begun, key=lambda task: task[:2])]

    def _most_urgent(self, device: int, now: int) -> Pass | None:
        stages = self._stages[device]
        arrivals, done = self._there["backward"], self._done["backward"]
        for stage in stages:
            number = done[stage]
            if number < len(arrivals[stage]) and arrivals[stage][number] <= now:
                return Pass(stage, "backward", number)
        arrivals, done = self._there["forward"], self._done["forward"]
        for stage in stages:
            number = done[stage]
            if number < len(arrivals[stage]) and arrivals[stage][number] <= now:
                if number - self._through[stage] < self._room[stage]:
                    return Pass(stage, "forward", number)
        for stage in stages if self._split else ():
            number = self._done["weights"][stage]
            if number < self._done["backward"][stage]:
                return Pass(stage, "weights", number)
        return None

    def _hand_on(self, stage: int, phase: Phase, end: int) -> list[tuple[int, int]]:
        """Tell the stage that waits for a pass; when to look at its device."""
        last = len(self._places) - 1
        if phase == "weights" or (phase == "backward" and stage == 0):
            return []
        goal = min(stage + 1, last) if phase == "forward" else stage - 1
        kind: Phase = "backward" if phase == "backward" or stage == last else "forward"
        self._there[kind][goal].append(end)
        return [(end, self._places[goal])]
