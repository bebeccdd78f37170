r"""Lower bounds on what a device does between two steps, as a sum over its layers.

Between its last pass of a step and its first one of the next, a device takes (see
``gradient_exchange.py``)::

    slot(d) = exposed(d) + optimizer(d) / R + waits(d)

With B the bytes of the gradients of its layers, g the most of one layer, and ``reduce`` and
``gather`` per byte, each term has two bounds. Only the last backward pass hides the reduction, and
only the first forward pass hides the gathering. And the first layers' piece, with about a quarter
of all bytes, is hidden by nothing::

    exposed(d)  >=  reduce * B - backward(d)        waits(d)  >=  gather * B - forward(d)
    exposed(d)  >=  reduce * (B / 4 - g)            waits(d)  >=  gather * (B / 4 - g)

All are sums over layers, less a constant. So they add to the work that devices share.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

from placer.schedule.gradient_pieces import PIECES
from placer.solver import pipelines
from placer.solver.problem import Problem
from placer.solver.replicas.replication import ExchangeTime

LayerMs = Callable[[int, int], float]


class SlotBound(NamedTuple):
    """A lower bound on the slot of each device: a sum over its layers, less a constant.

    Attributes:
        layer_ms: the term of a layer on a device; negative where passes hide more than it takes.
        less_ms: what the sum exceeds the bound by.
    """

    layer_ms: LayerMs
    less_ms: float = 0.0


def slot_bounds(problem: Problem) -> list[SlotBound]:
    """Return lower bounds on the slots of contiguous stages, or the bound without an exchange.

    No term of a layer is less than minus one forward and one backward pass.

    Args:
        problem: the placement problem.
    """

    def optimizer_ms(layer: int, device: int) -> float:
        return pipelines.optimizer_ms(problem, layer, device)

    found = [SlotBound(optimizer_ms)]
    costs = problem.replication
    if costs is None or not problem.contiguous:
        return found
    is_split = problem.request.schedule == "zero-bubble"
    largest = max(layer.grad_bytes for layer in problem.layers)

    def last_pass_ms(layer: int, device: int) -> float:
        if is_split:
            return pipelines.weight_grad_ms(problem, layer, device)
        return problem.layers[layer].backward_ms[problem.devices[device].type]

    def forward_ms(layer: int, device: int) -> float:
        return problem.forward_ms[layer][device]

    def ways(times: tuple[ExchangeTime, ...], hidden_ms: LayerMs) -> list[SlotBound]:
        def whole_ms(layer: int, device: int) -> float:
            size_bytes = problem.layers[layer].grad_bytes
            return size_bytes * times[device].byte_ms - hidden_ms(layer, device)

        def piece_ms(layer: int, device: int) -> float:
            return problem.layers[layer].grad_bytes * times[device].byte_ms / PIECES

        slowest_ms = max(time.byte_ms for time in times)
        return [SlotBound(whole_ms), SlotBound(piece_ms, largest * slowest_ms)]

    for reduction, gathering in product(
        ways(costs.reduce, last_pass_ms), ways(costs.gather, forward_ms)
    ):
        found.append(_sum(SlotBound(optimizer_ms), reduction, gathering))
    return found


def _sum(*bounds: SlotBound) -> SlotBound:
    """Return the sum of bounds on different terms."""

    def layer_ms(layer: int, device: int) -> float:
        return sum(bound.layer_ms(layer, device) for bound in bounds)

    return SlotBound(layer_ms, sum(bound.less_ms for bound in bounds))
