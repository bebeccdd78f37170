"""All calls of Placer's public API by the equivalence suite, so that a rename changes one file.

Requests are built from a few numbers (``question``). Answers become plain dictionaries whose keys
belong to this suite, not to the wire format. Texts that people read are left out: they may be
reworded without a change of behaviour. Times of solving, ids and versions are left out as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from fastapi.testclient import TestClient
from torch import nn

import placer
from placer.testing import logical_devices
from placer_server.app import create_app
from placer_server.settings import Settings

MIB = 2**20
STAND_INS = ("cpu:0", "cpu:1")
TIME_LIMIT_S = 120.0
"""Far more than any case needs: every search here ends with a proof."""


def spread(index: int, salt: int) -> float:
    """Return a number from 0 to 1 that looks random and is the same on every machine."""
    return (index * 389 + salt * 613 + 101) * 7919 % 10007 / 10007


def layer(
    index: int,
    *,
    kinds: Sequence[str],
    training: bool,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the profile of one layer: unlike its neighbours, slower on each further device type.

    Args:
        index: position in execution order.
        kinds: the device types.
        training: whether it has a backward pass, gradients and optimizer state.
        extra: further fields, or other values.
    """
    forward_ms = round(1 + 3 * spread(index, 1), 3)
    backward_ms = round(forward_ms * (1.5 + spread(index, 2)), 3)
    slower = [1 + 0.6 * number + 0.2 * number * spread(index, 3) for number in range(len(kinds))]
    size = round((2 + 6 * spread(index, 4)) * MIB)
    state = {"param_bytes": size, "buffer_bytes": 1000 + index, "forward_workspace_bytes": MIB // 4}
    times = {
        "forward_ms": {kind: forward_ms * ratio for kind, ratio in zip(kinds, slower, strict=True)}
    }
    if training:
        times["backward_ms"] = {
            kind: backward_ms * ratio for kind, ratio in zip(kinds, slower, strict=True)
        }
        times["weight_grad_ms"] = {kind: 0.4 * time for kind, time in times["backward_ms"].items()}
        times["optimizer_ms"] = {kind: round(0.2 + 0.3 * spread(index, 5), 3) for kind in kinds}
        state |= {
            "grad_bytes": size,
            "optimizer_bytes": 2 * size,
            "saved_bytes": round((1 + 2 * spread(index, 6)) * MIB),
            "backward_workspace_bytes": MIB // 2,
            "deferred_bytes": MIB // 8,
        }
    return {"name": f"l{index}", **times, **state, **(extra or {})}


def edge(source: int, *targets: int, training: bool, size: int = MIB) -> dict[str, Any]:
    """Return a value that one layer makes and others read, with its gradient in training."""
    found: dict[str, Any] = {
        "source": f"l{source}",
        "targets": [f"l{target}" for target in targets],
        "bytes": size + 4096 * source,
    }
    if training:
        found |= {"gradient_bytes": found["bytes"], "saved_by": found["targets"]}
    return found


def cluster(
    kinds: Sequence[str],
    *,
    memory_mib: int | Sequence[int] = 4096,
    bandwidth: float = 8e9,
    unlike_links: bool = False,
    missing: Sequence[tuple[int, int]] = (),
) -> dict[str, Any]:
    """Return devices ``d0``, ``d1``, ... of the given types, and links between all of them.

    Args:
        kinds: the type of each device.
        memory_mib: of all devices, or of each.
        bandwidth: of every link, in bytes/s; of the fastest one if they are unlike.
        unlike_links: give every link a bandwidth of its own.
        missing: source and target of links that there are not.
    """
    memory = [memory_mib] * len(kinds) if isinstance(memory_mib, int) else list(memory_mib)
    devices = [
        {"name": f"d{number}", "type": kind, "memory_bytes": limit * MIB, "reserve_bytes": MIB}
        for number, (kind, limit) in enumerate(zip(kinds, memory, strict=True))
    ]
    links = []
    for one in range(len(kinds)):
        for other in range(len(kinds)):
            if one != other and (one, other) not in missing:
                share = 0.2 + 0.8 * spread(5 * one + other, 7) if unlike_links else 1.0
                ends = {"source": f"d{one}", "target": f"d{other}"}
                links.append(
                    ends | {"bandwidth_bytes_per_s": bandwidth * share, "latency_s": 1.5e-5}
                )
    return {"devices": devices, "links": links}


GAP = 2e-6
"""A bound may be below an optimal objective by half of this share."""

CHAIN = tuple((index, (index + 1,)) for index in range(7))
BRANCHES = ((0, (1, 4)), (1, (2,)), (2, (3, 7)), (3, (6,)), (4, (5,)), (5, (6,)), (6, (7,)))
"""A fork at layer 0 that joins at layer 6, and a skip from layer 2 to layer 7."""


def question(
    *,
    edges: Sequence[tuple[int, Sequence[int]]] = CHAIN,
    kinds: Sequence[str] = ("a", "a", "a"),
    training: bool = True,
    extra: Mapping[int, Mapping[str, Any]] | None = None,
    profile: Mapping[str, Any] | None = None,
    devices: Mapping[str, Any] | None = None,
    size: int = MIB,
    more_batch_sizes: Mapping[int, float] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Return a placement request as its JSON holds it.

    Args:
        edges: source and targets of every value; together they name all layers.
        kinds: the type of each device.
        training: whether the profile is of a training step.
        extra: further fields of layers, by index.
        profile: further fields of the profile.
        devices: further arguments of ``cluster``.
        size: of the values between layers, in bytes.
        more_batch_sizes: micro-batch sizes of further profiles, and how long they take beside the
            first one's.
        fields: further fields of the request.
    """
    types = sorted(set(kinds))
    count = 1 + max(target for _, targets in edges for target in targets)
    layers = [
        layer(index, kinds=types, training=training, extra=(extra or {}).get(index))
        for index in range(count)
    ]
    base = {
        "model": "Generated",
        "training": training,
        "optimizer": "Adam" if training else None,
        "batch_size": 4,
        "layers": layers,
        "edges": [
            edge(source, *targets, training=training, size=size) for source, targets in edges
        ],
        **(profile or {}),
    }
    request = {
        "profile": base,
        "cluster": cluster(kinds, **(devices or {})),
        "workers": 1,
        "time_limit_s": TIME_LIMIT_S,
        **fields,
    }
    if more_batch_sizes:
        request["profiles"] = [
            _resized(base, samples, ratio) for samples, ratio in more_batch_sizes.items()
        ]
    return request


def _resized(profile: Mapping[str, Any], samples: int, ratio: float) -> dict[str, Any]:
    """Return a profile of another micro-batch size: times by ``ratio``, values by their samples."""
    share = samples / profile["batch_size"]
    layers = []
    for one in profile["layers"]:
        times = {
            name: {kind: time * ratio for kind, time in one[name].items()}
            for name in ("forward_ms", "backward_ms", "weight_grad_ms")
            if name in one
        }
        layers.append({**one, **times, "saved_bytes": round(one.get("saved_bytes", 0) * share)})
    edges = [
        {**one, **{name: round(one[name] * share) for name in ("bytes", "gradient_bytes")}}
        for one in profile["edges"]
    ]
    return {**profile, "batch_size": samples, "layers": layers, "edges": edges}


class Service:
    """The REST service in this process, started when it is first spoken to; a context manager."""

    def __init__(self) -> None:
        self._open = ExitStack()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @cached_property
    def client(self) -> TestClient:
        """A client of a service with an empty database."""
        settings = Settings(database=":memory:", workers=1, queue=64)
        app = create_app(settings)
        client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
        return self._open.enter_context(client)


def request_of(content: Mapping[str, Any]) -> placer.PlacementRequest:
    """Return the request that JSON holds."""
    return placer.PlacementRequest.model_validate(content)


def answer(content: Mapping[str, Any], service: Service, *, is_unique: bool) -> dict[str, Any]:
    """Solve a request and return what is compared.

    Args:
        content: the request as its JSON holds it.
        service: judges a map that is not compared.
        is_unique: whether one map alone is optimal, or one for each renaming of equal devices; else
            only the objective and its bound are compared, since any optimal map is a right answer.
    """
    placement = placer.solve(request_of(content))
    value, bound = placement.objective_value, placement.bound
    if placement.layer_devices:
        assert placement.status == "optimal", "the search ended without a proof"
        assert bound is not None and value is not None
        assert (1 - GAP) * value <= bound <= (1 + GAP) * value
    found: dict[str, Any] = {
        "status": placement.status,
        "objective": value,
        "contiguous": placement.contiguous,
        "schedule": placement.schedule,
        "chunks": placement.chunks,
        "batch size": placement.batch_size,
        "speedup": placement.speedup,
    }
    if placement.single_device is not None:
        single = placement.single_device
        found["single device"] = [single.objective_value, single.fits, single.missing_bytes]
    if placement.infeasible is not None:
        why = placement.infeasible
        found["infeasible"] = {
            "layers": list(why.layers),
            "devices": list(why.devices),
            "short bytes": why.missing_bytes,
            "requirements": len(why.requirements),
            "smallest": why.minimal,
        }
    if placement.limits is not None:
        helps = [[one.objective_value, one.speedup] for one in placement.limits.improvements]
        found["limits"] = {"kind": placement.limits.kind, "helps": helps}
    if placement.tie_breaks is not None:
        ties = placement.tie_breaks
        found["ties"] = [ties.transfer_ms, ties.imbalance_ms, ties.proven]
    if placement.step is not None:
        found["choices"] = sorted(
            [one.chunks, one.batch_size, one.schedule, one.contiguous]
            for one in placement.step.choices
        )
    if is_unique:
        found |= _map(content, placement)
    elif placement.layer_devices:
        judged = evaluate(service, content, placement.layer_devices)
        found["judged"] = [judged["valid"], judged["objective_value"]]
    return found


def _map(content: Mapping[str, Any], placement: placer.Placement) -> dict[str, Any]:
    """Return the map of a placement and what it predicts of every device."""
    cluster = content["cluster"]
    kinds = {(device["type"], device["memory_bytes"]) for device in cluster["devices"]}
    speeds = {link["bandwidth_bytes_per_s"] for link in cluster["links"]}
    are_alike = len(kinds) == len(speeds) == 1 and not content.get("constraints", {}).get("pinned")
    used = dict.fromkeys(placement.layer_devices.values())
    names = {one: f"device {number}" if are_alike else one for number, one in enumerate(used)}
    loads = {}
    for load in placement.devices:
        if load.layers:
            times = [load.compute_ms, load.send_ms, load.receive_ms, load.load_ms]
            memory = load.memory
            kept = [memory.param_bytes, memory.grad_bytes, memory.optimizer_bytes]
            kept += [memory.buffer_bytes, memory.activation_bytes, memory.workspace_bytes]
            loads[names[load.device]] = {"times": times, "memory": kept, "busiest": load.bottleneck}
    found: dict[str, Any] = {
        "map": [names[device] for device in placement.layer_devices.values()],
        "stages": [names[device] for device in placement.stages],
        "in flight": list(placement.in_flight),
        "recompute": [names[device] for device in placement.recompute],
        "loads": loads,
    }
    if placement.step is not None:
        step = placement.step
        found["step"] = {
            "alone": step.isolated_ms,
            "steady state": step.steady_state_ms,
            "bubble": step.bubble,
            "optimizer": step.optimizer_ms,
            "samples per s": step.samples_per_s,
            "in flight": list(step.in_flight),
        }
    return found


def timeline(service: Service, content: Mapping[str, Any]) -> dict[str, Any]:
    """Solve a request over REST and return the timeline of its placement.

    Every pass and copy is a start and an end in milliseconds, in the order of micro-batches.
    """
    placed = service.client.post("/v1/placements?wait=60", json=dict(content))
    assert placed.status_code == 200, placed.text
    reply = service.client.get(f"/v1/placements/{placed.json()['id']}/timeline")
    assert reply.status_code == 200, reply.text
    shown = reply.json()
    passes: dict[str, list[list[float]]] = {}
    for one in sorted(shown["passes"], key=lambda one: one["micro_batch"]):
        key = f"stage {one['stage']} on {one['device']}, {one['phase']}"
        passes.setdefault(key, []).append([one["start_ms"], one["end_ms"]])
    for one in sorted(shown["copies"], key=lambda one: one["micro_batch"]):
        key = f"stage {one['source_stage']} to {one['target_stage']}, {one['carries']}"
        passes.setdefault(key, []).append([one["start_ms"], one["end_ms"]])
    devices = {
        one["device"]: [one["busy_ms"], one["idle_ms"], one["optimizer_ms"]]
        for one in shown["devices"]
    }
    return {
        "step": shown["step_ms"],
        "single device": shown["single_device_ms"],
        "bubble": shown["bubble"],
        "busy, idle, optimizer": devices,
        "passes": passes,
    }


def evaluate(
    service: Service, content: Mapping[str, Any], layer_devices: Mapping[str, str]
) -> dict[str, Any]:
    """Judge a map by the service's cost model."""
    body = {"request": content, "layer_devices": dict(layer_devices)}
    found: dict[str, Any] = service.client.post("/v1/placements:evaluate", json=body).json()
    return found


def profile_of(model: nn.Module, inputs: Any, optimizer: torch.optim.Optimizer) -> placer.Profile:
    """Measure a model on two stand-ins, as quickly as can be."""
    return placer.profile(
        model,
        inputs,
        list(STAND_INS),
        optimizer=optimizer,
        progress=False,
        repeats=1,
        cache=False,
    )


def structure(profile: placer.Profile) -> dict[str, Any]:
    """Return what a profile says besides times: layers, edges, groups, and their bytes."""
    sizes = ("param_bytes", "grad_bytes", "optimizer_bytes", "buffer_bytes", "saved_bytes")
    sizes += ("forward_workspace_bytes", "backward_workspace_bytes", "deferred_bytes")
    return {
        "captured": profile.captured,
        "batch size": profile.batch_size,
        "layers": {
            one.name: [one.module, *(getattr(one, name) for name in sizes)]
            for one in profile.layers
        },
        "edges": [
            [one.source, list(one.targets), one.bytes, one.gradient_bytes, list(one.saved_by)]
            for one in profile.edges
        ],
        "colocated": sorted(sorted(group) for group in profile.colocated),
        "tied": [[sorted(tie.layers), tie.gradient_bytes, tie.param_bytes] for tie in profile.tied],
    }


def suggest(profile: placer.Profile) -> placer.Placement:
    """Place a measured profile on both stand-ins, by times that do not depend on the machine.

    Layers without parameters take less, so that the stages differ between models.
    """
    layers = []
    for index, one in enumerate(profile.layers):
        forward_ms = (1.0 if one.param_bytes else 0.1) + round(spread(index, 8), 3)
        times = {
            "forward_ms": forward_ms,
            "backward_ms": 2 * forward_ms,
            "weight_grad_ms": forward_ms,
        }
        update = {name: {"cpu": time} for name, time in times.items()}
        layers.append(one.model_copy(update=update | {"optimizer_ms": {}, "host_ms": {}}))
    devices = cluster(("cpu", "cpu"))
    text = {f"d{number}": name for number, name in enumerate(STAND_INS)}
    for device in devices["devices"]:
        device["name"] = text[device["name"]]
    for link in devices["links"]:
        link["source"], link["target"] = text[link["source"]], text[link["target"]]
    fixed = profile.model_copy(
        update={"layers": tuple(layers), "cluster": placer.Cluster.model_validate(devices)}
    )
    return placer.suggest(
        fixed,
        constraints=placer.Constraints(min_devices=2),
        time_limit_s=TIME_LIMIT_S,
        progress=False,
    )


@contextmanager
def placed_flow(model: nn.Module, placement: placer.Placement) -> Iterator[placer.DataFlow]:
    """Yield a flow that runs a placement on two stand-ins, which refuse to mix their tensors."""
    with logical_devices(len(STAND_INS)):
        flow = placer.DataFlow(model, list(STAND_INS))
        flow.update_flow(placement)
        yield flow


def move(flow: placer.DataFlow, devices: Sequence[int]) -> None:
    """Let a flow run its layers on other devices."""
    for name, device in zip(flow.layer_gpus, devices, strict=True):
        flow.layer_gpus[name] = device
    flow.update_flow()


def recompute(flow: placer.DataFlow, devices: Sequence[int]) -> None:
    """Let devices keep no activations in training, and compute them again in the backward pass."""
    flow.recompute = list(devices)


def train_step(flow: placer.DataFlow, loss_fn: Any, optimizer: Any, schedule: str) -> Any:
    """Return a training step of a flow under a schedule."""
    return flow.train_step(loss_fn, optimizer, schedule)


def stream(flow: placer.DataFlow, batches: Any) -> list[Any]:
    """Run batch after batch without gradients."""
    with torch.no_grad():
        return list(flow.stream(batches))
