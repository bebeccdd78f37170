r"""A bound on the step from one device's passes for a node, which have heads and tails.

The head of a layer's pass is the longest way of a micro-batch to it, the tail the longest way from
it to the end, on whichever devices. A device does the passes of a node's layers, n micro-batches
each, one after another. So any subset of these passes satisfies::

    the shortest head + n * their sum + the shortest tail  <=  step

    tied weights   F(first)           F(last) B(last)           B(first)      both on one device
                   '---- head ----'  '-- n times both --'  '--- tail ---'     of the last layer's
                                                                              passes

The largest of these bounds is the end of Jackson's preemptive schedule.

Source: Carlier, "The one-machine sequencing problem", European Journal of Operational Research 11,
1982.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from placer.solver.bounds.simple_bounds import fastest_ms, longest_before
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction
from placer.solver.values import arcs_of, gradient_arcs

Matrix = Sequence[Sequence[float]]


class Ways(NamedTuple):
    """By layer, heads and tails of its passes, in milliseconds.

    Attributes:
        there: what goes before its forward pass.
        turn: what goes before its backward pass.
        home: what follows the forward pass.
        back: what follows what others wait for of the backward pass.
    """

    there: list[float]
    turn: list[float]
    home: list[float]
    back: list[float]


def of_nodes(problem: Problem, nodes: Reduction, awaited_ms: Matrix, ways: Ways) -> float:
    """Return a lower bound on every step: one node's passes with what precedes and follows, in ms.

    Args:
        problem: the placement problem.
        nodes: its layers in nodes.
        awaited_ms: by layer and device, what others wait for of a backward pass.
        ways: as ``ways_of`` tells them.
    """
    least = 0.0
    for layers, allowed in zip(nodes.nodes, nodes.allowed, strict=True):
        kinds = {
            tuple(
                (problem.forward_ms[i][d], awaited_ms[i][d], problem.backward_ms[i][d])
                for i in layers
            )
            for d in allowed
        }
        least = max(least, min(_of_device(problem, layers, times, ways) for times in kinds))
    return least


def _of_device(
    problem: Problem, layers: Sequence[int], times: Sequence[tuple[float, float, float]], ways: Ways
) -> float:
    passes = []
    for layer, (forward, awaited, backward) in zip(layers, times, strict=True):
        # A backward pass counts in two parts: others wait for the input gradient, and nobody waits
        # for the weight gradient, so its tail is 0.
        passes.append((ways.there[layer], forward, ways.home[layer]))
        passes.append((ways.turn[layer], awaited, ways.back[layer]))
        passes.append((ways.turn[layer] + awaited, backward - awaited, 0.0))
    return one_machine([one for one in passes if one[1] > 0], problem.request.chunks)


def one_machine(passes: Sequence[tuple[float, float, float]], times: int) -> float:
    """Return when all passes and what follows each are done at the soonest.

    Args:
        passes: head, length and tail of each.
        times: how often each is done.
    """
    # Jackson's schedule: of the passes whose heads are over, the device does the one with the
    # longest tail, and interrupts it for a pass with a longer tail. Its end is the largest bound of
    # all subsets.
    waiting: list[tuple[float, float]] = []
    time_ms = end_ms = 0.0
    for head, length, tail in (*sorted(passes), (inf, 0.0, 0.0)):
        while waiting and time_ms < head:
            behind, left_ms = heappop(waiting)
            done_ms = min(left_ms, head - time_ms)
            time_ms += done_ms
            if done_ms < left_ms:
                heappush(waiting, (behind, left_ms - done_ms))
            else:
                end_ms = max(end_ms, time_ms - behind)
        time_ms = max(time_ms, head)
        heappush(waiting, (-tail, times * length))
    return end_ms


def ways_of(problem: Problem, awaited_ms: Matrix) -> Ways:
    """Return the longest ways to and from the layers' passes, on the fastest devices without links.

    Args:
        problem: the placement problem.
        awaited_ms: by layer and device, what others wait for of a backward pass.
    """
    forward, awaited = fastest_ms(problem, problem.forward_ms), fastest_ms(problem, awaited_ms)
    arcs, back_arcs = arcs_of(problem.values), gradient_arcs(problem.values)
    #     there[l] ──F(l)──▶ turn[l] ──B(l)──▶ back[l]
    #     '-- before F --'              '-- after B --'    home[l]: after F(l), until the step ends
    there, back = longest_before(forward, arcs), longest_before(awaited, back_arcs)
    turn = [way + own for way, own in zip(there, forward, strict=True)]
    home = [own + way for own, way in zip(awaited, back, strict=True)]
    # the reader's are known
    for source, reader in sorted(back_arcs, key=lambda arc: -arc[1]):
        turn[source] = max(turn[source], turn[reader] + awaited[reader])
    for source, reader in sorted(arcs, key=lambda arc: -arc[1]):
        home[source] = max(home[source], forward[reader] + home[reader])
    return Ways(there, turn, home, back)
