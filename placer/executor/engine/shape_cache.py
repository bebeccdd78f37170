"""What is made for each shape that comes, static tensors and recordings, kept for those that came
last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import torch

from placer import devices

KEPT_SHAPES = 8
"""How many are kept; each takes memory for its activations."""

Made = TypeVar("Made")


class LatestShapes(OrderedDict[Hashable, Made]):
    """What was made for the shapes that were used last, the latest last.

    Args:
        places: of something that was made, the devices that may still be at work with it; what is
            let go of is waited for. It should not hold the owner of these: they would live until
            Python looks for cycles.
    """

    def __init__(self, places: Callable[[Made], Iterable[torch.device]]) -> None:
        super().__init__()
        self._places = places

    def used(self, key: Hashable) -> Made | None:
        """What there is for a shape that is now the latest used; None where there is nothing."""
        if key in self:
            self.move_to_end(key)
        return self.get(key)

    def make_room(self) -> None:
        """Let go of what was not used for longest, so that there is room for one more."""
        while len(self) >= KEPT_SHAPES:
            self.let_go(next(iter(self)))

    def keep_only(self, is_of_use: Callable[[Any], bool]) -> None:
        """Let go of what can no longer be used.

        Args:
            is_of_use: of a key.
        """
        for key in [key for key in self if not is_of_use(key)]:
            self.let_go(key)

    def let_go(self, key: Hashable) -> None:
        """Let go of a shape, once the devices are done with it."""
        for place in self._places(self[key]):
            devices.synchronise(place)
        del self[key]
