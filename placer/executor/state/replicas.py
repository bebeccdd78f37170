"""The state that recorded segments read: the model's own, or copies of it where that is on another device."""

from __future__ import annotations

from itertools import chain, starmap

import torch
from torch import Tensor

from placer import devices
from placer.executor.segments import StateLookup
from placer.executor.state.written import writes
from placer.graph.layers import LayerGraph


class Replicas:
    """A model's state where layers read it: itself on its own device, a copy on others, kept up to date."""

    def __init__(self, graph: LayerGraph, lookup: StateLookup) -> None:
        self._graph = graph
        self._lookup = lookup
        self._mutated = mutated(graph)
        self._own: dict[tuple[str, torch.device], list[int]] = {}
        self._copies: dict[tuple[str, torch.device], tuple[list[int], Tensor]] = {}

    def lookup(self, name: str, place: torch.device) -> Tensor:
        """What a layer on this device uses; state that layers change is the model's own, wherever it is."""
        tensor = self._lookup(name, place)
        if name in self._graph.constants:
            return tensor
        if name in self._mutated or devices.same(devices.location(tensor), place):
            # Without the flag: autocast would keep casts of parameters beyond the recording that made them.
            own = tensor.detach()
            self._own[name, place] = devices.addresses([own])
            return own
        if (name, place) not in self._copies:
            self._copies[name, place] = (writes([tensor]), devices.copy(tensor, place))
        return self._copies[name, place][1]

    @property
    def are_none(self) -> bool:
        """Whether all state that was looked up is the model's own."""
        return not self._copies

    def refresh(self, lookup: StateLookup) -> bool:
        """Bring copies up to date; False where the model's own state is no longer where it was."""
        self._lookup = lookup
        if devices.addresses(list(starmap(lookup, self._own))) != [*chain.from_iterable(self._own.values())]:
            return False
        for (name, place), (known, replica) in self._copies.items():
            tensor = lookup(name, place)
            written = writes([tensor])
            if written != known:
                devices.fill(replica, tensor)
                self._copies[name, place] = (written, replica)
        return True


def mutated(graph: LayerGraph) -> set[str]:
    """The state that layers change."""
    return {name for layer in graph.layers for name in layer.mutated}
