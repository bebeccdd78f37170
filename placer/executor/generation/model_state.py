"""The state of a model that a recorded pass relies on, and the state that belongs to a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from threading import RLock, get_ident
from typing import Any

from torch import Tensor, nn

from placer import devices
from placer.capture.pytrees import flatten
from placer.executor.state.model_fingerprint import Attributes, Census
from placer.utils.user_warnings import warn

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


class TextState:
    """The first text of a model runs alone until its first pass shows where its state is.

        prompt ─ ...     the modules have the same tensors as before: other texts may begin
        prompt ─ ...     a module keeps a tensor of the text: one text after another

    A cache that ``generate`` passes around belongs to a text. A recurrent state, a position or a
    cache in an attribute of a module would be overwritten by other texts.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._gate = RLock()
        self._owner: int | None = None
        self._before: dict[tuple[str, str], list[tuple[Tensor, int | None]]] = {}
        self._is_known = self._is_kept = False

    def forget(self) -> None:
        """Look again at the next text."""
        self._is_known = self._is_kept = False

    @contextmanager
    def text(self) -> Iterator[None]:
        """Generate a text inside; wait before it if the state of another one may be in modules."""
        me = get_ident()
        if self._owner == me or self._may_begin:
            yield
            return
        self._gate.acquire()
        self._owner = me
        try:
            if self._may_begin:
                self._release()
            elif not self._is_known:
                self._before = _kept_tensors(self._module)
            yield
        finally:
            if self._owner == me:
                self._release()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Run a call of the model inside, and look afterwards what the first one has left."""
        yield
        if self._owner != get_ident() or self._is_known:
            return
        found = _kept_tensors(self._module).items()
        kept = [place for place, now in found if not _are_same(now, self._before.get(place, []))]
        self._is_known, self._is_kept = True, bool(kept)
        if not kept:
            self._release()
            return
        path, name = kept[0]
        warn(
            f"the model keeps a tensor of a text in {name!r} of {path or 'the model'!r}, so one "
            "text is generated after another"
        )

    @property
    def _may_begin(self) -> bool:
        return self._is_known and not self._is_kept

    def _release(self) -> None:
        self._owner, self._before = None, {}
        self._gate.release()


def _kept_tensors(module: nn.Module) -> dict[tuple[str, str], list[tuple[Tensor, int | None]]]:
    """Return the tensors in the attributes of modules, and how often each was written to."""
    return {
        (path, name): [(leaf, _writes(leaf)) for leaf in flatten(value)[0] if _is_tensor(leaf)]
        for path, child in module.named_modules()
        for name, value in (*vars(child).items(), *child._buffers.items())
        if name not in _FIELDS and not callable(value)
    }


# Attributes of nn.Module itself.
_FIELDS = frozenset(vars(nn.Module()))


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _writes(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else int(tensor._version)


def _are_same(
    some: list[tuple[Tensor, int | None]], others: list[tuple[Tensor, int | None]]
) -> bool:
    return len(some) == len(others) and all(
        one is other and count == before
        for (one, count), (other, before) in zip(some, others, strict=True)
    )


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
