"""The generations of one flow, which may run in several threads at once.

    thread 1, slot 0   prompt ─ token ───────── token ─────────       the caller's streams
    thread 2, slot 1            prompt ─ token ───────── token ─      streams of its own
    turn               1        2        1      2        1      2

A slot has the static caches and recordings of one generation at a time. A thread keeps its slot
while it is in ``flow.applied()``; later threads use the slot again. Every pass is issued in a turn,
and the host waits for its result outside of it, so the devices work for all generations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices
from placer.executor.engine.compiled_segments import Backend
from placer.executor.generation.calls import new_tokens
from placer.executor.generation.decoding import Decoding
from placer.executor.generation.findings import Findings, GenerationReport
from placer.executor.generation.static_cache import cache_of, cache_tensors
from placer.executor.hook_path import HookPath
from placer.executor.state.model_lock import ModelLock

_PATIENCE_S = 0.1
"""Maximum time for which a recording waits until other generations wait for their turn."""

_MOST_SLOTS = 16
"""Slots with recordings: the caller's streams, and as many side streams as a device has."""

_TOO_MANY = f"more than {_MOST_SLOTS} generations run at once"

Join = Callable[[], AbstractContextManager[Any]]
"""A context in which a thread that is in no ``flow.applied()`` joins the ones that are."""


class CancelledError(Exception):
    """A generation whose result nobody takes any more."""


@dataclass
class _Slot:
    """What one generation at a time works with.

    Attributes:
        number: from 0, whose streams are the caller's.
        decoding: its recorded passes.
        streams: its own; None for the caller's.
    """

    number: int
    decoding: Decoding
    streams: devices.SideStreams | None = None


class Generations:
    """The slots of one flow.

    Args:
        module: the model.
        hooks: run it where nothing is recorded.
        lock: of the model.
        join: lets a thread generate that did not enter ``flow.applied()``.
    """

    def __init__(self, module: nn.Module, hooks: HookPath, lock: ModelLock, join: Join) -> None:
        self._module = module
        self._hooks = hooks
        self._lock = lock
        self._join = join
        self._findings = Findings()
        self._version = 0
        self._idle: list[_Slot] = []
        self._by_thread: dict[int, _Slot] = {}
        self._choosing = Lock()

    @property
    def report(self) -> GenerationReport:
        """Return how the tokens of all generations were computed."""
        return self._findings.report

    def clear(self) -> None:
        """Drop all recordings and findings: the layers move."""
        self._findings.outdate()
        self._findings.report = GenerationReport()
        self._findings.is_unsteady = False
        self._drop_idle(lambda slot: True)

    def free(self) -> None:
        """Free the memory of idle slots with streams of their own."""
        self._drop_idle(lambda slot: slot.number > 0)

    def _drop_idle(self, condition: Callable[[_Slot], bool]) -> None:
        with self._choosing:
            dropped = [slot for slot in self._idle if condition(slot)]
            self._idle = [slot for slot in self._idle if not condition(slot)]
        for slot in dropped:
            slot.decoding.drop()
            if slot.streams is not None:
                slot.streams.release()

    @contextmanager
    def slot(self, places: Sequence[torch.device], apart: bool = False) -> Iterator[None]:
        """Let this thread generate in a slot inside the block.

        Args:
            places: the devices of the layers and of results.
            apart: whether the slot has streams of its own in any case.
        """
        thread = get_ident()
        if thread in self._by_thread:
            yield
            return
        slot = self._taken(thread, places, apart)
        try:
            if slot.streams is None:
                yield
            else:
                with slot.streams.entered():
                    yield
        finally:
            self._return(thread, slot)

    def _taken(self, thread: int, places: Sequence[torch.device], apart: bool) -> _Slot:
        with self._choosing:
            fitting = (slot for slot in self._idle if slot.number > 0 or not apart)
            slot = min(fitting, key=lambda one: one.number, default=None)
            if slot is not None:
                self._idle.remove(slot)
            else:
                used = {one.number for one in (*self._by_thread.values(), *self._idle)}
                free = (number for number in range(int(apart), _MOST_SLOTS) if number not in used)
                slot = self._made(next(free, _MOST_SLOTS), places)
            self._by_thread[thread] = slot
            return slot

    def _made(self, number: int, places: Sequence[torch.device]) -> _Slot:
        """Return a new slot; one of too many works in the caller's streams and records nothing."""
        streams, refusal = None, _TOO_MANY if number == _MOST_SLOTS else ""
        if 0 < number < _MOST_SLOTS:
            try:
                streams = devices.SideStreams(places)
            except devices.NoStreamsError:
                number, refusal = _MOST_SLOTS, _TOO_MANY
        is_quiet = partial(self._lock.is_alone, _PATIENCE_S)
        decoding = Decoding(self._module, self._hooks, self._findings, is_quiet, streams, refusal)
        return _Slot(number, decoding, streams)

    def _return(self, thread: int, slot: _Slot) -> None:
        if self._lock.has_other_blocks:
            # the next thread may use the slot while this one reads its cache
            with self._lock:
                slot.decoding.release_caches()
        with self._choosing:
            del self._by_thread[thread]
            if slot.number < _MOST_SLOTS:
                self._idle.append(slot)

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: torch.device,
        through_hooks: Callable[[], Any],
        backend: Backend | None = None,
    ) -> tuple[Any] | None:
        """Run a call of the model inside ``flow.applied()``, in this thread's turn.

        See ``Decoding.run``.
        """
        slot, found = self._by_thread.get(get_ident()), cache_of(kwargs)
        if slot is None or found is None:
            return None
        # loops of the user's own draw their tokens between the passes, too
        self._lock.note_busy()
        self._claim(slot, found[1])
        if new_tokens(args, kwargs) == 1:
            result = slot.decoding.run(args, kwargs, target, through_hooks, backend)
        else:
            self._make_room(slot)
            result = slot.decoding.run_prompt(args, kwargs, target, through_hooks)
        if self._version != self._findings.version:
            # recordings of slots that no thread uses would keep their memory
            self._version = self._findings.version
            self._drop_idle(lambda one: True)
        return result

    def _claim(self, slot: _Slot, cache: Any) -> None:
        """Take a cache over from the slot whose static memory it has views of."""
        with self._choosing:
            others = [one for one in (*self._by_thread.values(), *self._idle) if one is not slot]
        for other in others:
            other.decoding.give_up(cache)

    def _make_room(self, slot: _Slot) -> None:
        """Drop recordings if a prompt may need the memory of a static cache."""
        with self._choosing:
            known = [slot, *self._idle]
        if any(one.decoding.is_short_of_memory() for one in known):
            self._drop_idle(lambda one: True)
            if slot.decoding.is_short_of_memory():
                slot.decoding.clear()

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Let the model's ``generate`` run in a slot, inside the block.

        Nothing happens if the model has no such method.
        """
        own, name = vars(self._module), "generate"
        if not callable(getattr(self._module, name, None)):
            yield
            return
        before = {name: own[name]} if name in own else {}
        own[name] = _PlacedGenerate(self._module, self.generate)
        try:
            yield
        finally:
            own.pop(name, None)
            own.update(before)

    def generate(
        self, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Generate in this thread's slot; a thread without one joins for this time.

        Args:
            generate: the model's own method.
            args: positional arguments.
            kwargs: keyword arguments.
        """
        slot = self._by_thread.get(get_ident())
        if slot is None:
            with self._join():
                result = self.generate(generate, args, kwargs)
                self.release_caches()
                return result
        with self._lock.busy():
            slot.decoding.length.announce(self._module, kwargs)
            try:
                result = generate(*args, **kwargs)
            finally:
                slot.decoding.length.forget()
        if slot.streams is not None:
            for tensor in result_tensors(result):
                slot.streams.hand_over(tensor)
        return result

    def release_caches(self) -> None:
        """Give the caches that this thread returned tensors of their own."""
        with self._lock:
            self._by_thread[get_ident()].decoding.release_caches()


def result_tensors(nest: Any) -> Iterator[Tensor]:
    """Yield the tensors in a result of ``generate``, its caches included.

    Args:
        nest: the result.
    """
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, Mapping):
        for item in nest.values():
            yield from result_tensors(item)
    elif isinstance(nest, (tuple, list)):
        for item in nest:
            yield from result_tensors(item)
    else:
        yield from cache_tensors(nest)


class _PlacedGenerate:
    """A model's ``generate`` that runs in a slot.

    A copy of the model gets the method of its class instead.

    Args:
        module: the model.
        run: runs the method with its arguments.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._module, self._run = module, run
        self._generate: Any = module.generate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate texts."""
        return self._run(self._generate, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "generate")
