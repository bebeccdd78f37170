"""What was measured of a model."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from placer.schema.base import (
    FIRST,
    IN_ORDER,
    MAX_LAYERS,
    SCHEMA_VERSION,
    Bytes,
    Name,
    TimesMs,
    Wire,
    refuse_duplicates,
    refuse_unknown,
)
from placer.schema.batch_options import BatchOptions
from placer.schema.cluster import Cluster

Shares = Annotated[
    dict[Name, Annotated[float, Field(ge=0, le=1e9)]], Field(max_length=64), IN_ORDER
]

UNSTEADY = 0.25
"""Timings of a profile that are further apart are not those of an idle device: a few hundredths are
usual, and half or more where other programs run on all cores of a CPU."""


class Layer(Wire):
    """One layer, measured alone on one micro-batch.

    Attributes:
        name: the layer's name, unique in its profile: a module path, with ``@1``, ``@2`` for later
            calls.
        module: the class of the module, for people.
        forward_ms: device time of the forward pass by device type.
        backward_ms: device time of the backward pass by device type; empty in an inference profile.
        weights_ms: the part of ``backward_ms`` that gradients of parameters take, and nobody waits
            for, by device type: the half that zero-bubble schedules do later; see
            ``weight_half_ms``.
        optimizer_ms: time of the optimizer's step on the layer's parameters, once a batch, by
            device type; left out where it is nothing.
        spread: how far timings of one pass forwards and backwards were apart, by device type: half
            of the range that holds their middle half, over their median; left out below 0.01.
        host_ms: time the host takes to launch one forward and backward, by device type; not part of
            any cost.
        param_bytes: parameters; a parameter that several layers share counts in the first of them
            alone.
        grad_bytes: gradients of the parameters that require one.
        optimizer_bytes: the optimizer's state for them.
        buffer_bytes: buffers.
        saved_bytes: tensors made inside the layer and kept for its backward pass, and results of
            the model that it makes, which wait for the loss; values that cross the layer's border
            are not counted here but on their edge, see ``Edge.saved_by``.
        forward_workspace_bytes: the most that a forward pass holds beyond all of those; in
            inference with inputs of the model that wait for a reader, and its results so far.
        backward_workspace_bytes: the same for a backward pass: gradients of what the layer reads
            and writes, and those of its parameters until they are added to the ones of earlier
            micro-batches.
        pass_workspace_bytes: the same of a recorded pass: nothing of what was kept is freed
            meanwhile, as its memory is its own, and products are added to the gradients of
            parameters as they are made. 0: it was not told apart, or is within 1 MiB of
            ``backward_workspace_bytes``, and is taken to be those.
        deferred_bytes: what the half of a backward pass by input leaves to the half by weight,
            where a schedule lets the two run apart, beside what was kept already: gradients of
            results of linear layers and convolutions. Under ``zero-bubble`` a device has them of
            every micro-batch in flight.
        input_workspace_bytes: the most that the half by input holds beside all that was kept, where
            the two run apart: what it leaves included, gradients of the parameters that wait left
            out. 0: it was not told apart, or is within 1 MiB of ``backward_workspace_bytes``, and
            is taken to be those.
        weights_workspace_bytes: the most that the half by weight holds beside what it waits with,
            of two operations like the largest: two run at a time, and all micro-batches take the
            same memory for it. Left out below 1 MiB. In training on a GPU each of these workspaces
            has 8 MiB more, for pieces of memory that passes take and do not fill.
    """

    name: Name
    module: Annotated[str, StringConstraints(max_length=512)] = ""
    forward_ms: TimesMs
    # Not ``= {}``, which is copied for each layer and doubles the time to read a profile.
    backward_ms: TimesMs = Field(default_factory=dict)
    weights_ms: TimesMs = Field(default_factory=dict)
    optimizer_ms: TimesMs = Field(default_factory=dict)
    spread: Shares = Field(default_factory=dict)
    host_ms: TimesMs = Field(default_factory=dict)
    param_bytes: Bytes = 0
    grad_bytes: Bytes = 0
    optimizer_bytes: Bytes = 0
    buffer_bytes: Bytes = 0
    saved_bytes: Bytes = 0
    forward_workspace_bytes: Bytes = 0
    backward_workspace_bytes: Bytes = 0
    pass_workspace_bytes: Bytes = 0
    deferred_bytes: Bytes = 0
    input_workspace_bytes: Bytes = 0
    weights_workspace_bytes: Bytes = 0

    def both_ms(self, kind: str) -> float:
        """Forward and backward on this type of device, in milliseconds; 0 where it was not measured
        there.
        """
        return self.forward_ms.get(kind, 0.0) + self.backward_ms.get(kind, 0.0)

    def weight_half_ms(self, kind: str) -> float:
        """The part of the backward pass that gradients of parameters take, on this type of device,
        in milliseconds.

        As measured, and no more than the whole; where it was not told apart, half, of a layer that
        has such gradients, else nothing.
        """
        whole = self.backward_ms.get(kind, 0.0)
        return min(whole, self.weights_ms.get(kind, whole / 2 if self.grad_bytes else 0.0))


class Edge(Wire):
    """One value and the layers that read it; it is sent once to each device that reads it.

    Attributes:
        source: the layer that makes the value.
        targets: the layers that read it.
        bytes: its size for one micro-batch.
        gradient_bytes: the size of its gradient, sent back from each reading device in training.
        saved_by: those of the source and the targets that keep the value for their backward pass.
        rest_bytes: the gradient that the last target returns may be a slice of a larger storage, as
            those of what is concatenated are. As long as it waits for the target before the last to
            add its own, all of the storage is held: so much besides, of which no other gradient
            that waits is a part.
        rest_until: the layer that is the last, backwards, to use that rest: it counts from there
            on, no sooner than after the last target, which it is if empty.
        deferred: whether the source's half by weight needs the gradient of the value, which is then
            part of ``Layer.deferred_bytes``: a linear layer's or convolution's result. Where it
            comes from the device of its only target it needs no other place beside. Left out below
            1 MiB, and of values with several targets, of which it is not asked.
    """

    source: Name
    targets: Annotated[tuple[Name, ...], Field(min_length=1), FIRST]
    bytes: Bytes
    gradient_bytes: Bytes = 0
    saved_by: Annotated[tuple[Name, ...], FIRST] = ()
    rest_bytes: Bytes = 0
    rest_until: str = ""
    deferred: bool = False


class TiedParameters(Wire):
    """Parameters that the same layers share, such as tied embeddings.

    Attributes:
        layers: two or more. They share a device unless ``split``.
        gradient_bytes: the gradients of these parameters, in training. In a backward pass each
            layer's gradient is added to the gradient of the layer after it, so that one waits from
            the last layer to the first.
        param_bytes: the parameters themselves. They count in the layer that runs first. If 0, as in
            profiles that do not tell, they take what their gradients take.
        split: whether the layers may be on several devices. Then each device that holds some of
            them and not the first holds a copy of the parameters and, in training, of their
            gradients.
    """

    layers: Annotated[tuple[Name, ...], Field(min_length=2), FIRST]
    gradient_bytes: Bytes = 0
    param_bytes: Bytes = 0
    split: bool = False

    @property
    def copy_bytes(self) -> int:
        """The parameters of one copy, in bytes."""
        return self.param_bytes or self.gradient_bytes


class Profile(Wire):
    """What was measured of one model: its layers in execution order, the values between them, and
    the devices.

    Attributes:
        model: the name of the model's class.
        graph_hash: the same for the same graph, shapes and types.
        training: whether backward times and training memory were measured.
        optimizer: the optimizer whose state was measured, in training.
        optimizer_step_share: what the optimizer's step makes and frees again, in bytes per byte of
            the gradients of a device: on GPUs torch steps all parameters of a device together.
            Where passes keep their memory, under ``zero-bubble``, it is there beside them; else the
            step has the memory that they are done with.
        with_loss: whether the layer that makes the model's result has the loss, too, in its times
            and memory.
        batch_size: samples in the micro-batch that was measured.
        batch_options: where the samples of a batch lie, and how its loss is reduced; taken over by
            ``update_flow``.
        granularity: how the layers were cut: ``auto``, ``blocks``, ``submodule``, ``fine``, a
            depth, or ``custom``.
        captured: whether the graph was captured; if not, execution goes through hooks, and
            ``not_captured_because`` says why.
        layers: in execution order: every edge runs forwards.
        edges: the values that cross layers.
        colocated: groups of layers that share state and so one device.
        tied: the parameters that several layers share. Layers that also share other state, which
            one of them changes, are not among them.
        cluster: the devices and links that were measured; None in a profile that is to be merged
            with a cluster later.
        versions: of python, torch and placer.
    """

    schema_version: Literal["1"] = SCHEMA_VERSION
    model: Annotated[str, StringConstraints(max_length=512)] = ""
    graph_hash: Annotated[str, StringConstraints(max_length=128)] = ""
    training: bool = False
    optimizer: Annotated[str, StringConstraints(max_length=128)] | None = None
    optimizer_step_share: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    with_loss: bool = False
    batch_size: Annotated[int, Field(ge=1, le=2**31)] = 1
    batch_options: BatchOptions = BatchOptions()
    granularity: (
        Annotated[int, Field(ge=1, le=1000)] | Annotated[str, StringConstraints(max_length=64)]
    ) = "auto"
    captured: bool = True
    not_captured_because: Annotated[str, StringConstraints(max_length=4096)] = ""
    layers: Annotated[tuple[Layer, ...], Field(min_length=1, max_length=MAX_LAYERS), FIRST]
    edges: Annotated[tuple[Edge, ...], FIRST] = ()
    colocated: Annotated[tuple[Annotated[tuple[Name, ...], FIRST], ...], FIRST] = ()
    tied: Annotated[tuple[TiedParameters, ...], FIRST] = ()
    cluster: Cluster | None = None
    versions: Annotated[dict[str, str], IN_ORDER] = {}

    def spread(self, kind: str) -> float:
        """How far timings on a type of device were apart: of all layers, each counting by its time."""
        times_ms = [layer.both_ms(kind) for layer in self.layers]
        apart = sum(
            ms * layer.spread.get(kind, 0.0)
            for ms, layer in zip(times_ms, self.layers, strict=True)
        )
        return apart / sum(times_ms) if apart else 0.0

    def unsteady(self, kind: str) -> str:
        """What is wrong with timings that were too far apart, and the way out; empty where nothing
        is.
        """
        apart = self.spread(kind)
        if apart <= UNSTEADY:
            return ""
        return (
            f"timings on {kind} are {apart:.0%} apart: other programs kept it busy, and times may "
            "be several times too long; when it is idle, clear the cache (placer cache clear) and "
            "profile again"
        )

    def untied(self) -> Profile:
        """Return the same profile in which layers that share parameters may be on several devices.

        Each device that holds some of them and not the one that runs first has a copy, as in
        execution. Its memory, and in training its gradient, count on that device. In training, the
        time is not counted in which copies are brought up to date and gradients are added up, once
        a step.

        Returns:
            The profile. Layers stay together that also share other state, or that ``colocated``
            names for another reason.
        """
        groups = [set(tie.layers) for tie in self.tied]
        changed = {
            "colocated": tuple(group for group in self.colocated if set(group) not in groups),
            "tied": tuple(tie.model_copy(update={"split": True}) for tie in self.tied),
        }
        return self.model_copy(update=changed)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [layer.name for layer in self.layers]
        refuse_duplicates("layer", names)
        place = {name: index for index, name in enumerate(names)}
        for edge in self.edges:
            if not _runs_well(edge, place):
                self._refuse_edge(edge, place)
        for group in self.colocated:
            refuse_unknown("colocated", group, place)
        self._refuse_small_originals(place)
        for tie in self.tied:
            refuse_unknown("tied", tie.layers, place)
            if not tie.split and not any(set(tie.layers) <= set(group) for group in self.colocated):
                sharing = ", ".join(map(repr, tie.layers))
                raise ValueError(
                    f"tied: layers {sharing} share parameters; name them together in colocated, "
                    "too, or let them be on several devices with split"
                )
        return self

    def _refuse_small_originals(self, place: dict[str, int]) -> None:
        """Raise a ValueError if a layer holds less than the parameters of which others hold copies."""
        copied: Counter[str] = Counter()
        for tie in self.tied:
            if tie.split and place.keys() >= set(tie.layers):
                copied[min(tie.layers, key=place.__getitem__)] += tie.copy_bytes
        for name, size in copied.items():
            held = self.layers[place[name]].param_bytes
            if held < size:
                raise ValueError(
                    f"tied: layer {name!r} runs first and has {held} bytes of parameters, but "
                    f"{size} of them are copied; count shared parameters in the param_bytes of the "
                    "layer that runs first"
                )

    def _refuse_edge(self, edge: Edge, place: dict[str, int]) -> None:
        """Say what is wrong with an edge."""
        label = f"edge from {edge.source!r}"
        refuse_unknown(label, (edge.source, *edge.targets, *edge.saved_by), place)
        for target in edge.targets:
            if place[target] <= place[edge.source]:
                raise ValueError(f"{label} to {target!r} {self._backwards(edge.source, target)}")
        for keeper in edge.saved_by:
            if keeper != edge.source and keeper not in edge.targets:
                raise ValueError(
                    f"{label}: saved_by names {keeper!r}, which neither makes nor reads the value"
                )
        refuse_unknown(f"{label}: rest_until", [edge.rest_until] if edge.rest_until else [], place)
        if len(set(edge.targets)) < 2:
            raise ValueError(
                f"{label}: rest_bytes is for values that two layers read or more; leave it out"
            )
        raise ValueError(
            f"{label}: rest_until names {edge.rest_until!r}, which is no layer after the target "
            "before the last, and up to the last; name one of these, or leave it out"
        )

    def _backwards(self, source: str, target: str) -> str:
        successors: dict[str, list[str]] = {}
        for edge in self.edges:
            successors.setdefault(edge.source, []).extend(edge.targets)
        path = _path(successors, target, source)
        if path:
            return f"closes a cycle: {' -> '.join([source, *path])}"
        return "runs against the order of the layers; list the layers in execution order"

    def to_json(self) -> str:
        """The profile as JSON with one layer, edge, device or link a line: readable, diffable and
        small.
        """
        return _lines(
            self.model_dump(mode="json", exclude_defaults=True)
            | {"schema_version": self.schema_version}
        )


def _runs_well(edge: Edge, place: dict[str, int]) -> bool:
    """Whether an edge is as it must be: the quick way, as a service checks many profiles of many
    edges.
    """
    source, targets = edge.source, edge.targets
    start = place.get(source, MAX_LAYERS)
    for target in targets:
        if place.get(target, -1) <= start:
            return False
    keepers = edge.saved_by
    if keepers != targets:
        for keeper in keepers:
            if keeper not in targets and keeper != source:
                return False
    return not (edge.rest_bytes or edge.rest_until) or _rest_runs_well(edge, place)


def _rest_runs_well(edge: Edge, place: dict[str, int]) -> bool:
    """Whether what is said of the rest of a storage can be so."""
    *_, before, last = -1, *sorted({place[target] for target in edge.targets})
    return before >= 0 and (not edge.rest_until or before < place.get(edge.rest_until, -1) <= last)


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
    """JSON in which every element of a list, and every scalar of an outer object, is a line of its
    own.
    """
    pad = " " * (depth + 1)
    rows = []
    for key, value in content.items():
        if isinstance(value, dict) and any(isinstance(item, list) for item in value.values()):
            text = _lines(value, depth + 1)
        elif isinstance(value, list) and value:
            text = "[\n" + ",\n".join(f"{pad}{_tight(item)}" for item in value) + f"\n{pad}]"
        else:
            text = _tight(value)
        rows.append(f"{pad}{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(rows) + "\n" + " " * depth + "}"


def _tight(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
