"""The state of a model that a recorded pass relies on."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from placer import devices
from placer.executor.state.model_fingerprint import Attributes, Census

_version = attrgetter("_version")

_PLAIN = (bool, int, float, str, list, tuple, dict, set, type(None))


class CannotRecordError(Exception):
    """A call that must run through hooks; the message says why."""


class ModelState:
    """What a recorded pass relies on: the model's modules, tensors, modes and plain attributes.

    Args:
        module: the model.

    Raises:
        CannotRecordError: if a part of it is in training mode or has hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._census = Census(module)
        *modes, everywhere = self._census.modes
        if any(trains for trains, _ in modes):
            raise CannotRecordError("a part of the model is in training mode")
        if any(hooked for _, hooked in (*modes, everywhere)):
            raise CannotRecordError("modules have hooks, which a recording would not run")
        self._addresses = self._now_addresses()
        self._attributes = Attributes()
        self._attributes.add(_plain_attributes(module))

    def _now_addresses(self) -> list[int]:
        return [*map(Tensor.data_ptr, self._census.state)]

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        before = self._census
        if not before.holds():
            # The hooks of a flow are new objects in each ``flow.applied()``.
            self._census = Census(self._module)
            if before.modes != self._census.modes or not before.describes(self._census):
                return False
        return self._attributes.hold() and self._now_addresses() == self._addresses

    def writes(self) -> list[int]:
        """Return how often each tensor was written to in place, as far as torch counts it.

        It counts no writes through ``.data``, and none to tensors of the inference mode.
        """
        try:
            return [*map(_version, devices.unwrapped_all(self._census.state))]
        except RuntimeError:
            return []


def _plain_attributes(module: nn.Module) -> list[tuple[Any, str]]:
    """Return the attributes with numbers, strings and containers of modules and their configs."""
    own = vars(nn.Module()).keys() | {"hf_device_map", "_hf_hook", "_previous_max_cache_length"}
    holders: dict[int, Any] = {}
    for child in module.modules():
        holders[id(child)] = child
        config = getattr(child, "config", None)
        if hasattr(config, "__dict__"):
            holders[id(config)] = config
    return [
        (holder, name)
        for holder in holders.values()
        for name, value in vars(holder).items()
        if name not in own and isinstance(value, _PLAIN) and hasattr(holder, name)
    ]
