"""The generations of one flow, which may run in several threads at once.

    thread 1, slot 0   prompt ─ token ───────── token ─────────       the caller's streams
    thread 2, slot 1            prompt ─ token ───────── token ─      streams of its own
    turn               1        2        1      2        1      2

A slot has the static caches and recordings of one generation at a time. A thread keeps its slot
while it is in ``flow.applied()``; later threads use the slot again. Every pass is issued in a turn,
and the host waits for its result outside of it, so the devices work for all generations. A thread
in the caller's streams also issues passes ahead, see ``pass_ahead.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices
from placer.executor.engine.compiled_segments import Backend
from placer.executor.generation import pass_ahead
from placer.executor.generation.cache_view import cache_of, cache_tensors
from placer.executor.generation.calls import new_tokens
from placer.executor.generation.decoding import Decoding
from placer.executor.generation.findings import Findings, GenerationReport
from placer.executor.generation.model_state import TextState
from placer.executor.generation.pass_ahead import PassAhead
from placer.executor.generation.recording import ReplayedCall
from placer.executor.generation.results import tensors_without_caches
from placer.executor.hook_path import HookPath
from placer.executor.stage_errors import nothing_held
from placer.executor.state.model_lock import ModelLock
from placer.utils.python_objects import attribute_set

_PATIENCE_S = 0.1
"""Maximum time for which a recording waits until other generations wait for their turn."""

_MOST_SLOTS = 16
"""Slots with recordings: the caller's streams, and as many side streams as a device has. On GPUs
one slot fewer has them, since the passes ahead of each flow take a stream of each device."""

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
        streams_ahead: for passes ahead; None without them.
        ahead: the passes ahead of the present call of ``generate``; None without them.
        latest: the device of results and the backend of the latest call.
    """

    number: int
    decoding: Decoding
    streams: devices.SideStreams | None = None
    streams_ahead: devices.SideStreams | None = None
    ahead: PassAhead | None = None
    latest: tuple[torch.device, Backend | None] | None = None


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
        self._text_state = TextState(module)

    @property
    def report(self) -> GenerationReport:
        """Return how the tokens of all generations were computed."""
        return self._findings.report

    def clear(self) -> None:
        """Drop all recordings and findings: the layers move."""
        self._findings.outdate()
        self._text_state.forget()
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
            for streams in (slot.streams, slot.streams_ahead):
                if streams is not None:
                    streams.release()

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
        if number < _MOST_SLOTS and (number > 0 or devices.are_asynchronous(places)):
            try:
                streams = devices.SideStreams(places)
            except devices.NoStreamsError:
                if number > 0:
                    number, refusal = _MOST_SLOTS, _TOO_MANY
        is_quiet = partial(self._lock.is_alone, _PATIENCE_S)
        decoding = Decoding(self._module, self._hooks, self._findings, is_quiet, streams, refusal)
        return _Slot(number, decoding, *((None, streams) if number == 0 else (streams, None)))

    def _return(self, thread: int, slot: _Slot) -> None:
        if self._lock.has_other_blocks:
            # the next thread may use the slot while this one reads its cache
            with self._lock:
                slot.decoding.release_caches()
        with self._choosing:
            del self._by_thread[thread]
            if slot.number < _MOST_SLOTS:
                self._idle.append(slot)

    def call(self) -> AbstractContextManager[None]:
        """Return a context for a call of the model inside ``flow.applied()``."""
        return self._text_state.call()

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
        result = self._came_ahead(slot, args, kwargs)
        if result is not None:
            return result
        self._claim(slot, found[1])
        if new_tokens(args, kwargs) == 1:
            result = slot.decoding.run(args, kwargs, target, through_hooks, backend)
            self._note_call(slot, kwargs, target, backend)
        else:
            self._make_room(slot)
            result = slot.decoding.run_prompt(args, kwargs, target, through_hooks)
        if self._version != self._findings.version:
            # recordings of slots that no thread uses would keep their memory
            self._version = self._findings.version
            self._drop_idle(lambda one: True)
        return result

    def _came_ahead(
        self, slot: _Slot, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any] | None:
        """Return the result of a call that was issued ahead, in a tuple; None if it was not."""
        found = None if slot.ahead is None else slot.ahead.taken(args, kwargs)
        if found is None:
            return None
        assert slot.ahead is not None and slot.streams_ahead is not None
        slot.streams_ahead.catch_up()
        if not slot.decoding.accepts(found):
            return None
        for tensor in tensors_without_caches(found.result):
            devices.keep_for_caller(tensor)
        slot.ahead.note_call(kwargs)
        return (found.result,)

    def _note_call(
        self, slot: _Slot, kwargs: dict[str, Any], target: torch.device, backend: Backend | None
    ) -> None:
        """Note a call for the pass after it."""
        slot.latest = target, backend
        if slot.ahead is not None and slot.decoding.has_replayed:
            slot.ahead.note_call(kwargs)
        elif slot.ahead is not None:
            slot.ahead.forget()

    def _issued_ahead(self, slot: _Slot, kwargs: dict[str, Any]) -> ReplayedCall | None:
        """Issue a pass ahead; see ``PassAhead``."""
        if slot.latest is None or self._hooks.runs or not devices.observed():
            return None
        assert slot.streams_ahead is not None
        with nothing_held(), self._lock, self._hooks.paused(), slot.streams_ahead.ahead():
            return slot.decoding.run_ahead(kwargs, *slot.latest)

    def _taken_back(self, slot: _Slot, call: ReplayedCall) -> None:
        """Undo a pass ahead."""
        assert slot.streams_ahead is not None
        with self._lock, self._hooks.paused():
            slot.streams_ahead.catch_up()
            slot.decoding.take_back(call)

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
        methods: dict[str, Callable[..., Any]] = {
            "generate": self.generate,
            pass_ahead.PREPARE: self._prepared,
            pass_ahead.UPDATE: self._updated,
        }
        with ExitStack() as stack:
            for name, run in methods.items():
                if callable(getattr(self._module, name, None)):
                    method = _PlacedMethod(self._module, name, run)
                    stack.enter_context(attribute_set(self._module, name, method))
            yield

    def _prepared(
        self, prepare: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the arguments of the next pass of this thread's text."""
        ahead = self._ahead()
        return prepare(*args, **kwargs) if ahead is None else ahead.prepared(prepare, args, kwargs)

    def _updated(
        self, update: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what the arguments of the next pass of this thread's text are made from."""
        ahead, updated = self._ahead(), update(*args, **kwargs)
        if ahead is not None:
            ahead.note_update(updated)
        return updated

    def _ahead(self) -> PassAhead | None:
        """Return the passes ahead of this thread's call of ``generate``; None without any."""
        slot = self._by_thread.get(get_ident())
        return None if slot is None else slot.ahead

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
        with self._text_state.text(), self._lock.busy():
            slot.decoding.length.announce(self._module, kwargs)
            try:
                with self._going_ahead(slot, args, kwargs) as given:
                    result = generate(*args, **given)
            finally:
                slot.decoding.length.forget()
        if slot.streams is not None:
            for tensor in result_tensors(result):
                slot.streams.hand_over(tensor)
        return result

    @contextmanager
    def _going_ahead(
        self, slot: _Slot, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Yield the keyword arguments with which a call of ``generate`` issues passes ahead."""
        outer = slot.ahead
        if outer is not None:
            outer.discard()
        slot.ahead = None
        if slot.streams_ahead is not None and pass_ahead.fits(self._module, args, kwargs):
            slot.ahead = PassAhead(
                partial(self._issued_ahead, slot), partial(self._taken_back, slot)
            )
            criteria = [*(kwargs.get("stopping_criteria") or ()), slot.ahead]
            kwargs = {**kwargs, "stopping_criteria": criteria}
        try:
            yield kwargs
        finally:
            if slot.ahead is not None:
                slot.ahead.discard()
            slot.ahead = outer

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


class _PlacedMethod:
    """A method of a model that runs in a slot.

    A copy of the model gets the method of its class instead.

    Args:
        module: the model.
        name: of the method.
        run: takes the method, and its positional and keyword arguments.
    """

    def __init__(self, module: nn.Module, name: str, run: Callable[..., Any]) -> None:
        self._module, self._name, self._run = module, name, run
        self._method: Any = getattr(module, name)
        # the signature, which transformers reads
        update_wrapper(self, self._method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method."""
        return self._run(self._method, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, self._name)
