"""The state that recorded segments read: the model's own, or copies of it where it is on another
device.
"""

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
    """A model's state where layers read it: itself on its own device, a copy on others, kept up to
    date.

    Args:
        graph: the layers.
        lookup: what they use for their state, wherever it is.
        copies: of the model's state.
    """

    def __init__(self, graph: LayerGraph, lookup: StateLookup, copies: Copies) -> None:
        self._lookup = lookup
        self._copies = copies
        self._mutated = mutated(graph)
        self._own: dict[tuple[str, torch.device], list[int]] = {}
        self._read: dict[tuple[str, torch.device], Copy] = {}

    def lookup(self, name: str, place: torch.device) -> Tensor:
        """Return what a layer on this device uses; state that layers change is the model's own,
        wherever it is.
        """
        tensor = self._lookup(name, place)
        if name in self._mutated or devices.same(devices.location(tensor), place):
            # Without the flag: autocast would keep casts of parameters beyond the recording that
            # made them.
            own = tensor.detach()
            self._own[name, place] = devices.addresses([own])
            return own
        self._read[name, place] = self._copies.get(tensor, place)
        return self._read[name, place].tensor

    def is_current(self, lookup: StateLookup) -> bool:
        """Whether ``refresh`` would change nothing."""
        return self._is_in_place(lookup) and are_current(self._read.values())

    def refresh(self, lookup: StateLookup) -> bool:
        """Bring copies up to date; return False if the model's own state is no longer where it was."""
        self._lookup = lookup
        if not self._is_in_place(lookup):
            return False
        for copy in self._read.values():
            copy.refresh()
        return True

    def _is_in_place(self, lookup: StateLookup) -> bool:
        return devices.addresses(list(starmap(lookup, self._own))) == [
            *chain.from_iterable(self._own.values())
        ]


def mutated(graph: LayerGraph) -> set[str]:
    """The state that layers change."""
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
