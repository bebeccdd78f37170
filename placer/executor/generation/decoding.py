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
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture import autocast
from placer.capture.pytrees import Structure, flatten
from placer.executor.engine.compiled_segments import Backend, error_line
from placer.executor.generation.calls import Call, attention_of, kind_of, modes, new_tokens, padded
from placer.executor.generation.compiled_pieces import Compilation, compilation
from placer.executor.generation.findings import Findings
from placer.executor.generation.model_state import CannotRecordError, ModelState
from placer.executor.generation.operation_trace import OperationTrace, Trace
from placer.executor.generation.results import UsersCache, copied, difference, exchanged
from placer.executor.generation.static_cache import (
    CacheView,
    StaticCopy,
    UnsupportedCacheError,
    cache_of,
    capacity_for,
    is_empty,
)
from placer.executor.generation.text_length import TextLength
from placer.executor.generation.trace_replay import TraceReplay
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


@dataclass
class _Recording:
    """A kind of calls, traced or recorded.

    Attributes:
        copy: the static cache.
        inputs: static tensors for the tensors among the arguments.
        structure: of the arguments.
        trace: of the first pass; None before it.
        replay: the recorded pass; None before it was recorded.
        result: structure of the result.
        outcome: for each tensor of the result the number of a value, or -1 - the index of an input.
        misses: consecutive calls for which the replay does something else than the model.
    """

    copy: StaticCopy
    inputs: list[Any]
    structure: Structure
    trace: Trace | None = None
    replay: TraceReplay | None = None
    result: Structure | None = None
    outcome: list[int] = field(default_factory=list)
    misses: int = 0


class _Kept:
    """The contents of tensors before a pass that changes them.

    Args:
        tensors: on any devices.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._kept = [(one, one.clone(), devices.location(one)) for one in tensors]

    def restore(self, place: torch.device | None = None) -> None:
        """Give the tensors their contents again.

        Args:
            place: the device whose tensors are meant; None for all.
        """
        for tensor, was, where in self._kept:
            if place is None or devices.same(where, place):
                tensor.copy_(was)


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
        self._caches: OrderedDict[Hashable, StaticCopy] = OrderedDict()
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
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
        args, kwargs = padded(call)
        leaves, structure = flatten((args, kwargs))
        general = structure.key, call.view.kinds(), *modes(), call.tokens
        key = general, call.signature, tuple(map(kind_of, leaves)), target, call.backend
        recording = self._known(key, call)
        if recording is not None and recording.replay is not None:
            return self._replayed(recording, call, leaves, target)
        if self._drop_if_changed():
            recording = None
        if general in self._findings.refused:
            raise CannotRecordError(self._findings.refused[general])
        self._refuse_noise()
        try:
            if recording is not None:
                return self._second(recording, call, leaves, target)
            if call.tokens == 1:
                self._refuse_vain_attempts()
            recording = self._opened(key, call, leaves, structure)
            found = self._first(recording, call, leaves, target)
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
        return self._verify(recording, general, key, call, found, through_hooks)

    def _known(self, key: Hashable, call: Call) -> _Recording | None:
        """Return the recording of a kind of calls, unless it missed too often; None without one."""
        recording = self._recordings.get(key)
        if recording is None:
            return None
        if recording.misses > _MOST_MISSES:
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
        recording: _Recording,
        general: Hashable,
        key: Hashable,
        call: Call,
        found: Any,
        through_hooks: Callable[[], Any],
    ) -> Any:
        """Compare the first pass of a kind with the model on the user's own cache."""
        expected = through_hooks()
        if not call.view.is_static:
            self._findings.homes[call.view.kinds()] = places = call.view.places()
            if places != recording.copy.places:
                # the prompt's cache came from elsewhere: keep the next one with its layers
                self._forget(key, call.signature)
        why = difference(found, expected, "a static cache gives another result than the model's")
        if why:
            self._findings.refused[general] = why
            self._forget(key, call.signature)
        else:
            self._findings.verified.add(general)
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

    def _opened(
        self,
        key: Hashable,
        call: Call,
        leaves: Sequence[Any],
        structure: Structure,
    ) -> _Recording:
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
                for leaf in leaves
            ]
        recording = self._recordings[key] = _Recording(copy, inputs, structure)
        return recording

    def _first(
        self, recording: _Recording, call: Call, leaves: Sequence[Any], target: torch.device
    ) -> Any:
        """Trace the first pass of a kind."""
        self._prepare(recording, call, leaves)
        recording.trace, result = self._traced(recording, call)
        assert self._findings.state is not None
        # A second run of the same token would change such a model again.
        self._findings.is_unsteady = not self._findings.state.holds()
        # the values are on their devices; the caller's are copies
        return self._returned(recording, call, leaves, target, result)

    def _second(
        self, recording: _Recording, call: Call, leaves: Sequence[Any], target: torch.device
    ) -> Any:
        """Trace another pass; record it and compare the replay, if it equals the first."""
        assert recording.trace is not None and self._findings.state is not None
        before = recording.trace
        self._prepare(recording, call, leaves)
        # The replay after it writes equal keys and values to the same place; other state, such as
        # the number of tokens, must be what it was.
        contents = {id(tensor) for tensor in recording.copy.tensors}
        kept = _Kept(one for one in before.changed() if id(one) not in contents)
        trace, result = self._traced(recording, call)
        found = self._returned(recording, call, leaves, target, result)
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
        again = self._collected(recording, replay, call, leaves, target)
        if why := difference(again, found, "the recorded pass gives another result than the model"):
            raise CannotRecordError(why)
        recording.replay = replay
        if call.backend is not None:
            made = compilation(trace, results, replay, call.backend, kept.restore)
            self._exchange(
                recording,
                made,
                kept.restore,
                lambda used: difference(
                    self._collected(recording, used, call, leaves, target), found, _COMPILED_DIFFERS
                ),
            )
        recording.copy.follow(call.view, call.tokens)
        self._attempts = 0
        self._note(call, recording)
        return found

    def _exchange(
        self,
        recording: _Recording,
        made: Compilation,
        restore: Callable[[], None],
        differs: Callable[[TraceReplay], str],
    ) -> None:
        """Let a recording run its compiled pass, if that gives the model's result.

        Args:
            recording: with a replay that is not compiled.
            made: the compiled pass.
            restore: see ``compilation``.
            differs: says how the result of a pass that has run differs from the model's.
        """
        assert recording.replay is not None
        if made.replay is not None:
            try:
                made.replay.record(self._streams)
                restore()
                made.replay.run()
                why = differs(made.replay)
            except Exception as error:  # such as a lack of memory: it runs without a compiler
                why = error_line(error)
            if why:
                made.gains.clear()
                made.obstacles.append(why)
            else:
                recording.replay = made.replay
        if not made.gains:
            # trials have changed the cache
            restore()
            recording.replay.run()
        self._findings.note(compiled=tuple(made.gains), not_compiled_because=tuple(made.obstacles))

    def _replayed(
        self, recording: _Recording, call: Call, leaves: Sequence[Any], target: torch.device
    ) -> Any:
        assert recording.replay is not None and self._findings.state is not None
        recording.copy.adopt(call.cache, call.view)
        _fill(recording.inputs, leaves)
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
        recording.copy.follow(call.view, call.tokens)
        self._note(call, recording, is_replayed=True)
        return self._collected(recording, recording.replay, call, leaves, target)

    def _prepare(self, recording: _Recording, call: Call, leaves: Sequence[Any]) -> None:
        """Bring the cache and the inputs of a call into static memory."""
        recording.copy.adopt(call.cache, call.view)
        recording.copy.save()
        _fill(recording.inputs, leaves)

    def _traced(self, recording: _Recording, call: Call) -> tuple[Trace, Any]:
        """Run a pass through hooks on static memory, and trace it.

        Returns:
            The trace, and the model's result, whose cache is the static one.
        """
        args, kwargs = recording.structure.unflatten(recording.inputs)
        kwargs[call.name] = recording.copy.cache
        before = _random_states()
        tracer = OperationTrace()
        try:
            with tracer, self._hooks.noted(tracer.note_action):
                result = self._hooks.run_model(args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise CannotRecordError(f"it fails with a static cache: {error}") from error
        trace = tracer.trace
        if not trace.obstacle and _random_states() != before:
            trace.obstacle = "it draws random numbers"
        if trace.obstacle:
            raise CannotRecordError(trace.obstacle)
        self._note_result(recording, result, tracer)
        return trace, result

    def _note_result(self, recording: _Recording, result: Any, tracer: OperationTrace) -> None:
        """Note which values a result consists of."""
        tensors, recording.result = flatten(exchanged(result, recording.copy.cache, UsersCache))
        inputs = {id(one): place for place, one in enumerate(recording.inputs)}
        recording.outcome = []
        for tensor in tensors:
            number = inputs.get(id(tensor))
            if number is not None:
                recording.outcome.append(-1 - number)
                continue
            made = tracer.number(tensor)
            if made is None:
                raise CannotRecordError("it returns a tensor that torch did not make")
            recording.outcome.append(made)

    def _returned(
        self,
        recording: _Recording,
        call: Call,
        leaves: Sequence[Any],
        target: torch.device,
        result: Any,
    ) -> Any:
        """Return the result of a traced pass to the caller."""
        tensors, structure = flatten(exchanged(result, recording.copy.cache, UsersCache))
        own = {id(one): given for one, given in zip(recording.inputs, leaves, strict=True)}
        moved = [own[id(one)] if id(one) in own else copied(one, target) for one in tensors]
        return exchanged(structure.unflatten(moved), UsersCache, call.cache)

    def _collected(
        self,
        recording: _Recording,
        replay: TraceReplay,
        call: Call,
        leaves: Sequence[Any],
        target: torch.device,
    ) -> Any:
        """Return the result of a replayed pass to the caller."""
        assert recording.result is not None
        tensors = [
            leaves[-1 - number] if number < 0 else copied(replay.value(number), target)
            for number in recording.outcome
        ]
        return exchanged(recording.result.unflatten(tensors), UsersCache, call.cache)

    def _note(
        self,
        call: Call,
        recording: _Recording | None = None,
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


def _fill(inputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copy the inputs of a call into their static tensors."""
    for own, one in zip(inputs, given, strict=True):
        devices.fill(own, one)


def _random_states() -> list[bytes]:
    """Return the states of torch's random number generators."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators += torch.cuda.default_generators
    return [bytes(generator.get_state().numpy().tobytes()) for generator in generators]
