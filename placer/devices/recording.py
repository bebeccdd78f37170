"""Work recorded as CUDA graphs."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from placer.devices.allocator.caching_allocator import Request, repeated
from placer.devices.allocator.packing import Rooms, fit
from placer.devices.names import RECORDING, synchronise
from placer.devices.streams import stream_of_recordings
from placer.utils.error_translation import ErrorTranslation

# What breaks a recording off: what its own thread may not do. Others go on, such as one that pins
# batches.
_ERRORS = "thread_local"


@dataclass(frozen=True)
class Recorder:
    """Streams to record on, and what libraries took for them: cuBLAS keeps a workspace for each
    stream and thread.

    Attributes:
        stream: for recordings.
        beside: for their second branches, see ``side_by_side``.
        library_bytes: what libraries took.
    """

    stream: torch.cuda.Stream
    beside: torch.cuda.Stream
    library_bytes: int


@cache
def recorder(device: torch.device) -> Recorder:
    """One for each device: every further stream would cost another workspace."""
    with torch.cuda.device(device):
        stream, beside = (stream_of_recordings(device) for _ in range(2))
        synchronise(device)
        before = torch.cuda.memory_allocated(device)
        for one in (stream, beside):
            _use_libraries(device, one)
        synchronise(device)
        return Recorder(stream, beside, max(0, int(torch.cuda.memory_allocated(device)) - before))


def warm_libraries(device: torch.device) -> None:
    """Let libraries take what they keep, on the stream in use and those of recordings, before
    anything is cached.

    Later they would take it of a larger piece that is free just then, which could not be given back
    any more.
    """
    if device.type == "cuda":
        _use_libraries(device, torch.cuda.current_stream(device))
        recorder(device)


def _use_libraries(device: torch.device, stream: torch.cuda.Stream) -> None:
    """Run what takes a workspace on a stream, forwards and backwards."""
    with torch.cuda.stream(stream), torch.enable_grad():
        square = torch.ones(256, 256, device=device, requires_grad=True)
        product = torch.nn.functional.linear(square, square, square[0])
        torch.autograd.grad(product.sum(), square)


class NotRecordable(Exception):
    """The work synchronises with the host or does what a CUDA graph cannot hold."""


def memory_pool(device: torch.device) -> Any:
    """Memory for recordings that share it; each must leave nothing there that is read after it."""
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
) -> list[Callable[[], None]]:
    """Record each pass as a CUDA graph; graphs that share memory replay only in order, one after
    another.

    What a pass leaves may lie where an earlier one of the same memory works, or any other that was
    recorded there: it must be used before that one is replayed again. Passes whose results are used
    later have memory of their own.

    Args:
        passes: work on static tensors, the later on results of the earlier.
        device: where they run.
        pools: by pass, the memory that it takes, from ``memory_pool``; one for all of them, and
            theirs alone, if None.
        generators: by pass, those that it draws random numbers from beside the device's.
        rooms: by pass, the pieces of memory that it takes first and works in; see
            ``fitting_rooms``. Without any it takes piece by piece.
        warm: passes like these have run before, and did nothing that cannot be recorded; else they
            run thrice first.

    Returns:
        What replays each.

    Raises:
        NotRecordable: a pass cannot be recorded.
    """
    pools = [memory_pool(device)] * len(passes) if pools is None else pools
    with ErrorTranslation(_not_recordable), _recordable(device) as stream:
        if not warm:
            _warm_up(passes, stream)
        rows = zip(
            passes,
            pools,
            generators or [()] * len(passes),
            rooms or [()] * len(passes),
            strict=True,
        )
        return [
            _captured(run, stream, pool, drawn_from, own)[0].replay
            for run, pool, drawn_from, own in rows
        ]


# So often a pass that shares its memory is recorded there to see what those like it take: the first
# leaves pieces in another order than it found them.
_TURNS = 2


def fitting_rooms(
    passes: Sequence[Callable[[], Any]], device: torch.device, shared: Collection[int] = ()
) -> list[Rooms]:
    """By pass, the pieces of memory from which it takes the least in all; none: it does best piece
    by piece.

    The passes are warm then, see ``record``.

    Piece by piece, what is freed in a pass serves only what is no larger, and a small tensor in it
    spoils it for the next large one: gaps stay that take up to half of the memory. Blocks that lie
    side by side in a piece are joined when they are free. Which pieces are best follows from what
    the passes ask for; see ``placer.devices.allocator.packing``.

    Args:
        passes: as for ``record``; each is to have memory of its own, or to share it with others as
            large.
        device: where they run.
        shared: the places of those that share it.

    Raises:
        NotRecordable: a pass cannot be recorded.
    """
    with ErrorTranslation(_not_recordable), _recordable(device) as stream:
        _warm_up(passes, stream)

        turns = [_TURNS if place in shared else 1 for place in range(len(passes))]

        def taken(rooms: Sequence[Rooms], histories: Sequence[_History] = ()) -> list[int]:
            pools, sizes = [memory_pool(device) for _ in passes], [0] * len(passes)
            graphs = []  # keep the memory that the next turn shares
            for turn in range(max(turns)):
                for place, (run, own) in enumerate(zip(passes, rooms, strict=True)):
                    # else it only runs for those behind it
                    counts = turn < turns[place]
                    pool = pools[place] if counts else memory_pool(device)
                    with (
                        _noting(histories[place], stream.device)
                        if histories and not turn
                        else nullcontext()
                    ):
                        graph, size = _captured(run, stream, pool, (), own)
                    if counts:
                        sizes[place] += size
                    if place in shared:
                        graphs.append(graph)
            return sizes

        asked: list[_History] = [[] for _ in passes]
        first = taken([()] * len(passes), asked)
        torch.cuda.empty_cache()
        # a trial may take more than it will save
        scarce = 2 * sum(first) > torch.cuda.mem_get_info(device)[0]
        if scarce:
            return [()] * len(passes)
        streams = [stream.cuda_stream, recorder(device).beside.cuda_stream]
        rows = [
            [repeated([*_requests(history, one)], often) for one in streams]
            for history, often in zip(asked, turns, strict=True)
        ]
        return fit(taken, first, rows if all(asked) else None)


_History = list[Mapping[str, Any]]


@contextmanager
def _noting(history: _History, device: torch.device) -> Iterator[None]:
    """Note what torch's allocator does; nothing where its history cannot be had, or is a user's."""
    try:
        mine = not torch._C._cuda_isHistoryEnabled()
        if mine:
            torch.cuda.memory._record_memory_history(
                "all", context=None, stacks="python", clear_history=True
            )
    except (AttributeError, TypeError):
        # these functions are torch's own, and may change
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
) -> tuple[torch.cuda.CUDAGraph, int]:
    """The graph of a pass, and what it took of the device's memory beyond what its pool had, in
    bytes.
    """
    graph = torch.cuda.CUDAGraph()
    for generator in drawn_from:
        graph.register_generator_state(generator)
    try:
        recording = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=_ERRORS)
        with _uncollected(), warnings.catch_warnings(), recording:
            # a layer of views alone
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
    """Take the pieces of each stream and free them at once: they are the pool's from now on."""
    beside = recorder(stream.device).beside
    for one, pieces in zip((stream, beside), rooms, strict=False):
        if not pieces:
            continue
        if one is beside:
            beside.wait_stream(stream)  # else it is not of the recording
        with torch.cuda.stream(one):
            held = [torch.empty(piece, dtype=torch.uint8, device=stream.device) for piece in pieces]
            del held
        if one is beside:
            stream.wait_stream(beside)


@contextmanager
def _uncollected() -> Iterator[None]:
    """No collection by Python: what one would let go, graphs and memory of several streams, breaks
    a recording off.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _end_allocating(device: torch.device, pool: Any) -> None:
    """Let a pool go whose recording failed.

    Where a recording is broken off by what it may not do, torch never tells its allocator that it
    is over: the pool would stay, and memory that several streams used would not be given back on
    this device any more.
    """
    try:
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
    except RuntimeError:
        # the recording ended as it should: the graph itself lets its pool go
        return
    torch._C._cuda_releasePool(device.index or 0, pool)


@contextmanager
def _recordable(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Give the stream to record on; a failure leaves the device as it was."""
    # a capture fails while another device is current
    with RECORDING, torch.cuda.device(device):
        stream, before = recorder(device).stream, torch.cuda.current_stream(device)
        try:
            yield stream
        except torch.OutOfMemoryError:
            raise
        except Exception:
            # a recording that fails may leave its own stream current
            torch.cuda.set_stream(before)
            # and random numbers expecting a recording
            generator = torch.cuda.default_generators[device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())
            synchronise(device)
            raise


def _not_recordable(error: BaseException) -> BaseException:
    """Say of whatever fails in a recording, but for want of memory, that it cannot be recorded."""
    if not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError):
        return error
    found = NotRecordable(str(error))
    found.__cause__ = error
    return found


def recording() -> bool:
    """Whether what is issued now is recorded."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def side_by_side(works: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Issue two pieces of work, of which neither reads what the other writes.

    Where they are recorded they are branches of the CUDA graph, so that kernels of one run where
    those of the other leave the device idle; else they run one after the other.

    Args:
        works: two at the most.
        device: where they run.
    """
    if len(works) < 2 or device.type != "cuda" or not recording():
        for work in works:
            work()
        return
    here, there = works
    stream, beside = torch.cuda.current_stream(device), recorder(device).beside
    beside.wait_stream(stream)
    with torch.cuda.stream(beside):
        there()
    here()
    stream.wait_stream(beside)


def _warm_up(passes: Sequence[Callable[[], Any]], stream: torch.cuda.Stream) -> None:
    """Run the passes three times on the stream that records; the last refuses what would spoil a
    recording.

    It would refuse that to other threads, too, who may wait for devices: where there are some, the
    recording tells.
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
        # torch tells that the mode does not detect everything: neither must it
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
