"""When tensors were last written to, so that copies of them are brought up to date then alone.

Torch counts the writes to each tensor, but not those of an optimizer whose step is one kernel
(``fused=True``): here the steps of all optimizers are noted. What is written through ``.data``
nobody counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from placer import devices

_VERSION = attrgetter("_version")

_clock = count(1)
# Of all steps that were taken in this process, the latest of each optimizer.
_latest: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def _note(optimizer: Optimizer, *_: Any) -> None:
    _latest[optimizer] = next(_clock)


register_optimizer_step_post_hook(_note)


def writes(tensors: Sequence[Tensor]) -> list[int]:
    """What is another list once a tensor was written to, in an optimizer's step or otherwise, or
    has other storage.
    """
    own = {id(tensor) for tensor in tensors}
    step = max((step for optimizer, step in _latest.items() if _holds(optimizer, own)), default=0)
    inside = devices.unwrapped_all(tensors)
    try:
        versions = [*map(_VERSION, inside)]
    except RuntimeError:
        # torch does not count the writes to tensors that were made in inference mode
        versions = [0 if tensor.is_inference() else tensor._version for tensor in inside]
    return [step, *versions, *devices.addresses(inside)]


def _holds(optimizer: Optimizer, own: set[int]) -> bool:
    return any(not own.isdisjoint(map(id, group["params"])) for group in optimizer.param_groups)
