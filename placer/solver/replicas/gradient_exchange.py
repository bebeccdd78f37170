r"""The time in which replicas exchange gradients and parameters, and the part that passes hide.

On device d, with its passes in the order of the plan, gradients of a piece (see
``placer.schedule.gradient_pieces``) are complete within the last backward pass of its stage, or the
last weight-gradient pass where these run apart. Reductions follow one another::

    busy(d)     = sum of all passes on d
    ready(j)    = sum of the passes on d up to the one that completes the gradients of piece j,
                  less the backward times of the layers of the stage before the piece
    end(j)      = max(ready(j), end(j - 1)) + reduce(bytes of j)      pieces by ready(j)
    exposed(d)  = max(0, end(last) - busy(d))

In the next step, parameters come piece by piece, the first layers first, while the forward passes
of earlier pieces run::

    waits(d)    = max over pieces j of  gather(bytes of 0) + ... + gather(bytes of j)
                                        - forward times of the pieces before j

Only passes hide an exchange, bubbles do not. Where a device may have several segments, the order of
passes is the one that is shortest without the exchange. Between its last pass and the first one of
the next step a device takes::

    slot(d)     = exposed(d) + optimizer(d) / R + waits(d)

**Lower bounds** on the slot are sums over layers. With B the bytes of the gradients of its layers,
g the most of one layer, and ``reduce`` and ``gather`` per byte, each term has two bounds. Only the
last backward pass hides the reduction, and only the first forward pass hides the gathering. And the
first layers' piece, with about a quarter of all bytes, is hidden by nothing::

    exposed(d)  >=  reduce * B - backward(d)        waits(d)  >=  gather * B - forward(d)
    exposed(d)  >=  reduce * (B / 4 - g)            waits(d)  >=  gather * (B / 4 - g)

All are sums over layers, less a constant. So they add to the work that devices share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple

from placer.schedule import Pipeline, Plan
from placer.schedule.gradient_pieces import PIECES, gradient_pieces
from placer.solver import pipelines
from placer.solver.problem import Problem
from placer.solver.replicas.replication import ExchangeTime, Replication

Ready = tuple[float, int]
"""When the gradients of a piece are complete, in ms, and their bytes."""


@dataclass(frozen=True)
class Exchange:
    """The exchange of one device in a step, in milliseconds.

    Attributes:
        reduce_ms: the reduction of its gradients.
        exposed_ms: the part of it after its last pass.
        gather_ms: the gathering of its parameters.
        waits_ms: the part of it for which the next passes wait.
        optimizer_ms: its part of the optimizer's step.
    """

    reduce_ms: float
    exposed_ms: float
    gather_ms: float
    waits_ms: float
    optimizer_ms: float

    @property
    def slot_ms(self) -> float:
        """The time between the device's last pass and its first pass of the next step."""
        return self.exposed_ms + self.optimizer_ms + self.waits_ms

    @property
    def total_ms(self) -> float:
        """The time of the whole exchange."""
        return self.reduce_ms + self.gather_ms

    @property
    def hidden_ms(self) -> float:
        """The part of it during which passes run."""
        return self.total_ms - self.exposed_ms - self.waits_ms


def exchanges(
    problem: Problem, pipeline: Pipeline, plan: Plan, stage_of: Sequence[int]
) -> dict[int, Exchange]:
    """Return the exchange of each device that holds layers.

    Args:
        problem: the placement problem, with replicas.
        pipeline: its stages, with their optimizers.
        plan: the order of their passes.
        stage_of: by layer, its stage.
    """
    costs = problem.replication
    assert costs is not None
    # All times here count a device's passes alone, without the gaps between them.
    busy, ended = passes_of_step(pipeline, plan)
    layers: list[list[int]] = [[] for _ in pipeline.places]
    for layer, stage in enumerate(stage_of):
        layers[stage].append(layer)
    ready: dict[int, list[Ready]] = defaultdict(list)
    stages: dict[int, list[list[int]]] = defaultdict(list)
    for stage, device in enumerate(pipeline.places):
        tails = piece_tails(problem, layers[stage], device, plan.split)
        ready[device] += [(ended[stage] - tail_ms, size) for tail_ms, size in tails]
        stages[device].append(layers[stage])
    found = {}
    optimizer = pipeline.optimizer_by_device()
    for device, pieces in ready.items():
        gather_ms, waits_ms = gathered(problem, stages[device], device, costs.gather[device])
        found[device] = Exchange(
            *reduced(pieces, costs.reduce[device], busy[device]),
            gather_ms=gather_ms,
            waits_ms=waits_ms,
            optimizer_ms=optimizer[device],
        )
    return found


def reduced(pieces: Iterable[Ready], reduce: ExchangeTime, busy_ms: float) -> tuple[float, float]:
    """Return the time to reduce some pieces, and the part of it after the last pass.

    Args:
        pieces: of a device.
        reduce: the time of a reduction.
        busy_ms: the passes of the device.
    """
    pieces = list(pieces)
    end_ms = reduced_by(pieces, reduce.time_ms)
    return sum(reduce.time_ms(size) for _, size in pieces), max(0.0, end_ms - busy_ms)


def reduced_by(pieces: Iterable[Ready], time_ms: pipelines.SizeMs) -> float:
    """Return when the last of some reductions ends, in milliseconds."""
    end = 0.0
    for ready, size in sorted(pieces):
        end = max(ready, end) + time_ms(size)
    return end


def piece_tails(
    problem: Problem, layers: Sequence[int], device: int, split: bool
) -> list[tuple[float, int]]:
    """Return, by piece of a stage, what its last pass still runs, in ms, and its bytes.

    Args:
        problem: the placement problem.
        layers: of the stage, ascending.
        device: that runs them.
        split: whether weight-gradient passes run apart.
    """
    sizes = [problem.layers[layer].grad_bytes for layer in layers]
    return [
        (
            sum(last_pass_ms(problem, layer, device, split) for layer in layers[: piece.start]),
            sum(sizes[place] for place in piece),
        )
        for piece in _pieces(problem, layers)
    ]


def last_pass_ms(problem: Problem, layer: int, device: int, split: bool) -> float:
    """Return the time of the pass that completes a layer's gradients; see ``piece_tails``."""
    if split:
        return pipelines.weight_grad_ms(problem, layer, device)
    # without the forward pass of a device that recomputes, which comes first
    return problem.layers[layer].backward_ms[problem.devices[device].type]


def gathered(
    problem: Problem, stages: Sequence[Sequence[int]], device: int, gather: ExchangeTime
) -> tuple[float, float]:
    """Return the time to gather a device's parameters, and how long forward passes wait for it.

    Args:
        problem: the placement problem.
        stages: of the device, in order; the layers of each, ascending.
        device: that runs them.
        gather: the time to gather parameters.
    """
    time_ms = gather.time_ms
    gathered_ms = passed_ms = waits_ms = 0.0
    for layers in stages:
        for size, forward_ms in piece_forwards(problem, layers, device):
            gathered_ms += time_ms(size)
            waits_ms = max(waits_ms, gathered_ms - passed_ms)
            passed_ms += forward_ms
    return gathered_ms, waits_ms


def piece_forwards(problem: Problem, layers: Sequence[int], device: int) -> list[tuple[int, float]]:
    """Return the bytes and the forward time of each piece of a stage, in execution order."""
    sizes = [problem.layers[layer].grad_bytes for layer in layers]
    kind = problem.devices[device].type
    # A stage without gradients has no pieces, but its forward pass takes time all the same.
    return [
        (
            sum(sizes[place] for place in piece),
            sum(problem.layers[layers[place]].forward_ms[kind] for place in piece),
        )
        for piece in reversed(_pieces(problem, layers) or [range(len(layers))])
    ]


def _pieces(problem: Problem, layers: Sequence[int]) -> list[range]:
    """Return the pieces of a stage, whose layers are ascending."""
    return gradient_pieces(
        [problem.layers[layer].grad_bytes for layer in layers],
        [problem.crossing_bytes[layer] for layer in layers],
    )


def with_exchanges(pipeline: Pipeline, found: dict[int, Exchange]) -> Pipeline:
    """Return the pipeline whose optimizers include the exchanges of their devices."""
    slots: list[float] = []
    for stage, device in enumerate(pipeline.places):
        # A device has one slot in a step, however many stages it has.
        is_first = pipeline.places.index(device) == stage
        slots.append(found[device].slot_ms if is_first else 0.0)
    return replace(pipeline, optimizer_ms=tuple(slots))


def with_amortised_exchanges(problem: Problem, costs: Replication) -> Problem:
    """Return the problem whose backward passes include their part of the step's exchange.

    Under objective ``throughput`` nothing hides the exchange, and each micro-batch of a step takes
    an equal part of it. Latencies, a few for all layers of a device, are left out.

    Args:
        problem: of one pipeline.
        costs: what its replicas cost.
    """
    chunks = problem.request.chunks
    backward_ms = tuple(
        tuple(
            time_ms + layer.grad_bytes * costs.byte_ms(device) / chunks
            for device, time_ms in enumerate(row)
        )
        for layer, row in zip(problem.layers, problem.backward_ms, strict=True)
    )
    return replace(problem, replication=costs, backward_ms=backward_ms)


def passes_of_step(pipeline: Pipeline, plan: Plan) -> tuple[dict[int, float], dict[int, float]]:
    """Return, by device, the sum of its passes; by stage, the sum until its last one."""
    times = {
        "forward": pipeline.forward_ms,
        "backward": pipeline.backward_ms,
        "weights": pipeline.weight_grad_ms,
    }
    if plan.split:
        times["backward"] = tuple(
            whole - apart
            for whole, apart in zip(pipeline.backward_ms, pipeline.weight_grad_ms, strict=True)
        )
    last = "weights" if plan.split else "backward"
    busy: dict[int, float] = defaultdict(float)
    ended: dict[int, float] = {}
    for stage, phase, _ in plan.issue:
        device = pipeline.places[stage]
        busy[device] += times[phase][stage]
        if phase == last:
            ended[stage] = busy[device]
    return busy, ended


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
    optimizer = SlotBound(partial(pipelines.optimizer_ms, problem))
    costs = problem.replication
    if costs is None or not problem.contiguous:
        return [optimizer]
    largest = max(layer.grad_bytes for layer in problem.layers)

    def backward_ms(layer: int, device: int) -> float:
        return last_pass_ms(problem, layer, device, problem.weights_apart)

    def forward_ms(layer: int, device: int) -> float:
        return problem.forward_ms[layer][device]

    def ways(times: tuple[ExchangeTime, ...], hidden_ms: LayerMs) -> list[SlotBound]:
        # Passes hide no more than their own time. And nothing hides the last piece, which has 1 /
        # PIECES of the bytes, up to the size of a layer.
        def whole_ms(layer: int, device: int) -> float:
            size_bytes = problem.layers[layer].grad_bytes
            return size_bytes * times[device].byte_ms - hidden_ms(layer, device)

        def piece_ms(layer: int, device: int) -> float:
            return problem.layers[layer].grad_bytes * times[device].byte_ms / PIECES

        slowest_ms = max(time.byte_ms for time in times)
        return [SlotBound(whole_ms), SlotBound(piece_ms, largest * slowest_ms)]

    reductions, gatherings = ways(costs.reduce, backward_ms), ways(costs.gather, forward_ms)
    exchanged = [_sum(optimizer, *terms) for terms in product(reductions, gatherings)]
    return [optimizer, *exchanged]


def _sum(*bounds: SlotBound) -> SlotBound:
    """Return the sum of bounds on different terms."""

    def layer_ms(layer: int, device: int) -> float:
        return sum(bound.layer_ms(layer, device) for bound in bounds)

    return SlotBound(layer_ms, sum(bound.less_ms for bound in bounds))
