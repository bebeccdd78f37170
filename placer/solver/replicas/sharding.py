r"""A step of fully sharded data parallelism (FSDP2) on all devices, to compare with placements.

Placer does not run it: ``torch.distributed.fsdp.fully_shard`` does. Each of K devices computes n
samples of every micro-batch, and holds 1 / K of the parameters, their gradients and the optimizer's
state. A *unit* is a block of the model, the outermost numbered module around a layer. Without
blocks, it is a child of the model. Layers in neither form the root unit.

**Time.** Parameters of a unit are gathered before each pass of it, while the unit before it
computes. Its gradients are reduced after its backward pass. One lane, L, carries these messages one
after another; the root unit is gathered once per micro-batch, and reduced at its end. For the units
u of a pass in their order, in ms::

    L = gather(first); end = 0
    each u:  begin = max(end, time at which u is gathered)
             L     = max(L, begin) + gather(next unit)
             end   = begin + compute(u)
             L     = max(L, end) + reduce(u)                    in the backward pass
    pass  = max(end, L)
    step  = chunks * max(forward pass + backward pass, host) + optimizer / K

``gather`` and ``reduce`` are the formulas of ``replication.py`` with R = K, and rates while devices
compute. ``compute`` is the slowest device's. ``host`` is the time to launch both passes of all
layers, because units run without a recording.

**Memory** of a device, where ``alone`` is the memory of the whole model on the device with one
micro-batch of n samples in flight and 1 / K of the optimizer::

    use = alone - params - gradients + params / K + gradients / K + params(root) + gradients(root)
          + largest params of two consecutive units + largest gradients of two consecutive units

A step counts if every device has this memory, for a measured n that fills the batch.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, permutations
from math import inf

from placer.exports.units import block_path, modules_of
from placer.schema import Placement, PlacementRequest, Profile, ShardedStep
from placer.solver import costs
from placer.solver.problem import Problem
from placer.solver.replicas.replication import (
    ExchangeTime,
    shared_profile,
    slowest,
    with_additions,
)

ROOT = ""
"""The unit of layers outside of blocks."""

SHORTER = 0.95
"""A sharded step is reported below this part of the placement's step: predictions of steps are
measured to be off by up to 5%."""


@dataclass(frozen=True)
class _Run:
    """Consecutive layers of one unit.

    Attributes:
        forward_ms: on the slowest device.
        backward_ms: on the slowest device.
        param_bytes: gathered for it; 0 of the root unit.
        grad_bytes: reduced after it; 0 of the root unit.
    """

    forward_ms: float
    backward_ms: float
    param_bytes: int
    grad_bytes: int


def with_sharded_step(request: PlacementRequest, placement: Placement) -> Placement:
    """Return a placement with the sharded step, if it is clearly shorter or alone fits.

    Args:
        request: the question, by objective ``step``.
        placement: its answer.
    """
    found = sharded_step(request)
    value = inf if placement.objective_value is None else placement.objective_value
    if found is None or found.step_ms >= SHORTER * value:
        return placement
    return placement.model_copy(update={"sharded": found})


def sharded_step(request: PlacementRequest) -> ShardedStep | None:
    """Return the shortest sharded step that fits on all devices; None without one.

    Args:
        request: the question, by objective ``step``.
    """
    units = units_of([layer.name for layer in request.profile.layers])
    gather = _gather_time(request)
    if not request.is_training or gather is None or _is_tied_across(request, units):
        return None
    found = [_step(request, profile, chunks, units, gather) for profile, chunks in _sizes(request)]
    fitting = [one for one in found if one is not None]
    return min(fitting, key=lambda one: one.step_ms, default=None)


def _gather_time(request: PlacementRequest) -> ExchangeTime | None:
    """Return what all devices take to gather parameters; None if they may not or cannot."""
    names = [device.name for device in request.devices]
    links = {(link.source, link.target): link for link in request.placed_on.links}
    most = request.constraints.max_devices or len(names)
    if (
        len(names) < 2
        or most < len(names)
        or not all(way in links for way in permutations(names, 2))
    ):
        return None
    return slowest(names, links, computing=True)


def _is_tied_across(request: PlacementRequest, units: Sequence[str]) -> bool:
    """Return whether units share parameters."""
    names = [layer.name for layer in request.profile.layers]
    unit_of = dict(zip(names, units, strict=True))
    return any(len({unit_of[one] for one in tie.layers}) > 1 for tie in request.profile.tied)


def units_of(layers: Sequence[str]) -> list[str]:
    """Return the unit of each layer: the path of a block or of a child, or the root.

    Args:
        layers: the names of layers, in execution order.
    """
    blocks = [{block_path(path) for path in modules_of(layer)} for layer in layers]
    if not any(path for paths in blocks for path in paths):
        blocks = [{path.partition(".")[0] for path in modules_of(layer)} for layer in layers]
    # a layer of several units belongs to their common parent, the root
    return [next(iter(paths)) or ROOT if len(paths) == 1 else ROOT for paths in blocks]


def _sizes(request: PlacementRequest) -> Iterator[tuple[Profile, int]]:
    """Yield the measured micro-batches of a device that fill the batch, with their number."""
    for profile in (request.profile, *request.profiles):
        chunks, rest = divmod(request.whole_batch_size, len(request.devices) * profile.batch_size)
        if not rest:
            yield profile, chunks


def _step(
    request: PlacementRequest,
    profile: Profile,
    chunks: int,
    units: Sequence[str],
    gather: ExchangeTime,
) -> ShardedStep | None:
    """Return the step with one size; None if a device lacks memory."""
    count = len(request.devices)
    reduce = with_additions(gather, count)
    problem = _whole_model(request, shared_profile(profile, count))
    runs = _runs(problem, units)
    root_params = sum(
        layer.param_bytes for layer, unit in zip(problem.layers, units, strict=True) if unit == ROOT
    )
    root_grads = sum(
        layer.grad_bytes for layer, unit in zip(problem.layers, units, strict=True) if unit == ROOT
    )
    most = [
        _held_bytes(problem, device, runs, count) + root_params + root_grads
        for device in range(count)
    ]
    if any(size > device.usable_bytes for size, device in zip(most, request.devices, strict=True)):
        return None
    forward_ms = gather.time_ms(root_params) + _pass_ms(
        [(gather.time_ms(run.param_bytes), run.forward_ms, 0.0) for run in runs]
    )
    backward_ms = reduce.time_ms(root_grads) + _pass_ms(
        [
            (gather.time_ms(run.param_bytes), run.backward_ms, reduce.time_ms(run.grad_bytes))
            for run in reversed(runs)
        ]
    )
    kinds = {device.type for device in request.devices}
    host_ms = max(sum(layer.host_ms.get(kind, 0.0) for layer in profile.layers) for kind in kinds)
    optimizer_ms = max(
        sum(layer.optimizer_ms.get(kind, 0.0) for layer in problem.layers) for kind in kinds
    )
    return ShardedStep(
        step_ms=chunks * max(forward_ms + backward_ms, host_ms) + optimizer_ms,
        compute_ms=chunks * sum(run.forward_ms + run.backward_ms for run in runs),
        memory_bytes=max(most),
        batch_size=profile.batch_size,
        chunks=chunks,
        modules=tuple(dict.fromkeys(unit for unit in units if unit != ROOT)),
    )


def _whole_model(request: PlacementRequest, profile: Profile) -> Problem:
    """Return the problem of the whole model on each device, one micro-batch at a time."""
    rules = request.constraints
    changed = {
        "profile": profile,
        "profiles": (),
        "objective": "throughput",
        "batch_size": None,
        "chunks": 1,
        "schedule": "1f1b",
        "cluster": request.placed_on,
        "constraints": rules.model_copy(update={"contiguous": True, "recompute": "never"}),
        "replicas": "never",
        "explain": False,
    }
    return Problem.from_request(request.model_copy(update=changed))


def _runs(problem: Problem, units: Sequence[str]) -> list[_Run]:
    """Return the consecutive layers of each unit in execution order."""
    devices = range(len(problem.devices))
    runs = []
    for unit, members in groupby(range(len(units)), key=units.__getitem__):
        layers = [*members]
        own = [problem.layers[layer] for layer in layers] if unit != ROOT else []
        runs.append(
            _Run(
                max(sum(problem.forward_ms[one][device] for one in layers) for device in devices),
                max(sum(problem.backward_ms[one][device] for one in layers) for device in devices),
                sum(layer.param_bytes for layer in own),
                sum(layer.grad_bytes for layer in own),
            )
        )
    return runs


def _held_bytes(problem: Problem, device: int, runs: Sequence[_Run], count: int) -> int:
    """Return the memory of a device without the gathered root unit."""
    alone = costs.costs_of(problem, [device] * len(problem.layers)).memory[device]
    state = alone.param_bytes + alone.grad_bytes
    part = -(-alone.param_bytes // count) - (-alone.grad_bytes // count)
    gathered = max(
        (one.param_bytes + other.param_bytes for one, other in pairwise(runs)),
        default=runs[0].param_bytes,
    )
    unreduced = max(
        (one.grad_bytes + other.grad_bytes for one, other in pairwise(runs)),
        default=runs[0].grad_bytes,
    )
    return alone.total_bytes - state + part + gathered + unreduced


def _pass_ms(runs: Sequence[tuple[float, float, float]]) -> float:
    """Return the time of a pass.

    Args:
        runs: the times to gather, to compute and to reduce of each run, in order.
    """
    lane_ms = gathered_ms = runs[0][0]
    end_ms = 0.0
    for number, (_, compute_ms, reduce_ms) in enumerate(runs):
        begin_ms = max(end_ms, gathered_ms)
        if number + 1 < len(runs):
            lane_ms = gathered_ms = max(lane_ms, begin_ms) + runs[number + 1][0]
        end_ms = begin_ms + compute_ms
        if reduce_ms:
            lane_ms = max(lane_ms, end_ms) + reduce_ms
    return max(end_ms, lane_ms)
