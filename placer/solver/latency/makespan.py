"""A pass over all layers in their order, updated as layers move to other devices.

It implements the formulas of ``pass_times.py``. Everything before the first moved layer stays the
same. A move is given up as soon as a finish, with the longest way from there to the end, exceeds
the limit.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Self

from placer.schema import Link
from placer.solver.bounds.simple_bounds import fastest_ms, longest_behind
from placer.solver.problem import Problem

Inputs = Sequence[Sequence[tuple[int, int, int]]]
"""By place, what it waits for: earlier places, the bytes that come from there, and how often."""


@dataclass(frozen=True)
class LinkTimes:
    """What a transfer takes, by the devices that it passes between.

    Infinitely long where there is no link.

    Attributes:
        latency_ms: whatever its size.
        byte_ms: for each byte.
    """

    latency_ms: list[list[float]]
    byte_ms: list[list[float]]

    @classmethod
    def from_problem(cls, problem: Problem) -> Self:
        """Return the times of a problem's links."""
        rows = list(enumerate(problem.links))
        return cls(
            [
                [_latency_ms(link, device == other) for other, link in enumerate(row)]
                for device, row in rows
            ],
            [
                [1e3 / link.bandwidth_bytes_per_s if link else 0.0 for link in row]
                for _, row in rows
            ],
        )

    def ms(self, device: int, other: int, size: int, times: int = 1) -> float:
        """Return the time of transfers of this many bytes each."""
        if not times:
            return 0.0  # also where there is no link
        return times * (self.latency_ms[device][other] + size * self.byte_ms[device][other])


def _latency_ms(link: Link | None, same: bool) -> float:
    return 0.0 if same else 1e3 * link.latency_s if link else inf


class Pass:
    """Layers that run one after another on each device, by their places in the order of all.

    Args:
        link_times: what transfers take.
        time_ms: by place and device.
        fastest_ms: by place, on the fastest device that it may be on.
        inputs: what each place waits for.
        devices: by place.

    Attributes:
        finish: by place, in milliseconds.
        looked_at: so many places have been reckoned until now.
    """

    def __init__(
        self,
        link_times: LinkTimes,
        time_ms: Sequence[Sequence[float]],
        fastest_ms: Sequence[float],
        inputs: Inputs,
        devices: Sequence[int],
    ) -> None:
        self._link_times, self._time_ms, self._inputs = link_times, time_ms, inputs
        arcs = [(source, place) for place, row in enumerate(inputs) for source, *_ in row]
        self._tail_ms = longest_behind(fastest_ms, arcs)  # at no cost of transfers
        self.least_ms = max(own + tail for own, tail in zip(fastest_ms, self._tail_ms, strict=True))
        self.looked_at = 0
        self._device = list(devices)
        self.held: list[list[int]] = [[] for _ in link_times.latency_ms]
        for place, device in enumerate(devices):
            self.held[device].append(place)
        self.finish = [0.0] * len(devices)
        found = self._run(0, inf)
        assert found is not None
        self.finish = found

    @classmethod
    def forwards(cls, problem: Problem, link_times: LinkTimes, devices: Sequence[int]) -> Self:
        """Return the forward pass of an assignment, given by layer."""
        inputs: list[list[tuple[int, int, int]]] = [[] for _ in problem.layers]
        for value in problem.values:
            for reader in value.readers:
                inputs[reader].append((value.source, value.bytes, value.repeats))
        return cls(
            link_times, problem.forward_ms, fastest_ms(problem, problem.forward_ms), inputs, devices
        )

    @classmethod
    def backwards(cls, problem: Problem, link_times: LinkTimes, devices: Sequence[int]) -> Self:
        """Return the mirror image: the last layer has the first place."""
        last = len(problem.layers) - 1
        inputs: list[list[tuple[int, int, int]]] = [[] for _ in problem.layers]
        for value in problem.values:
            for reader in value.readers if value.gradient_bytes else ():
                inputs[last - value.source].append((last - reader, value.gradient_bytes, 1))
        fastest = fastest_ms(problem, problem.backward_ms)
        return cls(link_times, problem.backward_ms[::-1], fastest[::-1], inputs, devices[::-1])

    @property
    def length_ms(self) -> float:
        """The last finish."""
        return max(self.finish)

    def moved(self, places: Mapping[int, int], most_ms: float) -> list[float] | None:
        """Return, by place, its finish where some go to other devices.

        The result is None where the last is later than is wanted.
        """
        before = {place: self._device[place] for place in places}
        self._put(places)
        finish = self._run(min(places), most_ms)
        self._put(before)
        return finish

    def keep(self, places: Mapping[int, int], finish: list[float]) -> None:
        """Accept the move that ``moved`` evaluated."""
        for place, device in places.items():
            held = self.held[self._device[place]]
            del held[bisect_left(held, place)]
            insort(self.held[device], place)
        self._put(places)
        self.finish = finish

    def critical(self) -> list[int]:
        """Return the places that the last finish waits for, one after another, from that one on."""
        place = max(range(len(self.finish)), key=self.finish.__getitem__)
        found = [place]
        while True:
            device = self._device[place]
            row = self.held[device]
            index = bisect_left(row, place)
            awaited = [(self.finish[row[index - 1]], row[index - 1])] if index else []
            for source, size, times in self._inputs[place]:
                there_ms = self._link_times.ms(self._device[source], device, size, times)
                awaited.append((self.finish[source] + there_ms, source))
            if not awaited:
                return found
            place = max(awaited)[1]
            found.append(place)

    def _put(self, places: Mapping[int, int]) -> None:
        for place, device in places.items():
            self._device[place] = device

    def _run(self, first: int, most_ms: float) -> list[float] | None:
        """Return, by place, its finish; finishes before the first moved layer stay."""
        finish, devices, tails = self.finish.copy(), self._device, self._tail_ms
        latency, byte, times, inputs = (
            self._link_times.latency_ms,
            self._link_times.byte_ms,
            self._time_ms,
            self._inputs,
        )
        free = [
            finish[held[index - 1]] if (index := bisect_left(held, first)) else 0.0
            for held in self.held
        ]
        for place in range(first, len(finish)):
            device = devices[place]
            start = free[device]
            for source, size, repeats in inputs[place]:
                there = finish[source]
                other = devices[source]
                if other != device and repeats:
                    there += repeats * (latency[other][device] + size * byte[other][device])
                if there > start:
                    start = there
            free[device] = finish[place] = end = start + times[place][device]
            if end + tails[place] > most_ms:
                self.looked_at += place - first
                return None
        self.looked_at += len(finish) - first
        return finish
