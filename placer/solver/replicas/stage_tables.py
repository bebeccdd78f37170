"""What stages hold, send and receive, by the ideals before each and at its end.

A stage from ideal i to ideal j has the layers of j that are not in i. Sums over its layers are
differences of sums over both ideals. A value v crosses the end of a stage::

    sent        made in the stage, and not all layers that read v are in j
    received    made in i, and more of the layers that read v are in j than in i
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from placer.solver import pipelines
from placer.solver.problem import Problem
from placer.solver.replicas.gradient_exchange import last_pass_ms
from placer.solver.replicas.stage_ideals import Bools, StageIdeals
from placer.solver.values import arcs_of

Table = NDArray[np.float64]
"""By the ideals before a stage and at its end."""


@dataclass(frozen=True, eq=False)
class StageTables:
    """The stages between all pairs of ideals. Times are of a unit, in milliseconds.

    Attributes:
        problem: of a unit, with some schedule; the number of micro-batches does not matter.
        ideals: where stages may begin and end.
    """

    problem: Problem
    ideals: StageIdeals

    @property
    def count(self) -> int:
        """The number of ideals."""
        return len(self.ideals.members)

    def sums(self, sizes: Sequence[float]) -> Table:
        """Return the sums over the layers of each stage."""
        totals = self.ideals.members @ np.array(sizes, dtype=float)
        return np.asarray(totals[None, :] - totals[:, None])

    @cached_property
    def within(self) -> Bools:
        """Whether the first ideal is within the second one, and they differ."""
        members = self.ideals.members.astype(np.float32)
        outside = members @ (1 - members).T > 0
        return np.asarray(~outside & outside.T)

    @cached_property
    def layers(self) -> dict[str, Table]:
        """Sums over the layers of a stage, by name."""
        problem, layers = self.problem, range(len(self.problem.layers))
        weights = [pipelines.weight_grad_ms(problem, layer, 0) for layer in layers]
        return {
            "forward": self.sums([problem.forward_ms[layer][0] for layer in layers]),
            "backward": self.sums([problem.backward_ms[layer][0] for layer in layers]),
            "weights": self.sums(weights if problem.weights_apart else [0.0] * len(weights)),
            "last pass": self.sums(
                [last_pass_ms(problem, layer, 0, problem.weights_apart) for layer in layers]
            ),
            "optimizer": self.sums([pipelines.optimizer_ms(problem, one, 0) for one in layers]),
            "gradients": self.sums([layer.grad_bytes for layer in problem.layers]),
        }

    @cached_property
    def messages(self) -> tuple[Table, Table]:
        """The least time that a stage sends and receives for a unit.

        A value counts as sent once, however many stages read it.
        """
        problem, members = self.problem, self.ideals.members
        values = [value for value in problem.values if value.readers]
        sources = [value.source for value in values]
        there = np.array([self._value_ms(value.bytes) for value in values])
        back = np.array([self._value_ms(value.gradient_bytes) for value in values])
        has = members[:, sources].astype(float)
        read = np.array([members[:, list(value.readers)].sum(axis=1) for value in values]).T
        counts = np.array([len(value.readers) for value in values])
        open_here = has * (read < counts)
        # made before the stage and open behind it, from what is made before its end and open there
        made = [(open_here @ ms)[None, :] - has @ ((read < counts) * ms).T for ms in (there, back)]
        found = [np.zeros_like(made[0]) for _ in range(2)]
        for number in range(int(counts.max(initial=0))):
            some = np.flatnonzero(counts > number)
            before = has[:, some] * (read[:, some] == number)
            behind = (read[:, some] > number).astype(float)
            for table, ms in zip(found, (there, back), strict=True):
                table += (before * ms[some]) @ behind.T
        return made[0] + found[1], made[1] + found[0]

    @cached_property
    def borders(self) -> tuple[Table, Table]:
        """By end of a stage, the least time of a unit to the next stage, and of gradients back.

        Only values from the one last layer to the one next layer are certain to pass between the
        two stages.
        """
        members = self.ideals.members
        needs, readers = np.zeros((2, members.shape[1], members.shape[1]), dtype=np.float32)
        for source, reader in arcs_of(self.problem.values):
            needs[reader, source] = readers[source, reader] = 1
        held = members.astype(np.float32)
        last = members & (held @ readers.T == 0)
        following = ~members & ((1 - held) @ needs.T == 0)
        has_one = (last.sum(axis=1) == 1) & (following.sum(axis=1) == 1)
        there, back = np.zeros((2, len(members)))
        for value in self.problem.values:
            passes = has_one & last[:, value.source] & following[:, list(value.readers)].any(axis=1)
            there += passes * self._value_ms(value.bytes)
            back += passes * self._value_ms(value.gradient_bytes)
        return there, back

    @cached_property
    def joints(self) -> Table:
        """The number of layers of a stage that all others come before or depend on."""
        problem, layers = self.problem, range(len(self.problem.layers))
        values = [value for value in problem.values if value.bound_readers]
        if not all(value.gradient_bytes for value in values):
            return self.sums([0.0] * len(layers))  # nobody waits for gradients
        behind = _layers_behind(problem)
        before = [sum(behind[one] >> layer & 1 for one in range(layer)) for layer in layers]
        joints = [before[layer] + behind[layer].bit_count() == len(layers) for layer in layers]
        return self.sums([float(joint) for joint in joints])

    def _value_ms(self, size_bytes: int) -> float:
        """Return the time of a message over the fastest link."""
        return self.problem.quickest_ms(size_bytes) if size_bytes else 0.0


def _layers_behind(problem: Problem) -> list[int]:
    """Return, by layer, a bit for each layer that depends on it, and for itself."""
    behind = [1 << layer for layer in range(len(problem.layers))]
    for value in sorted(problem.values, key=lambda value: -value.source):
        for reader in value.bound_readers:
            behind[value.source] |= behind[reader]
    return behind
