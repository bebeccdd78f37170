r"""Lower bounds on stages with numbers of replicas of their own, by dynamic programming.

A stage has the layers of an ideal j that are not in an ideal i within it (``stage_ideals.py``).
On m replicas, with U units in each of c micro-batches, k = U / m, and the forward and backward
times F and B and the weight-gradient times W of a unit::

    work(i, j, m)   = k (F + B)                            what a device computes for a micro-batch
    way(i, j, m)    = k (F + B - W') + transfers at j      W' = W under zero-bubble, else 0
    slot(i, j, m)  >= optimizer / m  +  max(0, reduce - last pass)  +  max(0, gather - first pass)

A stage computes all micro-batches, and its first and last one also pass through all stages before
it. Between two steps the first stage has its slot. So for stages s, numbered from 0, a steady-state
step takes at least::

    slot(0) + max over s of ( way(0) + ... + way(s - 1) + c (work(s) - k W') )
    max over s of ( c work(s) + slot(s) )
    max over borders of c * transfer in one direction

and an isolated step at least the same, with slot(s) of the same stage in place of slot(0). The
smallest such value over all ideals and numbers of replicas is exact, from the last stage back. With
the layers outside i, and d devices::

    A(i, d) = min over j, m of  max( c (work(i, j, m) - k W'),  way(i, j, m) + A(j, d - m) )
    B(i, d) = min over j, m of  max( c work(i, j, m) + slot(i, j, m),  B(j, d - m) )

``way`` and ``slot(0)`` count for stages with a layer that all others come before or depend on, if
all values have gradients: all stages before and behind wait for such a stage. Transfers at j count
where one layer is the last one in every stage that ends at j, and one layer the first one behind.

Under objective ``throughput`` the second one, with the load of ``group_costs.py``, is the objective
itself where links are alike and no value is sent to several stages. Messages count over the fastest
link, and an exchange over the fastest links of a device. Stages whose state and saved tensors
exceed a device's memory are left out.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
section 3.1 (the dynamic program over layers and devices).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from placer.schedule.gradient_pieces import ADD_BYTES_PER_S
from placer.solver import pipelines
from placer.solver.problem import ROUNDING, Problem
from placer.solver.replicas.group_costs import GroupModel
from placer.solver.replicas.replication import loaded_rate
from placer.solver.replicas.stage_ideals import Bools
from placer.solver.replicas.stage_tables import StageTables, Table


class Part(NamedTuple):
    """The first stages of a plan, up to some layer.

    Attributes:
        bound: a lower bound on every plan that begins so.
        stages: the ideals before each and at its end, and its number of replicas.
        devices: that are left.
        way_ms: of the stages.
        first: the value that is added to the first bound: the slot of the first stage.
        most: the largest terms of both bounds.
    """

    bound: float
    stages: tuple[tuple[int, int, int], ...]
    devices: int
    way_ms: float = 0.0
    first: float = 0.0
    most: tuple[float, float] = (0.0, 0.0)

    @property
    def position(self) -> int:
        """The ideal at the end of the last stage."""
        return self.stages[-1][1] if self.stages else 0


@dataclass(frozen=True)
class _Terms:
    """The terms of stages with one number of replicas.

    Attributes:
        work_ms: of all micro-batches, as the first bound counts it.
        way_ms: of one micro-batch.
        whole_ms: of all micro-batches and the slot, as the second bound counts them.
        slot_ms: between two steps.
    """

    work_ms: Table
    way_ms: Table
    whole_ms: Table
    slot_ms: Table


class GroupBounds:
    """The bounds of one model of costs.

    Args:
        model: of a schedule and a number of units.
        counts: the possible numbers of replicas; each divides the units of the model.
        tables: of the stages that there may be.
        devices: how many there are.
    """

    def __init__(
        self,
        model: GroupModel,
        counts: Sequence[int],
        tables: StageTables,
        devices: int,
    ) -> None:
        self._model, self._problem = model, model.problem
        self.counts, self.devices = tuple(counts), devices
        self.tables = tables
        self._is_step = self._problem.request.objective == "step"
        self._steady = pipelines.is_steady_state(self._problem)
        self._terms = {count: self._terms_of(count) for count in self.counts}

    def first(self) -> Part:
        """Return the plan without stages yet, with the bound of all plans."""
        begin = Part(0.0, (), self.devices)
        bounds, _ = self._next_bounds(begin)
        return begin._replace(bound=float(bounds.min(initial=np.inf)))

    def following(self, part: Part) -> Iterator[Part]:
        """Yield the plans with one more stage, lowest bound first."""
        bounds, seconds = self._next_bounds(part)
        usable, at = self._usable(part), part.position
        flat = bounds.ravel()
        for index in np.argsort(flat, kind="stable"):
            if flat[index] == np.inf:
                return
            number, stop = divmod(int(index), self.tables.count)
            count = usable[number]
            own = self._terms[count]
            is_begin = self._steady and not part.stages
            yield Part(
                float(flat[index]),
                (*part.stages, (at, stop, count)),
                part.devices - count,
                part.way_ms + float(own.way_ms[at, stop]),
                float(own.slot_ms[at, stop]) if is_begin else part.first,
                (
                    max(part.most[0], part.way_ms + float(own.work_ms[at, stop])),
                    float(seconds[number, stop]),
                ),
            )

    def _usable(self, part: Part) -> list[int]:
        return [count for count in self.counts if count <= part.devices]

    def _next_bounds(self, part: Part) -> tuple[Table, Table]:
        """Return, by number of replicas and end, the bound with that stage, and its second term."""
        rows, others = [], []
        at = part.position
        for count in self._usable(part):
            own, left = self._terms[count], part.devices - count
            second = np.maximum(part.most[1], own.whole_ms[at])
            whole = np.maximum(second, self._whole[left])
            if self._is_step:
                first = np.maximum(
                    max(part.most[0], 0.0),
                    part.way_ms + np.maximum(own.work_ms[at], own.way_ms[at] + self._work[left]),
                )
                extra = own.slot_ms[at] if self._steady and not part.stages else part.first
                whole = np.maximum(whole, first + extra)
            rows.append(whole * (1 - ROUNDING))
            others.append(second)
        if not rows:
            empty = np.full((0, self.tables.count), np.inf)
            return empty, empty
        return np.array(rows), np.array(others)

    # The tables

    @cached_property
    def _work(self) -> Table:
        """A, by number of devices and ideal."""
        return self._least({count: (one.work_ms, one.way_ms) for count, one in self._terms.items()})

    @cached_property
    def _whole(self) -> Table:
        """B, by number of devices and ideal."""
        zero = np.zeros_like(self.tables.within, dtype=float)
        return self._least({count: (one.whole_ms, zero) for count, one in self._terms.items()})

    def _least(self, terms: dict[int, tuple[Table, Table]]) -> Table:
        found = np.full((self.devices + 1, self.tables.count), np.inf)
        found[:, -1] = -np.inf  # no stage is left
        for devices in range(1, self.devices + 1):
            best = found[devices - 1].copy()
            for count, (own, added) in terms.items():
                if count <= devices:
                    reached = np.maximum(own, added + found[devices - count][None, :])
                    best = np.minimum(best, reached.min(axis=1))
            best[-1] = -np.inf
            found[devices] = best
        return found

    def _terms_of(self, count: int) -> _Terms:
        problem, layers = self._problem, self.tables.layers
        units, chunks = self._model.units // count, problem.request.chunks
        reduce, gather = self._byte_ms(count)
        possible = self._possible(count)
        compute = layers["forward"] + layers["backward"]
        if not self._is_step:
            exchange = layers["gradients"] * (reduce + gather) / chunks
            send, receive = self.tables.messages
            if problem.request.transfers == "overlapped":
                load = np.maximum(units * compute + exchange, units * np.maximum(send, receive))
            else:
                load = units * (compute + send + receive) + exchange
            load = np.where(possible, load / self._model.units, np.inf)
            return _Terms(load, load, load, load)
        there, back = self.tables.borders
        slot = layers["optimizer"] / count
        exposed = reduce * layers["gradients"] - layers["last pass"]
        waits = gather * layers["gradients"] - layers["forward"]
        slot = slot + np.maximum(exposed, 0.0) + np.maximum(waits, 0.0)
        input_ms = units * (compute - layers["weights"])
        lanes = chunks * units * np.maximum(there, back)[None, :]
        work, way = chunks * input_ms, input_ms + units * (there + back)[None, :]
        whole = np.maximum(chunks * units * compute + slot, lanes)
        if self._steady:
            slot = np.where(self.tables.joints > 0, slot, 0.0)
        else:
            work = work + slot
        return _Terms(
            np.where(possible, work, np.inf),
            np.where(self.tables.joints > 0, way, 0.0),
            np.where(possible, whole, np.inf),
            np.where(possible, slot, np.inf),
        )

    def _byte_ms(self, count: int) -> tuple[float, float]:
        """Return the least time of a byte of gradients to reduce, and to gather, in any group."""
        pipelines_of = self._problem.replication
        if pipelines_of is not None:
            return (
                min(time.byte_ms for time in pipelines_of.reduce),
                min(time.byte_ms for time in pipelines_of.gather),
            )
        if count == 1:
            return 0.0, 0.0
        reduce, gather = (sums[count - 2] / count for sums in self._least_sums)
        return reduce + 3e3 * (count - 1) / count / ADD_BYTES_PER_S, gather

    @cached_property
    def _least_sums(self) -> tuple[Table, Table]:
        """By number of others, the least time of a byte to each, while devices compute or not.

        A group is no faster than one that a device forms with those that it has the fastest links
        to.
        """
        count, found = len(self._problem.devices), []
        for computing in (True, False):
            times = np.full((count, count), np.inf)
            for (source, target), link in self._model.cluster.items():
                rate = loaded_rate(link, computing).bandwidth_bytes_per_s
                times[self._number[source], self._number[target]] = 1e3 / rate
            sums = np.cumsum(np.sort(times, axis=1), axis=1)
            found.append(sums.min(axis=0))
        return found[0], found[1]

    @cached_property
    def _number(self) -> dict[str, int]:
        return {device.name: number for number, device in enumerate(self._problem.devices)}

    def _possible(self, count: int) -> Bools:
        """Return which stages have layers, and are not certain to exceed a limit."""
        problem = self._problem
        found = self.tables.within
        if problem.most_layers is not None:
            found = found & (self.tables.sums([1.0] * len(problem.layers)) <= problem.most_layers)
        units = self._model.units // count
        layers = range(len(problem.layers))
        held = self.tables.sums([_least_bytes(problem, layer, count, units) for layer in layers])
        return np.asarray(found & (held <= problem.devices[0].usable_bytes))


def _least_bytes(problem: Problem, index: int, count: int, units: int) -> int:
    """Return the least memory of a layer on one of several replicas."""
    layer = problem.layers[index]
    state = layer.param_bytes + layer.buffer_bytes + layer.grad_bytes
    state += -(-layer.optimizer_bytes // count)
    return state + (0 if problem.may_recompute else units * layer.saved_bytes)
