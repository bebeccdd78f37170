"""The predicted and the measured results of a case."""

from __future__ import annotations

import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from placer import (
    Constraints,
    DataFlow,
    Placement,
    PlacementRequest,
    Profile,
    devices,
    profile,
    refine,
    solve,
)
from placer.capture import capture_graph
from placer.schedule import Pipeline, Transfer, plan, step_ms
from placer.schema import MemoryUse

from ..executor import timing
from ..executor.memory import Meter
from ..executor.sample import Sample, attempt, reason, release
from . import cases, peers
from .cases import Case, Model

Values = dict[str, list[float]]
ENGINE = "ours"
LAST = "peers"
"""The part of a case that comes last."""


def measure(model: Model) -> Iterator[Sample]:
    """Yield samples of a model in all four ways, in parts that may fail independently."""
    cases.prepare()
    capture_graph(
        nn.Linear(1, 1), torch.zeros(1, 1)
    )  # the first use of torch.export imports modules, which is not profiling time
    with tempfile.TemporaryDirectory() as folder:
        for case in cases.of(model):
            try:
                yield from _case(case, Path(folder))
            except Exception as error:
                traceback.print_exc()
                yield Sample(case.label, ENGINE, case.devices, case.chunks, failed=reason(error))
            release()


def _case(case: Case, folder: Path) -> Iterator[Sample]:
    for place in cases.places(case.devices):
        _warm_libraries(place)
    model = case.make(cases.home())
    inputs, target = case.batch(cases.home(), case.micro_batch)
    found: list[tuple[Profile, Placement]] = []

    def run_profile() -> Values:
        values, measured = profiled(case, model, inputs, folder)
        found.append((measured, solve(request(case, measured))))
        return values

    yield _part(case, "profile", run_profile)
    if not found:
        return
    alone, placement = found[0]
    whole = _with_loss(case, model, inputs, target, folder) if case.training else alone
    yield _part(
        case, "stages", lambda: staged(case, model, alone, whole, placement, inputs, target)
    )
    yield _part(case, "memory", lambda: memory(case, model, alone, placement))
    yield _part(case, "step", lambda: stepped(case, model, whole, placement))
    model.to(cases.home())
    values, missing = peers.estimates(case, model, inputs)
    for name, why in missing.items():
        yield Sample(case.label, name, case.devices, case.chunks, failed=why)
    yield Sample(
        case.label,
        LAST,
        case.devices,
        case.chunks,
        {name: [value] for name, value in values.items()},
    )


def _part(case: Case, name: str, run: Callable[[], Values]) -> Sample:
    """Return a part of a case; a failure prints its traceback and is one line in the results."""

    def told() -> Values:
        try:
            return run()
        except Exception:
            print(f"{case.label}, {name}:", file=sys.stderr)
            traceback.print_exc()
            raise

    return attempt(case.label, name, case.devices, case.chunks, told)


def profiled(case: Case, model: nn.Module, inputs: Tensor, folder: Path) -> tuple[Values, Profile]:
    """Return how long profiling takes with an empty and with a full cache, and the profile.

    Args:
        case: the case.
        model: the model, on its first device.
        inputs: one micro-batch on the same device.
        folder: the folder of the cache. Links that an earlier case measured stay in it, as they
            would for a user.
    """
    shutil.rmtree(folder / "layers", ignore_errors=True)
    times: list[float] = []
    for _ in range(2):
        began = perf_counter()
        found = profile(
            model,
            inputs,
            [str(place) for place in cases.places(case.devices)],
            training=case.training,
            optimizer="adam",
            progress=False,
            cache=folder,
        )
        times.append(perf_counter() - began)
    return {"cold_s": times[:1], "warm_s": times[1:]}, found


def _with_loss(
    case: Case, model: nn.Module, inputs: Tensor, target: Tensor, folder: Path
) -> Profile:
    """Return the profile with the loss; its layers are in the cache."""
    places = [str(place) for place in cases.places(case.devices)]
    return profile(
        model,
        inputs,
        places,
        optimizer="adam",
        progress=False,
        cache=folder,
        loss_fn=case.loss,
        target=target,
    )


def request(case: Case, found: Profile, **changes: Any) -> PlacementRequest:
    """Return the request for a profile."""
    asked: dict[str, Any] = {
        "profile": found,
        "constraints": Constraints(contiguous=True),
        "chunks": case.chunks,
        "schedule": "zero-bubble" if case.training else "1f1b",
        "transfers": "overlapped",
        "time_limit_s": 5.0,
    }
    return PlacementRequest(**asked | changes)


def staged(
    case: Case,
    model: nn.Module,
    alone: Profile,
    whole: Profile,
    placement: Placement,
    inputs: Tensor,
    target: Tensor,
) -> Values:
    """Return predicted and measured stage passes, and the step predicted from measured passes.

    The last stage includes the loss.

    Args:
        case: the case.
        model: the model, on its first device.
        alone: the profile without the loss, which the peers do not predict either.
        whole: the profile with the loss.
        placement: the placement to measure.
        inputs: one micro-batch.
        target: its target.
    """
    asked = request(case, whole)
    refined = refine(
        placement, model, inputs, request=asked, loss_fn=case.loss, target=target, rounds=1
    )
    stages = refined.rounds[0].stages
    return {
        "predicted_ms": [stage.predicted_ms for stage in stages],
        "measured_ms": [stage.measured_ms for stage in stages],
        "loss_ms": [sum(stage.loss_forward_ms + stage.loss_backward_ms for stage in stages)],
        "predicted_loss_ms": [_pass_ms(whole, placement) - _pass_ms(alone, placement)],
        "refined_step_ms": [predicted_step_ms(case, refined.profile, placement)],
    }


def _pass_ms(found: Profile, placement: Placement) -> float:
    """Return the time of a micro-batch through all layers, in training also backwards."""
    assert found.cluster is not None
    types = {device.name: device.type for device in found.cluster.devices}
    kinds = [(layer, types[placement.layer_devices[layer.name]]) for layer in found.layers]
    return sum(layer.forward_ms[kind] + layer.backward_ms.get(kind, 0.0) for layer, kind in kinds)


def memory(case: Case, model: nn.Module, found: Profile, placement: Placement) -> Values:
    """Return each device's predicted and allocated peak for one micro-batch.

    The run goes forwards and backwards as a manual loop does: autograd frees memory as it goes, and
    no pass is recorded. The memory model counts placements in this way if they need not be
    contiguous. The loss is not a layer, so it is a mean here, which holds next to nothing.
    """
    by_hand = _pinned(placement, contiguous=False)
    alone = solve(request(case, found, chunks=1, schedule="1f1b", constraints=by_hand))
    # A tiny model may be fastest on one device: the others hold nothing that could be compared.
    holding = set(alone.layer_devices.values())
    loads = {load.device: load for load in alone.devices if load.device in holding}
    used = _peaks(case, model, alone)
    if not used:
        return {}
    names = [str(place) for place in cases.places(case.devices)]
    rows = [(loads[name], *peak) for name, peak in zip(names, used, strict=True) if name in loads]
    return {
        "predicted_bytes": [float(load.memory.total_bytes) for load, _, _ in rows],
        "measured_bytes": [float(peak) for _, peak, _ in rows],
        "reserved_bytes": [float(reserved) for _, _, reserved in rows],
    }


def _peaks(case: Case, model: nn.Module, placement: Placement) -> list[tuple[int, int]]:
    """Return each device's peak of tensor bytes, and the peak of bytes reserved for them.

    The step covers one micro-batch that comes from the host. Reserved bytes include rounding and
    fragments. Neither number includes what libraries keep, which the device's reserve covers, nor
    memory that was free before. Without GPUs nothing is counted.
    """
    places = cases.places(case.devices)
    if cases.is_small():
        return []
    inputs, _ = case.batch(torch.device("cpu"), case.micro_batch)
    flow = DataFlow(model, places)
    flow.update_flow(placement)
    flow.output_device = torch.device(list(placement.layer_devices.values())[-1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4) if case.training else None

    def run() -> None:
        with torch.set_grad_enabled(case.training):
            output = flow(inputs, chunks=1)
            if optimizer is not None:
                output.mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        for place in places:
            torch.cuda.synchronize(place)

    try:
        run()  # libraries allocate workspaces, the optimizer makes its state
        release()
        beside = [allocated(place) - _held(model, optimizer, place) for place in places]
        empty = [int(torch.cuda.memory_reserved(place)) - allocated(place) for place in places]
        for place in places:
            torch.cuda.reset_peak_memory_stats(place)
        run()
        return [
            (
                int(torch.cuda.max_memory_allocated(place)) - other,
                int(torch.cuda.max_memory_reserved(place)) - other - before,
            )
            for place, other, before in zip(places, beside, empty, strict=True)
        ]
    finally:
        flow.undo()
        model.zero_grad(set_to_none=True)
        release()


def _pinned(placement: Placement, contiguous: bool = True) -> Constraints:
    """Return constraints that fix the same map."""
    return Constraints(contiguous=contiguous, pinned=dict(placement.layer_devices))


def stepped(case: Case, model: nn.Module, found: Profile, placement: Placement) -> Values:
    """Return predicted and measured step times, state bytes, and each device's reserved bytes.

    The times cover a whole batch in the executor.
    """
    batch = case.batch(cases.home(), case.micro_batch * case.chunks)
    model.cpu()  # so that all of it is counted on the device that gets it
    used = Meter(cases.places(case.devices))
    flow = DataFlow(model, [str(place) for place in cases.places(case.devices)])
    flow.update_flow(placement)
    try:
        if case.training:
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
            step = flow.train_step(case.loss, optimizer, schedule="zero-bubble")
            times = timing.steps(lambda: step(*batch), cases.places(case.devices))
            held = state_bytes(model, optimizer)
            reserved = used.against(solve(request(case, found, constraints=_pinned(placement))))
        else:
            with torch.no_grad():
                times = timing.steps(
                    lambda: flow(batch[0], chunks=case.chunks), cases.places(case.devices)
                )
            held, reserved = state_bytes(model), {}
    finally:
        flow.undo()
        model.zero_grad(set_to_none=True)
        release()
    predicted = {
        "predicted_ms": [predicted_step_ms(case, found, placement)],
        "predicted_state_bytes": [
            float(sum(_state_bytes(load.memory) for load in placement.devices))
        ],
    }
    held_bytes = {
        "step_reserved_bytes": reserved.get("peak_bytes", []),
        "step_predicted_bytes": reserved.get("predicted_bytes", []),
    }
    return predicted | {"state_bytes": [float(held)]} | held_bytes | times


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Return the bytes that a model needs in addition to activations.

    They are parameters and buffers, with an optimizer also gradients and its state.
    """
    return sum(tensor.nbytes for tensor in _state(model, optimizer))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    held = [*model.parameters(), *model.buffers()]
    if optimizer is not None:
        # each parameter has a gradient
        held += [parameter for parameter in model.parameters() if parameter.requires_grad]
        held += [
            leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)
        ]
    return held


def _state_bytes(memory: MemoryUse) -> int:
    """Return the same bytes as a placement predicts them for a device."""
    return memory.param_bytes + memory.grad_bytes + memory.optimizer_bytes + memory.buffer_bytes


def predicted_step_ms(case: Case, found: Profile, placement: Placement) -> float:
    """Return the step that a profile predicts.

    Stage times and transfers are simulated; the optimizer's step follows.
    """
    stages = list(dict.fromkeys(placement.layer_devices.values()))
    assert found.cluster is not None
    types = {device.name: device.type for device in found.cluster.devices}
    sums: dict[str, list[float]] = {
        name: [0.0] * len(stages) for name in ("forward", "backward", "weights", "optimizer")
    }
    for layer in found.layers:
        place = placement.layer_devices[layer.name]
        kind, stage = types[place], stages.index(place)
        sums["forward"][stage] += layer.forward_ms[kind]
        if case.training:
            sums["backward"][stage] += layer.backward_ms[kind]
            sums["weights"][stage] += layer.weight_half_ms(kind)
            sums["optimizer"][stage] += layer.optimizer_ms.get(kind, 0.0)
    places = range(len(stages))
    forward, backward, weights = (sums[name] for name in ("forward", "backward", "weights"))
    transfers = _transfers(found, placement, stages, case.training)
    order = plan(
        "zero-bubble",
        places,
        placement.chunks,
        forward_ms=forward,
        backward_ms=backward,
        weight_grad_ms=weights,
        transfers=transfers,
        room=placement.in_flight or None,
        training=case.training,
    )
    pipeline = Pipeline(tuple(places), tuple(forward), tuple(backward), tuple(weights), transfers)
    return step_ms(pipeline, order) + max(sums["optimizer"])


def _transfers(
    found: Profile, placement: Placement, stages: list[str], training: bool
) -> tuple[Transfer, ...]:
    """Return the transfers between stages; all values of a pair form one transfer."""
    assert found.cluster is not None
    times: dict[tuple[int, int], list[float]] = {}
    for edge in found.edges:
        source = placement.layer_devices[edge.source]
        for target in {placement.layer_devices[name] for name in edge.targets} - {source}:
            there, back = found.cluster.link(source, target), found.cluster.link(target, source)
            assert there is not None and back is not None
            pair = times.setdefault((stages.index(source), stages.index(target)), [0.0, 0.0])
            pair[0] += there.transfer_ms(edge.bytes)
            pair[1] += (
                back.transfer_ms(edge.gradient_bytes) if training and edge.gradient_bytes else 0.0
            )
    return tuple(
        Transfer(a, b, there, back or None) for (a, b), (there, back) in sorted(times.items())
    )


def allocated(place: torch.device) -> int:
    """Return the bytes of tensors on a device; 0 on a stand-in, where they are not counted."""
    return int(torch.cuda.memory_allocated(place)) if place.type == "cuda" else 0


def _held(model: nn.Module, optimizer: torch.optim.Optimizer | None, place: torch.device) -> int:
    """Return the bytes that the allocator counts for tensors that stay on a device between steps.

    Each tensor is a multiple of 512 bytes.
    """
    here = [tensor for tensor in _state(model, optimizer) if tensor.device == place]
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in here)


def _warm_libraries(place: torch.device) -> None:
    """Run both passes once, so that libraries take the memory that they keep.

    A device's reserve covers this memory; a placement does not.
    """
    if place.type != "cuda":
        return
    square = torch.ones(256, 256, device=place, requires_grad=True)
    (square @ square).sum().backward()  # type: ignore[no-untyped-call]
    devices.library_bytes(place)
    torch.cuda.synchronize(place)


__all__ = ["measure"]
