"""Repetition of a traced pass: one recorded piece per device at a time, and copies between them.

    trace:    a0 a1 ──copy──> b0 b1 ──copy──> a2        (a: on cuda:0, b: on cuda:1)
    pieces:   level 0, cuda:0   level 1, cuda:1   level 2, cuda:0

A piece is a maximal run of operations of one device that need nothing of a later piece. On a GPU it
is one CUDA graph. A CPU runs its operations one by one, from the trace and without the model's
code, so that it repeats what a graph would. The host waits for a GPU only if a piece of the CPU
needs its values, and for the stream of the pieces alone: weights that rest on the host are copied
meanwhile.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.executor.generation.tracing.operation_trace import (
    Guard,
    Operation,
    Trace,
    filled,
    tensors_of,
)
from placer.executor.generation.tracing.repetitions import distinct
from placer.executor.state.resting.resting_replay import Action, RestingReplay, link


@dataclass
class Piece:
    """A part of a pass on one device.

    Attributes:
        device: where it runs.
        level: the number of devices' borders before it; pieces run in the order of their levels.
        arrivals: copies from other devices that it starts with.
        operations: what it runs then.
        work: runs the operations otherwise, with the values by number; None to run them one by one.
        replay: runs the operations; a recording's replay on a GPU.
        resting: copies the weights that rest on the host; None if the piece reads none.
    """

    device: torch.device
    level: int
    arrivals: list[Operation] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    work: Callable[[dict[int, Tensor]], None] | None = None
    replay: Callable[[], None] | None = None
    resting: RestingReplay | None = None


class TraceReplay:
    """A pass that is run again from its trace.

    Args:
        trace: of the pass, without an obstacle.
        results: numbers of the values that the caller reads afterwards.

    Attributes:
        pieces: in the order in which they run.
        reserved_bytes: by device, the memory of its recordings.
    """

    def __init__(self, trace: Trace, results: Collection[int]) -> None:
        operations, omitted = distinct(trace, results)
        self.pieces = _pieces(trace, operations)
        self.reserved_bytes: dict[torch.device, int] = {}
        self._guards = trace.guards
        arrived = {number: one for number, one in trace.arrived.items() if number not in omitted}
        self._values: dict[int, Tensor] = {**trace.constants, **trace.externals, **arrived}
        self._external = frozenset(self._values)
        self._first = _with_resting(self.pieces)
        self._last_reads = _last_reads(self.pieces, self._external | set(results))

    def record(self, streams: devices.SideStreams | None = None) -> None:
        """Turn the pieces on GPUs into CUDA graphs, without running them.

        Args:
            streams: where to record; None for the devices' recorders.

        Raises:
            devices.NotRecordable: if a piece cannot be recorded.
        """
        pools: dict[torch.device, Any] = {}
        for piece in self.pieces:
            if not piece.operations:
                continue  # it only receives results
            if piece.device.type != "cuda":
                piece.replay = _run_later(self, piece)
                continue
            # A value that a later piece reads stays referenced, so its memory is not given to
            # another recording of the pool.
            pool = pools.setdefault(piece.device, devices.memory_pool(piece.device))
            work = [_run_later(self, piece)]
            # The operations have just run, so no library needs another warm-up.
            stream = None if streams is None else streams.stream(piece.device)
            before = devices.reserved_bytes(piece.device)
            with self._slots_locked():
                (piece.replay,) = devices.record(
                    work, piece.device, pools=[pool], warm=True, stream=stream
                )
            taken = devices.reserved_bytes(piece.device) - before
            self.reserved_bytes[piece.device] = self.reserved_bytes.get(piece.device, 0) + taken

    @property
    def reads_on_host(self) -> bool:
        """Return whether the host waits for numbers before each pass; see ``is_same``."""
        return bool(self._guards)

    def is_same(self) -> bool:
        """Return whether the pass would read the same numbers on the host, for its inputs now."""
        return all(self._holds(guard) for guard in self._guards)

    def _holds(self, guard: Guard) -> bool:
        values = ChainMap[int, Tensor]({}, self._values)
        for operation in guard.operations:
            _run_operation(operation, values)
        return bool(values[guard.number].item() == guard.value)

    def run(self) -> None:
        """Run the pass; the host waits for a device only if a layer on the CPU needs its values."""
        with self._slots_locked():
            self._run()

    @contextmanager
    def _slots_locked(self) -> Iterator[None]:
        """Keep other threads from the slots of weights that rest on the host."""
        with ExitStack() as locks:
            for resting in self._first:
                locks.enter_context(resting.lock)
            yield

    def _run(self) -> None:
        for resting in self._first:
            resting.begin()
        for piece in self.pieces:
            for arrival in piece.arrivals:
                self._receive(arrival)
            if piece.resting is not None:
                piece.resting.wait()
            if piece.replay is not None:
                piece.replay()
            if piece.resting is not None:
                piece.resting.end()

    def value(self, number: int) -> Tensor:
        """Return a value of the latest pass; the next one overwrites it."""
        return self._values[number]

    def _receive(self, arrival: Operation) -> None:
        source, target = arrival.reads[0], arrival.makes[0]
        if arrival.writes:
            target, source = arrival.reads[:2]
        devices.fill(self._values[target], self._values[source], in_turn=True)

    def values(self) -> dict[int, Tensor]:
        """Return the values by number that are needed outside of a piece."""
        return dict(self._values)

    def left_by(self, piece: Piece) -> list[int]:
        """Return the numbers of the values that a piece makes for others."""
        dropped = {
            number for one in piece.operations for number in self._last_reads.get(id(one), ())
        }
        made = (number for one in piece.operations for number in one.makes)
        return [
            number
            for number in dict.fromkeys(made)
            if number not in dropped and number not in self._external
        ]

    def run_piece(self, piece: Piece, values: dict[int, Tensor]) -> None:
        """Run a piece.

        Args:
            piece: of this pass.
            values: by number; what the piece leaves for others is added.
        """
        if piece.work is not None:
            piece.work(values)
            return
        last_reads = self._last_reads
        if piece.resting is not None:
            piece.resting.restart()
        for operation in piece.operations:
            if piece.resting is not None and isinstance(operation.function, Action):
                piece.resting.act(operation.function)
                continue
            _run_operation(operation, values)
            for number in last_reads.get(id(operation), ()):
                values.pop(number, None)


def _run_operation(operation: Operation, values: MutableMapping[int, Tensor]) -> None:
    """Run an operation on values by number, and add its results."""
    made = operation.function(*filled(operation.args, values), **filled(operation.kwargs, values))
    values.update(zip(operation.makes, tensors_of(made), strict=True))


def _with_resting(pieces: Iterable[Piece]) -> list[RestingReplay]:
    """Let pieces copy the weights that rest on the host; return the first of each device."""
    by_device: defaultdict[torch.device, list[RestingReplay]] = defaultdict(list)
    for piece in pieces:
        actions = [one.function for one in piece.operations if isinstance(one.function, Action)]
        if actions:
            piece.resting = RestingReplay(actions)
            by_device[piece.device].append(piece.resting)
    for own in by_device.values():
        link(own)
    return [own[0] for own in by_device.values()]


def _run_later(replay: TraceReplay, piece: Piece) -> Callable[[], None]:
    return lambda: replay.run_piece(piece, replay._values)


class _Levels:
    """The level of each operation, from what it reads, writes and follows on its device."""

    def __init__(self) -> None:
        self._latest: dict[torch.device, int] = {}
        # by storage: where it was last written, and the level of the latest transfer from it
        self._written: dict[int, tuple[int, torch.device]] = {}
        self._sent: dict[int, int] = {}

    def level(self, operation: Operation, trace: Trace) -> int:
        """Return the level of the next operation of the pass."""
        device, storages = operation.device, trace.storages
        level = self._latest.get(device, 0)
        for number in operation.reads:
            at, place = self._written.get(storages[number], (0, device))
            level = max(level, at if place == device else at + 1)
        for number in operation.writes:
            # a copy that reads the old contents comes before
            level = max(level, self._sent.get(storages[number], -1) + 1)
        if operation.is_transfer and operation.writes:
            # a piece starts with its copies: what used the target before belongs to another piece
            level = max(level, self._latest.get(device, -1) + 1)
        if operation.is_transfer:
            for number in operation.reads:
                self._sent[storages[number]] = max(level, self._sent.get(storages[number], -1))
        for number in (*operation.writes, *operation.makes):
            self._written[storages[number]] = level, device
        self._latest[device] = level
        return level


def _pieces(trace: Trace, operations: Iterable[Operation]) -> list[Piece]:
    """Return the pieces of a pass, in the order in which they run."""
    found: dict[tuple[int, torch.device], Piece] = {}
    levels = _Levels()
    for operation in operations:
        level = levels.level(operation, trace)
        piece = found.setdefault((level, operation.device), Piece(operation.device, level))
        if operation.is_transfer:
            piece.arrivals.append(operation)
        else:
            piece.operations.append(operation)
    return sorted(found.values(), key=lambda piece: piece.level)


def _last_reads(pieces: Iterable[Piece], kept: Collection[int]) -> dict[int, list[int]]:
    """Return by identity of an operation the values that nothing needs after it.

    A value that leaves its piece is needed again: its memory is static.

    Args:
        pieces: of the pass.
        kept: values that stay.
    """
    readers: defaultdict[int, set[int]] = defaultdict(set)
    last: dict[int, Operation] = {}
    for number, piece in enumerate(pieces):
        for arrival in piece.arrivals:
            for value in arrival.reads:
                # a copy between pieces needs it outside of any piece
                readers[value].update((-1, number))
        for operation in piece.operations:
            for value in (*operation.reads, *operation.makes):
                readers[value].add(number)
                last[value] = operation
    found: defaultdict[int, list[int]] = defaultdict(list)
    for value, operation in last.items():
        if value not in kept and len(readers[value]) == 1:
            found[id(operation)].append(value)
    return dict(found)
