"""Decoding: calls of a model with a cache, through a recorded pass.

    first token of a kind  traced on a static copy of the cache, and compared with the hooks' result
    second token           traced again; if the traces are equal, recorded, replayed and compared
    later tokens           replayed

Prompts run through hooks, and are recorded in the same way when their shape comes again: see
``prompts.py``.

A kind is everything that the recorded pass depends on: the structure of the call, shapes, the
cache's capacity, and the state of the model. What cannot be recorded runs through hooks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture import autocast
from placer.capture.pytrees import flatten
from placer.executor.engine.compiled_segments import Backend
from placer.executor.generation.cache_view import (
    CacheView,
    UnsupportedCacheError,
    cache_of,
    capacity_for,
    is_empty,
)
from placer.executor.generation.calls import Call, Kind, attention_of, kind_of, modes, new_tokens
from placer.executor.generation.findings import Findings
from placer.executor.generation.model_state import CannotRecordError, ModelState
from placer.executor.generation.recording import Kept, Recording, ReplayedCall
from placer.executor.generation.results import difference
from placer.executor.generation.static_cache import StaticCopy
from placer.executor.generation.text_length import TextLength
from placer.executor.generation.tracing.compiled_pieces import compilation
from placer.executor.generation.tracing.trace_replay import TraceReplay
from placer.executor.hook_path import HookPath
from placer.utils.units import count_text

_KEPT_RECORDINGS = 8
_KEPT_CACHES = 2
"""Static caches that stay in memory; each may be as large as the user's own."""

_ATTEMPTS = 8
"""Maximum number of consecutive traces of which none becomes a recording."""

_LONGEST_WAIT = 1 << 12
"""Most tokens through hooks before another kind of calls is traced."""

_MOST_MISSES = 1
"""Consecutive calls that do something else than a recording before their kind is recorded again."""

_NOISE = "another generation was busy between its passes for as long as a recording may wait"

_COMPILED_DIFFERS = "the compiled pass gives another result than the model"

_UNSTEADY = "attributes of the model change in every pass"


class _WaitingError(Exception):
    """A call that goes through hooks this time; the message says why."""


class Decoding:
    """The recorded passes of one generation at a time.

    Args:
        module: the model.
        hooks: run it where nothing is recorded.
        findings: about the model, which all generations of the flow share.
        is_quiet: waits for other generations' threads, which do nothing then during this pass;
            returns False if they do something else for long.
        streams: where the thread works and records; None for the caller's streams.
        refusal: why nothing is recorded here; empty if something may be.

    Attributes:
        length: the known limits of the text's length.
        has_replayed: whether the latest call of ``run`` replayed a recording.
    """

    def __init__(
        self,
        module: nn.Module,
        hooks: HookPath,
        findings: Findings,
        is_quiet: Callable[[], bool],
        streams: devices.SideStreams | None = None,
        refusal: str = "",
    ) -> None:
        self._module = module
        self._hooks = hooks
        self._findings = findings
        self._is_quiet = is_quiet
        self._streams = streams
        self._refusal = refusal
        self.length = TextLength()
        self.has_replayed = False
        self._caches: OrderedDict[Hashable, StaticCopy] = OrderedDict()
        self._recordings: OrderedDict[Hashable, Recording] = OrderedDict()
        self._version = findings.version
        self._attempts = self._waits = 0
        self._noisy_attempts = self._noisy_waits = 0

    def clear(self) -> None:
        """Drop all recordings and static caches."""
        self.release_caches()
        self.drop()

    def drop(self) -> None:
        """Drop all recordings; users' caches keep the static memory that they view."""
        self._caches.clear()
        self._recordings.clear()

    def release_caches(self) -> None:
        """Give users' caches tensors of their own, before another thread works here."""
        for copy in self._caches.values():
            copy.release()

    def give_up(self, cache: Any) -> None:
        """Give a cache tensors of its own, because another generation goes on with it.

        Args:
            cache: of transformers.
        """
        for copy in self._caches.values():
            if copy.belongs_to(cache):
                copy.release()

    def is_short_of_memory(self) -> bool:
        """Return whether a prompt may need the memory of the static caches and recordings."""
        taken = Counter[torch.device]()
        for copy in self._caches.values():
            taken.update(copy.sizes())
        for recording in self._recordings.values():
            if recording.replay is not None:
                taken.update(recording.replay.reserved_bytes)
        return any(
            devices.counts_bytes(place) and devices.unused_bytes(place) < size
            for place, size in taken.items()
        )

    def drop_outdated(self) -> None:
        """Drop the recordings if another generation found that the model has changed."""
        if self._version != self._findings.version:
            self._version = self._findings.version
            self.clear()

    def _outdate(self) -> None:
        """Drop the recordings of all generations: of the others, when their turn comes."""
        self._findings.outdate()
        self._version = self._findings.version
        self.clear()

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: torch.device,
        through_hooks: Callable[[], Any],
        backend: Backend | None = None,
    ) -> tuple[Any] | None:
        """Run a call of the model inside ``flow.applied()`` that decodes one token per sequence.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            target: the device of the results.
            through_hooks: runs the call without this class.
            backend: of ``torch.compile``, for the recorded pass; None for none.

        Returns:
            The model's result, in a tuple; None if the call does something else, or cannot be
            recorded.
        """
        found = cache_of(kwargs)
        if found is None or new_tokens(args, kwargs) != 1:
            return None
        name, cache = found
        self.has_replayed = False
        self.drop_outdated()
        try:
            self._refuse_modes()
            call = self._read(args, kwargs, name, cache)
            if call is None:
                return None
            call.backend = backend
            result = (self._run(call, target, through_hooks),)
        except (CannotRecordError, UnsupportedCacheError, _WaitingError) as error:
            self._findings.note(hooked=1, why=str(error))
            return None
        return result

    def run_ahead(
        self, kwargs: dict[str, Any], target: torch.device, backend: Backend | None
    ) -> ReplayedCall | None:
        """Replay the recorded pass of a call that is expected to come.

        Whether the model has changed meanwhile is asked by ``accepts``, when the call has come.

        Args:
            kwargs: keyword arguments of the call.
            target: the device of the results.
            backend: as in ``run``.

        Returns:
            The pass; None if the text is finished, or if there is no recording that can be undone.
        """
        found = cache_of(kwargs)
        if found is None or new_tokens((), kwargs) != 1:
            return None
        self.drop_outdated()
        try:
            self._refuse_modes()
            call = self._read((), kwargs, *found)
            # only the device knows whether a static cache of the user has room
            if call is None or call.view.length is None or self.length.is_reached(call.view.length):
                return None
            call.backend = backend
            kind = Kind.of(call, target)
        except (CannotRecordError, UnsupportedCacheError):
            return None
        recording = self._known(kind.key, call)
        if recording is None or recording.replay is None or not recording.can_be_undone:
            return None
        recording.fill(call, kind)
        recording.replay.run()
        result, state = recording.followed(call, kind), self._findings.state
        contents = () if state is None else state.writes()
        return ReplayedCall(result, call, recording, self._version, contents)

    def accepts(self, ahead: ReplayedCall) -> bool:
        """Return whether the model is unchanged since a pass ahead; take the pass back otherwise.

        Args:
            ahead: what ``run_ahead`` returned last.
        """
        state = self._findings.state
        is_same = ahead.version == self._findings.version
        if is_same and state is not None and state.holds() and state.writes() == ahead.contents:
            self._note(ahead.call, ahead.recording, is_replayed=True)
            return True
        self.take_back(ahead)
        self._outdate()
        return False

    def take_back(self, ahead: ReplayedCall) -> None:
        """Undo a pass ahead, which the devices may still compute: its call does not come.

        Args:
            ahead: what ``run_ahead`` returned last.
        """
        ahead.recording.copy.take_back(ahead.call.view)

    def run_prompt(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: torch.device,
        through_hooks: Callable[[], Any],
    ) -> tuple[Any] | None:
        """Run a call of the model inside ``flow.applied()`` that fills an empty cache.

        See ``run``.
        """
        found = cache_of(kwargs)
        if found is None or not is_empty(found[1]):
            return None
        name, cache = found
        self.drop_outdated()
        rest = {key: value for key, value in kwargs.items() if key != name}
        leaves, structure = flatten((args, rest))
        key = structure.key, tuple(map(kind_of, leaves)), *modes()
        prompts, tokens = self._findings.prompts, new_tokens(args, kwargs)
        try:
            self._refuse_modes()
            if prompts.is_new(key):
                with attention_of(args, kwargs):
                    return (prompts.note(key, cache, target, through_hooks),)
            view = prompts.opened(key, cache)
            if view is None:
                return None
            capacity = capacity_for(tokens, self.length.expected(tokens))
            signature = view.signature(capacity)
            call = Call(args, rest, name, cache, view, capacity, signature, tokens=tokens)
            result = (self._run(call, target, through_hooks),)
        except (CannotRecordError, UnsupportedCacheError, _WaitingError) as error:
            self._findings.note_prompt(why=str(error))
            return None
        return result

    def _read(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, cache: Any
    ) -> Call | None:
        """Return the parts of a call; None if its cache holds no prompt yet."""
        rest = {key: value for key, value in kwargs.items() if key != name}
        for copy in self._caches.values():
            view = copy.current_view(cache)
            if view is not None:
                return Call(args, rest, name, cache, view, copy.capacity, copy.signature)
        view = CacheView(cache)
        if not view.is_filled:
            return None
        view.homes = None if view.is_static else self._findings.homes.get(view.kinds())
        capacity = view.capacity(self.length.expected(view.length))
        return Call(args, rest, name, cache, view, capacity, view.signature(capacity))

    def _run(self, call: Call, target: torch.device, through_hooks: Callable[[], Any]) -> Any:
        kind = Kind.of(call, target)
        general, key = kind.general, kind.key
        recording = self._known(key, call)
        if recording is not None and recording.replay is not None:
            return self._replayed(recording, call, kind)
        if self._drop_if_changed():
            recording = None
        if general in self._findings.refused:
            raise CannotRecordError(self._findings.refused[general])
        self._refuse_noise()
        try:
            if recording is not None:
                return self._second(recording, call, kind)
            if call.tokens == 1:
                self._refuse_vain_attempts()
            recording = self._opened(call, kind)
            found = self._first(recording, call, kind)
        except torch.OutOfMemoryError as error:
            if recording is not None:
                recording.copy.undo()
            # the recordings hold memory that the hooks need
            self._outdate()
            self._findings.refused[general] = f"there is no memory to record it: {error}"
            raise CannotRecordError(self._findings.refused[general]) from error
        except CannotRecordError as error:
            if recording is not None:
                recording.copy.undo()
                self._forget(key, call.signature)
            self._findings.refused[general] = str(error)
            raise
        if self._findings.is_unsteady or general in self._findings.verified:
            recording.copy.follow(call.view, call.tokens)
            self._note(call, why=_UNSTEADY if self._findings.is_unsteady else "")
            return found
        recording.copy.undo()  # the user's cache goes on without it
        return self._verify(recording, call, kind, found, through_hooks)

    def _known(self, key: Hashable, call: Call) -> Recording | None:
        """Return the recording of a kind of calls, unless it missed too often; None without one."""
        recording = self._recordings.get(key)
        if recording is None:
            return None
        is_half_made = recording.trace is None and recording.replay is None  # a pass has failed
        if is_half_made or recording.misses > _MOST_MISSES:
            self._forget(key, call.signature)
            return None
        if recording.replay is not None:
            self._recordings.move_to_end(key)
            self._caches.move_to_end(call.signature)
        return recording

    def _drop_if_changed(self) -> bool:
        """Drop all recordings if the model has changed, and return whether it has."""
        findings = self._findings
        with self._hooks.alone():
            has_changed = findings.state is not None and not findings.state.holds()
            if has_changed:
                self._outdate()
            if findings.state is None:
                findings.state = ModelState(self._module)
        return has_changed

    def _verify(
        self,
        recording: Recording,
        call: Call,
        kind: Kind,
        found: Any,
        through_hooks: Callable[[], Any],
    ) -> Any:
        """Compare the first pass of a kind with the model on the user's own cache."""
        expected = through_hooks()
        if not call.view.is_static:
            self._findings.homes[call.view.kinds()] = places = call.view.places()
            if places != recording.copy.places:
                # the prompt's cache came from elsewhere: keep the next one with its layers
                self._forget(kind.key, call.signature)
        why = difference(found, expected, "a static cache gives another result than the model's")
        if why:
            self._findings.refused[kind.general] = why
            self._forget(kind.key, call.signature)
        else:
            self._findings.verified.add(kind.general)
        self._note(call, why=why)
        return expected

    def _refuse_vain_attempts(self) -> None:
        """Raise a _WaitingError after many kinds of calls of which each came only once."""
        if self._waits:
            self._waits -= 1
            raise _WaitingError("its arguments differ from token to token")
        self._attempts += 1
        if self._attempts > _ATTEMPTS:
            self._waits = min(_LONGEST_WAIT, 1 << self._attempts)

    def _refuse_noise(self) -> None:
        """Raise a _WaitingError if other generations do not wait for their turn.

        While GPUs are recorded, no other thread may draw random numbers on them, as sampling does,
        and a trace tells from their states whether the model draws some.
        """
        if self._noisy_waits:
            self._noisy_waits -= 1
            raise _WaitingError(_NOISE)
        if not self._is_quiet():
            self._noisy_attempts += 1
            self._noisy_waits = min(_LONGEST_WAIT, 1 << self._noisy_attempts)
            raise _WaitingError(_NOISE)
        self._noisy_attempts = 0

    def _forget(self, key: Hashable, signature: Hashable) -> None:
        """Drop a recording, and its static cache if no other recording uses it."""
        recording = self._recordings.pop(key, None)
        if recording is None or any(
            other.copy is recording.copy for other in self._recordings.values()
        ):
            return
        recording.copy.release()
        self._caches.pop(signature, None)

    def _refuse_modes(self) -> None:
        if self._refusal:
            raise CannotRecordError(self._refusal)
        if torch.is_grad_enabled():
            raise CannotRecordError("gradients are enabled; call it inside torch.no_grad()")
        if self._module.training:
            raise CannotRecordError("the model is in training mode; call model.eval() first")
        if autocast.current_dtype() is not None and torch.is_autocast_cache_enabled():
            # a recording would keep reading weights that were cast before they changed
            raise CannotRecordError("autocast keeps casts of weights")
        if self._findings.is_unsteady:
            raise CannotRecordError(_UNSTEADY)
        resting = self._hooks.resting
        if resting is not None and resting.on_disk:
            raise CannotRecordError(
                f"{count_text(resting.on_disk, 'parameter')} rest on the disk, and a recording"
                " cannot read files"
            )
        if resting is not None and resting.experts:
            raise CannotRecordError(
                "experts rest on the host, and which of them are copied depends on the tokens"
            )

    def _opened(self, call: Call, kind: Kind) -> Recording:
        """Return a new recording with memory for its inputs and its cache."""
        copy = self._caches.get(call.signature)
        if copy is None:
            while len(self._caches) >= _KEPT_CACHES:
                _, old = self._caches.popitem(last=False)
                old.release()
                for other in [k for k, one in self._recordings.items() if one.copy is old]:
                    del self._recordings[other]
            copy = self._caches[call.signature] = StaticCopy(call.view, call.capacity)
        while len(self._recordings) >= _KEPT_RECORDINGS:
            self._recordings.popitem(last=False)
        with torch.inference_mode(False), torch.no_grad():
            inputs = [
                devices.copy(leaf, devices.location(leaf)) if isinstance(leaf, Tensor) else leaf
                for leaf in kind.leaves
            ]
        recording = self._recordings[kind.key] = Recording(copy, inputs, kind.structure)
        return recording

    def _first(self, recording: Recording, call: Call, kind: Kind) -> Any:
        """Trace the first pass of a kind."""
        recording.fill(call, kind)
        recording.copy.save()
        recording.trace, result = recording.traced(call, self._hooks)
        assert self._findings.state is not None
        # A second run of the same token would change such a model again.
        self._findings.is_unsteady = not self._findings.state.holds()
        # the values are on their devices; the caller's are copies
        return recording.returned(call, kind, result)

    def _second(self, recording: Recording, call: Call, kind: Kind) -> Any:
        """Trace another pass; record it and compare the replay, if it equals the first."""
        assert recording.trace is not None and self._findings.state is not None
        before = recording.trace
        recording.fill(call, kind)
        recording.copy.save()
        # The replay after it writes equal keys and values to the same place; other state, such as
        # the number of tokens, must be what it was.
        contents = {id(tensor) for tensor in recording.copy.tensors}
        kept = Kept(one for one in before.changed() if id(one) not in contents)
        trace, result = recording.traced(call, self._hooks)
        found = recording.returned(call, kind, result)
        if not self._findings.state.holds():
            self._findings.is_unsteady = True
            recording.copy.follow(call.view, call.tokens)
            self._note(call, why=_UNSTEADY)
            return found
        if why := before.difference(trace):
            raise CannotRecordError(why)
        recording.trace = None
        results = [one for one in recording.outcome if one >= 0]
        replay = TraceReplay(trace, results)
        try:
            replay.record(self._streams)
        except devices.NotRecordable as error:
            raise CannotRecordError(str(error)) from error
        kept.restore()
        replay.run()
        again = recording.collected(call, kind, replay)
        if why := difference(again, found, "the recorded pass gives another result than the model"):
            raise CannotRecordError(why)
        recording.replay = replay
        if call.backend is not None:
            made = compilation(trace, results, replay, call.backend, kept.restore)
            recording.exchange(
                made,
                self._streams,
                kept.restore,
                # a compiler keeps intermediate values that the model rounds: both are inexact
                lambda used: difference(
                    recording.collected(call, kind, used), found, _COMPILED_DIFFERS, rounded=2
                ),
            )
            self._findings.note(
                compiled=tuple(made.gains), not_compiled_because=tuple(made.obstacles)
            )
        recording.copy.follow(call.view, call.tokens)
        self._attempts = 0
        self._note(call, recording)
        return found

    def _replayed(self, recording: Recording, call: Call, kind: Kind) -> Any:
        assert recording.replay is not None and self._findings.state is not None
        recording.fill(call, kind)
        if not recording.replay.is_same():
            recording.misses += 1
            raise CannotRecordError("it reads numbers on the host that differ from call to call")
        recording.misses = 0
        recording.replay.run()
        # Meanwhile the devices work.
        if not self._findings.state.holds():
            recording.copy.rewind(call.tokens)
            self._outdate()
            raise CannotRecordError("the model has changed")
        self.has_replayed = call.tokens == 1
        self._note(call, recording, is_replayed=True)
        return recording.followed(call, kind)

    def _note(
        self,
        call: Call,
        recording: Recording | None = None,
        is_replayed: bool = False,
        why: str = "",
    ) -> None:
        """Count a call in the report.

        Args:
            call: the call.
            recording: its recorded pass; None without one.
            is_replayed: whether the pass gave the result; otherwise the hooks did.
            why: it could not be recorded.
        """
        if call.tokens > 1:
            self._findings.note_prompt(int(is_replayed), why)
            return
        latest: dict[str, Any] = {}
        if recording is not None and recording.replay is not None:
            latest["stages"] = tuple(str(piece.device) for piece in recording.replay.pieces)
            latest["capacity"] = recording.copy.capacity
        self._findings.note(int(is_replayed), int(not is_replayed), why, **latest)
