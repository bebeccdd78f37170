"""Recording of work as CUDA graphs."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from placer.devices.allocator.caching_allocator import Request, repeated
from placer.devices.allocator.packing import Rooms, fit
from placer.devices.names import RECORDING, synchronise
from placer.devices.streams import stream_of_recordings
from placer.utils.error_translation import ErrorTranslation
from placer.utils.garbage_collection import paused_collection

# Capture error mode: only forbidden calls of the recording thread break a recording off. Other
# threads may go on, for example a data loader that pins batches.
_ERRORS = "thread_local"


@dataclass(frozen=True)
class Recorder:
    """The streams to record on, and the memory that libraries keep for them.

    cuBLAS keeps a workspace for each stream and thread.

    Attributes:
        stream: the stream of recordings.
        branch: the stream of their second branch, see ``side_by_side``.
        library_bytes: bytes that libraries keep for both.
    """

    stream: torch.cuda.Stream
    branch: torch.cuda.Stream
    library_bytes: int


@cache
def recorder(device: torch.device) -> Recorder:
    """Return the device's recorder; there is one, because each stream costs a workspace."""
    with torch.cuda.device(device):
        stream, branch = (stream_of_recordings(device) for _ in range(2))
        synchronise(device)
        before = torch.cuda.memory_allocated(device)
        _keep_workspaces(stream, branch)
        synchronise(device)
        return Recorder(stream, branch, max(0, int(torch.cuda.memory_allocated(device)) - before))


def warm_libraries(device: torch.device) -> None:
    """Let libraries allocate their workspaces, before anything is cached.

    This covers the current stream and the recording streams. Allocated later, a workspace would lie
    in a larger free segment, which could then never be returned to the device.
    """
    if device.type == "cuda":
        _use_libraries(device, torch.cuda.current_stream(device))
        recorder(device)


def _use_libraries(device: torch.device, stream: torch.cuda.Stream) -> None:
    """Run a forward and a backward pass that need a workspace, on a stream."""
    with torch.cuda.stream(stream), torch.enable_grad():
        square = torch.ones(256, 256, device=device, requires_grad=True)
        product = torch.nn.functional.linear(square, square, square[0])
        torch.autograd.grad(product.sum(), square)


@cache
def _workspace_pool(device: torch.device) -> Any:
    """Return the memory pool of the workspaces of recordings, which is never released."""
    return memory_pool(device)


def _keep_workspaces(*streams: torch.cuda.Stream) -> None:
    """Let libraries have their workspaces for recordings in memory that nothing else uses.

    A graph holds the addresses of workspaces, and torch frees these while the graph is in use:
    when ``torch.compile`` records graphs of its own, and in newer versions when another graph of
    the same stream is deleted (https://github.com/pytorch/pytorch/issues/193402). Replays would
    overwrite whatever lies there next. What is freed into a pool that is never released stays
    mapped, and the next recording finds it there again.

    A replay that is still running may use the same workspaces, so it is waited for.

    Args:
        streams: of recordings that are about to begin.
    """
    for stream in streams:
        synchronise(stream.device)
        index, pool = stream.device.index or 0, _workspace_pool(stream.device)
        with torch.cuda.stream(stream):
            torch._C._cuda_beginAllocateCurrentStreamToPool(index, pool)
            try:
                _use_libraries(stream.device, stream)
            finally:
                torch._C._cuda_endAllocateToPool(index, pool)


class NotRecordable(Exception):
    """The work synchronises with the host or does something that a CUDA graph cannot hold."""


def memory_pool(device: torch.device) -> Any:
    """Return a memory pool for recordings that share it.

    A recording must leave no result in a shared pool that is read after the next replay.
    """
    with torch.cuda.device(device):
        return torch.cuda.graph_pool_handle()


def record(
    passes: Sequence[Callable[[], Any]],
    device: torch.device,
    *,
    pools: Sequence[Any] | None = None,
    generators: Sequence[Sequence[torch.Generator]] | None = None,
    rooms: Sequence[Rooms] = (),
    warm: bool = False,
    stream: torch.cuda.Stream | None = None,
) -> list[Callable[[], None]]:
    """Record each pass as a CUDA graph and return the functions that replay them.

    Graphs that share a pool may replay only in order, one after another. The results of a pass lie
    in memory that later recordings of the same pool use: read them before those replay. Passes
    whose results are needed longer get a pool of their own.

    Args:
        passes: work on static tensors; later passes may read results of earlier ones.
        device: where they run.
        pools: for each pass, a pool from ``memory_pool``; None for one new pool for all of them.
        generators: for each pass, the random number generators that it uses in addition to the
            device's.
        rooms: for each pass, the pieces of memory to reserve first; see ``fitting_rooms``. Empty to
            let memory grow as needed.
        warm: the passes ran before and did nothing that cannot be recorded. Otherwise they run
            three times first.
        stream: where to record; None for the device's recorder. Recordings of one stream share the
            workspaces of libraries, so their replays must not overlap.

    Returns:
        For each pass, a function that replays it.

    Raises:
        NotRecordable: if a pass cannot be recorded.
    """
    pools = [memory_pool(device)] * len(passes) if pools is None else pools
    with ErrorTranslation(_not_recordable), _recordable(device, stream) as used:
        if not warm:
            _warm_up(passes, used)
        rows = zip(
            passes,
            pools,
            generators or [()] * len(passes),
            rooms or [()] * len(passes),
            strict=True,
        )
        return [
            _captured(run, used, pool, drawn_from, own)[0].replay
            for run, pool, drawn_from, own in rows
        ]


# Recordings of a pass in its shared pool before it is measured: the first one leaves the free
# pieces in a different order, so the second is typical.
_TURNS = 2


def fitting_rooms(
    passes: Sequence[Callable[[], Any]], device: torch.device, shared: Collection[int] = ()
) -> list[Rooms]:
    """Return for each pass the initial pieces with which it reserves the least memory.

    Empty pieces mean that growing as needed is best. Without pieces, freed memory of a pass serves
    only requests that are no larger, and a small tensor in it blocks the next large one. The gaps
    take up to half of the memory. In one large piece, adjacent free blocks merge.
    ``placer.devices.allocator.packing`` finds the best pieces from the passes' requests. Afterwards
    the passes are warm, see ``record``.

    Args:
        passes: as for ``record``; each with its own pool, or sharing one with passes of equal size.
        device: where they run.
        shared: the indices of the passes that share a pool.

    Raises:
        NotRecordable: if a pass cannot be recorded.
    """
    with ErrorTranslation(_not_recordable), _recordable(device) as stream:
        _warm_up(passes, stream)

        turns = [_TURNS if place in shared else 1 for place in range(len(passes))]
        taken = partial(_reserved_bytes, passes, turns, device, stream)
        first_histories: list[_History] = [[] for _ in passes]
        first = taken([()] * len(passes), first_histories)
        torch.cuda.empty_cache()
        # a trial may reserve more than it will save
        scarce = 2 * sum(first) > torch.cuda.mem_get_info(device)[0]
        if scarce:
            return [()] * len(passes)
        streams = [stream.cuda_stream, recorder(device).branch.cuda_stream]
        rows = [
            [repeated([*_requests(history, one)], often) for one in streams]
            for history, often in zip(first_histories, turns, strict=True)
        ]
        return fit(taken, first, rows if all(first_histories) else None)


_History = list[Mapping[str, Any]]


def _reserved_bytes(
    passes: Sequence[Callable[[], Any]],
    turns: Sequence[int],
    device: torch.device,
    stream: torch.cuda.Stream,
    rooms: Sequence[Rooms],
    histories: Sequence[_History] = (),
) -> list[int]:
    """Return for each pass the bytes that its recordings reserve.

    Args:
        passes: as for ``fitting_rooms``.
        turns: for each pass, its recordings that count.
        device: where they run.
        stream: where to record.
        rooms: for each pass, the pieces of memory to reserve first.
        histories: for each pass, a list to which the allocator's actions in its first recording are
            added; empty to record none.
    """
    pools, sizes = [memory_pool(device) for _ in passes], [0] * len(passes)
    graphs = []  # references keep the pools alive for the next turn
    for turn in range(max(turns)):
        for place, (run, own) in enumerate(zip(passes, rooms, strict=True)):
            # A pass that no longer counts still runs, because later passes read its results.
            counts = turn < turns[place]
            pool = pools[place] if counts else memory_pool(device)
            noted = histories[place] if histories and not turn else None
            graph, size = _captured(run, stream, pool, (), own, noted)
            if counts:
                sizes[place] += size
            if turns[place] > 1:
                graphs.append(graph)
    return sizes


@contextmanager
def _noting(history: _History, device: torch.device) -> Iterator[None]:
    """Record the actions of torch's allocator in ``history``.

    Record nothing if torch has no such history or the user already records one.
    """
    try:
        mine = not torch._C._cuda_isHistoryEnabled()
        if mine:
            torch.cuda.memory._record_memory_history(
                "all", context=None, stacks="python", clear_history=True
            )
    except (AttributeError, TypeError):
        # private functions of torch, which may change
        mine = False
    try:
        yield
        if mine:
            with suppress(AttributeError, TypeError, LookupError):
                history += torch.cuda.memory._snapshot()["device_traces"][device.index or 0]
    finally:
        if mine:
            torch.cuda.memory._record_memory_history(None)


def _requests(history: _History, stream: int) -> Iterator[Request]:
    for entry in history:
        if entry["action"] in ("alloc", "free_completed") and entry["stream"] == stream:
            yield Request(entry["addr"], entry["size"] if entry["action"] == "alloc" else None)


def _captured(
    run: Callable[[], Any],
    stream: torch.cuda.Stream,
    pool: Any,
    drawn_from: Sequence[torch.Generator],
    rooms: Rooms,
    history: _History | None = None,
) -> tuple[torch.cuda.CUDAGraph, int]:
    """Return the graph of a pass and the bytes that it reserved beyond its pool.

    The allocator's actions are added to ``history``, if there is one.
    """
    _keep_workspaces(stream, recorder(stream.device).branch)
    noting = nullcontext() if history is None else _noting(history, stream.device)
    graph = torch.cuda.CUDAGraph()
    for generator in drawn_from:
        graph.register_generator_state(generator)
    try:
        recording = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=_ERRORS)
        # A collection could destroy graphs, or memory of several streams, and break the recording.
        with noting, paused_collection(), warnings.catch_warnings(), recording:
            # a pass of views only has no kernels
            warnings.filterwarnings("ignore", message=".*CUDA Graph is empty")
            before = torch.cuda.memory_reserved(stream.device)
            _take_rooms(stream, rooms)
            run()
            after = torch.cuda.memory_reserved(stream.device)
    except BaseException:
        _end_allocating(stream.device, pool)
        raise
    return graph, int(after) - int(before)


def _take_rooms(stream: torch.cuda.Stream, rooms: Rooms) -> None:
    """Allocate and free the pieces of each stream, which reserves them for the pool."""
    branch = recorder(stream.device).branch
    for one, pieces in zip((stream, branch), rooms, strict=False):
        if not pieces:
            continue
        if one is branch:
            branch.wait_stream(stream)  # makes this stream part of the recording
        with torch.cuda.stream(one):
            held = [torch.empty(piece, dtype=torch.uint8, device=stream.device) for piece in pieces]
            del held
        if one is branch:
            stream.wait_stream(branch)


def _end_allocating(device: torch.device, pool: Any) -> None:
    """Release the pool of a failed recording.

    If a forbidden call breaks a recording off, torch does not notify its allocator. The pool would
    stay, and memory that several streams used could never be freed on this device.
    """
    try:
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
    except RuntimeError:
        # the recording ended normally: the graph itself releases its pool
        return
    torch._C._cuda_releasePool(device.index or 0, pool)


@contextmanager
def _recordable(
    device: torch.device, own: torch.cuda.Stream | None = None
) -> Iterator[torch.cuda.Stream]:
    """Yield the stream to record on; restore the device's state after a failure.

    Args:
        device: where to record.
        own: the stream; None for the device's recorder.
    """
    # a capture fails while another device is current
    with RECORDING, torch.cuda.device(device):
        stream = recorder(device).stream if own is None else own
        before = torch.cuda.current_stream(device)
        try:
            yield stream
        except torch.OutOfMemoryError:
            raise
        except Exception:
            # a failed recording may leave its own stream current
            torch.cuda.set_stream(before)
            # and the random number generator in capture mode
            generator = torch.cuda.default_generators[device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())
            synchronise(device)
            raise


def _not_recordable(error: BaseException) -> BaseException:
    """Return a NotRecordable for every exception except out-of-memory errors."""
    if not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError):
        return error
    found = NotRecordable(str(error))
    found.__cause__ = error
    return found


def recording() -> bool:
    """Return whether the current stream is being recorded."""
    return (
        torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
    )


def side_by_side(works: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Issue two pieces of work that do not read each other's results.

    In a recording they become parallel branches of the CUDA graph, so kernels of one run where the
    other leaves the device idle. Otherwise they run one after the other.

        stream         ──┬── first ───┬──
        second stream    └── second ──┘

    Args:
        works: at most two.
        device: where they run.
    """
    if len(works) < 2 or device.type != "cuda" or not recording():
        for work in works:
            work()
        return
    here, there = works
    stream, branch = torch.cuda.current_stream(device), recorder(device).branch
    branch.wait_stream(stream)
    with torch.cuda.stream(branch):
        there()
    here()
    stream.wait_stream(branch)


def _warm_up(passes: Sequence[Callable[[], Any]], stream: torch.cuda.Stream) -> None:
    """Run the passes three times on the recording stream.

    The last run raises on a synchronisation, which a recording does not allow. This setting is
    process-wide and would fail other threads that synchronise, so it is used only in a
    single-threaded process. Otherwise the recording itself fails.
    """
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    mode = torch.cuda.get_sync_debug_mode()
    alone = threading.active_count() == 1
    with torch.cuda.stream(stream):
        for strict in (False, False, alone):
            _set_sync_debug_mode("error" if strict else mode)
            try:
                for run in passes:
                    run()
            finally:
                _set_sync_debug_mode(mode)
    torch.cuda.current_stream(stream.device).wait_stream(stream)
    synchronise(stream.device)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        # torch warns that the mode misses some synchronisations, which is acceptable here
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
