"""Running the integer programs: limits, workers, progress, stopping."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from ortools.sat.python import cp_model


class OperationsPerWork(NamedTuple):
    """Operations that count as one unit of work, about a second of one core of 2020.

    Work makes searches that CP-SAT does not run comparable with its deterministic time.

    Attributes:
        numbers: table entries of cuts of a linear order.
        ends: layers and ends of values for which the tables are built.
        pairs: pairs of ideals of neighbouring frontiers.
        order_pairs: the same for a known order of classes, which is cheaper.
        cuts: minimum cuts of windows of stages.
        footprints: sets of nodes whose memory is computed.
        labels: labels of sweeps.
        labels_of_a_search: the fixed cost of a sweep, in labels.
        maps: complete placements that are evaluated.
        scheduled_ends: ends of values times devices in list schedules.
        layers: layers whose finish time local search recomputes.
    """

    numbers: int = 100_000_000
    ends: int = 60_000
    pairs: int = 5_000_000
    order_pairs: int = 30_000_000
    cuts: int = 15_000
    footprints: int = 3_000
    labels: int = 2_000_000
    labels_of_a_search: int = 20_000
    maps: int = 200
    scheduled_ends: int = 1_000_000
    layers: int = 2_000_000


PER_WORK = OperationsPerWork()


SUBSOLVERS = ("default_lp", "quick_restart_no_lp")
"""What a few workers take turns at: one that reckons with bounds and one that learns fast."""

Value = Callable[[cp_model.IntVar], int]


@dataclass(frozen=True)
class Answer:
    """What an integer program says.

    Attributes:
        devices: by layer, the device; None if none was found.
        bound: a proven lower bound on the objective, in its own unit.
        infeasible: whether it is proven that there is no placement.
        complete: whether the search ended by itself.
    """

    devices: list[int] | None
    bound: float
    infeasible: bool
    complete: bool


@dataclass
class Meter:
    """Counts work, in the solver's own measure, the same on every machine.

    Attributes:
        limit: no more than this may be done in all.
        done: what was done.
    """

    limit: float = inf
    done: float = 0.0

    @property
    def left(self) -> float:
        """The work that may still be done."""
        return self.limit - self.done


@dataclass(frozen=True)
class Limits:
    """What a search may use.

    Attributes:
        time_s: the longest that it may take.
        workers: cores.
        seed: of its random choices; the same seed gives the same answer while the time does not run
            out.
        stop: ends the search from another thread.
        progress: called with each better placement and the bound at that time.
        work: ends the search as well, in the measure of ``Meter``.
        meter: counts the work of this search and of others; ends it when they have done all that
            they may.
    """

    time_s: float
    workers: int = 1
    seed: int = 0
    stop: threading.Event | None = None
    progress: Callable[[list[int], float], None] | None = None
    work: float = inf
    meter: Meter = field(default_factory=Meter)


class Program(Protocol):
    """An integer program that can read its own solutions."""

    @property
    def cp(self) -> cp_model.CpModel:
        """The program."""

    def read(self, value: Value) -> list[int]:
        """Return, by layer, its device, from the values of a solution."""

    def in_unit(self, bound: float) -> float:
        """Return a bound in the objective's own unit."""


def run(program: Program, limits: Limits) -> Answer:
    """Search until it is proven, or a limit is met."""
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(limits.time_s, 0.01)
    work = min(limits.work, limits.meter.left)
    if work <= 0:
        return Answer(devices=None, bound=0.0, infeasible=False, complete=False)
    if work < inf:
        # Deterministic time does not depend on the machine's speed, so the same work gives the same
        # answer everywhere.
        solver.parameters.max_deterministic_time = work
    solver.parameters.num_workers = limits.workers
    # else the answer depends on which worker is faster
    solver.parameters.interleave_search = limits.workers > 1
    solver.parameters.random_seed = limits.seed
    # else 9.15 may prove too much (google/or-tools issue 5293)
    solver.parameters.presolve_inclusion_work_limit = 0
    # CP-SAT's default portfolio has about ten subsolvers. With one or two workers, each would get
    # too little time.
    if limits.workers <= len(SUBSOLVERS):
        solver.parameters.subsolvers.extend(SUBSOLVERS)
    with _stopping(solver, limits.stop):
        status = solver.solve(
            program.cp, _Progress(program, limits.progress) if limits.progress else None
        )
    limits.meter.done += solver.response_proto.deterministic_time
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Answer(
        devices=program.read(solver.value) if found else None,
        bound=program.in_unit(solver.best_objective_bound)
        if status != cp_model.INFEASIBLE
        else 0.0,
        infeasible=status == cp_model.INFEASIBLE,
        complete=status in (cp_model.OPTIMAL, cp_model.INFEASIBLE),
    )


class _Progress(cp_model.CpSolverSolutionCallback):
    """Hands every better placement on."""

    def __init__(self, program: Program, report: Callable[[list[int], float], None]) -> None:
        super().__init__()
        self._program, self._report = program, report

    def on_solution_callback(self) -> None:
        """Report the solution; CP-SAT calls this."""
        self._report(
            self._program.read(self.value), self._program.in_unit(self.best_objective_bound)
        )


class _stopping:
    """While it is open, a set event ends the search."""

    def __init__(self, solver: cp_model.CpSolver, stop: threading.Event | None) -> None:
        self._solver, self._stop = solver, stop
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._stop is not None:
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()

    def _watch(self) -> None:
        assert self._stop is not None
        while not self._over.is_set():
            if self._stop.wait(0.01):
                # asked again, as a search that has not begun does not hear it
                self._solver.stop_search()
                self._over.wait(0.01)
