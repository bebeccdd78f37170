r"""Data parallelism on unlike devices: how many samples of each micro-batch each device computes.

The whole model is on every device of a subset D. Of a batch of B samples in c micro-batches, device
d computes n(d) samples of each, whole numbers with sum B / c. With p(d, n) the forward and backward
time of a micro-batch of n samples on d, interpolated between measured sizes, and tail(d, n, j) the
part of its backward pass that follows the completion of piece j, and waits(d, n) as in
``gradient_exchange.py``::

    exposed(d, n) = max(0, max over pieces j of
                           reduce(j) + reduce(j + 1) + ... + reduce(last) - tail(d, n, j))
    busy(d, n)    = waits(d, n) + c * p(d, n) + exposed(d, n)
    step          = max over d in D of busy(d, n(d)) + max over d in D of optimizer(d) / R

A reduction waits for the slowest device. So the step is the maximum of terms of single devices, and
a dynamic program over the devices finds the best shares exactly: with ``best(k, m)`` the smallest
maximum of the first k devices with m samples in all::

    best(k, m) = min over n of max(best(k - 1, m - n), busy(k, n))

Subsets and numbers of micro-batches are tried in the order of a lower bound, the time that the work
takes if all devices compute at their best rate, until no bound is below the best step.

Shares are between the smallest and the largest measured size, and a device does not recompute
unless it must.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placer.schema import Device, PlacementRequest, Schedule
from placer.schema.base import PROVEN_GAP
from placer.solver import costs
from placer.solver.problem import ROUNDING, Problem
from placer.solver.replicas.gradient_exchange import piece_forwards, piece_tails
from placer.solver.replicas.replication import (
    Replication,
    can_interpolate,
    profile_of_share,
    replication,
    shared_profile,
)

Times = NDArray[np.float64]

MOST_SUBSETS = 2_000
"""The most subsets of devices that are tried, about ten seconds. Of more, only the fastest devices
of each number are taken."""


@dataclass(frozen=True)
class SharedBatch:
    """A batch that devices share, each with the whole model.

    Attributes:
        devices: by replica, its index in the cluster.
        samples: by replica, its samples of each micro-batch.
        chunks: micro-batches in a batch.
        step_ms: the time of a step.
        bound_ms: a lower bound on the steps with other shares of these devices and micro-batches.
        replication: what the devices exchange.
    """

    devices: tuple[int, ...]
    samples: tuple[int, ...]
    chunks: int
    step_ms: float
    bound_ms: float
    replication: Replication


class _TimesBySize(NamedTuple):
    """Times of a device by size of its share, from the smallest measured size on.

    Attributes:
        passes: both passes of a micro-batch.
        optimizer: the optimizer without replicas. Each measured size has its own measurement of
            it, which also counts for the sizes up to the next one.
        tails: by piece in the order of backward passes, what follows it in the pass.
        tail_bytes: the bytes of their gradients.
        forwards: by piece in the order of forward passes, its forward time.
        forward_bytes: the bytes of their parameters.
    """

    passes: Times
    optimizer: Times
    tails: list[Times]
    tail_bytes: list[int]
    forwards: list[Times]
    forward_bytes: list[int]


class _Candidate(NamedTuple):
    """A subset of devices and a number of micro-batches, with a bound of its steps in ms."""

    bound: float
    devices: tuple[int, ...]
    chunks: int
    replication: Replication
    optimizer_ms: float


class UnevenShares:
    """The search for the best shares of each number of devices.

    Args:
        request: the question, by objective ``step``.
        over: whether the time is over.
        are_equal: whether only equal shares count, as in other engines.

    Attributes:
        found: by number of devices, the best shares.
        bounds: by number of devices, a lower bound on the steps of all of them, in ms.
    """

    def __init__(
        self, request: PlacementRequest, over: Callable[[], bool], are_equal: bool = False
    ) -> None:
        self._request, self._over, self._are_equal = request, over, are_equal
        every = (request.profile, *request.profiles)
        self._profiles = sorted(every, key=lambda profile: profile.batch_size)
        self._least, self._most = self._profiles[0].batch_size, self._profiles[-1].batch_size
        self._problem = Problem.from_request(request)
        self._fitting: dict[tuple[str, int, bool, int], NDArray[np.bool_]] = {}
        self._times: dict[tuple[str, bool], _TimesBySize] = {}
        self.found: dict[int, SharedBatch] = {}
        self.bounds: dict[int, float] = {}

    @property
    def schedule(self) -> Schedule:
        """The order of micro-batches; with one stage, all take equally long."""
        asked = self._request.schedule
        return "1f1b" if asked == "auto" else asked

    @property
    def measured_batch_sizes(self) -> tuple[int, ...]:
        """The sizes between which times are interpolated."""
        return tuple(profile.batch_size for profile in self._profiles)

    def applies(self) -> bool:
        """Return whether devices are unlike, and may each hold the whole model."""
        rules = self._request.constraints
        return (
            self._request.objective == "step"
            and len(self._problem.alike_devices()) > 1
            and can_interpolate(self._profiles)
            and (rules.max_layers or inf) >= len(self._problem.layers)
        )

    def search(self, known_ms: float) -> None:
        """Try the candidates in the order of their bounds.

        Args:
            known_ms: a step that is known: candidates that are not shorter are skipped.
        """
        candidates = sorted(self._candidates(), key=lambda one: (one.bound, one.devices))
        for one in candidates:
            replicas, known = len(one.devices), self._known(known_ms)
            bound = one.bound
            # A skipped candidate may be better by less than half of the proven gap: the answer
            # still counts as optimal.
            if bound < known * (1 - PROVEN_GAP / 2) and not self._over():
                best = self._best_of(one)
                bound = inf if best is None else best.bound_ms
                if best is not None and best.step_ms < self._step_of(replicas):
                    self.found[replicas] = best
            self.bounds[replicas] = min(self.bounds.get(replicas, inf), bound)

    def _known(self, known_ms: float) -> float:
        return min([known_ms, *(one.step_ms for one in self.found.values())])

    def _step_of(self, replicas: int) -> float:
        return self.found[replicas].step_ms if replicas in self.found else inf

    # Candidates

    def _candidates(self) -> Iterator[_Candidate]:
        whole = self._request.whole_batch_size
        for devices in self._subsets():
            members = [self._problem.devices[device] for device in devices]
            shared = replication([members], self._links)
            if shared is None:
                continue
            # the least of any share's size, so that it holds for all shares
            least_ms = max(float(self._by_size(device).optimizer.min()) for device in devices)
            optimizer_ms = least_ms / shared.replicas
            rate = sum(self._best_rate(device) for device in devices)
            # More micro-batches would give some device less than the smallest measured size.
            for chunks in range(1, whole // (self._least * len(devices)) + 1):
                samples, rest = divmod(whole, chunks)
                if rest or samples > self._most * len(devices):
                    continue
                bound = (whole / rate + optimizer_ms) * (1 - ROUNDING) if rate < inf else 0.0
                yield _Candidate(bound, devices, chunks, shared, optimizer_ms)

    def _subsets(self) -> Iterator[tuple[int, ...]]:
        """Yield the subsets of two devices or more; of alike devices the first are taken."""
        rules = self._request.constraints
        least, most = rules.min_devices or 1, rules.max_devices or inf
        classes = self._problem.alike_devices()
        if prod(len(members) + 1 for members in classes) > MOST_SUBSETS:
            fastest = sorted(range(len(self._problem.devices)), key=lambda d: -self._best_rate(d))
            every: Iterator[tuple[int, ...]] = (
                tuple(sorted(fastest[:count])) for count in range(1, len(fastest) + 1)
            )
        else:
            counts = itertools.product(*(range(len(members) + 1) for members in classes))
            every = (
                tuple(sorted(d for n, own in zip(one, classes, strict=True) for d in own[:n]))
                for one in counts
            )
        return (devices for devices in every if max(2, least) <= len(devices) <= most)

    @cached_property
    def _links(self) -> dict[tuple[str, str], Any]:
        return {(link.source, link.target): link for link in self._request.placed_on.links}

    def _best_rate(self, device: int) -> float:
        """Return the most samples per ms of a device at any size."""
        time_ms = self._by_size(device).passes
        sizes = np.arange(self._least, self._most + 1)
        return float(
            np.max(np.divide(sizes, time_ms, where=time_ms > 0, out=np.full_like(time_ms, inf)))
        )

    # Times by size

    def _by_size(self, device: int) -> _TimesBySize:
        """Return the times of a device by size."""
        one = self._problem.devices[device]
        key = one.type, self._problem.recompute[device] == "always"
        if key not in self._times:
            self._times[key] = self._interpolated(device, is_repeated=key[1])
        return self._times[key]

    def _interpolated(self, device: int, is_repeated: bool) -> _TimesBySize:
        """Return the times of a device by size.

        Args:
            device: its index.
            is_repeated: whether forward passes run twice.
        """
        sizes = np.arange(self._least, self._most + 1)
        known = [profile.batch_size for profile in self._profiles]
        kind = self._problem.devices[device].type
        layers, split = range(len(self._problem.layers)), self.schedule == "zero-bubble"
        problems = [replace(self._problem, layers=profile.layers) for profile in self._profiles]
        tails = [piece_tails(problem, layers, device, split) for problem in problems]
        forwards = [piece_forwards(problem, layers, device) for problem in problems]
        passes = [
            sum(layer.both_ms(kind) + is_repeated * layer.forward_ms[kind] for layer in one.layers)
            for one in self._profiles
        ]

        totals = [
            sum(layer.optimizer_ms.get(kind, 0.0) for layer in one.layers) for one in self._profiles
        ]
        optimizer = np.array(totals)[np.searchsorted(known, sizes, side="right") - 1]

        def by_size(measured: Sequence[float]) -> Times:
            return np.asarray(np.interp(sizes, known, measured))

        return _TimesBySize(
            by_size(passes),
            optimizer,
            [by_size([time_ms for time_ms, _ in piece]) for piece in zip(*tails, strict=True)],
            [size for _, size in tails[0]],
            [by_size([time_ms for _, time_ms in piece]) for piece in zip(*forwards, strict=True)],
            [size for size, _ in forwards[0]],
        )

    # Shares

    def _best_of(self, one: _Candidate) -> SharedBatch | None:
        """Return the best shares of a candidate that fit into memory, or None without any."""
        samples = self._request.whole_batch_size // one.chunks
        costs_ms = [self._costs_ms(one, device) for device in one.devices]
        if self._are_equal:
            sizes = np.arange(self._least, self._most + 1)
            is_share = sizes * len(one.devices) == samples
            costs_ms = [np.where(is_share, own, inf) for own in costs_ms]
        # Search without memory limits first. A device whose share does not fit then loses all sizes
        # that do not fit, so each device is a misfit once at most, and the loop ends.
        while True:
            longest_ms, shares = _fairest(costs_ms, self._least, samples)
            if longest_ms == inf:
                return None
            misfits = [
                place
                for place, (device, share) in enumerate(zip(one.devices, shares, strict=True))
                if not self._fits(one, device)[share - self._least]
            ]
            if not misfits:
                optimizer_ms = self._optimizer_ms(one, shares)
                # No shares have a smaller maximum, and none have a shorter optimizer; but the
                # shares with the smallest maximum may have a longer optimizer. So the bound is not
                # always the step.
                return SharedBatch(
                    one.devices,
                    shares,
                    one.chunks,
                    longest_ms + optimizer_ms,
                    longest_ms + one.optimizer_ms,
                    one.replication,
                )
            for place in misfits:
                costs_ms[place] = np.where(
                    self._fits(one, one.devices[place]), costs_ms[place], inf
                )

    def _optimizer_ms(self, one: _Candidate, shares: Sequence[int]) -> float:
        """Return the time of the longest optimizer with these shares."""
        longest = max(
            float(self._by_size(device).optimizer[share - self._least])
            for device, share in zip(one.devices, shares, strict=True)
        )
        return longest / one.replication.replicas

    def _costs_ms(self, one: _Candidate, device: int) -> Times:
        """Return, by size, the time of a device between the optimizers of two steps."""
        times = self._by_size(device)
        reduce, gather = one.replication.reduce[0], one.replication.gather[0]
        exposed, waits = np.zeros_like(times.passes), np.zeros_like(times.passes)
        # From the last piece on: reduce(j) + ... + reduce(last), as in the formula of ``exposed``.
        left_ms = 0.0
        for tail, size in zip(reversed(times.tails), reversed(times.tail_bytes), strict=True):
            left_ms += reduce.time_ms(size)
            exposed = np.maximum(exposed, left_ms - tail)
        # A piece waits until the parameters of all pieces up to it are gathered, less the time in
        # which the pieces before it compute.
        gathered_ms, passed = 0.0, np.zeros_like(times.passes)
        for forward, size in zip(times.forwards, times.forward_bytes, strict=True):
            gathered_ms += gather.time_ms(size)
            waits = np.maximum(waits, gathered_ms - passed)
            passed = passed + forward
        return np.asarray(waits + one.chunks * times.passes + exposed)

    def _fits(self, one: _Candidate, device: int) -> NDArray[np.bool_]:
        """Return, by size, whether a device has memory for it."""
        place = self._problem.devices[device]
        flight = one.chunks if self.schedule == "fill-drain" else 1
        again = self._problem.recompute[device] == "always"
        key = f"{place.type} {place.usable_bytes}", len(one.devices), again, flight
        if key not in self._fitting:
            sizes = range(self._least, self._most + 1)
            problems = (
                self.problem_of(device, size, one.chunks, one.replication) for size in sizes
            )
            self._fitting[key] = np.array([_fits_alone(problem) for problem in problems])
        return self._fitting[key]

    def problem_of(self, device: int, samples: int, chunks: int, shared: Replication) -> Problem:
        """Return the problem of one device that computes its share of each micro-batch."""
        place: Device = self._problem.devices[device]
        profile = shared_profile(profile_of_share(self._profiles, samples), shared.replicas)
        rules = self._request.constraints
        is_always = rules.recompute_on(place.name) == "always"
        changed = {
            "profile": profile,
            "profiles": (),
            "batch_size": None,
            "chunks": chunks,
            "schedule": self.schedule,
            "cluster": self._request.placed_on.model_copy(
                update={"devices": (place,), "links": ()}
            ),
            "constraints": rules.model_copy(
                update={
                    "contiguous": True,
                    "recompute": "always" if is_always else "never",
                    "max_devices": None,
                    "min_devices": None,
                }
            ),
            "explain": False,
        }
        own = replace(shared, reduce=shared.reduce[:1], gather=shared.gather[:1])
        return replace(
            Problem.from_request(self._request.model_copy(update=changed)), replication=own
        )


def _fits_alone(problem: Problem) -> bool:
    asked = problem.request.model_copy(update={"objective": "throughput"})
    problem = replace(problem, request=asked)
    result = costs.evaluate(problem, [0] * len(problem.layers))
    return result is not None and costs.fits(problem, result)


def _fairest(costs_ms: Sequence[Times], least: int, samples: int) -> tuple[float, tuple[int, ...]]:
    """Return the smallest possible maximum of the devices' costs, and shares that reach it.

    Args:
        costs_ms: by device, the cost of each size from the least on; infinite where impossible.
        least: the smallest size.
        samples: the sum of all shares.
    """
    # best[k][m] is ``best(k, m)`` of the module's docstring.
    best = [np.full(samples + 1, inf)]
    best[0][0] = 0.0
    for own in costs_ms:
        before, after = best[-1], np.full(samples + 1, inf)
        for size, cost in enumerate(own, start=least):
            if size > samples:
                break
            after[size:] = np.minimum(after[size:], np.maximum(before[: samples + 1 - size], cost))
        best.append(after)
    longest = float(best[-1][samples])
    if longest == inf:
        return inf, ()
    shares: list[int] = []
    left = samples
    for before, own in zip(reversed(best[:-1]), reversed(costs_ms), strict=True):
        # the smallest share with which this device and those before it reach the maximum
        sizes = range(least, min(least + len(own) - 1, left) + 1)
        share = next(n for n in sizes if max(before[left - n], own[n - least]) <= longest)
        shares.append(share)
        left -= share
    return longest, tuple(reversed(shares))
