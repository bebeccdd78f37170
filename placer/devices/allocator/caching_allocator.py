"""A simulation of torch's CUDA caching allocator.

    requests of a pass ──▶ pieces of the device, each cut into blocks ──▶ bytes of all pieces

A request is served from the smallest free block that is large enough; the block is split. Adjacent
free blocks of a piece are merged. If no block fits, the allocator takes another piece from the
device. So freed memory serves only requests that are no larger, and a small tensor inside it makes
it useless for the next large one.

Source: c10/cuda/CUDACachingAllocator.cpp, default settings, private pool of a CUDA graph.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_MIB = 2**20
_UNIT_BYTES = 512
# Requests up to this size are served from small pieces (``kSmallSize`` of torch).
_SMALL_BYTES = _MIB
_SMALL_PIECE_BYTES = 2 * _MIB
# Requests below this size share pieces of ``_MEDIUM_PIECE_BYTES``; larger ones get a piece of their
# own size, rounded up (``kMinLargeAlloc``).
_MEDIUM_BYTES = 10 * _MIB
_MEDIUM_PIECE_BYTES = 20 * _MIB
PIECE_UNIT_BYTES = 2 * _MIB
LEAST_ROOM_BYTES = _MEDIUM_BYTES
"""Smallest reserved piece: a smaller request would share a medium piece."""


@dataclass(frozen=True)
class Request:
    """One allocation or release.

    Attributes:
        tensor: identifies the tensor among all that exist at the same time.
        size: bytes of an allocation; None for a release.
    """

    tensor: int
    size: int | None = None


def repeated(requests: Sequence[Request], turns: int) -> list[Request]:
    """Return the requests ``turns`` times, each time for other tensors."""
    return [
        # the shift keeps the identifiers of different turns apart; ``turns`` is at most 4
        Request((request.tensor << 2) + turn, request.size)
        for turn in range(turns)
        for request in requests
    ]


def most_at_once(requests: Iterable[Request]) -> int:
    """Return the peak of the allocated bytes, rounded as the allocator rounds.

    This is a lower bound of ``taken`` for every choice of pieces.
    """
    there: dict[int, int] = {}
    now = most = 0
    for request in requests:
        if request.size is None:
            now -= there.pop(request.tensor, 0)
        else:
            there[request.tensor] = _rounded(request.size, _UNIT_BYTES)
            now += there[request.tensor]
            most = max(most, now)
    return most


def taken(requests: Iterable[Request], rooms: Sequence[int] = ()) -> int:
    """Return the bytes of all pieces that serve the requests.

    Args:
        requests: in the order of issue; a release without an allocation belongs to another pool and
            is ignored.
        rooms: sizes in bytes of the pieces that exist, free, before the first request; each at
            least ``LEAST_ROOM_BYTES``.
    """
    memory = _Memory()
    for room in rooms:
        memory.add_piece(_piece(room, small=False), small=False)
    for request in requests:
        if request.size is None:
            memory.free(request.tensor)
        else:
            memory.serve(request.tensor, _rounded(request.size, _UNIT_BYTES))
    return memory.taken


@dataclass(eq=False)
class _Block:
    """A part of a piece, linked to its neighbours."""

    address: int
    size: int
    small: bool
    before: _Block | None = None
    behind: _Block | None = None
    free: bool = True

    @property
    def rank(self) -> tuple[int, int]:
        """Return the key of best fit: the smallest block first, then the lowest address."""
        return self.size, self.address


@dataclass
class _Memory:
    taken: int = 0
    used: dict[int, _Block] = field(default_factory=dict)
    offered: tuple[list[_Block], list[_Block]] = field(default_factory=lambda: ([], []))

    def add_piece(self, size: int, small: bool) -> None:
        self._offer(_Block(self.taken, size, small))
        self.taken += size

    def serve(self, tensor: int, size: int) -> None:
        small = size <= _SMALL_BYTES
        offered = self.offered[small]
        place = bisect_left(offered, (size, 0), key=_rank)
        if place == len(offered):
            self.add_piece(_piece(size, small), small)
            place = bisect_left(offered, (size, 0), key=_rank)
        block = offered.pop(place)
        block.free = False
        # Split only if the remainder is usable: any multiple of 512 bytes in a small piece, more
        # than 1 MiB in a large one (``should_split`` of torch).
        rest = block.size - size
        if rest >= _UNIT_BYTES if small else rest > _SMALL_BYTES:
            behind = _Block(block.address + size, rest, small, block, block.behind)
            if block.behind is not None:
                block.behind.before = behind
            block.size, block.behind = size, behind
            self._offer(behind)
        self.used[tensor] = block

    def free(self, tensor: int) -> None:
        block = self.used.pop(tensor, None)
        if block is None:
            return
        # merge with free neighbours, so that a later large request fits
        if block.behind is not None and block.behind.free:
            self._withdraw(block.behind)
            block = _joined(block, block.behind)
        if block.before is not None and block.before.free:
            self._withdraw(block.before)
            block = _joined(block.before, block)
        self._offer(block)

    def _offer(self, block: _Block) -> None:
        block.free = True
        insort(self.offered[block.small], block, key=_rank)

    def _withdraw(self, block: _Block) -> None:
        offered = self.offered[block.small]
        del offered[bisect_left(offered, block.rank, key=_rank)]


def _rank(block: _Block) -> tuple[int, int]:
    return block.rank


def _joined(first: _Block, second: _Block) -> _Block:
    first.size += second.size
    first.behind = second.behind
    if first.behind is not None:
        first.behind.before = first
    return first


def _piece(size: int, small: bool) -> int:
    if small:
        return _SMALL_PIECE_BYTES
    return _MEDIUM_PIECE_BYTES if size < _MEDIUM_BYTES else _rounded(size, PIECE_UNIT_BYTES)


def _rounded(size: int, unit: int) -> int:
    return max(1, -(-size // unit)) * unit
