"""The best cut of a linear order into stages, by dynamic programming over the nodes.

    nodes   0 1 2 | 3 4 5 6 | 7 8      best(devices left, i) = min over j of
    stages    a   |    b    |  c           join(cost of nodes i..j-1 as the next stage,
                                                best(devices left but one, j))

The cut is optimal where the order is the only one (each node reads from the one before) and one
stage reads every value that is cut, as in a chain. If the order is the only one, its value is still
a lower bound: every cut value counts once and over the fastest link. Otherwise the cut is a start
for the integer program.

Source: Narayanan et al., "PipeDream", SOSP 2019, section 3.1; Tarnawski et al., NeurIPS 2020,
section 5.

**Long orders** are cut between runs of nodes. A known cut is then improved with runs that are finer
the nearer they are to one of its borders, down to single nodes, so that borders move together, far
and little::

    nodes    . . . . . . . . . . . . . . . . | . . . . . . . . . . . . . .
    runs     |       |       |   |   | |.|.|.|.|.| | |   |   |       |

The number of runs doubles each time while time is left, until each node is a run if they are few
enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isqrt, prod
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from placer.solver import costs
from placer.solver.chain.intervals import Intervals
from placer.solver.problem import ROUNDING, Problem
from placer.solver.reduce import Exchange, Reduction, exchanges
from placer.solver.values import arcs_of

Table = NDArray[np.float64]
Counts = tuple[int, ...]

MOST_NODES = 512
"""The most runs of nodes of a first cut: its tables grow with the square."""
MOST_STATES = 4096
"""The most numbers of devices by class in a table; with more, classes are joined."""

ROWS = 64
"""Rows of a table that are computed together, so that they stay in the core's cache."""


@dataclass(frozen=True)
class Cut:
    """The best cut of the linear order.

    Attributes:
        devices: by layer, its device; None if no cut meets the limits.
        bound: a proven lower bound on the objective of every contiguous placement; 0 where the cut
            proves none.
        value: what the cut reaches, or about that: it may count every cut value once and over the
            fastest link.
    """

    devices: list[int] | None
    bound: float
    value: float = inf


def best_cut(
    problem: Problem,
    nodes: Reduction,
    order: Sequence[int] | None = None,
    exchanged: Sequence[Exchange] | None = None,
) -> Cut:
    """Return the best cut of an order of the nodes into one contiguous stage per device.

    Args:
        problem: the placement problem.
        nodes: its layers in nodes, in topological order.
        order: another topological order of the nodes; theirs if left out.
        exchanged: as ``nets.exchanges`` tells it, where it is known.
    """
    runs = even_runs(problem, nodes, order or range(len(nodes.nodes)), MOST_NODES)
    return cut_of_blocks(problem, nodes, runs, exchanged)


def cut_of_blocks(
    problem: Problem,
    nodes: Reduction,
    blocks: list[list[int]],
    exchanged: Sequence[Exchange] | None = None,
) -> Cut:
    """Return the same where stages begin and end only where blocks do.

    Runs of the nodes, in an order of them.
    """
    classes, exact = device_classes(problem)
    table = CutTable(problem, nodes, blocks, classes, exchanged)
    best, counts = table.fill()
    if not np.isfinite(best):
        return Cut(None, 0.0)
    exact = exact and table.intervals.exact and len(blocks) == len(nodes.nodes)
    # Without another topological order, the table covers all contiguous placements. For latency it
    # adds all transfers, although some may run in parallel, so there it is no lower bound.
    only_order = exact and is_only_order(problem, nodes)
    proven = best if only_order and problem.request.objective != "latency" else 0.0
    found = Cut(table.read(counts), proven, best)
    return found if _counts_all(problem) else _best_of_all_numbers(problem, table, found)


def _counts_all(problem: Problem) -> bool:
    """Return whether the table counts all transfers.

    Not where a value is sent to several devices, one after another.
    """
    return (
        problem.request.objective != "throughput"
        or problem.multicast
        or all(len(value.readers) == 1 for value in problem.values)
    )


def _best_of_all_numbers(problem: Problem, table: CutTable, found: Cut) -> Cut:
    """Return the best cut when every transfer counts: the one found, or one with fewer devices.

    The table's value of a cut is a lower bound, so the least is evaluated first and few need
    evaluation.
    """
    by_number: dict[int, tuple[float, Counts]] = {}
    for counts, best in table.best.items():
        if sum(counts) >= problem.least_devices and np.isfinite(best[0]):
            one = float(best[0]), counts
            by_number[sum(counts)] = min(one, by_number.get(sum(counts), one))
    #     devices                 1     2     3     evaluate the smallest lower bound first;
    #     lower bound of a cut   40    25    22     stop once it reaches an evaluated cut
    known = replace(found, value=inf)
    for least, counts in sorted(by_number.values(), key=lambda one: (one[0], sum(one[1]))):
        if least >= known.value:
            break
        cut = table.read(counts)
        result = costs.evaluate(problem, cut) if costs.allowed(problem, cut) else None
        if (
            result is not None
            and result.objective_value < known.value
            and costs.fits(problem, result)
        ):
            known = replace(found, devices=cut, value=result.objective_value)
    return known if known.value < inf else found


def work_of_cut(problem: Problem, nodes: Reduction) -> int:
    """Return about how many table entries a cut computes."""
    return choices_of_devices(problem) * min(len(nodes.nodes), MOST_NODES) ** 2


def ends_of_values(problem: Problem) -> int:
    """Return in how many runs values may be made or read, summed over all values."""
    return sum(min(1 + len(value.readers), MOST_NODES) for value in problem.values)


def choices_of_devices(problem: Problem) -> int:
    """Return the number of a cut's states: choices of a device and of those that follow."""
    classes, _ = device_classes(problem)
    return prod(len(members) + 1 for members in classes) * len(classes)


def is_only_order(problem: Problem, nodes: Reduction) -> bool:
    """Return whether each node reads a value of the one before."""
    steps = nodes.arcs(arcs_of(problem.values))
    return all((node, node + 1) in steps for node in range(len(nodes.nodes) - 1))


def even_runs(
    problem: Problem, nodes: Reduction, order: Sequence[int], most: int
) -> list[list[int]]:
    """Return the nodes one by one.

    Where they are more than ``most``, runs of them with about the same compute.
    """
    count = len(nodes.nodes)
    if count <= most:
        return [[node] for node in order]
    work = np.array([problem.work_ms(nodes.nodes[node], 0) for node in order])
    # The small constant keeps nodes without work from all falling into one run.
    share = np.cumsum(work + work.mean() * 0.1 + 1e-12)
    label = np.minimum((share / share[-1] * most).astype(int), most - 1)
    runs = itertools.groupby(range(count), key=lambda place: int(label[place]))
    return [[order[place] for place in run] for _, run in runs]


def device_classes(problem: Problem) -> tuple[list[list[int]], bool]:
    """Return the classes of devices that may be swapped, and True.

    With too many classes, devices of one type and limit form a class, and the second result is
    False.
    """
    classes = problem.alike_devices()
    if prod(len(members) + 1 for members in classes) <= MOST_STATES:
        return classes, True
    by_kind: dict[tuple[str, int], list[int]] = {}
    for index, device in enumerate(problem.devices):
        by_kind.setdefault((device.type, device.usable_bytes), []).append(index)
    # Joined classes ignore that links differ, so the cut is only a start and proves nothing.
    if prod(len(members) + 1 for members in by_kind.values()) <= MOST_STATES:
        return list(by_kind.values()), False
    return [list(range(len(problem.devices)))], False


class CutTable:
    """The table of the dynamic program, by how many devices of each class the later stages take."""

    def __init__(
        self,
        problem: Problem,
        nodes: Reduction,
        blocks: list[list[int]],
        classes: list[list[int]],
        exchanged: Sequence[Exchange] | None = None,
    ) -> None:
        self.problem, self.nodes, self.blocks, self.classes = problem, nodes, blocks, classes
        self.intervals = Intervals(problem, nodes, blocks, exchanged)
        self.join = np.add if problem.request.objective == "latency" else np.maximum
        self.best: dict[Counts, Table] = {}
        self._costs: dict[tuple[int, int], Table] = {}

    def fill(self) -> tuple[float, Counts]:
        """Fill the table; return the best value for all blocks, and the devices that it takes."""
        count = len(self.blocks)
        none = (0,) * len(self.classes)
        self.best[none] = np.full(count + 1, np.inf)
        # best[counts][i]: the value of blocks i, i+1, ... on `counts` devices of each class. With
        # no device left, only the empty rest is possible.
        self.best[none][count] = 0.0
        ranges = [range(len(members) + 1) for members in self.classes]
        for counts in sorted(itertools.product(*ranges), key=sum):
            if 0 < sum(counts) <= self.problem.most_devices:
                self.best[counts] = np.min(
                    [self._least(counts, c) for c in kinds_left(counts)], axis=0
                )
        enough = [counts for counts in self.best if sum(counts) >= self.problem.least_devices]
        # more devices may be demanded than there are blocks for
        chosen = min(
            enough, key=lambda counts: (float(self.best[counts][0]), sum(counts)), default=none
        )
        return float(self.best[chosen][0]), chosen

    def read(self, counts: Counts) -> list[int]:
        """Return, by layer, its device, following the best choices from the first block."""
        devices = [0] * len(self.nodes.nodes)
        start = 0
        taken = [0] * len(self.classes)
        while start < len(self.blocks):
            # The table stores values, not choices. Computing one row again is cheaper than storing
            # an argmin for every state.
            options = [(self._row(counts, c, start), c) for c in kinds_left(counts)]
            row, kind = min(options, key=lambda option: float(option[0].min()))
            stop = int(row.argmin())
            device = self.classes[kind][taken[kind]]
            taken[kind] += 1
            for node in itertools.chain(*self.blocks[start:stop]):
                devices[node] = device
            start, counts = stop, one_less(counts, kind)
        return self.nodes.spread(devices)

    def _options(self, counts: Counts, kind: int) -> Table:
        """Return, by first block and end, the value if such a device takes the stage."""
        joined: Table = self.join(
            self.cost(kind, sum(counts)), self.best[one_less(counts, kind)][None, :]
        )
        return joined

    def _row(self, counts: Counts, kind: int, start: int) -> Table:
        """Return the same of one first block."""
        row: Table = self.join(
            self.cost(kind, sum(counts))[start], self.best[one_less(counts, kind)]
        )
        return row

    def _least(self, counts: Counts, kind: int) -> Table:
        """Return, by first block, the least value if such a device takes the next stage."""
        cost, later = self.cost(kind, sum(counts)), self.best[one_less(counts, kind)]
        parts = [
            # a stage ends behind it
            self.join(cost[start : start + ROWS, start:], later[None, start:]).min(axis=1)
            for start in range(0, len(later), ROWS)
        ]
        return np.concatenate(parts)

    def cost(self, kind: int, stages_left: int) -> Table:
        """Return, by first block and end, the cost of the stage with this many stages left.

        The number includes the stage itself.
        """
        # Many numbers of later stages have the same micro-batches in flight and share one table.
        key = kind, self.intervals.flight(stages_left)
        if key not in self._costs:
            self._costs[key] = self.intervals.cost(self.classes[kind][0], key[1])
        return self._costs[key]


def kinds_left(counts: Counts) -> list[int]:
    """Return the classes that have a device left."""
    return [kind for kind, number in enumerate(counts) if number]


def one_less(counts: Counts, kind: int) -> Counts:
    """Return the same with a device less of one class."""
    return (*counts[:kind], counts[kind] - 1, *counts[kind + 1 :])


MOST_RUNS = 2048
"""The most runs of nodes in a refined cut."""

MOST_WORK = 600_000_000
"""The most numbers that a cut computes, one or two seconds."""

MOST_CELLS = 50_000_000
"""The most numbers in the tables of a cut, 400 MB."""

NARROWER = 4
"""Shrinking factor of a border's neighbourhood from cut to cut."""


def finer_cuts(
    problem: Problem, nodes: Reduction, devices: Sequence[int] | None, left_s: Callable[[], float]
) -> Iterator[Cut]:
    """Yield better and better cuts; none if the order has few nodes, each a run of its own.

    Args:
        problem: the placement problem, contiguity understood.
        nodes: its layers in nodes, in topological order.
        devices: by layer, its device, in a cut of that order; None where none was found.
        left_s: the time that is left.
    """
    count, borders = len(nodes.nodes), _borders(nodes, devices) if devices else []
    number = MOST_NODES
    if count <= number or len(borders) >= len(problem.devices):
        return
    exchanged, best, most = exchanges(problem, nodes), inf, _most_runs(problem)
    reach, next_s = count // (len(borders) + 1), 0.0
    while next_s < left_s():
        began = monotonic()
        runs = _runs(problem, nodes, borders, number, reach)
        cut = cut_of_blocks(problem, nodes, runs, exchanged)
        next_s = monotonic() - began
        better = cut.devices is not None and cut.value < best * (1 - ROUNDING)
        if cut.devices is not None and (better or cut.bound):
            best, borders = cut.value, _borders(nodes, cut.devices)
            yield cut
        if number >= count:
            return
        # More runs come first, while the time allows them: twice as many take four times as long.
        # After that, the ends of runs move closer to the borders, until this improves nothing
        # either.
        larger = max(number, min(2 * number, most))
        if larger > number and next_s * (larger / number) ** 2 < left_s():
            number, next_s = larger, next_s * (larger / number) ** 2
        elif not better and _step_count(number, borders, reach) < reach:
            reach = max(reach // NARROWER, 1)
        elif not better:
            return


def _most_runs(problem: Problem) -> int:
    """Return how many runs may be looked at, by the work and the room that it takes."""
    flights = min(problem.request.chunks, problem.most_devices) if problem.training else 1
    tables = len(device_classes(problem)[0]) * flights
    by_work = isqrt(MOST_WORK // choices_of_devices(problem))
    return min(MOST_RUNS, by_work, isqrt(MOST_CELLS // tables), MOST_CELLS // len(problem.layers))


def _borders(nodes: Reduction, devices: Sequence[int]) -> list[int]:
    """Return the nodes that are on another device than the one before."""
    held = [devices[layers[0]] for layers in nodes.nodes]
    return [node for node in range(1, len(held)) if held[node] != held[node - 1]]


def _step_count(number: int, borders: Sequence[int], reach: int) -> int:
    """Return how many runs may end on each side of a border; without borders, ``reach``."""
    return max((number // len(borders) - 1) // 2, 1) if borders else reach


def _runs(
    problem: Problem, nodes: Reduction, borders: Sequence[int], number: int, reach: int
) -> list[list[int]]:
    """Return about ``number`` runs of nodes, which are finer near the borders.

    Args:
        problem: the placement problem.
        nodes: its layers in nodes, in topological order.
        borders: the nodes with which runs of the known cut begin; empty for even runs.
        number: of runs.
        reach: the largest distance from a border at which a run may end.
    """
    count = len(nodes.nodes)
    if number >= count or not borders:
        return even_runs(problem, nodes, range(count), number)
    steps = _steps(reach, _step_count(number, borders, reach))
    ends = {border + step for border in borders for step in (0, *steps, *(-step for step in steps))}
    inside = sorted(end for end in ends if 0 < end < count)
    return [list(range(*run)) for run in itertools.pairwise((0, *inside, count))]


def _steps(reach: int, most: int) -> list[int]:
    """Return at most so many distances up to ``reach``, the near ones close together.

    All where there are few.
    """
    most = min(max(most, 1), reach)
    return [max(place, int(reach ** (place / most))) for place in range(1, most + 1)]
