"""The indexed form of a request: layers and devices by number, matrices instead of dictionaries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from placer.errors import InputError
from placer.schedule import gradient_pieces, least_in_flight
from placer.schema import Device, Layer, Link, PlacementRequest, Recompute
from placer.schema.base import LARGEST_BYTES, LONGEST_MS, Tier
from placer.solver.components import closed_groups, strong_components
from placer.solver.replicas.replication import Replication
from placer.solver.values import SharedState, Value, arcs_of, shared_state_of, values_of
from placer.utils.units import count_text

ROUNDING = 1e-9
"""Relative error of sums in another order: a limit is exceeded only by more than this."""

SAME = 1e-12
"""Relative difference below which two objectives or times are equal."""

FREE_LINK = Link(source="any", target="other", bandwidth_bytes_per_s=1e18)
"""A link of the highest bandwidth: transfers over it take no time."""


@dataclass(frozen=True)
class Problem:
    """A placement request by index: ``[layer]``, ``[layer][device]`` and ``[device][device]``.

    Attributes:
        request: where it came from.
        layers: in execution order.
        devices: in the cluster's order.
        values: one per edge, and per tie.
        forward_ms: by layer and device.
        backward_ms: by layer and device, with one more forward pass on devices that always
            recompute; zeros in inference.
        links: by source and target device; None where no value may pass.
        allowed: by layer, the devices that it may be on.
        groups: layers that must share a device, two or more each; layers pinned to one device are
            such a group, too.
        contiguous: whether the quotient graph over devices must be acyclic.
        loose: layers that this does not bind, see ``but_for_groups``.
        most_devices: how many devices may be used.
        least_devices: how many must be.
        most_layers: how many layers a device may hold; None: all.
        multicast: whether one sending reaches all devices that read a value; over links that are
            all alike.
        untaxed: devices whose transfers cost them nothing; it costs those that they exchange values
            with.
        shared: parameters that devices hold copies of. Bounds may leave them out, as copies only
            add to what is held.
        replication: what replicas of the devices add to the costs; None without replicas.
    """

    request: PlacementRequest
    layers: tuple[Layer, ...]
    devices: tuple[Device, ...]
    values: tuple[Value, ...]
    forward_ms: tuple[tuple[float, ...], ...]
    backward_ms: tuple[tuple[float, ...], ...]
    links: tuple[tuple[Link | None, ...], ...]
    allowed: tuple[frozenset[int], ...]
    groups: tuple[tuple[int, ...], ...]
    contiguous: bool
    most_devices: int
    least_devices: int = 1
    most_layers: int | None = None
    multicast: bool = False
    untaxed: frozenset[int] = frozenset()
    loose: frozenset[int] = frozenset()
    shared: tuple[SharedState, ...] = ()
    replication: Replication | None = None

    @classmethod
    def from_request(cls, request: PlacementRequest) -> Self:
        """Index a request.

        Raises:
            InputError: its sums are larger than any memory figure may be, or a transfer longer than
                any time.
        """
        layers, devices = request.profile.layers, request.devices
        place = {layer.name: index for index, layer in enumerate(layers)}
        values = values_of(request, place)
        colocated = _colocated(request, place)
        _refuse_overflow(request, values)
        _refuse_slow_links(request)
        return cls(
            request=request,
            layers=layers,
            devices=devices,
            values=values,
            forward_ms=tuple(
                tuple(layer.forward_ms[device.type] for device in devices) for layer in layers
            ),
            backward_ms=_backward_ms(request),
            links=_links(request),
            allowed=_allowed(request, place),
            groups=closed_groups([*colocated, *_pinned_together(request, place)]),
            contiguous=_contiguous(request, len(layers), values, colocated),
            most_devices=min(
                request.constraints.max_devices or len(devices), len(devices), len(layers)
            ),
            least_devices=request.constraints.min_devices or 1,
            most_layers=request.constraints.max_layers,
            shared=shared_state_of(request, place),
        )

    @property
    def training(self) -> bool:
        """True for a training step."""
        return self.request.is_training

    @cached_property
    def recompute(self) -> tuple[Recompute, ...]:
        """The recomputation rule of each device: forward passes again instead of saved tensors."""
        if not self.training:
            return tuple("never" for _ in self.devices)
        return tuple(self.request.constraints.recompute_on(device.name) for device in self.devices)

    @property
    def weights_apart(self) -> bool:
        """True if weight-gradient passes run apart, while later micro-batches run backwards."""
        return self.training and self.request.schedule == "zero-bubble"

    @property
    def any_numbers(self) -> bool:
        """True if any number of devices may be used, and each may hold any number of layers."""
        most_devices = min(len(self.devices), len(self.layers))
        return (self.least_devices, self.most_devices, self.most_layers) == (1, most_devices, None)

    @property
    def one_stage_each(self) -> bool:
        """True if each device has one stage, so that the placement is reported as contiguous."""
        return self.contiguous and not self.loose

    @property
    def recorded(self) -> bool:
        """True if memory follows recorded passes: in training, with one stage per device."""
        return self.weights_apart or (self.training and self.one_stage_each)

    def but_for_groups(self) -> Problem | None:
        """Return the problem with contiguity for all but colocated layers; None if useless.

        Tied embeddings run first and last. If they share a device and every device has one stage,
        all layers are on that device. So the placement would be free, and the search would cover
        all maps. Here only the embeddings may return to a device, and the rest is a chain::

            d0  embedding, blocks 0 and 1, head ─▶ d1  blocks 2 to 4 ─▶ d2  blocks 5 to 7 ─▶ d0

        Every placement of this problem is a placement of the free problem, at the same costs.
        """
        chosen = self.request.constraints.contiguous is not None
        if self.contiguous or chosen or self.request.objective != "throughput":
            return None
        place = {layer.name: index for index, layer in enumerate(self.layers)}
        colocated = _colocated(self.request, place)
        grouped = {layer for group in colocated for layer in group}
        components = strong_components(len(self.layers), arcs_of(self.values), colocated)
        pulling = [
            grouped.intersection(component)
            for component in components
            if not grouped.issuperset(component)
        ]
        loose = frozenset[int]().union(*pulling)
        values = tuple(
            replace(
                value,
                ordered=value.ordered and value.source not in loose,
                unbound=loose & value.reader_set,
            )
            for value in self.values
        )
        return replace(self, contiguous=True, loose=loose, values=values)

    def backwards(self, flight: int) -> int:
        """Return the least number of micro-batches in flight with memory of their own backwards."""
        return flight if self.weights_apart and not self.one_stage_each else 1

    def flight(self, stages_left: int) -> int:
        """Return the fewest micro-batches that a stage must be able to hold at once.

        Args:
            stages_left: the number of stages from this one on.
        """
        request = self.request
        if not self.training:
            return 1
        if not self.one_stage_each:
            return request.chunks
        return least_in_flight(request.schedule, stages_left, 0, request.chunks)

    @cached_property
    def touching(self) -> tuple[tuple[int, ...], ...]:
        """The values that a layer makes or reads, by layer, as their places in ``values``."""
        found: list[list[int]] = [[] for _ in self.layers]
        for index, value in enumerate(self.values):
            for layer in {value.source, *value.readers}:
                found[layer].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def deferred_bytes(self) -> tuple[int, ...]:
        """The bytes that each micro-batch in flight leaves to a weight-gradient pass, by layer."""
        return tuple(layer.deferred_bytes if self.weights_apart else 0 for layer in self.layers)

    @cached_property
    def back_workspace_bytes(self) -> tuple[int, ...]:
        """The workspace of a layer's backward pass, or of its separate input-gradient half.

        It is 0 in inference.
        """
        if self.weights_apart:
            return tuple(map(input_grad_workspace_bytes, self.layers))
        if not self.training:
            return (0,) * len(self.layers)
        return tuple(recorded_workspace_bytes(layer) for layer in self.layers)

    @cached_property
    def weight_grad_workspace_bytes(self) -> tuple[int, ...]:
        """The workspace of a layer's separate weight-gradient pass, shared by all micro-batches."""
        return tuple(
            layer.weight_grad_workspace_bytes if self.weights_apart else 0 for layer in self.layers
        )

    @cached_property
    def crossing_bytes(self) -> tuple[int, ...]:
        """The bytes of values that are made before a layer and read from it on, by layer."""
        # not the profile's edges: layers may be merged
        values = (
            (value.bytes, value.source, max(value.readers, default=value.source))
            for value in self.values
        )
        return tuple(gradient_pieces.crossing_bytes(values, len(self.layers)))

    @cached_property
    def step_bytes(self) -> tuple[int, ...]:
        """The temporary bytes of the optimizer's step for a layer, by layer; 0 in inference."""
        share = self.request.profile.optimizer_workspace_ratio if self.training else 0.0
        return tuple(int(share * layer.grad_bytes) for layer in self.layers)

    @property
    def may_recompute(self) -> bool:
        """True if any device may recompute."""
        return any(rule != "never" for rule in self.recompute)

    def again_ms(self, layer: int, device: int) -> float:
        """Return the extra time of a layer where its device recomputes but need not.

        Where it must, ``compute_ms`` includes this time.
        """
        return 0.0 if self.recompute[device] == "always" else self.forward_ms[layer][device]

    def compute_ms(self, layer: int, device: int) -> float:
        """Forward and, in training, backward time of a layer on a device."""
        return self.forward_ms[layer][device] + self.backward_ms[layer][device]

    def work_ms(self, layers: Iterable[int], device: int) -> float:
        """Return the forward and, in training, backward time of some layers on a device."""
        return sum(self.compute_ms(layer, device) for layer in layers)

    def assignment_of(self, where: Mapping[str, str]) -> list[int]:
        """Return, by layer, the index of its device, from their names."""
        index = {device.name: number for number, device in enumerate(self.devices)}
        return [index[where[layer.name]] for layer in self.layers]

    def by_number(self, resting: Mapping[str, Tier]) -> dict[int, Tier]:
        """Return where the parameters of layers rest, by the layers' numbers instead of names."""
        return {
            number: resting[layer.name]
            for number, layer in enumerate(self.layers)
            if layer.name in resting
        }

    @cached_property
    def kinds_of_links(self) -> tuple[Link, ...]:
        """One link of each bandwidth and latency."""
        links = (link for row in self.links for link in row if link is not None)
        return tuple(
            {(link.bandwidth_bytes_per_s, link.latency_s): link for link in links}.values()
        )

    def quickest_ms(self, size_bytes: int, unlinked_ms: float = 0.0) -> float:
        """Return the time over the link that is quickest for so many bytes.

        Args:
            size_bytes: of a value or a gradient.
            unlinked_ms: the time if no devices are linked.
        """
        times = (link.transfer_ms(size_bytes) for link in self.kinds_of_links)
        return min(times, default=unlinked_ms)

    def slowest_ms(self, size_bytes: int) -> float:
        """Return the time over the link that is slowest for so many bytes; 0 without links."""
        return max((link.transfer_ms(size_bytes) for link in self.kinds_of_links), default=0.0)

    def linked(self, value: Value, source: int, target: int) -> bool:
        """Return whether the value may pass from one device to another, and its gradient back."""
        if not value.repeats:
            return True
        there, back = self.links[source][target], self.links[target][source]
        return there is not None and (back is not None or not value.gradient_bytes)

    def send_ms(self, value: Value, source: int, target: int) -> float:
        """Return the time that the value takes from one device to another."""
        if not value.repeats:
            return 0.0
        link = self.links[source][target]
        assert link is not None  # linked() was asked before
        return value.repeats * link.transfer_ms(value.bytes)

    def gradient_ms(self, value: Value, source: int, target: int) -> float:
        """Return the time that the gradient takes back, from ``target`` to ``source``.

        0 without a gradient.
        """
        link = self.links[target][source]
        return (
            link.transfer_ms(value.gradient_bytes)
            if link is not None and value.gradient_bytes
            else 0.0
        )

    @cached_property
    def one_link(self) -> Link | None:
        """A link that all links are like, if all devices are linked and all links are alike."""
        links = [link for a, row in enumerate(self.links) for b, link in enumerate(row) if a != b]
        if not links or not all(_same_way(links[0], link) for link in links):
            return None
        return links[0]

    @cached_property
    def _choices(self) -> frozenset[frozenset[int]]:
        """The sets of devices that layers may be on, each once."""
        return frozenset(self.allowed)

    def alike(self, one: int, other: int) -> bool:
        """Return whether swapping two devices changes nothing.

        Neither times, limits, links, pins, forbidden layers nor what replicas exchange.
        """
        return (
            self.devices[one].usable_bytes == self.devices[other].usable_bytes
            and self.devices[one].type == self.devices[other].type
            and (one in self.untaxed) == (other in self.untaxed)
            and self.recompute[one] == self.recompute[other]
            and (self.replication is None or self.replication.alike(one, other))
            and all((one in devices) == (other in devices) for devices in self._choices)
            and _same_way(self.links[one][other], self.links[other][one])
            and all(
                _same_way(self.links[one][third], self.links[other][third])
                and _same_way(self.links[third][one], self.links[third][other])
                for third in range(len(self.devices))
                if third not in (one, other)
            )
        )

    def alike_devices(self) -> list[list[int]]:
        """Return the classes of devices that may be swapped, each in the cluster's order."""
        classes: list[list[int]] = []
        for device in range(len(self.devices)):
            for members in classes:
                if self.alike(members[0], device):
                    members.append(device)
                    break
            else:
                classes.append([device])
        return classes


def input_grad_workspace_bytes(layer: Layer) -> int:
    """Return the workspace of a layer's input-gradient half, or of all if not measured apart."""
    return layer.input_grad_workspace_bytes or layer.backward_workspace_bytes


def recorded_workspace_bytes(layer: Layer) -> int:
    """Return the workspace of a layer's recorded backward pass, or an eager one if unmeasured."""
    return layer.recorded_workspace_bytes or layer.backward_workspace_bytes


def _backward_ms(request: PlacementRequest) -> tuple[tuple[float, ...], ...]:
    if not request.is_training:
        return ((0.0,) * len(request.devices),) * len(request.profile.layers)
    always = [
        request.constraints.recompute_on(device.name) == "always" for device in request.devices
    ]
    return tuple(
        tuple(
            layer.backward_ms[device.type] + (layer.forward_ms[device.type] if again else 0.0)
            for device, again in zip(request.devices, always, strict=True)
        )
        for layer in request.profile.layers
    )


def _links(request: PlacementRequest) -> tuple[tuple[Link | None, ...], ...]:
    by_ends = {(link.source, link.target): link for link in request.placed_on.links}
    names = [device.name for device in request.devices]
    return tuple(tuple(by_ends.get((source, target)) for target in names) for source in names)


def _allowed(request: PlacementRequest, place: dict[str, int]) -> tuple[frozenset[int], ...]:
    rules = request.constraints
    index = {device.name: number for number, device in enumerate(request.devices)}
    banned: dict[int, set[int]] = defaultdict(set)
    for name, devices in rules.forbidden.items():
        for layer in place.values() if name == "*" else (place[name],):
            banned[layer].update(index[device] for device in devices)
    allowed = []
    for name, layer in place.items():
        devices_left = set(index.values()) - banned[layer]
        if name in rules.pinned:
            devices_left &= {index[rules.pinned[name]]}
        allowed.append(frozenset(devices_left))
    return tuple(allowed)


def _colocated(request: PlacementRequest, place: dict[str, int]) -> tuple[tuple[int, ...], ...]:
    """Return the colocated groups of profile and constraints, joined where they overlap."""
    named = (*request.profile.colocated, *request.constraints.colocated)
    return closed_groups([place[name] for name in group] for group in named)


def _pinned_together(request: PlacementRequest, place: dict[str, int]) -> list[list[int]]:
    """Return the layers that are pinned to each device."""
    pinned: dict[str, list[int]] = defaultdict(list)
    for layer, device in request.constraints.pinned.items():
        pinned[device].append(place[layer])
    return list(pinned.values())


def _contiguous(
    request: PlacementRequest,
    count: int,
    values: Sequence[Value],
    colocated: Sequence[Sequence[int]],
) -> bool:
    """Return the required contiguity; by default true, unless colocation pulls the model together.

    It is also false where layers may be computed on the host that copies parameters to devices:
    there, copies run while the host computes, if its layers are between layers that are copied.

    Contiguity makes one layer of every strongly connected component of the layer graph with its
    groups joined. If such a component pulls in half or more of the layers outside its groups, as
    tied embeddings do, the placement is free. Pins never make it free: a pinned request must not
    get a shorter bottleneck than the same request without pins.
    """
    if request.constraints.contiguous is not None:
        return request.constraints.contiguous
    if request.computes_on_host:
        return False
    grouped = {layer for group in colocated for layer in group}
    if not grouped:
        return True
    for component in strong_components(count, arcs_of(values), colocated):
        members = sum(layer in grouped for layer in component)
        pulled = len(component) - members
        if members and pulled and 2 * pulled >= count - members:
            return False
    return True


def _refuse_overflow(request: PlacementRequest, values: Sequence[Value]) -> None:
    chunks = request.chunks if request.is_training else 1
    total = 3 * sum((value.bytes + value.waiting_bytes) * chunks for value in values) + sum(
        layer.param_bytes
        + layer.grad_bytes
        + layer.optimizer_bytes
        + layer.buffer_bytes
        + (layer.saved_bytes + layer.deferred_bytes) * chunks
        + (layer.forward_workspace_bytes + input_grad_workspace_bytes(layer)) * chunks
        + recorded_workspace_bytes(layer)
        + layer.weight_grad_workspace_bytes
        for layer in request.profile.layers
    )
    total += int(
        request.profile.optimizer_workspace_ratio
        * sum(layer.grad_bytes for layer in request.profile.layers)
    )
    if total > LARGEST_BYTES:
        raise InputError(
            f"the layers need {total} bytes in all with"
            f" {count_text(chunks, 'micro-batch', 'micro-batches')}; no more than 2**60 can be"
            " placed: give fewer or smaller micro-batches, or correct the profile"
        )


def _refuse_slow_links(request: PlacementRequest) -> None:
    """Refuse links over which some value or gradient takes longer than ``LONGEST_MS``."""
    sizes = [
        (max(edge.bytes, edge.gradient_bytes, 1), edge.source) for edge in request.profile.edges
    ]
    if not sizes:
        return
    size_bytes, source = max(sizes, key=lambda one: one[0])
    most = max(1, *(edge.repeats for edge in request.profile.edges))
    for link in request.placed_on.links:
        time_ms = most * link.transfer_ms(size_bytes)
        if time_ms > LONGEST_MS:
            raise InputError(
                f"{size_bytes} bytes of layer {source!r} would take {time_ms:.3g} ms over link "
                f"{link.source!r} -> {link.target!r} (bandwidth_bytes_per_s = "
                f"{link.bandwidth_bytes_per_s:g}, latency_s = {link.latency_s:g}); no more than "
                "1e9 can be placed: leave out a link that no value may pass"
            )


def _same_way(one: Link | None, other: Link | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.bandwidth_bytes_per_s, one.latency_s) == (
        other.bandwidth_bytes_per_s,
        other.latency_s,
    )
