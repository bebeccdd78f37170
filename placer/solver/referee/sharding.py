"""The referee's own computation of a sharded step, as ``replicas/sharding.py`` describes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from math import inf
from typing import NamedTuple

from placer.errors import PlacementError
from placer.exports.units import is_number
from placer.schedule.gradient_pieces import ADD_BYTES_PER_S
from placer.schema import Layer, Placement, PlacementRequest, Profile
from placer.schema.base import WHOLE, module_paths
from placer.solver.referee.claims import equal, near, require
from placer.solver.referee.memory import Memory
from placer.solver.referee.replicas import Rate, rates_while_computing, with_part_of_optimizer


class _Found(NamedTuple):
    """A sharded step that may not fit."""

    step_ms: float
    compute_ms: float
    profile: Profile
    chunks: int
    whole_bytes: int


def check_sharded(request: PlacementRequest, placement: Placement) -> None:
    """Raise unless a sharded step is claimed where it is shorter, with its time and memory."""
    claimed = placement.sharded
    if request.objective != "step":
        require(claimed is None, "sharded comes with objective 'step' alone")
        return
    found = _steps(request)
    most_bytes = min(device.usable_bytes for device in request.devices)
    value = inf if placement.objective_value is None else placement.objective_value
    require(
        claimed is None or claimed.step_ms < 0.6 * value,
        f"a sharded step is claimed that is hardly shorter than {value} ms",
    )
    least_ms = 0.6 * value if claimed is None else claimed.step_ms
    for one in found:
        # the solver's rounding may differ where both are about equal
        if one.step_ms < least_ms * (1 - 1e-9) and _use(request, one) <= most_bytes:
            raise PlacementError(f"a sharded step of {one.step_ms} ms is not reported")
    if claimed is None:
        return
    steps = {(one.profile.batch_size, one.chunks): one for one in found}
    same = steps.get((claimed.batch_size, claimed.chunks))
    if same is None:
        raise PlacementError(f"no sharded step has micro-batches of {claimed.batch_size} samples")
    near("sharded.step_ms", claimed.step_ms, same.step_ms)
    near("sharded.compute_ms", claimed.compute_ms, same.compute_ms)
    equal("sharded.memory_bytes", claimed.memory_bytes, _use(request, same))
    require(
        claimed.memory_bytes <= most_bytes,
        f"a sharded step needs {claimed.memory_bytes} bytes; a device has {most_bytes}",
    )
    units = [unit for unit in _units(request).values() if unit is not None]
    equal("sharded.modules", claimed.modules, tuple(dict.fromkeys(units)))


def _sizes(request: PlacementRequest) -> Iterator[tuple[Profile, int]]:
    """Yield the micro-batches that every device may compute, with their number."""
    if not (_may_compute_all(request) and _may_exchange(request)):
        return
    for profile in (request.profile, *request.profiles):
        share = len(request.devices) * profile.batch_size
        if request.whole_batch_size % share == 0:
            yield profile, request.whole_batch_size // share


def _may_compute_all(request: PlacementRequest) -> bool:
    """Return whether each of several devices may train all layers."""
    rules, count, layers = request.constraints, len(request.devices), len(request.profile.layers)
    enough = (rules.max_devices or count) >= count and (rules.max_layers or layers) >= layers
    return request.is_training and count > 1 and enough and not (rules.pinned or rules.forbidden)


def _may_exchange(request: PlacementRequest) -> bool:
    """Return whether all devices are linked, and no two units share parameters."""
    links = {(link.source, link.target) for link in request.placed_on.links}
    names = [device.name for device in request.devices]
    unit_of = _units(request)
    return all((a, b) in links for a in names for b in names if a != b) and all(
        len({unit_of[one] for one in tie.layers}) == 1 for tie in request.profile.tied
    )


def _units(request: PlacementRequest) -> dict[str, str | None]:
    """Return the unit of each layer; None for the root."""
    paths_of = {layer.name: _paths(layer.name) for layer in request.profile.layers}
    has_blocks = any(_block(path) for paths in paths_of.values() for path in paths)
    found: dict[str, str | None] = {}
    for name, paths in paths_of.items():
        own = {_block(path) if has_blocks else path.split(".")[0] for path in paths}
        found[name] = (own.pop() or None) if len(own) == 1 else None
    return found


def _paths(layer: str) -> list[str]:
    """Return the paths of the modules in a layer; an empty one for the whole model."""
    return ["" if path == WHOLE else path for path in module_paths(layer)]


def _block(path: str) -> str | None:
    """Return the path of the outermost numbered module; None without one."""
    parts = path.split(".")
    numbers = [place for place, part in enumerate(parts) if is_number(part)]
    return ".".join(parts[: numbers[0] + 1]) if numbers else None


class _Run(NamedTuple):
    """Consecutive layers of one unit; the root unit has no bytes here."""

    forward_ms: float
    backward_ms: float
    param_bytes: int
    grad_bytes: int


def _steps(request: PlacementRequest) -> list[_Found]:
    """Return the steps of all sizes."""
    if not (sizes := [*_sizes(request)]):
        return []
    rates = rates_while_computing(request, [device.name for device in request.devices])
    return [_step(request, rates, *size) for size in sizes]


def _step(
    request: PlacementRequest, rates: tuple[Rate, Rate], profile: Profile, chunks: int
) -> _Found:
    """Return a step with one size."""
    count, unit_of = len(request.devices), _units(request)
    root = [layer for layer in profile.layers if unit_of[layer.name] is None]
    runs = [
        _run(request, [*layers], is_root=unit is None)
        for unit, layers in groupby(profile.layers, key=lambda layer: unit_of[layer.name])
    ]
    per_micro_batch = max(_passes_ms(rates, runs, root), _longest(request, profile, "host_ms"))
    return _Found(
        step_ms=chunks * per_micro_batch + _longest(request, profile, "optimizer_ms") / count,
        compute_ms=chunks * sum(run.forward_ms + run.backward_ms for run in runs),
        profile=profile,
        chunks=chunks,
        whole_bytes=_params(root) + _gradients(root) + _most_gathered(runs),
    )


def _use(request: PlacementRequest, found: _Found) -> int:
    """Return the memory of each device; layers need the same on all types of devices."""
    count = len(request.devices)
    part = with_part_of_optimizer(found.profile, count)
    return found.whole_bytes + _part_bytes(request, part, request.devices[0].name, count)


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
    """Return the most bytes of whole units beyond the root, which neither splits nor frees them."""
    params = [0, *(run.param_bytes for run in runs if run.param_bytes), 0]
    grads = [0, *(run.grad_bytes for run in runs if run.param_bytes), 0]
    backward = max(a + b for a, b in pairwise(grads))
    return max(a + b for a, b in pairwise(params)) + max(backward, *params)


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


def _passes_ms(rates: tuple[Rate, Rate], runs: Sequence[_Run], root: Sequence[Layer]) -> float:
    """Return the time of both passes of a micro-batch."""
    reduce, gather = rates
    gathers = [_message(gather, run.param_bytes) for run in runs]
    none = [_message(reduce, 0)] * len(runs)
    forward = _pass(gathers, [run.forward_ms for run in runs], none)
    backward = _pass(
        gathers[::-1],
        [run.backward_ms for run in reversed(runs)],
        [_message(reduce, run.grad_bytes) for run in reversed(runs)],
    )
    whole = _message(gather, _params(root)), _message(reduce, _gradients(root))
    return sum(message.copy_ms + message.time_ms for message in whole) + forward + backward


class _Message(NamedTuple):
    """What devices exchange of a unit, and the copy between the message and its tensors."""

    time_ms: float
    copy_ms: float


def _message(rate: Rate, size: int) -> _Message:
    if not size:
        return _Message(0.0, 0.0)
    return _Message(rate[0] + rate[1] * size, (size + size) * 1e3 / ADD_BYTES_PER_S)


def _pass(
    gathers: Sequence[_Message], computes: Sequence[float], reduces: Sequence[_Message]
) -> float:
    """Return the time of a pass, message by message in the order in which they are issued."""
    units = [step for step, message in enumerate(gathers) if message.time_ms > 0]
    after = dict(pairwise(units))
    ready = {step: gathers[step].time_ms for step in units[:1]}
    free, clock, reduced = sum(ready.values()), 0.0, 0.0
    for step, time_ms in enumerate(computes):
        begun = max(clock, ready.get(step, 0.0)) + gathers[step].copy_ms
        if step in after:
            free = ready[after[step]] = max(free, begun) + gathers[after[step]].time_ms
        clock = begun + time_ms
        if reduces[step].time_ms > 0:
            # one buffer packs gradients, so a unit waits until the last unit's have left
            clock = max(clock, reduced) + reduces[step].copy_ms
            free = reduced = max(free, clock) + reduces[step].time_ms
    return max(clock, free)
