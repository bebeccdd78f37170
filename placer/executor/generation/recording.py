"""One kind of calls, traced or recorded: its static memory, its passes and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.capture.pytrees import Structure, flatten
from placer.executor.engine.compiled_segments import error_line
from placer.executor.generation.calls import Call, Kind
from placer.executor.generation.model_state import CannotRecordError
from placer.executor.generation.results import UsersCache, copied, exchanged
from placer.executor.generation.static_cache import StaticCopy
from placer.executor.generation.tracing.compiled_pieces import Compilation
from placer.executor.generation.tracing.operation_trace import OperationTrace, Trace
from placer.executor.generation.tracing.trace_replay import TraceReplay
from placer.executor.hook_path import HookPath


@dataclass
class Recording:
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

    @property
    def can_be_undone(self) -> bool:
        """Return whether a replay reads nothing on the host, and can be taken back."""
        return self.replay is not None and not self.replay.reads_on_host and self.copy.counts_tokens

    def fill(self, call: Call, kind: Kind) -> None:
        """Bring the cache and the inputs of a call into static memory.

        Args:
            call: of this kind.
            kind: with its arguments.
        """
        self.copy.adopt(call.cache, call.view)
        for own, one in zip(self.inputs, kind.leaves, strict=True):
            devices.fill(own, one)

    def traced(self, call: Call, hooks: HookPath) -> tuple[Trace, Any]:
        """Run a pass through hooks on static memory, and trace it.

        Args:
            call: of this kind, whose inputs and cache are in static memory.
            hooks: run it.

        Returns:
            The trace, and the model's result, whose cache is the static one.
        """
        args, kwargs = self.structure.unflatten(self.inputs)
        kwargs[call.name] = self.copy.cache
        before = _random_states()
        tracer = OperationTrace(hooks.computes_on_host)
        try:
            with tracer, hooks.noted(tracer.note_action):
                result = hooks.run_model(args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise CannotRecordError(f"it fails with a static cache: {error}") from error
        trace = tracer.trace
        if not trace.obstacle and _random_states() != before:
            trace.obstacle = "it draws random numbers"
        if trace.obstacle:
            raise CannotRecordError(trace.obstacle)
        self._note_result(result, tracer)
        return trace, result

    def _note_result(self, result: Any, tracer: OperationTrace) -> None:
        """Note which values a result consists of."""
        tensors, self.result = flatten(exchanged(result, self.copy.cache, UsersCache))
        inputs = {id(one): place for place, one in enumerate(self.inputs)}
        self.outcome = []
        for tensor in tensors:
            number = inputs.get(id(tensor))
            if number is not None:
                self.outcome.append(-1 - number)
                continue
            made = tracer.number(tensor)
            if made is None:
                raise CannotRecordError("it returns a tensor that torch did not make")
            self.outcome.append(made)

    def returned(self, call: Call, kind: Kind, result: Any) -> Any:
        """Return the result of a traced pass to the caller.

        Args:
            call: of this kind.
            kind: with its arguments.
            result: of ``traced``.
        """
        tensors, structure = flatten(exchanged(result, self.copy.cache, UsersCache))
        own = {id(one): given for one, given in zip(self.inputs, kind.leaves, strict=True)}
        moved = [own[id(one)] if id(one) in own else copied(one, kind.target) for one in tensors]
        return exchanged(structure.unflatten(moved), UsersCache, call.cache)

    def collected(self, call: Call, kind: Kind, replay: TraceReplay) -> Any:
        """Return the result of a replayed pass to the caller.

        Args:
            call: of this kind.
            kind: with its arguments.
            replay: that has run.
        """
        assert self.result is not None
        tensors = [
            kind.leaves[-1 - number] if number < 0 else copied(replay.value(number), kind.target)
            for number in self.outcome
        ]
        return exchanged(self.result.unflatten(tensors), UsersCache, call.cache)

    def followed(self, call: Call, kind: Kind) -> Any:
        """Return the result of the replay; the user's cache has its tokens from now on.

        Args:
            call: of this kind.
            kind: with its arguments.
        """
        assert self.replay is not None
        self.copy.follow(call.view, call.tokens)
        return self.collected(call, kind, self.replay)

    def exchange(
        self,
        made: Compilation,
        streams: devices.SideStreams | None,
        restore: Callable[[], None],
        differs: Callable[[TraceReplay], str],
    ) -> None:
        """Run the compiled pass from now on, if that gives the model's result.

        Args:
            made: the compiled pass; its obstacles say why it does not run.
            streams: where to record.
            restore: see ``compilation``.
            differs: says how the result of a pass that has run differs from the model's.
        """
        assert self.replay is not None
        if made.replay is not None:
            try:
                made.replay.record(streams)
                restore()
                made.replay.run()
                why = differs(made.replay)
            except Exception as error:  # such as a lack of memory: it runs without a compiler
                why = error_line(error)
            if why:
                made.gains.clear()
                made.obstacles.append(why)
            else:
                self.replay = made.replay
        if not made.gains:
            # trials have changed the cache
            restore()
            self.replay.run()


@dataclass
class ReplayedCall:
    """A call that was replayed before the model was called.

    Attributes:
        result: of the model.
        call: the call.
        recording: its recorded pass.
        version: of the findings about the model then.
        contents: the writes to the model's tensors until then.
    """

    result: Any
    call: Call
    recording: Recording
    version: int
    contents: Sequence[int]


class Kept:
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


def _random_states() -> list[bytes]:
    """Return the states of torch's random number generators."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators += torch.cuda.default_generators
    return [bytes(generator.get_state().numpy().tobytes()) for generator in generators]
