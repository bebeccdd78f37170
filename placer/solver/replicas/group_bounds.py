r"""Lower bounds on stages with numbers of replicas of their own, by dynamic programming.

For layers i to j - 1 on m replicas, U units in each of c micro-batches, k = U / m, and the forward
and backward times F and B and the weight-gradient times W of a unit::

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
smallest such value over all ends of stages and numbers of replicas is exact, from the last layer
back. With the layers from i on, and d devices::

    A(i, d) = min over j, m of  max( c (work(i, j, m) - k W'),  way(i, j, m) + A(j, d - m) )
    B(i, d) = min over j, m of  max( c work(i, j, m) + slot(i, j, m),  B(j, d - m) )

If not each layer reads the layer before it, a border between stages may leave out layer p and have
later ones that do not depend on it. With ``free(p)`` the end of all these, a stage that ends before
layer p has at least the layers before p that no stage before may have::

    A(i, d) = min over j, m, and k from j to free(j) of  max( ..., way(i, j, m) + A(k, d - m) )

Unless a stage can only have the layers from i to j, only terms count that grow with its layers, so
no transfers, and no exchange without the passes that hide it.
``way`` and ``slot(0)`` count for stages with a layer that all others come before or depend on, if
all values have gradients: no later stage begins before them, or ends after them.

Under objective ``throughput`` the second one, with the load of ``group_costs.py``, is the objective
itself where links are alike. Messages count over the fastest link, and an exchange over the fastest
links of a device. Stages whose state and saved tensors exceed a device's memory are left out.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
section 3.1 (the dynamic program over layers and devices).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placer.schedule.gradient_pieces import ADD_BYTES_PER_S
from placer.solver import pipelines
from placer.solver.problem import ROUNDING, Problem
from placer.solver.replicas.gradient_exchange import last_pass_ms
from placer.solver.replicas.group_costs import GroupModel
from placer.solver.replicas.replication import loaded_rate

Table = NDArray[np.float64]
"""By first layer of a stage and by its end, as positions in ``GroupBounds.ends``."""


class Part(NamedTuple):
    """The first stages of a plan, up to some layer.

    Attributes:
        bound: a lower bound on every plan that begins so.
        stages: starts and ends, as positions, and numbers of replicas.
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
        """The end of the last stage."""
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
        ends: the layers at which stages may begin or end, from 0 to the number of layers.
        devices: how many there are.
        free: by end, how far the layers of stages before it may reach, as a position in ``ends``;
            None if stages are cuts of the profile's order.
    """

    def __init__(
        self,
        model: GroupModel,
        counts: Sequence[int],
        ends: Sequence[int],
        devices: int,
        free: Sequence[int] | None = None,
    ) -> None:
        self._free = free
        self._model, self._problem = model, model.problem
        self.counts, self.devices = tuple(counts), devices
        self.ends = np.array(ends)
        self._is_step = self._problem.request.objective == "step"
        self._steady = pipelines.is_steady_state(self._problem)
        self._terms = {count: self._terms_of(count) for count in self.counts}

    def of_every_order(self, free: Sequence[int]) -> GroupBounds:
        """Return the bounds of plans whose stages need not be cuts of the profile's order.

        Args:
            free: by layer, how far the layers of stages before it may reach.
        """
        return GroupBounds(self._model, self.counts, range(len(free)), self.devices, free)

    def first(self) -> Part:
        """Return the plan without stages yet, with the bound of all plans."""
        begin = Part(0.0, (), self.devices)
        bounds, _ = self._next_bounds(begin)
        bound = float(bounds.min(initial=np.inf))
        if self._free is not None:
            # the first stages may have later layers only
            later = slice(1, self._free[0] + 1)
            rest = np.maximum(self._whole[-1], self._work[-1] if self._is_step else -np.inf)
            bound = min(bound, float(rest[later].min(initial=np.inf)) * (1 - ROUNDING))
        return begin._replace(bound=bound)

    def following(self, part: Part) -> Iterator[Part]:
        """Yield the plans with one more stage, lowest bound first."""
        bounds, seconds = self._next_bounds(part)
        usable, at = self._usable(part), part.position
        flat = bounds.ravel()
        for index in np.argsort(flat, kind="stable"):
            if flat[index] == np.inf:
                return
            number, stop = divmod(int(index), len(self.ends))
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

    def heaviest_layer(self) -> float:
        """Return a bound on all plans, in whatever order: some stage has the heaviest layer."""
        layers = range(len(self._problem.layers))
        return max(
            min(self._layer_bound(layer, count) for count in self.counts) for layer in layers
        )

    def _layer_bound(self, index: int, count: int) -> float:
        """Return the least that a stage with this layer takes; infinite if it does not fit.

        Further layers add more to the passes of a stage than they hide of its exchange.
        """
        problem, model, layer = self._problem, self._model, self._problem.layers[index]
        units, chunks = model.units // count, problem.request.chunks
        if _least_bytes(problem, index, count, units) > problem.devices[0].usable_bytes:
            return np.inf
        reduce, gather = self._byte_ms(count)
        compute_ms = units * problem.compute_ms(index, 0)
        if not self._is_step:
            return (compute_ms + layer.grad_bytes * (reduce + gather) / chunks) / model.units
        last_ms = last_pass_ms(problem, index, 0, problem.weights_apart)
        exposed = max(0.0, reduce * layer.grad_bytes - last_ms)
        waits = max(0.0, gather * layer.grad_bytes - problem.forward_ms[index][0])
        slot_ms = pipelines.optimizer_ms(problem, index, 0) / count + exposed + waits
        return (chunks * compute_ms + slot_ms) * (1 - ROUNDING)

    def _usable(self, part: Part) -> list[int]:
        return [count for count in self.counts if count <= part.devices]

    def _next_bounds(self, part: Part) -> tuple[Table, Table]:
        """Return, by number of replicas and end, the bound with that stage, and its second term."""
        rows, others = [], []
        at = part.position
        for count in self._usable(part):
            own, left = self._terms[count], part.devices - count
            second = np.maximum(part.most[1], own.whole_ms[at])
            whole = np.maximum(second, self._with_free_layers(self._whole[left]))
            if self._is_step:
                first = np.maximum(
                    max(part.most[0], 0.0),
                    part.way_ms
                    + np.maximum(
                        own.work_ms[at],
                        own.way_ms[at] + self._with_free_layers(self._work[left]),
                    ),
                )
                extra = own.slot_ms[at] if self._steady and not part.stages else part.first
                whole = np.maximum(whole, first + extra)
            rows.append(whole * (1 - ROUNDING))
            others.append(second)
        if not rows:
            empty = np.full((0, len(self.ends)), np.inf)
            return empty, empty
        return np.array(rows), np.array(others)

    # The tables

    @cached_property
    def _work(self) -> Table:
        """A, by number of devices and first layer."""
        return self._least({count: (one.work_ms, one.way_ms) for count, one in self._terms.items()})

    @cached_property
    def _whole(self) -> Table:
        """B, by number of devices and first layer."""
        zero = np.zeros((len(self.ends), len(self.ends)))
        return self._least({count: (one.whole_ms, zero) for count, one in self._terms.items()})

    def _least(self, terms: dict[int, tuple[Table, Table]]) -> Table:
        found = np.full((self.devices + 1, len(self.ends)), np.inf)
        found[:, -1] = -np.inf  # no stage is left
        for devices in range(1, self.devices + 1):
            best = found[devices - 1].copy()
            for count, (own, added) in terms.items():
                if count <= devices:
                    rest = self._with_free_layers(found[devices - count])
                    reached = np.maximum(own, added + rest[None, :])
                    best = np.minimum(best, reached.min(axis=1))
            best[-1] = -np.inf
            found[devices] = best
        return found

    def _with_free_layers(self, rest: Table) -> Table:
        """Return the least value of the layers from an end on, if some may be in earlier stages."""
        if self._free is None:
            return rest
        return np.array([rest[end : free + 1].min() for end, free in enumerate(self._free)])

    def _sums(self, sizes: Sequence[float]) -> Table:
        """Return the sums over the layers of each stage."""
        totals = np.concatenate([[0.0], np.cumsum(np.array(sizes, dtype=float))])[self.ends]
        return np.asarray(totals[None, :] - totals[:, None])

    @cached_property
    def _layers(self) -> dict[str, Table]:
        """Sums of a unit over layers, by name."""
        problem, layers = self._problem, range(len(self._problem.layers))
        weights = [pipelines.weight_grad_ms(problem, layer, 0) for layer in layers]
        return {
            "forward": self._sums([problem.forward_ms[layer][0] for layer in layers]),
            "backward": self._sums([problem.backward_ms[layer][0] for layer in layers]),
            "weights": self._sums(weights if problem.weights_apart else [0.0] * len(weights)),
            "last pass": self._sums(
                [last_pass_ms(problem, layer, 0, problem.weights_apart) for layer in layers]
            ),
            "optimizer": self._sums([pipelines.optimizer_ms(problem, one, 0) for one in layers]),
            "gradients": self._sums([layer.grad_bytes for layer in problem.layers]),
        }

    @cached_property
    def _borders(self) -> tuple[Table, Table]:
        """By end of a stage, the least time of a unit to the next stage, and of gradients back.

        Only values from the last layer to the next one are certain to pass between the two stages.
        """
        there = np.zeros(len(self._problem.layers) + 1)
        back = np.zeros_like(there)
        for value in self._problem.values:
            if value.source + 1 in value.reader_set:
                there[value.source + 1] += self._value_ms(value.bytes)
                back[value.source + 1] += self._value_ms(value.gradient_bytes)
        return there[self.ends], back[self.ends]

    def _value_ms(self, size_bytes: int) -> float:
        """Return the time of a message over the fastest link."""
        return self._problem.quickest_ms(size_bytes) if size_bytes else 0.0

    @cached_property
    def _messages(self) -> tuple[Table, Table]:
        """The least time that a stage sends and receives for a unit.

        A value counts as sent once, however many stages read it.
        """
        count = len(self._problem.layers) + 1
        send, receive = np.zeros((count, count)), np.zeros((count, count))
        for value in self._problem.values:
            there, back = self._value_ms(value.bytes), self._value_ms(value.gradient_bytes)
            last = max(value.readers, default=value.source)
            made_here = slice(None, value.source + 1), slice(value.source + 1, last + 1)
            send[made_here] += there
            receive[made_here] += back
            for before, reader in pairwise([value.source, *sorted(value.readers)]):
                read_here = slice(before + 1, reader + 1), slice(reader + 1, None)
                receive[read_here] += there
                send[read_here] += back
        return send[np.ix_(self.ends, self.ends)], receive[np.ix_(self.ends, self.ends)]

    def _terms_of(self, count: int) -> _Terms:
        problem, layers = self._problem, self._layers
        units, chunks = self._model.units // count, problem.request.chunks
        reduce, gather = self._byte_ms(count)
        possible = self._possible(count)
        compute = layers["forward"] + layers["backward"]
        if not self._is_step:
            exchange = layers["gradients"] * (reduce + gather) / chunks
            send, receive = (np.where(self._exact, one, 0.0) for one in self._messages)
            if problem.request.transfers == "overlapped":
                load = np.maximum(units * compute + exchange, units * np.maximum(send, receive))
            else:
                load = units * (compute + send + receive) + exchange
            load = np.where(possible, load / self._model.units, np.inf)
            return _Terms(load, load, load, load)
        there, back = self._borders
        slot = layers["optimizer"] / count
        whole_slot = slot
        if count > 1:
            exposed = reduce * layers["gradients"] - layers["last pass"]
            waits = gather * layers["gradients"] - layers["forward"]
            whole_slot = slot + np.maximum(exposed, 0.0) + np.maximum(waits, 0.0)
        slot = np.where(self._exact, whole_slot, slot)
        input_ms = units * (compute - layers["weights"])
        lanes = np.where(self._exact, chunks * units * np.maximum(there, back)[None, :], 0.0)
        work, way = chunks * input_ms, input_ms
        if self._free is None:
            way = way + units * (there + back)[None, :]
        if self._steady:
            slot = np.where(self._joints > 0, slot, 0.0)
        else:
            work = work + slot
        whole = np.maximum(chunks * units * compute + whole_slot, lanes)
        return _Terms(
            np.where(possible, work, np.inf),
            np.where(self._joints > 0, way, 0.0),
            np.where(possible, whole, np.inf),
            np.where(possible, slot, np.inf),
        )

    @cached_property
    def _exact(self) -> NDArray[np.bool_]:
        """Whether a stage from a layer to an end has these layers and no others."""
        places = np.arange(len(self.ends))
        if self._free is None:
            return np.ones((len(places), len(places)), dtype=bool)
        free = np.array(self._free)
        before = np.concatenate([[-1], np.maximum.accumulate(free)[:-1]])
        # no stage before has a later layer, and none of them leaves out an earlier one
        return np.asarray((before < places)[:, None] & (free == places)[None, :])

    @cached_property
    def _joints(self) -> Table:
        """The number of layers of a stage that all later layers wait for, there and back."""
        problem, layers = self._problem, range(len(self._problem.layers))
        values = [value for value in problem.values if value.bound_readers]
        if not all(value.gradient_bytes for value in values):
            return self._sums([0.0] * len(layers))  # nobody waits for gradients
        behind = layers_behind(problem)
        before = [sum(behind[one] >> layer & 1 for one in range(layer)) for layer in layers]
        joints = [before[layer] + behind[layer].bit_count() == len(layers) for layer in layers]
        return self._sums([float(joint) for joint in joints])

    def _byte_ms(self, count: int) -> tuple[float, float]:
        """Return the least time of a byte of gradients to reduce, and to gather, in any group."""
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

    def _possible(self, count: int) -> NDArray[np.bool_]:
        """Return which stages have layers, and are not certain to exceed a limit."""
        problem = self._problem
        starts, stops = self.ends[:, None], self.ends[None, :]
        found = starts < stops
        if problem.most_layers is not None:
            found &= stops - starts <= problem.most_layers
        units = self._model.units // count
        layers = range(len(problem.layers))
        held = self._sums([_least_bytes(problem, layer, count, units) for layer in layers])
        return np.asarray(found & (held <= problem.devices[0].usable_bytes))


def _least_bytes(problem: Problem, index: int, count: int, units: int) -> int:
    """Return the least memory of a layer on one of several replicas."""
    layer = problem.layers[index]
    state = layer.param_bytes + layer.buffer_bytes + layer.grad_bytes
    state += -(-layer.optimizer_bytes // count)
    return state + (0 if problem.may_recompute else units * layer.saved_bytes)


def layers_behind(problem: Problem) -> list[int]:
    """Return, by layer, a bit for each layer that depends on it, and for itself."""
    behind = [1 << layer for layer in range(len(problem.layers))]
    for value in sorted(problem.values, key=lambda value: -value.source):
        for reader in value.bound_readers:
            behind[value.source] |= behind[reader]
    return behind
