"""State for recorded segments: the model's own, or copies for other devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, starmap

import torch
from torch import Tensor

from placer import devices
from placer.capture.layers import LayerGraph
from placer.executor.segments import StateLookup
from placer.executor.state.state_copies import Copies, Copy, are_current


class Replicas:
    """A model's state as layers read it: the original on its own device, copies on others.

    Args:
        graph: the layers.
        lookup: returns a layer's state, wherever it is.
        copies: of the model's state.
    """

    def __init__(self, graph: LayerGraph, lookup: StateLookup, copies: Copies) -> None:
        self._lookup = lookup
        self._copies = copies
        self._mutated = mutated(graph)
        self._own: dict[tuple[str, torch.device], list[devices.Address]] = {}
        self._read: dict[tuple[str, torch.device], Copy] = {}

    def lookup(self, name: str, place: torch.device) -> Tensor:
        """Return the tensor for a layer on this device; changed state is always the original."""
        tensor = self._lookup(name, place)
        if name in self._mutated or devices.same(devices.location(tensor), place):
            # detached: autocast would cache casts of parameters beyond the recording that made them
            own = tensor.detach()
            self._own[name, place] = devices.addresses([own])
            return own
        self._read[name, place] = self._copies.get(tensor, place)
        return self._read[name, place].tensor

    def is_current(self, lookup: StateLookup) -> bool:
        """Return whether ``refresh`` would change nothing."""
        return self._is_in_place(lookup) and are_current(self._read.values())

    def refresh(self, lookup: StateLookup) -> bool:
        """Update copies; return False if the model's own state has moved."""
        self._lookup = lookup
        if not self._is_in_place(lookup):
            return False
        for copy in self._read.values():
            copy.refresh()
        return True

    def _is_in_place(self, lookup: StateLookup) -> bool:
        # recorded passes contain addresses, so a moved tensor invalidates them
        return devices.addresses(list(starmap(lookup, self._own))) == [
            *chain.from_iterable(self._own.values())
        ]


def mutated(graph: LayerGraph) -> set[str]:
    """Return the state that layers change."""
    return {name for layer in graph.layers for name in layer.mutated}


@contextmanager
def restored(graph: LayerGraph, places: Iterable[torch.device]) -> Iterator[None]:
    """Restore the state that layers change, and random numbers, after passes run for a look.

    Args:
        graph: the layers.
        places: the devices whose random numbers are restored.
    """
    kept = {name: graph.state[name].clone() for name in mutated(graph)}
    try:
        with devices.keep_random_state(list(places)):
            yield
    finally:
        with torch.no_grad():
            for name, value in kept.items():
                graph.state[name].copy_(value)
