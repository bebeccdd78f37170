"""``DataFlow.stream``: batch after batch through the devices, with no drain between them.

    tick        0     1     2     3     4     5
    segment 0   b0    b1    b2    b3
    segment 1         b0    b1    b2    b3
    segment 2               b0    b1    b2    b3

Every tick issues one segment of every batch that is on its way, the oldest first, so a device that
holds several segments has work of several batches to turn to. A result such as b0 is handed out
once the ticks ahead of it are issued. The caller waits for no device until it looks into a result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from placer import devices
from placer.capture import autocast, input_forms
from placer.capture.batch_dims.declared_layout import (
    DEFAULT_OPTIONS,
    refuse_absent_outputs,
    require_batch_options,
)
from placer.capture.layers import LayerGraph
from placer.capture.pytrees import outline
from placer.devices import Courier, Lane
from placer.errors import InputError
from placer.executor.engine.compiled_segments import Backend
from placer.executor.engine.shape_cache import LatestShapes
from placer.executor.engine.slot import Slot
from placer.executor.engine.stage import Stage
from placer.executor.inference.stream_pipeline import InferencePipeline
from placer.executor.inference.ticket import Ticket
from placer.executor.model_captures import Capture, shapes
from placer.executor.placed_model import PlacedModel
from placer.executor.settings import Settings
from placer.executor.stage_errors import nothing_held
from placer.schema import BatchOptions
from placer.utils.option_checks import require_count

_HOOKED = {"the model": ("", "it runs through hooks, or is not placed")}
_AHEAD = 2
"""Batches beyond those that fill the pipeline: work for the devices while the caller looks into a
result."""


class Known(NamedTuple):
    """A batch whose capture is known; its result is handed out flattened, as its inputs are given.

    Attributes:
        capture: the graph that covers it.
        tensors: the flattened inputs.
        backend: of torch.compile; None where segments run uncompiled.
        pipeline: of the placement, if stages have replicas.
    """

    capture: Capture
    tensors: Sequence[Any]
    backend: Backend | None = None
    pipeline: int = 0


class _OutdatedError(Exception):
    """The model is no longer what was recorded."""


class Streams:
    """All streams of one flow; they share its devices, and the recordings of each shape.

    Args:
        placed: the model.
        settings: of the flow.
        run: runs a batch that has no capture.

    Attributes:
        lanes: of every device that was used.
        courier: for the copies.
    """

    def __init__(self, placed: PlacedModel, settings: Settings, run: Callable[..., Any]) -> None:
        self._placed = placed
        self._settings = settings
        self._run = run
        self.lanes: dict[torch.device, Lane] = {}
        self.courier = Courier()
        # of all shapes, since batches of several are on their way at once
        lanes = self.lanes
        self._pipelines: LatestShapes[tuple[LayerGraph, InferencePipeline]] = LatestShapes(
            lambda made: lanes
        )
        self._moving: list[Ticket] = []
        self._is_hooked = False
        # of one order with the flow's, whose calls stream, and which streams call
        self._lock = placed.lock

    def open(
        self,
        batches: Iterable[Any],
        in_flight: int | None = None,
        backend: Backend | None = None,
        options: BatchOptions | None = None,
        has_turns: bool = True,
    ) -> Generator[Any, None, None]:
        """Return a stream over these batches; see ``DataFlow.stream``.

        Args:
            batches: an iterable.
            in_flight: batches that are taken before the first result is handed out; None for as
                many as fill the pipeline, and two more.
            backend: of torch.compile; None to compile nothing.
            options: what is declared of the batches.
            has_turns: whether replicated pipelines take turns; otherwise the first one runs all.

        Raises:
            InputError: the batches cannot be iterated, or are one tensor, or ``in_flight`` is not a
                count.
        """
        if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
            raise InputError(
                f"batches is one {type(batches).__name__}; "
                "give an iterable of batches: [x], x.split(32), a DataLoader"
            )
        self._settings.refuse_resting("flow.stream")
        if in_flight is not None:
            require_count("in_flight", in_flight, "batches")
        if options is not None:
            require_batch_options(options)
        enter = partial(self._enter, backend=backend, options=options, has_turns=has_turns)
        return self._results(iter(batches), in_flight, enter)

    def ahead(
        self, batches: Sequence[Known], is_unchanged: Callable[[], bool]
    ) -> list[list[Any]] | None:
        """Run recorded batches, and look at the model as soon as the first device has work.

        For a network of hundreds of modules, a look takes the host as long as many a segment takes
        its device.

        Args:
            batches: of one call.
            is_unchanged: whether their captures still match the model.

        Returns:
            Their flattened results; None if one is not recorded, or the model has changed.
        """
        known = [self._pipelines.used(self._key(batch)) for batch in batches]
        graphs = {pipeline: graph for graph, pipeline in filter(None, known)}
        if None in known or not all(pipeline.leaves_nothing for pipeline in graphs):
            return None

        def are_current() -> bool:
            return is_unchanged() and all(
                pipeline.state.is_current(self._placed.current_state(graph))
                for pipeline, graph in graphs.items()
            )

        try:
            return list(self._results(iter(batches), are_current=are_current))
        except _OutdatedError:
            return None

    def stages(self, batch: Known) -> list[Stage[Slot]]:
        """Return the stages of batches like this one, as they run once the shape came twice."""
        for _ in self.open([batch, batch]):
            pass
        _, pipeline = self._pipelines[self._key(batch)]
        return pipeline.stages

    def pipelines(self) -> list[InferencePipeline]:
        """Return the pipelines of the shapes that are kept, the latest used last."""
        return [pipeline for _, pipeline in self._pipelines.values()]

    def compiling(self) -> dict[str, tuple[str, str]]:
        """Return what torch.compile gained, or why it does not run, by segment that it was for.

        Where several shapes have a segment of one name, the shape that came last counts.
        """
        found = dict(_HOOKED) if self._is_hooked else {}
        for pipeline in self.pipelines():
            found |= pipeline.compiling()
        return found

    def clear(self) -> None:
        """Release recordings and static tensors, once the devices are done with them.

        Batches on their way still arrive.
        """
        for place in self.lanes:
            devices.synchronise(place)
        self._pipelines.clear()
        self._is_hooked = False

    def _results(
        self,
        source: Iterator[Any],
        in_flight: int | None = None,
        enter: Callable[[Any, int], Ticket] | None = None,
        are_current: Callable[[], bool] | None = None,
    ) -> Generator[Any, None, None]:
        tickets: deque[Ticket] = deque()
        taken, is_open = 0, True
        try:
            with self._lock, _inference():
                self._begin() if are_current is None else self._wait_for_callers()
            while True:
                while is_open and len(tickets) < (in_flight or self._wanted(tickets)):
                    ticket = self._take(source, taken, enter or self._enter)
                    if ticket is None:
                        is_open = False
                        break
                    taken += 1
                    tickets.append(ticket)
                    # The first device has work now: the look at the model costs no time.
                    if taken == 1 and are_current is not None and not are_current():
                        raise _OutdatedError
                    is_open = all(ticket.error is None for ticket in tickets)
                if not tickets:
                    return
                # Do not hold the lock during the yield: the caller decides when it asks for the
                # next result.
                with self._lock:
                    while not tickets[0].is_over:
                        self._tick()
                    result = self._result_of(tickets.popleft())
                yield result
                # Otherwise the result would stay in memory while the caller works on the next one.
                del result
        except KeyboardInterrupt:
            self.clear()  # a batch may be half issued
            raise
        finally:
            with self._lock, _inference():
                self._end(tickets)

    @staticmethod
    def _wanted(tickets: deque[Ticket]) -> int:
        """Return how many batches to have on their way: enough to fill the pipelines, and some."""
        pipeline = tickets[-1].pipeline if tickets else None
        if pipeline is None:
            return 1
        # replicated pipelines begin on different devices
        found = {ticket.pipeline.place for ticket in tickets if ticket.pipeline is not None}
        return len(found) * len(pipeline.stages) + _AHEAD

    def _take(
        self, source: Iterator[Any], number: int, enter: Callable[[Any, int], Ticket]
    ) -> Ticket | None:
        """Return the source's next batch, on its way; None if it is exhausted."""
        try:
            batch = next(source)
        except StopIteration:
            return None
        except Exception as error:
            error.add_note(f"raised by the source of the stream, for batch {number}")
            return Ticket(error=error)
        try:
            with self._lock, _inference():
                ticket = enter(batch, number)
                # before another thread's batch enters: its inputs may come to the same place
                self._tick()
                return ticket
        except Exception as error:
            error.add_note(f"in batch {number} of the stream{input_forms.input_advice(error)}")
            return Ticket(error=error)

    def _enter(
        self,
        batch: Any,
        number: int,
        backend: Backend | None = None,
        options: BatchOptions | None = None,
        has_turns: bool = True,
    ) -> Ticket:
        if isinstance(batch, Known):
            return self._send_off(batch, number, is_flat=True)
        args, kwargs = _arguments(batch)
        placed = self._placed
        part = placed.laid_out((args, kwargs), options)
        capture = placed.captured(part, needed=False) if placed.assignment is not None else None
        # The flow's own options describe all its calls, and may name results of others of them.
        own = self._settings.batch_options
        declared = DEFAULT_OPTIONS if options is None or options is own else options
        if capture is None:
            self._is_hooked = backend is not None
            self._drain()
            result = self._run(*args, **kwargs)
            refuse_absent_outputs(declared, result)
            return Ticket(result=result)
        if declared.outputs:
            refuse_absent_outputs(declared, outline(capture.exported.outputs))
        turns = self._settings.replication.turns
        is_shared = has_turns and placed.has_replicas(capture)
        pipeline = turns[number % len(turns)] if is_shared else 0
        known = Known(capture, part.tensors, backend, pipeline)
        return self._send_off(known, number, is_flat=False)

    def _send_off(self, batch: Known, number: int, is_flat: bool) -> Ticket:
        key = self._key(batch)
        known = self._pipelines.used(key)
        pipeline = self._add(key, batch) if known is None else known[1]
        ticket = Ticket(pipeline, is_flat=is_flat)
        try:
            ticket.passage = pipeline.enter(number, batch.tensors)
        except BaseException:
            self._pipelines.let_go(key)  # it may be half recorded
            raise
        self._moving.append(ticket)
        # the first of a shape makes the static tensors as it goes
        if pipeline.in_turn or not pipeline.is_known:
            self._drain()
        return ticket

    def _key(self, batch: Known) -> Hashable:
        target = self._settings.output_device
        run = batch.capture, self._placed.assignment, target, batch.backend, batch.pipeline
        return *run, shapes(batch.tensors), autocast.current_dtypes()

    def _add(self, key: Hashable, batch: Known) -> InferencePipeline:
        """Make the pipeline of a new shape, in place of the one that was not used for longest."""
        # Pipelines of a model that has changed would only take memory.
        placed = self._placed
        self._pipelines.keep_only(lambda other: placed.captures.holds(other[0]))
        self._pipelines.make_room(self._settings.replication.count)
        graph, places = placed.layers(batch.capture, batch.pipeline)
        outputs, target = batch.capture.exported.outputs, self._settings.output_device
        state = placed.current_state(graph)
        shared = state, placed.weights.copies, self.lanes, self.courier
        pipeline = InferencePipeline(graph, places, outputs, target, *shared, batch.backend)
        self._pipelines[key] = (graph, pipeline)
        self._wait_for_callers()
        return pipeline

    def _tick(self) -> None:
        """Issue one segment of every batch that is on its way, the oldest first."""
        with self._lock, _inference():
            for ticket in list(self._moving):
                ticket.advance()
                if ticket.is_over:
                    self._moving.remove(ticket)

    def _drain(self) -> None:
        while self._moving:
            self._tick()

    def _result_of(self, ticket: Ticket) -> Any:
        if ticket.error is not None:
            self._fail(ticket)
        if ticket.pipeline is None or ticket.passage is None:
            return ticket.result
        with _inference():
            leaves = ticket.pipeline.engine.leaves(ticket.passage)
        return leaves if ticket.is_flat else ticket.pipeline.outputs.unflatten(leaves)

    def _fail(self, ticket: Ticket) -> NoReturn:
        """Raise the error of a batch, which nothing holds then.

        If memory ran out, the recordings are released.
        """
        error = ticket.error
        assert error is not None
        self._drop(ticket)
        if isinstance(error, torch.OutOfMemoryError):
            self.clear()
        try:
            with nothing_held():
                raise error
        finally:
            del error

    def _drop(self, ticket: Ticket) -> None:
        """Forget a batch, wherever it is."""
        if ticket in self._moving:
            self._moving.remove(ticket)
        ticket.drop()

    def _begin(self) -> None:
        """Bring copies of the model's state up to date."""
        self._wait_for_lanes()
        current = {key: graph for key, (graph, _) in self._pipelines.items()}
        for key, graph in current.items():
            if not self._pipelines[key][1].state.refresh(self._placed.current_state(graph)):
                self.clear()
                break
        self._wait_for_callers()

    def _end(self, tickets: Iterable[Ticket]) -> None:
        """Let whatever the caller issues from now on, on any device, come after the stream."""
        for ticket in tickets:
            self._drop(ticket)
        self._wait_for_lanes()

    def _wait_for_callers(self) -> None:
        marks = [Lane(place, caller=True).mark() for place in self.lanes]
        for lane in self.lanes.values():
            lane.wait(*marks)

    def _wait_for_lanes(self) -> None:
        for place, lane in self.lanes.items():
            Lane(place, caller=True).wait(lane.mark())


def _inference() -> AbstractContextManager[None]:
    """Return a context without gradients.

    It is not torch's inference mode, whose tensors could not be written to outside of it.
    """
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return inference()
    return nullcontext()


@contextmanager
def inference() -> Iterator[None]:
    """Enter what ``_inference`` returns; inside, its contexts are empty."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch,), {}
