"""The referee's own computation of a sharded step, as ``replicas/sharding.py`` describes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from math import inf
from typing import NamedTuple

from placer.errors import PlacementError
from placer.schema import Layer, Placement, PlacementRequest, Profile
from placer.schema.base import MERGED, WHOLE
from placer.solver.referee.claims import equal, near, require
from placer.solver.referee.memory import Memory
from placer.solver.referee.replicas import Rate, rates_while_computing, with_part_of_optimizer


class _Found(NamedTuple):
    """A sharded step."""

    step_ms: float
    batch_size: int
    chunks: int
    memory_bytes: int


def check_sharded(request: PlacementRequest, placement: Placement) -> None:
    """Raise unless a sharded step is claimed where it is shorter, with its time and memory."""
    claimed = placement.sharded
    if request.objective != "step":
        require(claimed is None, "sharded comes with objective 'step' alone")
        return
    found = [_step(request, *size) for size in _sizes(request)]
    steps = {(one.batch_size, one.chunks): one for one in found if one is not None}
    value = inf if placement.objective_value is None else placement.objective_value
    best_ms = min((one.step_ms for one in steps.values()), default=inf)
    # the solver's rounding may differ where both are about equal
    if claimed is None:
        is_short = best_ms < 0.95 * value * (1 - 1e-9)
        require(not is_short, f"a sharded step of {best_ms} ms is not reported; {value} ms are")
        return
    require(
        claimed.step_ms < 0.95 * value, f"a sharded step of {claimed.step_ms} ms is hardly shorter"
    )
    near("sharded.step_ms", claimed.step_ms, best_ms)
    same = steps.get((claimed.batch_size, claimed.chunks))
    if same is None:
        raise PlacementError(f"no sharded step has micro-batches of {claimed.batch_size} samples")
    near("sharded.step_ms of its micro-batches", claimed.step_ms, same.step_ms)
    equal("sharded.memory_bytes", claimed.memory_bytes, same.memory_bytes)


def _sizes(request: PlacementRequest) -> Iterator[tuple[Profile, int]]:
    """Yield the micro-batches that every device may compute, with their number."""
    count, rules = len(request.devices), request.constraints
    links = {(link.source, link.target) for link in request.placed_on.links}
    names = [device.name for device in request.devices]
    all_linked = all((a, b) in links for a in names for b in names if a != b)
    unit_of = _units(request)
    ties_inside = all(
        len({unit_of[one] for one in tie.layers}) == 1 for tie in request.profile.tied
    )
    may = request.is_training and count > 1 and (rules.max_devices or count) >= count
    if not (may and all_linked and ties_inside):
        return
    for profile in (request.profile, *request.profiles):
        share = count * profile.batch_size
        if request.whole_batch_size % share == 0:
            yield profile, request.whole_batch_size // share


def _units(request: PlacementRequest) -> dict[str, str | None]:
    """Return the unit of each layer; None for the root."""

    def block(path: str) -> str | None:
        parts = path.split(".")
        numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
        return ".".join(parts[: numbers[0] + 1]) if numbers else None

    paths_of = {
        layer.name: [path.split("@")[0] for path in layer.name.split(MERGED) if path != WHOLE]
        for layer in request.profile.layers
    }
    has_blocks = any(block(path) for paths in paths_of.values() for path in paths)
    found: dict[str, str | None] = {}
    for name, paths in paths_of.items():
        own = {block(path) if has_blocks else path.split(".")[0] for path in paths}
        found[name] = own.pop() if len(own) == 1 else None
    return found


class _Run(NamedTuple):
    """Consecutive layers of one unit; the root unit has no bytes here."""

    forward_ms: float
    backward_ms: float
    param_bytes: int
    grad_bytes: int


def _step(request: PlacementRequest, profile: Profile, chunks: int) -> _Found | None:
    """Return a step with one size; None if a device lacks memory."""
    count, unit_of = len(request.devices), _units(request)
    part = with_part_of_optimizer(profile, count)
    root = [layer for layer in part.layers if unit_of[layer.name] is None]
    runs = [
        _run(request, [*layers], is_root=unit is None)
        for unit, layers in groupby(part.layers, key=lambda layer: unit_of[layer.name])
    ]
    apart = _params(root) + _gradients(root) + _most_gathered(runs)
    uses = {one: apart + _part_bytes(request, part, one.name, count) for one in request.devices}
    if any(use > device.usable_bytes for device, use in uses.items()):
        return None
    per_micro_batch = max(_passes_ms(request, runs, root), _longest(request, part, "host_ms"))
    step_ms = chunks * per_micro_batch + _longest(request, part, "optimizer_ms")
    return _Found(step_ms, profile.batch_size, chunks, max(uses.values()))


def _run(request: PlacementRequest, layers: Sequence[Layer], is_root: bool) -> _Run:
    kinds = {device.type for device in request.devices}
    return _Run(
        max(sum(layer.forward_ms[kind] for layer in layers) for kind in kinds),
        max(sum(layer.backward_ms[kind] for layer in layers) for kind in kinds),
        0 if is_root else _params(layers),
        0 if is_root else _gradients(layers),
    )


def _longest(request: PlacementRequest, profile: Profile, name: str) -> float:
    """Return the longest sum of a time of all layers on a device."""
    kinds = {device.type for device in request.devices}
    return max(
        sum(float(getattr(layer, name).get(kind, 0.0)) for layer in profile.layers)
        for kind in kinds
    )


def _params(layers: Sequence[Layer]) -> int:
    return sum(layer.param_bytes for layer in layers)


def _gradients(layers: Sequence[Layer]) -> int:
    return sum(layer.grad_bytes for layer in layers)


def _most_gathered(runs: Sequence[_Run]) -> int:
    """Return the bytes of whole units beyond the root: two at a time, in the worst case."""
    pairs = [*pairwise(runs)] or [(runs[0], _Run(0.0, 0.0, 0, 0))]
    return max(a.param_bytes + b.param_bytes for a, b in pairs) + max(
        a.grad_bytes + b.grad_bytes for a, b in pairs
    )


def _part_bytes(request: PlacementRequest, profile: Profile, device: str, count: int) -> int:
    """Return the memory of a device with its part of the state, and one micro-batch in flight."""
    asked = request.model_copy(
        update={"profile": profile, "chunks": 1, "schedule": "1f1b", "objective": "throughput"}
    )
    where = {layer.name: device for layer in profile.layers}
    use = Memory(asked, where, contiguous=True).total(device, 1)
    for whole in (_params(profile.layers), _gradients(profile.layers)):
        use += -(-whole // count) - whole
    return use


def _passes_ms(request: PlacementRequest, runs: Sequence[_Run], root: Sequence[Layer]) -> float:
    """Return the time of both passes of a micro-batch."""
    reduce, gather = rates_while_computing(request, [device.name for device in request.devices])
    gathers = [_time(gather, run.param_bytes) for run in runs]
    forward = _pass(gathers, [run.forward_ms for run in runs], [0.0] * len(runs))
    backward = _pass(
        gathers[::-1],
        [run.backward_ms for run in reversed(runs)],
        [_time(reduce, run.grad_bytes) for run in reversed(runs)],
    )
    whole = _time(gather, _params(root)) + _time(reduce, _gradients(root))
    return whole + forward + backward


def _time(rate: Rate, size: int) -> float:
    return rate[0] + rate[1] * size if size else 0.0


def _pass(gathers: Sequence[float], computes: Sequence[float], reduces: Sequence[float]) -> float:
    """Return the time of a pass, message by message in the order in which they are issued."""
    ready, ended = [0.0] * len(gathers), [0.0] * len(gathers)
    free = ready[0] = gathers[0]
    for step, time_ms in enumerate(computes):
        begun = max(ready[step], ended[step - 1] if step else 0.0)
        ended[step] = begun + time_ms
        if step + 1 < len(gathers):
            free = ready[step + 1] = max(free, begun) + gathers[step + 1]
        if reduces[step] > 0:
            free = max(free, ended[step]) + reduces[step]
    return max(ended[-1], free)
