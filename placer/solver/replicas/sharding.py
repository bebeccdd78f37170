r"""A step of fully sharded data parallelism (FSDP2) on all devices, to compare with placements.

Placer does not run it: ``torch.distributed.fsdp.fully_shard`` does. Each of K devices computes n
samples of every micro-batch, and holds 1 / K of the parameters, their gradients and the optimizer's
state. A *unit* is a block of the model, the outermost numbered module around a layer. Without
blocks, it is a child of the model. Layers in neither form the root unit.

**Time.** Parameters of a unit are gathered before each pass of it, while the unit before it
computes, and then copied out of the message. Its gradients are reduced after its backward pass; the
reduction of the unit before it has ended by then, and they are copied into a message. Both copies
run where passes run, so nothing hides them. One lane, L, carries the messages one after another;
the root unit is gathered once per micro-batch, and reduced at its end, so its layers only compute.
For the units u of a pass in their order, in ms::

    L = gather(first); end = 0
    each u:  begin = max(end, time at which u is gathered) + copy(params(u))
             L     = max(L, begin) + gather(next unit)
             end   = begin + compute(u)
             end   = max(end, end of the reduction before)      in the backward pass
                     + copy(gradients(u))
             L     = max(L, end) + reduce(u)                    in the backward pass
             end   = end + compute(layers of the root until the next unit)
    pass  = max(end, L)
    step  = chunks * max(forward pass + backward pass + root, host) + optimizer / K

    root    = gather(params(root)) + copy(params(root))
              + copy(gradients(root)) + reduce(gradients(root))
    copy(b) = 2 b / ADD_BYTES_PER_S                             reads and writes each byte

``gather`` and ``reduce`` are the formulas of ``replication.py`` with R = K, and rates while devices
compute. ``compute`` is the slowest device's. ``host`` is the time to launch both passes of all
layers, because units run without a recording.

**Error.** FSDP2 hardly reaches this time. It leaves out what the host does to shard: hooks around
each pass of a unit, views of each parameter, launches of copies and messages. It also leaves out
that recorded layers, which a profile measures, may run faster than launched layers. Without
``copy``, predictions were 11% (GPT, bound by GPUs) and 39% (ResNet-101, bound by the host) shorter
than measured steps on two H200s. ``SHORTER`` allows for it.

**Memory** of a device, where ``alone`` is the memory of the whole model on the device with one
micro-batch of n samples in flight and 1 / K of the optimizer::

    use = alone - params - gradients + params / K + gradients / K + params(root) + gradients(root)
          + largest params of two consecutive units
          + max(largest gradients of two consecutive units, largest params of a unit)

Forward passes hold the second summand of the maximum: the received copy of a unit is freed when the
next one has arrived. A step counts if every device has this memory, for a measured n that fills the
batch, and if the request neither pins nor forbids layers: every device computes all of them.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, pairwise
from math import inf
from typing import NamedTuple

from placer.exports.units import block_path, modules_of
from placer.schedule.gradient_pieces import ADD_BYTES_PER_S
from placer.schema import Cluster, Layer, Placement, PlacementRequest, Profile, ShardedStep
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

SHORTER = 0.6
"""A sharded step is reported below this part of the placement's step: the two measured steps took
1.12 and 1.65 times their predictions, so FSDP2 is faster even with the larger error."""


class _Run(NamedTuple):
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


_ABSENT = _Run(0.0, 0.0, 0, 0)


class _Step(NamedTuple):
    """A step with one size of micro-batches, whose memory is not known.

    Attributes:
        step_ms: time of a step.
        profile: of a micro-batch.
        chunks: micro-batches of a device.
        runs: in execution order.
        root: the layers of the root unit.
    """

    step_ms: float
    profile: Profile
    chunks: int
    runs: list[_Run]
    root: list[Layer]


def with_sharded_step(request: PlacementRequest, placement: Placement) -> Placement:
    """Return a placement with the sharded step, if it is clearly shorter or alone fits.

    Args:
        request: the question, by objective ``step``.
        placement: its answer.
    """
    value = inf if placement.objective_value is None else placement.objective_value
    found = sharded_step(request, SHORTER * value)
    return placement if found is None else placement.model_copy(update={"sharded": found})


def sharded_step(request: PlacementRequest, below_ms: float = inf) -> ShardedStep | None:
    """Return the shortest sharded step that fits on all devices; None without one.

    Args:
        request: the question, by objective ``step``.
        below_ms: a longer step is not looked for.
    """
    units = units_of([layer.name for layer in request.profile.layers])
    gather = _gather_time(request)
    if not request.is_training or gather is None or _is_tied_across(request, units):
        return None
    steps = [_step(request, profile, chunks, units, gather) for profile, chunks in _sizes(request)]
    most_bytes = min(device.usable_bytes for device in request.devices)
    # memory takes most of the time to compute, so it comes last
    for step in sorted(steps, key=lambda one: one.step_ms):
        if step.step_ms >= below_ms:
            return None
        if (memory_bytes := _held_bytes(request, step)) <= most_bytes:
            return ShardedStep(
                step_ms=step.step_ms,
                compute_ms=step.chunks * sum(run.forward_ms + run.backward_ms for run in step.runs),
                memory_bytes=memory_bytes,
                batch_size=step.profile.batch_size,
                chunks=step.chunks,
                modules=tuple(dict.fromkeys(unit for unit in units if unit != ROOT)),
            )
    return None


def _gather_time(request: PlacementRequest) -> ExchangeTime | None:
    """Return what all devices take to gather parameters; None if they may not or cannot."""
    names, rules = [device.name for device in request.devices], request.constraints
    links = {(link.source, link.target): link for link in request.placed_on.links}
    layers = len(request.profile.layers)
    if (
        len(names) < 2
        or len(links) < len(names) * (len(names) - 1)
        or (rules.max_devices or len(names)) < len(names)
        or (rules.max_layers or layers) < layers
        or rules.pinned
        or rules.forbidden
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
) -> _Step:
    """Return the step with one size."""
    count, kinds = len(request.devices), {device.type for device in request.devices}
    reduce = with_additions(gather, count)
    runs = _runs(profile.layers, units, kinds)
    root = [layer for layer, unit in zip(profile.layers, units, strict=True) if unit == ROOT]
    param_bytes = sum(layer.param_bytes for layer in root)
    grad_bytes = sum(layer.grad_bytes for layer in root)
    root_ms = gather.time_ms(param_bytes) + reduce.time_ms(grad_bytes)
    root_ms += _copy_ms(param_bytes + grad_bytes)
    forward_ms = _pass_ms([(run.forward_ms, run.param_bytes, 0) for run in runs], gather, reduce)
    backward_ms = _pass_ms(
        [(run.backward_ms, run.param_bytes, run.grad_bytes) for run in reversed(runs)],
        gather,
        reduce,
    )
    host_ms = max(sum(layer.host_ms.get(kind, 0.0) for layer in profile.layers) for kind in kinds)
    optimizer_ms = max(
        sum(layer.optimizer_ms.get(kind, 0.0) for layer in profile.layers) for kind in kinds
    )
    step_ms = chunks * max(forward_ms + backward_ms + root_ms, host_ms) + optimizer_ms / count
    return _Step(step_ms, profile, chunks, runs, root)


def _runs(layers: Sequence[Layer], units: Sequence[str], kinds: Collection[str]) -> list[_Run]:
    """Return the consecutive layers of each unit in execution order."""
    runs = []
    for unit, pairs in groupby(zip(units, layers, strict=True), key=lambda pair: pair[0]):
        run = [layer for _, layer in pairs]
        own = run if unit != ROOT else []
        runs.append(
            _Run(
                max(sum(layer.forward_ms[kind] for layer in run) for kind in kinds),
                max(sum(layer.backward_ms[kind] for layer in run) for kind in kinds),
                sum(layer.param_bytes for layer in own),
                sum(layer.grad_bytes for layer in own),
            )
        )
    return runs


def _held_bytes(request: PlacementRequest, step: _Step) -> int:
    """Return the memory of a device, whatever its type."""
    count = len(request.devices)
    problem = _whole_model(request, shared_profile(step.profile, count))
    alone = costs.costs_of(problem, [0] * len(problem.layers)).memory[0]
    state = alone.param_bytes + alone.grad_bytes
    part = -(-alone.param_bytes // count) - (-alone.grad_bytes // count)
    root = sum(layer.param_bytes + layer.grad_bytes for layer in step.root)
    units = [run for run in step.runs if run.param_bytes]
    pairs = [*pairwise(units), *((unit, _ABSENT) for unit in units[-1:])]
    gathered = max((one.param_bytes + other.param_bytes for one, other in pairs), default=0)
    unreduced = max((one.grad_bytes + other.grad_bytes for one, other in pairs), default=0)
    received = max((unit.param_bytes for unit in units), default=0)
    return alone.total_bytes - state + part + root + gathered + max(unreduced, received)


def _whole_model(request: PlacementRequest, profile: Profile) -> Problem:
    """Return the problem of the whole model on the first device, one micro-batch at a time."""
    rules = request.constraints
    changed = {
        "profile": profile,
        "profiles": (),
        "objective": "throughput",
        "batch_size": None,
        "chunks": 1,
        "schedule": "1f1b",
        "cluster": Cluster(devices=request.devices[:1]),
        "constraints": rules.model_copy(update={"contiguous": True, "recompute": "never"}),
        "replicas": "never",
        "explain": False,
    }
    return Problem.from_request(request.model_copy(update=changed))


def _pass_ms(
    runs: Sequence[tuple[float, int, int]], gather: ExchangeTime, reduce: ExchangeTime
) -> float:
    """Return the time of a pass.

    Args:
        runs: of each run in order, the time to compute, the bytes to gather and those to reduce.
        gather: the time to gather parameters.
        reduce: the time to reduce gradients.
    """
    gathers = iter([gather.time_ms(param_bytes) for _, param_bytes, _ in runs if param_bytes])
    lane_ms = gathered_ms = next(gathers, 0.0)
    end_ms = reduced_ms = 0.0
    for compute_ms, param_bytes, grad_bytes in runs:
        if param_bytes:
            end_ms = max(end_ms, gathered_ms) + _copy_ms(param_bytes)
            lane_ms = gathered_ms = max(lane_ms, end_ms) + next(gathers, 0.0)
        end_ms += compute_ms
        if grad_bytes:
            end_ms = max(end_ms, reduced_ms) + _copy_ms(grad_bytes)
            lane_ms = reduced_ms = max(lane_ms, end_ms) + reduce.time_ms(grad_bytes)
    return max(end_ms, lane_ms)


def _copy_ms(size_bytes: int) -> float:
    """Return the time in which a device copies bytes within its memory."""
    return 1e3 * 2 * size_bytes / ADD_BYTES_PER_S
