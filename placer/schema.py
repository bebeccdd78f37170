"""The wire types: what is profiled, what is asked, what is answered.

    Profile + Cluster  ->  PlacementRequest  ->  Placement

Every quantity carries its unit in its name: ``_ms`` milliseconds, ``_s`` seconds, ``_bytes`` bytes. Unknown fields,
NaN, infinities and negative quantities are refused. The types are immutable; ``model_copy(update=...)`` makes a
changed copy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, StringConstraints, model_validator

__all__ = [
    "SCHEMA_VERSION",
    "Cluster",
    "Constraints",
    "Device",
    "DeviceLoad",
    "Edge",
    "Help",
    "Infeasibility",
    "Layer",
    "Limiting",
    "Limits",
    "Link",
    "MemoryUse",
    "Objective",
    "Placement",
    "PlacementRequest",
    "Profile",
    "Schedule",
    "SingleDevice",
    "Status",
    "Transfers",
]

SCHEMA_VERSION: Literal["1"] = "1"
"""The version of every wire type; a reader refuses one that it does not know."""

V = TypeVar("V")

MAX_LAYERS = 100_000
MAX_DEVICES = 1_024

FIRST = FailFast()
"""Of a list, only the first faulty element is reported: a million faults would take a gigabyte to describe."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Milliseconds = Annotated[float, Field(ge=0, le=1e9)]
Bytes = Annotated[int, Field(ge=0, le=2**60)]


def _in_order(named: dict[str, V]) -> dict[str, V]:
    """Sorted by name, so that equal questions are written, and hashed, alike."""
    return named if len(named) < 2 else dict(sorted(named.items()))


IN_ORDER = AfterValidator(_in_order)
TimesMs = Annotated[dict[Name, Milliseconds], Field(max_length=64), IN_ORDER]

Objective = Literal["throughput", "latency", "memory"]
"""What is made small: the bottleneck (ms), one sample's critical path (ms), or the largest memory use (bytes)."""

Schedule = Literal["fill-drain", "1f1b"]
Transfers = Literal["added", "overlapped"]
Limiting = Literal["memory", "link", "layer", "work"]
Status = Literal["optimal", "feasible", "infeasible", "unknown"]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Layer(_Wire):
    """One layer, measured alone on one micro-batch.

    Attributes:
        name: the layer's name, unique in its profile: a module path, with ``@1``, ``@2`` for later calls.
        module: the class of the module, for people.
        forward_ms: device time of the forward pass by device type.
        backward_ms: device time of the backward pass by device type; empty in an inference profile.
        host_ms: time the host takes to launch one forward and backward, by device type; not part of any cost.
        param_bytes: parameters; a parameter that several layers share counts in the first of them alone.
        grad_bytes: gradients of the parameters that require one.
        optimizer_bytes: the optimizer's state for them.
        buffer_bytes: buffers.
        saved_bytes: tensors made inside the layer and kept for its backward pass; values that cross the layer's border
            are not counted here but on their edge, see ``Edge.saved_by``.
        forward_workspace_bytes: the most that a forward pass holds beyond all of those.
        backward_workspace_bytes: the same for a backward pass: gradients of what the layer reads and writes, and those
            of its parameters until they are added to the ones of earlier micro-batches.
    """

    name: Name
    module: Annotated[str, StringConstraints(max_length=512)] = ""
    forward_ms: TimesMs
    backward_ms: TimesMs = {}
    host_ms: TimesMs = {}
    param_bytes: Bytes = 0
    grad_bytes: Bytes = 0
    optimizer_bytes: Bytes = 0
    buffer_bytes: Bytes = 0
    saved_bytes: Bytes = 0
    forward_workspace_bytes: Bytes = 0
    backward_workspace_bytes: Bytes = 0


class Edge(_Wire):
    """One value and the layers that read it; it is sent once to each device that reads it.

    Attributes:
        source: the layer that makes the value.
        targets: the layers that read it.
        bytes: its size for one micro-batch.
        gradient_bytes: the size of its gradient, sent back from each reading device in training.
        saved_by: those of the source and the targets that keep the value for their backward pass.
    """

    source: Name
    targets: Annotated[tuple[Name, ...], Field(min_length=1), FIRST]
    bytes: Bytes
    gradient_bytes: Bytes = 0
    saved_by: Annotated[tuple[Name, ...], FIRST] = ()


class Device(_Wire):
    """One accelerator, or one CPU stand-in.

    Attributes:
        name: as torch names it: ``cuda:0``, ``cpu:1``.
        type: the key into a layer's times: ``NVIDIA H200``, ``cpu``.
        memory_bytes: the limit; what a placement may use is this less the reserve.
        reserve_bytes: kept free of the placement: context, library workspaces, other programs.
        host: the machine that the device is in.
    """

    name: Name
    type: Name
    memory_bytes: Bytes
    reserve_bytes: Bytes = 0
    host: Annotated[str, StringConstraints(max_length=512)] = ""

    @property
    def usable_bytes(self) -> int:
        """What a placement may use, in bytes."""
        return self.memory_bytes - self.reserve_bytes

    @model_validator(mode="after")
    def _limit_above_reserve(self) -> Self:
        if self.memory_bytes < self.reserve_bytes:
            raise ValueError(
                f"device {self.name!r}: memory_bytes {self.memory_bytes} is below reserve_bytes {self.reserve_bytes}"
            )
        return self


class Link(_Wire):
    """A directed way between two devices: a transfer of n bytes takes ``latency_s + n / bandwidth_bytes_per_s``."""

    source: Name
    target: Name
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0, le=1e18)]
    latency_s: Annotated[float, Field(ge=0, le=1e6)] = 0.0

    def transfer_ms(self, size_bytes: int) -> float:
        """The time that ``size_bytes`` take over this link, in milliseconds."""
        return 1e3 * (self.latency_s + size_bytes / self.bandwidth_bytes_per_s)


class Cluster(_Wire):
    """The devices and the links between them; two devices without a link cannot exchange values."""

    devices: Annotated[tuple[Device, ...], Field(min_length=1, max_length=MAX_DEVICES), FIRST]
    links: Annotated[tuple[Link, ...], FIRST] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [device.name for device in self.devices]
        _refuse_duplicates("device", names)
        known = set(names)
        for link in self.links:
            for end in (link.source, link.target):
                if end not in known:
                    raise ValueError(f"link {link.source!r} -> {link.target!r}: there is no device {end!r}")
            if link.source == link.target:
                raise ValueError(f"link {link.source!r} -> {link.target!r} joins a device with itself")
        _refuse_duplicates("link", [f"{link.source} -> {link.target}" for link in self.links])
        return self

    def link(self, source: str, target: str) -> Link | None:
        """The link from ``source`` to ``target``, or None where there is none."""
        return next((link for link in self.links if (link.source, link.target) == (source, target)), None)


class Profile(_Wire):
    """What was measured of one model: its layers in execution order, the values between them, and the devices.

    Attributes:
        model: the name of the model's class.
        graph_hash: the same for the same graph, shapes and types.
        training: whether backward times and training memory were measured.
        optimizer: the optimizer whose state was measured, in training.
        batch_size: samples in the micro-batch that was measured.
        granularity: how the layers were cut: ``auto``, ``submodule``, ``fine``, a depth, or ``custom``.
        captured: whether the graph was captured; if not, execution goes through hooks, and ``not_captured_because``
            says why.
        layers: in execution order: every edge runs forwards.
        edges: the values that cross layers.
        colocated: groups of layers that share state and so one device.
        cluster: the devices and links that were measured; None in a profile that is to be merged with a cluster later.
        versions: of python, torch and placer.
    """

    schema_version: Literal["1"] = SCHEMA_VERSION
    model: Annotated[str, StringConstraints(max_length=512)] = ""
    graph_hash: Annotated[str, StringConstraints(max_length=128)] = ""
    training: bool = False
    optimizer: Annotated[str, StringConstraints(max_length=128)] | None = None
    batch_size: Annotated[int, Field(ge=1, le=2**31)] = 1
    granularity: Annotated[int, Field(ge=1, le=1000)] | Annotated[str, StringConstraints(max_length=64)] = "auto"
    captured: bool = True
    not_captured_because: Annotated[str, StringConstraints(max_length=4096)] = ""
    layers: Annotated[tuple[Layer, ...], Field(min_length=1, max_length=MAX_LAYERS), FIRST]
    edges: Annotated[tuple[Edge, ...], FIRST] = ()
    colocated: Annotated[tuple[Annotated[tuple[Name, ...], FIRST], ...], FIRST] = ()
    cluster: Cluster | None = None
    versions: Annotated[dict[str, str], IN_ORDER] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [layer.name for layer in self.layers]
        _refuse_duplicates("layer", names)
        place = {name: index for index, name in enumerate(names)}
        for edge in self.edges:
            self._check_edge(edge, place)
        for group in self.colocated:
            _refuse_unknown("colocated", group, place)
        return self

    def _check_edge(self, edge: Edge, place: dict[str, int]) -> None:
        if not _runs_well(edge, place):
            self._refuse_edge(edge, place)

    def _refuse_edge(self, edge: Edge, place: dict[str, int]) -> None:
        """Say what is wrong with an edge."""
        label = f"edge from {edge.source!r}"
        _refuse_unknown(label, (edge.source, *edge.targets, *edge.saved_by), place)
        for target in edge.targets:
            if place[target] <= place[edge.source]:
                raise ValueError(f"{label} to {target!r} {self._backwards(edge.source, target)}")
        for keeper in edge.saved_by:
            if keeper != edge.source and keeper not in edge.targets:
                raise ValueError(f"{label}: saved_by names {keeper!r}, which neither makes nor reads the value")

    def _backwards(self, source: str, target: str) -> str:
        successors: dict[str, list[str]] = {}
        for edge in self.edges:
            successors.setdefault(edge.source, []).extend(edge.targets)
        path = _path(successors, target, source)
        if path:
            return f"closes a cycle: {' -> '.join([source, *path])}"
        return "runs against the order of the layers; list the layers in execution order"

    def to_json(self) -> str:
        """The profile as JSON with one layer, edge, device or link a line: readable, diffable and small."""
        return _lines(self.model_dump(mode="json", exclude_defaults=True) | {"schema_version": self.schema_version})


class Constraints(_Wire):
    """What a placement must respect, beside memory.

    Attributes:
        contiguous: each stage is a set of layers with no path that leaves it and comes back (the quotient graph over
            devices is acyclic). None: contiguous, unless a group of colocated layers would then pull the whole model
            onto one device, as tied embeddings do; then free.
        pinned: layer -> the device that it must be on.
        forbidden: layer -> devices that it must not be on. A layer of ``*`` stands for every layer.
        colocated: groups of layers that must share a device, beside those of the profile.
        max_devices: use at most so many devices.
    """

    contiguous: bool | None = None
    pinned: Annotated[dict[Name, Name], IN_ORDER] = {}
    forbidden: Annotated[dict[Name, Annotated[tuple[Name, ...], FIRST]], IN_ORDER] = {}
    colocated: Annotated[tuple[Annotated[tuple[Name, ...], FIRST], ...], FIRST] = ()
    max_devices: Annotated[int, Field(ge=1, le=MAX_DEVICES)] | None = None


class PlacementRequest(_Wire):
    """A question: where should the layers of this profile run?

    Attributes:
        profile: what was measured.
        cluster: the devices to place on; the profile's own if None.
        objective: what is made small, see ``Objective``.
        constraints: what must be respected.
        training: whether a training step or inference is placed; as profiled if None.
        chunks: micro-batches in a batch.
        schedule: how micro-batches are ordered, which sets how many are in flight at a stage in training: all of them
            for ``fill-drain``, at most ``stages - stage`` for ``1f1b`` (contiguous placements; else all of them).
        transfers: ``added``: a device computes and transfers one after the other; ``overlapped``: its load is the
            largest of its compute, its sends and its receives.
        time_limit_s: after this the best answer so far and its bound are returned.
        seed: of the solver's random choices.
        workers: cores that the solver may use.
        explain: whether the answer says what limits it and what would help, by solving changed questions in what is
            left of the time; not under objective ``memory``.
    """

    schema_version: Literal["1"] = SCHEMA_VERSION
    profile: Profile
    cluster: Cluster | None = None
    objective: Objective = "throughput"
    constraints: Constraints = Constraints()
    training: bool | None = None
    chunks: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    schedule: Schedule = "1f1b"
    transfers: Transfers = "added"
    time_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    workers: Annotated[int, Field(ge=1, le=256)] = 2
    explain: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        cluster = self.cluster or self.profile.cluster
        if cluster is None:
            raise ValueError("neither the request nor its profile has a cluster: give the devices to place on")
        if self.is_training and not self.profile.training:
            raise ValueError("training is asked for, but the profile was made with training=False")
        layers = {layer.name for layer in self.profile.layers}
        devices = {device.name for device in cluster.devices}
        rules = self.constraints
        _refuse_unknown("constraints.pinned", rules.pinned, layers)
        _refuse_unknown("constraints.pinned", rules.pinned.values(), devices, "device")
        _refuse_unknown("constraints.forbidden", (name for name in rules.forbidden if name != "*"), layers)
        for banned in rules.forbidden.values():
            _refuse_unknown("constraints.forbidden", banned, devices, "device")
        for group in rules.colocated:
            _refuse_unknown("constraints.colocated", group, layers)
        self._check_times(cluster)
        return self

    def _check_times(self, cluster: Cluster) -> None:
        for kind in {device.type for device in cluster.devices}:
            for layer in self.profile.layers:
                if kind not in layer.forward_ms:
                    raise ValueError(f"layer {layer.name!r} has no forward_ms for device type {kind!r}")
                if self.is_training and kind not in layer.backward_ms:
                    raise ValueError(f"layer {layer.name!r} has no backward_ms for device type {kind!r}")

    @property
    def is_training(self) -> bool:
        """Whether a training step is placed."""
        return self.profile.training if self.training is None else self.training

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices to place on."""
        return self.placed_on.devices

    @property
    def placed_on(self) -> Cluster:
        """The cluster to place on: the request's, else the profile's."""
        cluster = self.cluster or self.profile.cluster
        assert cluster is not None  # the validator refused it
        return cluster

    def content_hash(self) -> str:
        """The same for the same question, whatever the order or spelling of its JSON: 32 hexadecimal digits."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:32]


class MemoryUse(_Wire):
    """What a device holds at its worst moment, by kind, in bytes."""

    param_bytes: Bytes = 0
    grad_bytes: Bytes = 0
    optimizer_bytes: Bytes = 0
    buffer_bytes: Bytes = 0
    activation_bytes: Bytes = 0
    workspace_bytes: Bytes = 0

    @property
    def total_bytes(self) -> int:
        """All of it, in bytes."""
        return (
            self.param_bytes
            + self.grad_bytes
            + self.optimizer_bytes
            + self.buffer_bytes
            + self.activation_bytes
            + self.workspace_bytes
        )


class DeviceLoad(_Wire):
    """What a placement asks of one device for one micro-batch.

    Attributes:
        device: its name.
        layers: how many layers it holds.
        compute_ms: forward and, in training, backward time of its layers.
        send_ms: time of the values and gradients that it sends.
        receive_ms: time of those that it receives.
        load_ms: compute and transfers as the request joins them.
        memory: by kind, at the worst moment.
        limit_bytes: what it may use.
        bottleneck: whether no device is busier.
    """

    device: Name
    layers: Annotated[int, Field(ge=0)]
    compute_ms: Milliseconds
    send_ms: Milliseconds
    receive_ms: Milliseconds
    load_ms: Milliseconds
    memory: MemoryUse
    limit_bytes: Bytes
    bottleneck: bool = False


class SingleDevice(_Wire):
    """The best that one device alone does: the answer to whether to split at all.

    Attributes:
        device: the fastest device on which the model fits, or, where it fits on none, the fastest.
        objective_value: the objective there, in the objective's unit.
        fits: whether it fits there.
        short_bytes: what is missing if it does not.
    """

    device: Name
    objective_value: Annotated[float, Field(ge=0)]
    fits: bool
    short_bytes: Bytes = 0


class Infeasibility(_Wire):
    """Requirements that cannot hold together.

    Attributes:
        reason: in words, with the values.
        layers: the layers concerned.
        devices: the devices concerned.
        short_bytes: the bytes missing, where memory is the reason.
    """

    reason: str
    layers: tuple[Name, ...] = ()
    devices: tuple[Name, ...] = ()
    short_bytes: Bytes = 0


class Help(_Wire):
    """A change that would make a placement better: the changed question was solved.

    Attributes:
        change: in words: ``2 GiB more on cuda:1``.
        objective_value: what is reached with it; no promise that nothing better is.
        speedup: the placement's objective over that.
    """

    change: str
    objective_value: Annotated[float, Field(ge=0)]
    speedup: Annotated[float, Field(ge=0)]


class Limits(_Wire):
    """What limits a placement.

    Attributes:
        kind: ``memory``: without its limits the answer is better; else what keeps the busiest device busy: its ``link``
            (transfers, more than it computes), one ``layer``, or the ``work`` of several.
        what: in words, with the values.
        helps: what would help, the most first; only what was solved in time, and is better.
    """

    kind: Limiting
    what: str
    helps: tuple[Help, ...] = ()


class Placement(_Wire):
    """The answer: where each layer runs, what that predicts, and what is proven about it.

    Attributes:
        id: the content hash of the request.
        status: ``optimal``: proven; ``feasible``: the best found in time; ``infeasible``: proven to be none;
            ``unknown``: none found in time.
        objective: what was made small.
        objective_value: its value, ms or bytes; None without a placement.
        bound: a proven lower bound on it.
        gap: (objective_value - bound) / objective_value.
        method: what found and proved it.
        solve_time_s: how long that took.
        layer_devices: layer -> device, in execution order; empty without a placement.
        granularity: of the profile, taken over by ``update_flow``.
        training: whether a training step was placed.
        batch_size: samples in a micro-batch.
        chunks: micro-batches in a batch.
        schedule: the order of micro-batches.
        contiguous: whether the stages are contiguous.
        stages: the devices that hold layers, in pipeline order: of contiguous stages, an order in which every value
            runs forwards, and in which their memory was reckoned; else by their first layer.
        devices: the load of each device.
        single_device: the best that one device does.
        speedup: single_device.objective_value / objective_value, for times; None without a placement.
        infeasible: why there is none.
        limits: what limits it, where the request asks to explain.
    """

    schema_version: Literal["1"] = SCHEMA_VERSION
    id: Annotated[str, StringConstraints(max_length=128)] = ""
    status: Status
    objective: Objective
    objective_value: Annotated[float, Field(ge=0)] | None = None
    bound: Annotated[float, Field(ge=0)] | None = None
    gap: Annotated[float, Field(ge=0, le=1)] | None = None
    method: str = ""
    solve_time_s: Annotated[float, Field(ge=0)] = 0.0
    model: str = ""
    layer_devices: dict[Name, Name] = {}
    granularity: int | str = "auto"
    training: bool = False
    batch_size: int = 1
    chunks: int = 1
    schedule: Schedule = "1f1b"
    contiguous: bool = True
    stages: tuple[Name, ...] = ()
    devices: tuple[DeviceLoad, ...] = ()
    single_device: SingleDevice | None = None
    speedup: float | None = None
    infeasible: Infeasibility | None = None
    limits: Limits | None = None

    def to_json(self) -> str:
        """The placement as readable JSON."""
        return json.dumps(self.model_dump(mode="json"), indent=1)


def _runs_well(edge: Edge, place: dict[str, int]) -> bool:
    """Whether an edge is as it must be: the quick way, as a service checks many profiles of many edges."""
    start = place.get(edge.source, MAX_LAYERS)
    for target in edge.targets:
        if place.get(target, -1) <= start:
            return False
    for keeper in edge.saved_by:
        if keeper not in edge.targets and keeper != edge.source:
            return False
    return True


def _refuse_duplicates(kind: str, names: Sequence[str]) -> None:
    if len(set(names)) == len(names):
        return
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{kind} {name!r} is listed twice")
        seen.add(name)


def _refuse_unknown(where: str, names: Iterable[str], known: Iterable[str], kind: str = "layer") -> None:
    known = known if isinstance(known, (dict, set)) else set(known)
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: there is no {kind} {name!r}")


def _path(successors: dict[str, list[str]], start: str, goal: str) -> list[str]:
    """A path from ``start`` to ``goal``, both included, or nothing."""
    came_from: dict[str, str | None] = {start: None}
    stack = [start]
    while stack:
        here = stack.pop()
        if here == goal:
            path = [here]
            while (before := came_from[path[-1]]) is not None:
                path.append(before)
            return path[::-1]
        for there in successors.get(here, ()):
            if there not in came_from:
                came_from[there] = here
                stack.append(there)
    return []


def _lines(content: dict[str, Any], depth: int = 0) -> str:
    """JSON in which every element of a list, and every scalar of an outer object, is a line of its own."""
    pad = " " * (depth + 1)
    rows = []
    for key, value in content.items():
        if isinstance(value, dict) and any(isinstance(item, list) for item in value.values()):
            text = _lines(value, depth + 1)
        elif isinstance(value, list) and value:
            text = "[\n" + ",\n".join(f"{pad} {json.dumps(item)}" for item in value) + f"\n{pad}]"
        else:
            text = json.dumps(value)
        rows.append(f"{pad}{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(rows) + "\n" + " " * depth + "}"
