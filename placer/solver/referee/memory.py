"""The referee's own computation of memory: it plays one micro-batch forwards and backwards.

It shares nothing with the solver, and implements the formulas in the docstring of ``memory.py`` a
second time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from placer.schedule.gradient_pieces import LANDINGS, gradient_pieces
from placer.schema import Edge, Layer, PlacementRequest

Split = tuple[int, int]
"""Bytes that are held, and of workspace."""

Flight = int | Mapping[str, int]
"""Micro-batches in flight on a device; or, by layer, at its segment."""


def stage_pieces(request: PlacementRequest, layers: Sequence[Layer]) -> list[range]:
    """Return the pieces of a stage by the positions of its layers."""
    order = {layer.name: step for step, layer in enumerate(request.profile.layers)}
    spans = [
        (edge.bytes, order[edge.source], max(order[target] for target in edge.targets))
        for edge in request.profile.edges
    ]
    changes = [0] * (len(order) + 1)
    for size, made, read in spans:
        changes[made + 1] += size
        changes[read + 1] -= size
    passing = list(itertools.accumulate(changes))
    crossing = [passing[order[layer.name]] for layer in layers]
    return gradient_pieces([layer.grad_bytes for layer in layers], crossing)


class Memory:
    """What the devices hold under an assignment.

    Args:
        request: the question.
        where: by layer, its device.
        contiguous: whether each device has one stage.
        replicas: of each stage.
    """

    def __init__(
        self,
        request: PlacementRequest,
        where: Mapping[str, str],
        contiguous: bool,
        replicas: int = 1,
    ) -> None:
        self._replicas = replicas
        self._contiguous = contiguous
        self._request, self._training, self._where = request, request.is_training, where
        self._step_share = request.profile.optimizer_workspace_ratio
        self._ties = [tie for tie in request.profile.tied if not tie.split]
        self._shared = [tie for tie in request.profile.tied if tie.split]
        self._apart = request.is_training and request.schedule == "zero-bubble"
        self._recorded = self._apart or (request.is_training and contiguous)
        self._order = {layer.name: step for step, layer in enumerate(request.profile.layers)}
        self._layers: dict[str, list[Layer]] = defaultdict(list)
        self._edges: dict[str, list[Edge]] = defaultdict(list)
        for layer in request.profile.layers:
            self._layers[where[layer.name]].append(layer)
        for edge in request.profile.edges:
            for device in {where[name] for name in (edge.source, *edge.targets)}:
                self._edges[device].append(edge)

    @property
    def request(self) -> PlacementRequest:
        """The question."""
        return self._request

    def layers_of(self, device: str) -> list[Layer]:
        """Return the layers of a device."""
        return self._layers[device]

    def total(
        self, device: str, flight: Flight, again: bool = False, backwards: int | None = None
    ) -> int:
        """Return all bytes on a device at the worst moment.

        Args:
            device: its name.
            flight: the micro-batches in flight.
            again: whether the device recomputes.
            backwards: for how many of them backward passes have memory of their own; the fewest if
                None.
        """
        mine = self._layers[device]
        state = (
            sum(layer.param_bytes + layer.buffer_bytes for layer in mine) + self.copies(device)[0]
        )
        if self._training:
            state += (
                sum(layer.grad_bytes + layer.optimizer_bytes for layer in mine)
                + self.copies(device)[1]
                + self.exchange_bytes(device)
            )
        return state + sum(max(self.splits(device, flight, again, backwards), key=sum))

    def exchange_bytes(self, device: str) -> int:
        """Return the bytes of the buffers of a device for the exchange with its replicas.

        It packs the parameters that it owns, and receives gradients of two pieces from each other.
        """
        count = self._replicas
        if count == 1:
            return 0
        largest = run = 0
        runs: dict[int, list[Layer]] = defaultdict(list)
        before = -1
        for layer in self._layers[device]:
            place = self._order[layer.name]
            run += not self._contiguous and place != before + 1
            before = place
            runs[run].append(layer)
        for layers in runs.values():
            for piece in stage_pieces(self._request, layers):
                largest = max(largest, sum(layers[place].grad_bytes for place in piece))
        owned = sum(layer.grad_bytes for layer in self._layers[device]) + count - 1
        received = LANDINGS * (count - 1) * largest + count - 1
        return owned // count + received // count

    def copies(self, device: str) -> tuple[int, int]:
        """Return the copies of shared parameters on a device, and their gradients.

        The original is with the first layer.
        """
        copied = []
        for tie in self._shared:
            home = self._where[min(tie.layers, key=self._order.__getitem__)]
            if home != device and device in {self._where[layer] for layer in tie.layers}:
                copied.append(tie)
        return sum(tie.param_bytes or tie.gradient_bytes for tie in copied), sum(
            tie.gradient_bytes for tie in copied
        )

    def splits(
        self, device: str, flight: Flight, again: bool = False, backwards: int | None = None
    ) -> set[Split]:
        """Return the activations and the workspace at each of the worst moments.

        It takes the arguments of ``total``.
        """
        if not self._training:
            return _largest(self._inference(device))
        if self._recorded and not again and isinstance(flight, int):
            fewest = flight if self._apart and not self._contiguous else 1
            return {self._of_passes(device, flight, fewest if backwards is None else backwards)}
        further = self._further(device, flight, again)
        moments = [*self._forwards(device), *self._backwards(device), (0, self._step(device))]
        found = {(held + further, workspace) for held, workspace in _largest(moments)}
        return (
            found
            if isinstance(flight, int)
            else _largest([*found, self._of_segments(device, flight)])
        )

    def _further(self, device: str, flight: Flight, again: bool) -> int:
        """Return what each micro-batch but the first keeps.

        With recomputation, that is what comes from other devices.
        """
        if again and isinstance(flight, int):
            foreign = [edge for edge in self._edges[device] if self._where[edge.source] != device]
            return (flight - 1) * sum(edge.bytes for edge in foreign)
        if isinstance(flight, int):
            return (flight - 1) * sum(self._kept_at(device).values())
        kept = sum((flight[layer.name] - 1) * layer.saved_bytes for layer in self._layers[device])
        for edge in self._edges[device]:
            keepers = [flight[name] for name in edge.saved_by if self._where[name] == device]
            kept += (max(keepers) - 1) * edge.bytes if keepers else 0
        return kept

    def _here(self, names: Iterable[str], device: str) -> list[int]:
        return sorted(self._order[name] for name in names if self._where[name] == device)

    def _edges_at(self, device: str, own: bool) -> list[Edge]:
        """Return all edges of a device, or those that it makes itself."""
        return [
            edge for edge in self._edges[device] if not own or self._where[edge.source] == device
        ]

    def _kept_at(self, device: str, own: bool = False) -> dict[int, int]:
        """Return, by step, what is kept from then on.

        Of values, perhaps those alone that the device makes itself.
        """
        kept: dict[int, int] = defaultdict(int)
        for layer in self._layers[device]:
            kept[self._order[layer.name]] += layer.saved_bytes
        for edge in self._edges_at(device, own):
            for first in self._here(edge.saved_by, device)[:1]:
                kept[first] += edge.bytes
        return kept

    def _forwards(self, device: str, own: bool = False) -> Iterator[Split]:
        """Play the forward pass.

        A value arrives when it is made, and goes when it is kept or no longer read. In recorded
        passes, which hold only their own values, a value that other devices read never goes.
        """
        arriving: dict[int, int] = defaultdict(int)
        leaving: dict[int, int] = defaultdict(int)
        for edge in self._edges_at(device, own):
            readers, keepers = self._here(edge.targets, device), self._here(edge.saved_by, device)
            made, stays = self._order[edge.source], own and len(readers) < len(set(edge.targets))
            if (readers or stays) and made not in keepers:
                arriving[made] += edge.bytes
                if keepers or not stays:
                    leaving[keepers[0] if keepers else readers[-1]] += edge.bytes
        kept_at, layer_at = self._kept_at(device, own), self._layer_at(device)
        kept = waiting = 0
        for step in sorted({*arriving, *layer_at}):
            if step in layer_at:
                kept += kept_at[step]
                waiting -= leaving[step]
                yield kept + waiting, layer_at[step].forward_workspace_bytes
            waiting += arriving[step]
        # A moment without a running layer: the recorded pass is over, and what is sent still stays.
        if own:
            yield kept + waiting, 0

    def _backwards(self, device: str) -> Iterator[Split]:
        """Play the backward pass.

        A gradient arrives after its first reader, and goes with its source or is sent. The last
        reader's gradient may be a slice. The rest of its storage then waits with it for the reader
        before. A gradient of tied parameters waits from the last layer that has them to the first.
        """
        arriving: dict[int, int] = defaultdict(int)
        used: dict[int, int] = defaultdict(int)
        sent: dict[int, int] = defaultdict(int)
        for edge in self._edges[device]:
            readers = self._here(edge.targets, device)
            if self._where[edge.source] == device:
                arriving[max(self._order[name] for name in edge.targets)] += edge.gradient_bytes
                used[self._order[edge.source]] += edge.gradient_bytes
            elif len(readers) > 1:
                arriving[readers[-1]] += edge.gradient_bytes
                sent[readers[0]] += edge.gradient_bytes
            before, last = sorted({-1, *(self._order[name] for name in edge.targets)})[-2:]
            if (
                edge.retained_bytes
                and last in readers
                and (len(readers) > 1 or self._where[edge.source] == device)
            ):
                arriving[self._order[edge.retained_until] if edge.retained_until else last] += (
                    edge.retained_bytes
                )
                sent[before] += edge.retained_bytes
        for tie in self._ties:
            sharing = self._here(tie.layers, device)
            if len(sharing) > 1:
                arriving[sharing[-1]] += tie.gradient_bytes
                sent[sharing[0]] += tie.gradient_bytes
        kept_at, layer_at = self._kept_at(device), self._layer_at(device)
        kept, waiting = sum(kept_at.values()), 0
        # A layer's saved tensors are there during its own backward pass, and go after it.
        for step in sorted({*arriving, *sent, *layer_at}, reverse=True):
            if step in layer_at:
                waiting -= used[step]
                yield kept + waiting, layer_at[step].backward_workspace_bytes
                kept -= kept_at[step]
            waiting += arriving[step] - sent[step]

    def _of_passes(self, device: str, flight: int, backwards: int) -> Split:
        """Return what passes keep for each micro-batch, and what the last pass of all works in."""
        mine = self._layers[device]
        each = max(
            (held + workspace for held, workspace in self._forwards(device, own=True)), default=0
        )
        each += self._places(device) + (self._landing(device) if flight > backwards else 0)
        if not self._apart:
            return flight * each, self._backward_pass(device) + self._step(device)
        weights = max((layer.weight_grad_workspace_bytes for layer in mine), default=0)
        return flight * each + backwards * self._backward_pass(device), weights + self._step(device)

    def _landing(self, device: str) -> int:
        """Return one micro-batch's gradients that need memory outside shared backward passes."""
        sent = [edge for edge in self._edges[device] if self._where[edge.source] != device]
        waiting = [
            edge
            for edge in self._edges[device]
            if edge not in sent and self._waits_where_it_comes(edge)
        ]
        return sum(edge.gradient_bytes for edge in (*sent, *waiting))

    def _waits_where_it_comes(self, edge: Edge) -> bool:
        """Return whether a sent value's gradient waits for a weight-gradient pass."""
        sent = any(self._where[name] != self._where[edge.source] for name in edge.targets)
        return sent and self._apart and edge.deferred and len(set(edge.targets)) == 1

    def _of_segments(self, device: str, flight: Mapping[str, int]) -> Split:
        """Return the memory of segments with passes of their own, as if on devices of their own."""
        held = workspace = 0
        for name, layers in self._segments._layers.items():
            if self._where[layers[0].name] == device:
                passing, shared = self._segments._of_passes(name, flight[layers[0].name], 1)
                held, workspace = held + passing, workspace + shared
        return held, workspace

    @cached_property
    def _segments(self) -> Memory:
        """The same layers, each run of them on a device of its own."""
        runs = itertools.groupby(self._where, key=self._where.__getitem__)
        apart = {
            layer: f"{device} {number}"
            for number, (device, layers) in enumerate(runs)
            for layer in layers
        }
        return Memory(self._request, apart, contiguous=True)

    def _places(self, device: str) -> int:
        """Return the bytes that arrive from other devices, values and gradients."""
        places = 0
        for edge in self._edges[device]:
            if self._where[edge.source] != device:
                places += edge.bytes
            elif any(self._where[name] != device for name in edge.targets):
                places += 0 if self._waits_where_it_comes(edge) else edge.gradient_bytes
        return places

    def _step(self, device: str) -> int:
        """Return the temporary bytes of the optimizer's step."""
        return sum(int(self._step_share * layer.grad_bytes) for layer in self._layers[device])

    def _backward_pass(self, device: str) -> int:
        """Play a backward pass, or its input half.

        What that leaves stays, and so do gradients that are to be sent.
        """
        arriving: dict[int, int] = defaultdict(int)
        used: dict[int, int] = defaultdict(int)
        for edge in self._edges[device]:
            for last in self._here(edge.targets, device)[-1:]:
                arriving[last] += edge.gradient_bytes
                used[self._order[edge.source]] += edge.gradient_bytes
        layer_at = self._layer_at(device)
        left = waiting = most = 0
        for step in sorted({*arriving, *used, *layer_at}, reverse=True):
            waiting -= used[step]
            if step in layer_at:
                layer = layer_at[step]
                own = (
                    layer.input_grad_workspace_bytes
                    if self._apart
                    else layer.recorded_workspace_bytes
                )
                most = max(most, left + waiting + (own or layer.backward_workspace_bytes))
                left += layer.deferred_bytes if self._apart else 0
            waiting += arriving[step]
        return max(most, left)

    def _inference(self, device: str) -> Iterator[Split]:
        """Play a forward pass alone: values are there from when they are made to their last reader.

        Where one was made it stays until it was read for good, wherever that is.
        """
        arriving: dict[int, int] = defaultdict(int)
        leaving: dict[int, int] = defaultdict(int)
        for edge in self._edges[device]:
            arriving[self._order[edge.source]] += edge.bytes
            made_here = self._where[edge.source] == device
            leaving[
                max(
                    self._order[name]
                    for name in edge.targets
                    if made_here or self._where[name] == device
                )
            ] += edge.bytes
        layer_at = self._layer_at(device)
        held = 0
        for step in sorted({*arriving, *leaving, *layer_at}):
            held += arriving[step]
            yield held, layer_at[step].forward_workspace_bytes if step in layer_at else 0
            held -= leaving[step]

    def _layer_at(self, device: str) -> dict[int, Layer]:
        return {self._order[layer.name]: layer for layer in self._layers[device]}


def _largest(moments: Iterable[Split]) -> set[Split]:
    """Return the moment with the largest sum, or zeros without moments."""
    moments = list(moments)
    most = max(map(sum, moments), default=0)
    return {moment for moment in moments if sum(moment) == most} or {(0, 0)}
