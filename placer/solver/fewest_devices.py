"""Objective ``devices``: the fewest devices that keep every one of them within a bottleneck.

Placements on at most n devices are sought that keep within it: n is as many as may be used at
first, then one less than the last placement uses, until none can. Placements on fewer devices are
placements on more, so that proves the number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from time import monotonic

from placer.schema import Infeasibility, Placement, PlacementRequest, TieBreaks
from placer.solver import answer, costs
from placer.solver.cpsat import ties
from placer.solver.cpsat.runner import Limits, Meter
from placer.solver.problem import ROUNDING, Problem
from placer.solver.reduce import reduced
from placer.solver.search import Progress, incumbent

METHOD = "fewest devices"

Outcome = tuple[list[int] | None, float, Infeasibility | None]
"""By layer, its device, or None; the bound on the bottleneck; why there is no placement whatever
the bottleneck."""

BottleneckSearch = Callable[[Problem, float | None], Outcome]
"""Looks for a placement within a bottleneck, and for no better one; for the smallest if None."""


class FewestSearch:
    """One solve.

    Args:
        request: the question, by objective ``devices``.
        search: looks for a placement on so many devices.
        progress: as ``solve`` takes it.
        stop: ends the search.
        meter: counts the work.
    """

    def __init__(
        self,
        request: PlacementRequest,
        search: BottleneckSearch,
        progress: Progress | None,
        stop: threading.Event | None,
        meter: Meter,
    ) -> None:
        assert request.bottleneck_ms is not None  # the request was validated
        self._request, self._search, self._progress, self._stop, self._meter = (
            request,
            search,
            progress,
            stop,
            meter,
        )
        self._most_ms = request.bottleneck_ms * (1 + ROUNDING)
        self._problem = Problem.from_request(request)
        self._began = monotonic()

    def answer(self) -> Placement:
        """Search downwards; the placement is not yet checked."""
        best: list[int] | None = None
        reason: Infeasibility | None = None
        bound, most = self._least(), self._problem.most_devices
        while most >= bound and not self._over():
            devices, bottleneck, reason = self._search(self._within(most), self._most_ms)
            if devices is not None and self._fits(devices):
                best, most = devices, len(set(devices)) - 1
                self._report(best, float(bound))
            # No placement on this number of devices meets the limits, so the answer needs more.
            elif reason is not None or bottleneck > self._most_ms:
                bound = most + 1
            else:
                break  # the time is over
        if best is not None:
            return self._found(best, float(bound))
        if bound > self._problem.most_devices:
            reason = reason or self._too_slow()
        return answer.nothing(self._problem, reason, float(bound), METHOD, self._time_s())

    def _report(self, best: list[int], bound: float) -> None:
        if self._progress is not None:
            used = float(len(set(best)))
            self._progress(incumbent(self._problem, best, used, bound, METHOD, self._time_s()))

    def _found(self, best: list[int], bound: float) -> Placement:
        """Return the best, or one on as few devices that transfers less or is better balanced."""
        broken: TieBreaks | None = None
        if self._request.break_ties:
            best, broken = self._ties_broken(best)
        placement = answer.found(self._problem, best, bound, METHOD, self._time_s())
        return placement.model_copy(update={"tie_breaks": broken})

    def _ties_broken(self, best: list[int]) -> tuple[list[int], TieBreaks]:
        few = self._within(len(set(best)))
        kept = [best]

        def limits(work: float) -> Limits:
            asked = few.request
            left_s = max(0.0, self._request.time_limit_s - self._time_s())
            return Limits(left_s, asked.workers, asked.seed, self._stop, None, work, self._meter)

        def offer(devices: list[int] | None) -> list[int]:
            if (
                devices is not None
                and len(set(devices)) <= few.most_devices
                and self._fits(devices)
            ):
                kept.append(devices)
            return min(kept, key=lambda one: ties.rank(costs.costs_of(self._problem, one)))

        broken = ties.broken(few, best, limits, offer, self._most_ms)
        return offer(None), broken

    def _within(self, most: int) -> Problem:
        """Return the question for a small bottleneck on at most so many devices."""
        left_s = max(0.01, self._request.time_limit_s - self._time_s())
        asked = self._request.model_copy(
            update={
                "objective": "throughput",
                "bottleneck_ms": None,
                "break_ties": False,
                "time_limit_s": left_s,
            }
        )
        return replace(self._problem, request=asked, most_devices=most)

    def _fits(self, devices: list[int]) -> bool:
        return costs.judged(self._problem, devices) is not None

    def _least(self) -> int:
        """Return a lower bound on devices: no fewer do all work within the bottleneck."""
        nodes = reduced(self._problem)
        work_ms = sum(
            min(
                (self._problem.work_ms(layers, d) for d in nodes.allowed[node]),
                default=0.0,
            )
            for node, layers in enumerate(nodes.nodes)
        )
        return max(self._problem.least_devices, ceil(work_ms / self._most_ms * (1 - ROUNDING)))

    def _too_slow(self) -> Infeasibility:
        """Return the reason that no placement meets the bottleneck, with the nearest one."""
        devices, bound, reason = self._search(self._within(self._problem.most_devices), None)
        if reason is not None:
            return reason
        result = costs.evaluate(self._problem, devices) if devices is not None else None
        found = f", {max(result.load_ms):.6g} ms where it is shortest" if result is not None else ""
        return Infeasibility(
            reason=f"bottleneck_ms = {self._request.bottleneck_ms:g}: whatever the placement, "
            "some device is busy for "
            f"{bound:.6g} ms or more{found}"
        )

    def _over(self) -> bool:
        return self._time_s() >= self._request.time_limit_s or (
            self._stop is not None and self._stop.is_set()
        )

    def _time_s(self) -> float:
        return monotonic() - self._began
