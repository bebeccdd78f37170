r"""Stages with unlike numbers of replicas, planned apart from the solver.

PipeDream gives each stage replicas of its own, which take micro-batches in turn: ``15-1`` are
fifteen replicas of the first stage and one of the second. On alike devices with alike links, a
dynamic program over the ends of stages finds the plan with the smallest bottleneck. With the layers
in one topological order, and T(i, j, m) the time of layers i to j - 1 on m replicas::

    A(j, k) = min over i < j and m <= k of  max( A(i, k - m), T(i, j, m) )

T is either Placer's load under objective ``throughput``, with one exchange of gradients for the n
micro-batches of a step, or PipeDream's estimate, with one exchange for each micro-batch::

    Placer       (compute + sends + receives) / m  +  exchange(gradients, m) / n
    PipeDream    max( (compute + 4 (m - 1) / m * parameters / bandwidth) / m,
                      2 * values at either end / bandwidth / m )

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
section 3.1. Formulas: ``optimizer_graph_hierarchical.py`` in
github.com/msr-fiddle/pipedream, commit 7db6a1c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placer.schema import PlacementRequest
from placer.solver.problem import Problem
from placer.solver.replicas.replication import replication

Matrix = NDArray[np.float64]
"""By first layer of a stage and by its end."""


class Stage(NamedTuple):
    """A stage: its first layer, its end and its replicas."""

    start: int
    stop: int
    replicas: int


@dataclass(frozen=True)
class Plan:
    """Stages in order.

    Attributes:
        stages: with their replicas.
        predicted_ms: the bottleneck by the cost model of the search.
    """

    stages: tuple[Stage, ...]
    predicted_ms: float

    def __str__(self) -> str:
        return "-".join(str(stage.replicas) for stage in self.stages)


class UnlikeReplicas:
    """Plans for the layers of a training request on alike devices with alike links.

    Args:
        request: with objective ``throughput``; its layers are in topological order.
    """

    def __init__(self, request: PlacementRequest) -> None:
        self.problem = Problem.from_request(request.model_copy(update={"replicas": "never"}))
        self._links = {(link.source, link.target): link for link in request.placed_on.links}
        (link, *_) = request.placed_on.links
        self._byte_ms = 1e3 / link.bandwidth_bytes_per_s
        self._devices = request.devices

    def best(self) -> Plan:
        """Return the plan with the smallest bottleneck by Placer's cost model.

        A value that several later stages read counts as sent once.
        """
        transfer_ms = self._received_ms + self._sent_ms
        return _best(
            [
                (self._compute_ms + transfer_ms) / count + self._exchange_ms(count)
                for count in self._counts
            ]
        )

    def of_pipedream(self) -> Plan:
        """Return the plan with the smallest bottleneck by PipeDream's estimate."""
        values_ms = 2 * self._byte_ms * self._cut_bytes
        ends = np.maximum(values_ms[:, None], values_ms[None, :])
        ends[0] = 0.0  # the estimate of a first stage has no transfers
        parameters = _spans([layer.param_bytes for layer in self.problem.layers])
        return _best(
            [
                np.maximum(
                    self._work_without_inputs_ms
                    + 4 * (count - 1) / count * parameters * self._byte_ms,
                    ends,
                )
                / count
                for count in self._counts
            ]
        )

    def data_parallel_of_pipedream(self) -> float:
        """Return PipeDream's estimate of data parallelism on all devices, in milliseconds."""
        count = len(self._devices)
        size = sum(layer.param_bytes for layer in self.problem.layers)
        work_ms = float(self._work_without_inputs_ms[0, -1])
        return (work_ms + 4 * (count - 1) / count * size * self._byte_ms) / count

    def bottleneck(self, plan: Plan) -> float:
        """Return the busiest device's time for a micro-batch by Placer's cost model, in ms."""
        stage_of = [stage for stage in plan.stages for _ in range(stage.start, stage.stop)]
        transfer_ms = dict.fromkeys(plan.stages, 0.0)
        for value in self.problem.values:
            source = stage_of[value.source]
            for reader in {stage_of[reader] for reader in value.readers} - {source}:
                both_ms = self._value_ms(value.bytes, value.gradient_bytes)
                transfer_ms[source] += both_ms
                transfer_ms[reader] += both_ms
        return max(
            float(self._compute_ms[start, stop] + transfer_ms[start, stop, count]) / count
            + float(self._exchange_ms(count)[start, stop])
            for start, stop, count in map(tuple, plan.stages)
        )

    @property
    def _counts(self) -> range:
        return range(1, len(self._devices) + 1)

    @cached_property
    def _compute_ms(self) -> Matrix:
        problem = self.problem
        return _spans([problem.compute_ms(layer, 0) for layer in range(len(problem.layers))])

    @cached_property
    def _work_without_inputs_ms(self) -> Matrix:
        """Return the work of stages as PipeDream's optimizer counts it, which removes inputs."""
        return _spans(
            [
                0.0 if layer.module.startswith("Input") else self.problem.compute_ms(index, 0)
                for index, layer in enumerate(self.problem.layers)
            ]
        )

    @cached_property
    def _gradients(self) -> Matrix:
        return _spans([layer.grad_bytes for layer in self.problem.layers])

    def _exchange_ms(self, count: int) -> Matrix:
        """Return the part of a step's exchange that each of its micro-batches takes."""
        if count == 1:
            return np.zeros_like(self._gradients)
        costs = replication([self._devices[:count]], self._links)
        assert costs is not None
        return self._gradients * costs.byte_ms(0) / self.problem.request.chunks

    def _value_ms(self, size_bytes: int, gradient_bytes: int) -> float:
        """Return the time of a value there and of its gradient back."""
        link = self.problem.links[0][1]
        assert link is not None
        back_ms = link.transfer_ms(gradient_bytes) if gradient_bytes else 0.0
        return link.transfer_ms(size_bytes) + back_ms

    @cached_property
    def _sent_ms(self) -> Matrix:
        found = np.zeros_like(self._compute_ms)
        for value in self.problem.values:
            until = max(value.readers, default=value.source) + 1
            found[: value.source + 1, value.source + 1 : until] += self._value_ms(
                value.bytes, value.gradient_bytes
            )
        return found

    @cached_property
    def _received_ms(self) -> Matrix:
        found = np.zeros_like(self._compute_ms)
        for value in self.problem.values:
            both_ms = self._value_ms(value.bytes, value.gradient_bytes)
            for before, reader in pairwise([value.source, *sorted(value.readers)]):
                found[before + 1 : reader + 1, reader + 1 :] += both_ms
        return found

    @cached_property
    def _cut_bytes(self) -> NDArray[np.float64]:
        """By end of a stage, the bytes of the values that later stages read."""
        found = np.zeros(len(self.problem.layers) + 1)
        for value in self.problem.values:
            found[value.source + 1 : max(value.readers, default=value.source) + 1] += value.bytes
        return found


def _spans(sizes: Sequence[float]) -> Matrix:
    """Return the sums of all runs of layers, by first layer and end."""
    ends = np.concatenate([[0.0], np.cumsum(sizes)])
    return np.asarray(ends[None, :] - ends[:, None])


def _best(times_ms: Sequence[Matrix]) -> Plan:
    """Return the stages with the smallest largest time.

    Args:
        times_ms: by number of replicas from one on, the time of each stage.
    """
    ends = len(times_ms[0])
    forwards = np.triu(np.ones((ends, ends), dtype=bool), 1)
    possible = [np.where(forwards, time_ms, np.inf) for time_ms in times_ms]
    # by devices, the smallest bottleneck of the layers before each end, and the last stage
    least = [np.full(ends, np.inf)]
    least[0][0] = 0.0
    last: list[list[Stage | None]] = [[None] * ends]
    for devices in range(1, len(times_ms) + 1):
        best, stages = least[-1].copy(), list(last[-1])
        for count in range(1, devices + 1):
            reached = np.maximum(least[devices - count][:, None], possible[count - 1])
            starts = reached.argmin(axis=0)
            for stop in np.flatnonzero(reached.min(axis=0) < best):
                best[stop] = reached[starts[stop], stop]
                stages[stop] = Stage(int(starts[stop]), int(stop), count)
        least.append(best)
        last.append(stages)
    return Plan(_stages(last), float(least[-1][-1]))


def _stages(last: Sequence[Sequence[Stage | None]]) -> tuple[Stage, ...]:
    """Return all stages, from the last one back."""
    found: list[Stage] = []
    devices, stop = len(last) - 1, len(last[0]) - 1
    while stop:
        stage = last[devices][stop]
        assert stage is not None
        found.append(stage)
        devices, stop = devices - stage.replicas, stage.start
    return tuple(reversed(found))
