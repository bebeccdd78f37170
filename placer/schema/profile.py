"""The measurements of a model."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from placer.schema.base import (
    FIRST,
    IN_ORDER,
    LONGEST_MS,
    MAX_LAYERS,
    SCHEMA_VERSION,
    Bytes,
    Name,
    TimesMs,
    Wire,
    refuse_duplicates,
    refuse_unknown,
)
from placer.schema.cluster import Cluster
from placer.schema.options import BatchOptions

Shares = Annotated[
    dict[Name, Annotated[float, Field(ge=0, le=LONGEST_MS)]], Field(max_length=64), IN_ORDER
]

MOST_REPEATS = 1_000_000
"""Limit of the runs of a model in one request; a generation of images takes fewer than 1,000."""

UNSTEADY = 0.25
"""Largest spread of timings on an idle device. A few hundredths are usual; half or more means that
other programs run on all cores."""


class Layer(Wire):
    """One layer, measured separately on one micro-batch.

    Attributes:
        name: unique in its profile: a module path, with ``@1``, ``@2`` for later calls.
        module: the class of the module, for display.
        forward_ms: device time of the forward pass, by device type.
        backward_ms: device time of the backward pass, by device type; empty in an inference
            profile.
        weight_grad_ms: by device type, the part of ``backward_ms`` for deferrable weight gradients,
            which zero-bubble schedules run later; see ``weight_half_ms``.
        optimizer_ms: time of the optimizer's step on the layer's parameters, once per batch, by
            device type; zeros are omitted.
        spread: by device type, half the interquartile range of the timings of both passes, over
            their median; omitted below 0.01.
        host_ms: time of the host to launch one forward and backward pass, by device type; not part
            of any cost.
        param_bytes: parameters; shared parameters count in the first of their layers.
        expert_bytes: the part of ``param_bytes`` in stacked experts of a mixture. If they rest off
            their device, a pass of a generation copies only the experts that its tokens choose.
            Only profiles of the passes of a generation have it.
        expert_share: the expected part of ``expert_bytes`` that the tokens of this profile's pass
            choose: 1 - (1 - k / n) ** t, where each of t tokens chooses k of n experts, all of them
            equally likely.
        grad_bytes: gradients of the parameters that require one.
        optimizer_bytes: the optimizer's state for them.
        buffer_bytes: buffers.
        saved_bytes: tensors created inside the layer and saved for its backward pass, and results
            of the model that it makes, which wait for the loss. Values that cross layers count on
            their edge, see ``Edge.saved_by``.
        forward_workspace_bytes: the peak of a forward pass beyond all of these; in inference, it
            includes model inputs that wait for a reader, and results so far.
        backward_workspace_bytes: the peak of a backward pass likewise: gradients of the layer's
            reads and writes, and new gradients of parameters until they are accumulated.
        recorded_workspace_bytes: the peak of a recorded backward pass, in which no saved memory is
            freed and products accumulate into gradients directly. 0: not measured separately, or
            within 1 MiB of ``backward_workspace_bytes``, whose value then applies.
        deferred_bytes: memory that the input-gradient pass leaves for the weight-gradient pass,
            beyond saved tensors: gradients of results of linear layers and convolutions. Under
            ``zero-bubble`` a device holds it for every micro-batch in flight.
        input_grad_workspace_bytes: the peak of the input-gradient pass beyond saved tensors,
            including ``deferred_bytes`` but not deferred gradients of parameters. 0: not measured
            separately, or within 1 MiB of ``backward_workspace_bytes``, whose value then applies.
        weight_grad_workspace_bytes: the peak of the weight-gradient pass beyond its deferred
            memory: two operations of the largest kind, because two run concurrently; all
            micro-batches share it. Omitted below 1 MiB. In training on a GPU, each workspace
            includes 8 MiB for partly filled allocator segments.
    """

    name: Name
    module: Annotated[str, StringConstraints(max_length=512)] = ""
    # times by device type
    forward_ms: TimesMs
    # A default of ``{}`` would be copied for each layer, which doubles the time to read a profile.
    backward_ms: TimesMs = Field(default_factory=dict)
    weight_grad_ms: TimesMs = Field(default_factory=dict)
    optimizer_ms: TimesMs = Field(default_factory=dict)
    spread: Shares = Field(default_factory=dict)
    host_ms: TimesMs = Field(default_factory=dict)
    # permanent state
    param_bytes: Bytes = 0
    expert_bytes: Bytes = 0
    expert_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    grad_bytes: Bytes = 0
    optimizer_bytes: Bytes = 0
    buffer_bytes: Bytes = 0
    # per micro-batch in flight, and peaks of single passes
    saved_bytes: Bytes = 0
    forward_workspace_bytes: Bytes = 0
    backward_workspace_bytes: Bytes = 0
    recorded_workspace_bytes: Bytes = 0
    deferred_bytes: Bytes = 0
    input_grad_workspace_bytes: Bytes = 0
    weight_grad_workspace_bytes: Bytes = 0

    def both_ms(self, kind: str) -> float:
        """Return forward plus backward time on a device type, in ms; 0 if not measured there."""
        return self.forward_ms.get(kind, 0.0) + self.backward_ms.get(kind, 0.0)

    def weight_half_ms(self, kind: str) -> float:
        """Return the time of the weight-gradient pass on a device type, in ms.

        It is at most the backward time. If it was not measured, it is half of the backward time for
        a layer with gradients of parameters, and 0 otherwise.
        """
        whole = self.backward_ms.get(kind, 0.0)
        return min(whole, self.weight_grad_ms.get(kind, whole / 2 if self.grad_bytes else 0.0))


class Edge(Wire):
    """A value and its readers; it is sent once to each device that reads it.

    Attributes:
        source: the layer that makes the value.
        targets: the layers that read it.
        bytes: its size for one micro-batch.
        gradient_bytes: the size of its gradient, sent back from each reading device in training.
        saved_by: the layers, among source and targets, that save the value for their backward pass.
        retained_bytes: the gradient from the last target may be a slice of a larger storage, as
            after a concatenation. While it waits for the gradient of the second-to-last target, the
            whole storage stays alive. These are the additional bytes, without parts that are other
            waiting gradients.
        retained_until: the layer whose backward pass is the last to use that rest; the rest counts
            from there on, but not before the last target has run backward. Empty for the last
            target.
        deferred: whether the source's weight-gradient pass needs this gradient, which is then part
            of ``Layer.deferred_bytes`` (a result of a linear layer or convolution). If it arrives
            from the device of its only target, it needs no further buffer. Omitted below 1 MiB and
            for values with several targets.
        repeats: how often the value is sent in one pass of the profile: in a joint profile of
            several models, how often its model runs. 0: nothing is sent, the targets only wait for
            the source, and devices need no link. Only requests for the latency of inference, with
            ``contiguous`` False, accept other numbers than 1.
    """

    source: Name
    targets: Annotated[tuple[Name, ...], Field(min_length=1), FIRST]
    bytes: Bytes
    gradient_bytes: Bytes = 0
    saved_by: Annotated[tuple[Name, ...], FIRST] = ()
    retained_bytes: Bytes = 0
    retained_until: str = ""
    deferred: bool = False
    repeats: Annotated[int, Field(ge=0, le=MOST_REPEATS)] = 1


class TiedParameters(Wire):
    """Parameters that several layers share, such as tied embeddings.

    Attributes:
        layers: two or more. They share a device unless ``split``.
        gradient_bytes: the gradients of these parameters, in training. In a backward pass, each
            layer adds its gradient to the gradient of the later layers, so one gradient waits from
            the last layer to the first.
        param_bytes: the parameters, which count in the first layer. 0, as in older profiles: equal
            to ``gradient_bytes``.
        split: whether the layers may be on several devices. Then each such device without the first
            layer holds a copy of the parameters and, in training, of their gradients.
    """

    layers: Annotated[tuple[Name, ...], Field(min_length=2), FIRST]
    gradient_bytes: Bytes = 0
    param_bytes: Bytes = 0
    split: bool = False

    @property
    def copy_bytes(self) -> int:
        """Return the bytes of the parameters of one copy."""
        return self.param_bytes or self.gradient_bytes


class Profile(Wire):
    """The measurements of one model: layers in execution order, edges and devices.

    Attributes:
        model: the name of the model's class.
        graph_hash: equal for equal graphs, shapes and types.
        training: whether backward times and training memory were measured.
        optimizer: the optimizer whose state was measured, in training.
        optimizer_workspace_ratio: temporaries of the optimizer's step, in bytes per byte of a
            device's gradients: on GPUs, torch steps all parameters of a device together. Under
            ``zero-bubble``, passes keep their memory, so this adds to it; otherwise the step reuses
            the passes' memory.
        with_loss: whether the loss is included in the times and memory of the layer that makes the
            model's result.
        batch_size: samples in the measured micro-batch.
        batch_options: batch dimensions and loss reduction; ``update_flow`` uses them.
        granularity: how the layers were formed: ``auto``, ``blocks``, ``submodule``, ``fine``, a
            depth, or ``custom``.
        captured: whether the graph was captured; if not, execution uses hooks, and
            ``not_captured_because`` gives the reason.
        not_captured_because: why the graph was not captured; empty if it was.
        layers: in execution order: every edge points forward.
        edges: the values that cross layers.
        colocated: groups of layers that share state and therefore a device.
        tied: the parameters that several layers share, without layers that also share buffers.
        cluster: the measured devices and links; None in a profile to be combined with a cluster
            later.
        versions: of python, torch and placer.
    """

    schema_version: Literal["3"] = SCHEMA_VERSION
    model: Annotated[str, StringConstraints(max_length=512)] = ""
    graph_hash: Annotated[str, StringConstraints(max_length=128)] = ""
    training: bool = False
    optimizer: Annotated[str, StringConstraints(max_length=128)] | None = None
    optimizer_workspace_ratio: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    with_loss: bool = False
    batch_size: Annotated[int, Field(ge=1, le=2**31)] = 1
    batch_options: BatchOptions = BatchOptions()
    granularity: (
        Annotated[int, Field(ge=1, le=1000)] | Annotated[str, StringConstraints(max_length=64)]
    ) = "auto"
    captured: bool = True
    not_captured_because: Annotated[str, StringConstraints(max_length=4096)] = ""
    # the graph
    layers: Annotated[tuple[Layer, ...], Field(min_length=1, max_length=MAX_LAYERS), FIRST]
    edges: Annotated[tuple[Edge, ...], FIRST] = ()
    colocated: Annotated[tuple[Annotated[tuple[Name, ...], FIRST], ...], FIRST] = ()
    tied: Annotated[tuple[TiedParameters, ...], FIRST] = ()
    cluster: Cluster | None = None
    versions: Annotated[dict[str, str], IN_ORDER] = {}

    def spread(self, kind: str) -> float:
        """Return the spread of timings on a device type: the mean over layers, weighted by time."""
        times_ms = [layer.both_ms(kind) for layer in self.layers]
        apart = sum(
            ms * layer.spread.get(kind, 0.0)
            for ms, layer in zip(times_ms, self.layers, strict=True)
        )
        return apart / sum(times_ms) if apart else 0.0

    def unsteady(self, kind: str) -> str:
        """Return a warning about unsteady timings and its remedy; empty if they are steady."""
        apart = self.spread(kind)
        if apart <= UNSTEADY:
            return ""
        return (
            f"timings on {kind} are {apart:.0%} apart: other programs kept it busy, and times may "
            "be several times too long; when it is idle, clear the cache (placer cache clear) and "
            "profile again"
        )

    def untied(self) -> Profile:
        """Return the profile such that layers with shared parameters may be on several devices.

        Each of these devices without the first layer has a copy, as in execution. The copy's
        memory, and in training its gradient, count on that device. Not counted is the time to
        update copies and to sum gradients, once per step.

        Returns:
            The profile. Layers that also share buffers stay together, as do groups that
            ``colocated`` names for other reasons.
        """
        # only the groups that exist because of shared parameters are dissolved
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
            # the fast check first; the slow one finds the reason for the message
            if not _runs_well(edge, place):
                self._refuse_edge(edge, place)
        for group in self.colocated:
            refuse_unknown("colocated", group, place)
        self._refuse_small_originals(place)
        for layer in self.layers:
            if layer.expert_bytes > layer.param_bytes:
                raise ValueError(
                    f"layers: {layer.name!r} has {layer.expert_bytes} bytes of experts and "
                    f"{layer.param_bytes} bytes of parameters, which include the experts; give at "
                    "least as many param_bytes"
                )
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
        """Raise a ValueError if a layer holds less than the parameters that others copy."""
        # copies are charged to the layer that runs first, so its param_bytes must include them
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
        refuse_unknown(
            f"{label}: retained_until", [edge.retained_until] if edge.retained_until else [], place
        )
        if len(set(edge.targets)) < 2:
            raise ValueError(
                f"{label}: retained_bytes is for values that two layers read or more; leave it out"
            )
        raise ValueError(
            f"{label}: retained_until names {edge.retained_until!r}, which does not run after "
            "the last "
            "target but one and no later than the last target; name a layer that does, or leave it "
            "out"
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
        """Return the profile as compact JSON with one layer, edge, device or link per line."""
        # the version comes first, so that readers and people see it without the rest
        return _lines(
            {"schema_version": self.schema_version}
            | self.model_dump(mode="json", exclude_defaults=True)
        )


def _runs_well(edge: Edge, place: dict[str, int]) -> bool:
    """Return whether an edge is valid.

    A fast check, since a service validates many profiles with many edges.
    """
    source, targets = edge.source, edge.targets
    start = place.get(source, MAX_LAYERS)
    for target in targets:
        if place.get(target, -1) <= start:
            return False
    # usually all targets save the value, so compare the tuples first
    keepers = edge.saved_by
    if keepers != targets:
        for keeper in keepers:
            if keeper not in targets and keeper != source:
                return False
    return not (edge.retained_bytes or edge.retained_until) or _rest_runs_well(edge, place)


def _rest_runs_well(edge: Edge, place: dict[str, int]) -> bool:
    """Return whether ``retained_until`` is consistent with the targets."""
    *_, before, last = -1, *sorted({place[target] for target in edge.targets})
    return before >= 0 and (
        not edge.retained_until or before < place.get(edge.retained_until, -1) <= last
    )


def _path(successors: dict[str, list[str]], start: str, goal: str) -> list[str]:
    """Return a path from ``start`` to ``goal``, both included; empty without one."""
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
    """Return JSON with one line for every list element and every scalar of an outer object."""
    pad = " " * (depth + 1)
    rows = []
    for key, value in content.items():
        if isinstance(value, dict) and any(isinstance(item, list) for item in value.values()):
            text = _lines(value, depth + 1)
        elif isinstance(value, list) and value:
            # no deeper than the list: a profile has many hundred rows
            text = "[\n" + ",\n".join(f"{pad[1:]}{_tight(item)}" for item in value) + f"\n{pad}]"
        else:
            text = _tight(value)
        rows.append(f"{pad}{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(rows) + "\n" + " " * depth + "}"


def _tight(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
