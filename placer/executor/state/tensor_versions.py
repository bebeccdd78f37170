"""Write counts of tensors, so that copies are updated only when necessary.

Torch counts writes to each tensor, except writes of an optimizer with one kernel per step
(``fused=True``). So the steps of all optimizers are recorded here. Writes through ``.data`` are not
counted.
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
# The latest step of each optimizer, numbered over the whole process.
_latest: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def _note(optimizer: Optimizer, *_: Any) -> None:
    _latest[optimizer] = next(_clock)


register_optimizer_step_post_hook(_note)


def writes(tensors: Sequence[Tensor]) -> list[Any]:
    """Return a list that differs after any tensor was written to or got other storage.

    An address changes if a storage is resized, a reference if another storage takes its address.
    """
    own = {id(tensor) for tensor in tensors}
    # the latest step of any optimizer that holds one of the tensors
    step = max((step for optimizer, step in _latest.items() if _holds(optimizer, own)), default=0)
    inside = devices.unwrapped_all(tensors)
    try:
        versions = [*map(_VERSION, inside)]
    except RuntimeError:
        # torch does not count the writes to tensors that were made in inference mode
        versions = [*map(devices.write_count, inside)]
    return [step, *versions, *devices.addresses(inside), *devices.storages(inside)]


def _holds(optimizer: Optimizer, own: set[int]) -> bool:
    return any(not own.isdisjoint(map(id, group["params"])) for group in optimizer.param_groups)
