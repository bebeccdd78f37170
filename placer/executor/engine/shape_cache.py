"""A cache of static tensors and recordings by input shape.

It keeps the shapes that were used last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import torch

from placer import devices

KEPT_SHAPES = 8
"""How many shapes are kept; each takes memory for its activations."""

Made = TypeVar("Made")


class LatestShapes(OrderedDict[Hashable, Made]):
    """What was made for the shapes that were used last, in the order of their use.

    Args:
        places: returns, for something that was made, the devices that may still be at work with it.
            They are waited for before it is released. The function should not hold the owner of
            this cache, which would then live until Python collects cycles.
    """

    def __init__(self, places: Callable[[Made], Iterable[torch.device]]) -> None:
        super().__init__()
        self._places = places

    def used(self, key: Hashable) -> Made | None:
        """Return what there is for a shape, which is now the latest used; None if nothing."""
        if key in self:
            self.move_to_end(key)
        return self.get(key)

    def make_room(self, pipelines: int = 1) -> None:
        """Release what was not used for longest, so that there is room for one more.

        Args:
            pipelines: that have each shape, each with devices of its own, whose memory counts.
        """
        while len(self) >= KEPT_SHAPES * pipelines:
            self.let_go(next(iter(self)))

    def keep_only(self, is_of_use: Callable[[Any], bool]) -> None:
        """Release what can no longer be used.

        Args:
            is_of_use: whether a key may still be used.
        """
        for key in [key for key in self if not is_of_use(key)]:
            self.let_go(key)

    def let_go(self, key: Hashable) -> None:
        """Release a shape, once the devices are done with it."""
        # Memory of a recording goes back to the allocator, which does not know that lanes still use
        # it.
        for place in self._places(self[key]):
            devices.synchronise(place)
        del self[key]
