"""The referee's own computation of a sharded step, as ``replicas/sharding.py`` describes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf

from placer.schema import Layer, Placement, PlacementRequest, Profile
from placer.schema.base import MERGED, WHOLE
from placer.solver.referee.claims import equal, near, require
from placer.solver.referee.memory import Memory
from placer.solver.referee.replicas import Rate, rates_while_computing, with_part_of_optimizer


def check_sharded(request: PlacementRequest, placement: Placement) -> None:
    """Raise unless a sharded step is claimed where it is shorter, with its time and memory."""
    claimed = placement.sharded
    if request.objective != "step":
        require(claimed is None, "sharded comes with objective 'step' alone")
        return
    found = [_step(request, *size) for size in _sizes(request)]
    steps = [one for one in found if one is not None]
    value = inf if placement.objective_value is None else placement.objective_value
    best = min(steps, default=(inf, 0, 0, 0))
    # the solver's rounding may differ where both are about equal
    if claimed is None:
        is_short = best[0] < 0.95 * value * (1 - 1e-9)
        require(not is_short, f"a sharded step of {best[0]} ms is not reported; {value} ms are")
        return
    require(
        claimed.step_ms < 0.95 * value, f"a sharded step of {claimed.step_ms} ms is hardly shorter"
    )
    near("sharded.step_ms", claimed.step_ms, best[0])
    mine = next(one for one in steps if (one[1], one[2]) == (claimed.batch_size, claimed.chunks))
    near("sharded.step_ms of its size", claimed.step_ms, mine[0])
    equal("sharded.memory_bytes", claimed.memory_bytes, mine[3])


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


def _step(
    request: PlacementRequest, profile: Profile, chunks: int
) -> tuple[float, int, int, int] | None:
    """Return time, samples, micro-batches and bytes of a step; None if a device lacks memory."""
    count, unit_of = len(request.devices), _units(request)
    part = with_part_of_optimizer(profile, count)
    runs: list[tuple[str | None, list[Layer]]] = []
    for layer in part.layers:
        if runs and runs[-1][0] == unit_of[layer.name]:
            runs[-1][1].append(layer)
        else:
            runs.append((unit_of[layer.name], [layer]))
    root = [layer for unit, layers in runs if unit is None for layer in layers]
    gathered = [0 if unit is None else _params(layers) for unit, layers in runs]
    reduced = [0 if unit is None else _gradients(layers) for unit, layers in runs]
    most = 0
    for device in request.devices:
        alone = _alone_bytes(request, part, device.name)
        params, gradients = _params(part.layers), _gradients(part.layers)
        use = alone - params - gradients + -(-params // count) + -(-gradients // count)
        use += _params(root) + _gradients(root)
        for sizes in (gathered, reduced):
            use += max((a + b for a, b in pairwise(sizes)), default=sizes[0])
        if use > device.usable_bytes:
            return None
        most = max(most, use)
    reduce, gather = rates_while_computing(request, [device.name for device in request.devices])
    kinds = {device.type for device in request.devices}
    forward, backward = [], []
    for _, layers in runs:
        forward.append(max(sum(layer.forward_ms[kind] for layer in layers) for kind in kinds))
        backward.append(max(sum(layer.backward_ms[kind] for layer in layers) for kind in kinds))
    ahead = _time(gather, _params(root)) + _pass(
        [_time(gather, size) for size in gathered], forward, [0.0] * len(runs)
    )
    back = _time(reduce, _gradients(root)) + _pass(
        [_time(gather, size) for size in reversed(gathered)],
        backward[::-1],
        [_time(reduce, size) for size in reversed(reduced)],
    )
    host = max(sum(layer.host_ms.get(kind, 0.0) for layer in part.layers) for kind in kinds)
    optimizer = max(
        sum(layer.optimizer_ms.get(kind, 0.0) for layer in part.layers) for kind in kinds
    )
    return (
        chunks * max(ahead + back, host) + optimizer,
        profile.batch_size,
        chunks,
        most,
    )


def _params(layers: Sequence[Layer]) -> int:
    return sum(layer.param_bytes for layer in layers)


def _gradients(layers: Sequence[Layer]) -> int:
    return sum(layer.grad_bytes for layer in layers)


def _alone_bytes(request: PlacementRequest, profile: Profile, device: str) -> int:
    """Return the memory of the whole model on a device, with one micro-batch in flight."""
    asked = request.model_copy(
        update={"profile": profile, "chunks": 1, "schedule": "1f1b", "objective": "throughput"}
    )
    where = {layer.name: device for layer in profile.layers}
    return Memory(asked, where, contiguous=True).total(device, 1)


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
