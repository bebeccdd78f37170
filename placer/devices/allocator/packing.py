"""A search for the initial memory pieces with which recorded passes reserve the least memory.

If the allocation requests of a pass are known, the simulated allocator ranks many candidates, and
one real run verifies the winner. Otherwise, or if the run disagrees with the simulation, real runs
alone bisect the size of one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations_with_replacement
from random import Random

from placer.devices.allocator import caching_allocator
from placer.devices.allocator.caching_allocator import Request

Pieces = tuple[int, ...]
"""Sizes in bytes of the pieces that exist before a pass begins; empty to let it grow as needed."""

Rooms = tuple[Pieces, ...]
"""For each stream of a pass, the pieces reserved for it. The allocator never serves a stream from
memory that another stream freed."""

Taken = Callable[[Sequence[Rooms]], Sequence[int]]
"""A function from the pieces of each pass to the bytes that each pass then reserves."""

TRIALS = 5
"""Steps of the bisection: they find the size of one piece to 2% of the baseline."""

LEAST_SHARE = 0.4
"""Smallest piece that is tried, as a share of the baseline."""

WORTH_BYTES = 24 * 2**20
"""Passes that reserve less than this are left alone."""

# Small tensors always lie outside the piece. A piece is too small only if more than this share of
# its size lies outside.
_BESIDE_SHARE = 0.02

# If a run reserves more than the simulation by this share, the simulation's rules do not hold.
_OFF_SHARE = 0.02

# More pieces saved no further memory on Inception-v3, ResNet-101 and a U-Net.
_MOST_ROOMS = 2

# Candidates for each number of pieces: random ones, and the maximum of all.
_DRAWN = 60
_COMPUTED = 300

# Number of the largest tensor sizes that are tried as one of two pieces.
_LIKELY = 30

# Number of the largest tensor sizes that are tried in pairs.
_PAIRED = 5

# Stop after this many candidates without an improvement.
_IN_VAIN = 100

# Upper limit of the simulated requests for each number of pieces; bounds the search to seconds.
_MOST_REQUESTS = 300_000

# Stop when the result is within this share of the lower bound.
_ENOUGH_SHARE = 0.002


def fit(
    taken: Taken,
    without: Sequence[int],
    requests: Sequence[Sequence[Sequence[Request]]] | None = None,
) -> list[Rooms]:
    """Return for each pass the pieces with which it reserves the least memory.

    Args:
        taken: runs the passes with given pieces and returns the bytes that they reserve.
        without: bytes that each pass reserves without pieces.
        requests: the requests of each pass by stream; None if they are unknown.
    """
    found: list[Rooms] = [()] * len(without)
    left = [size >= WORTH_BYTES for size in without]
    if requests is not None:
        proposed = [
            tuple(map(propose, rows)) if pays else ()
            for rows, pays in zip(requests, left, strict=True)
        ]
        tried = taken(proposed) if any(map(any, proposed)) else without
        for index, (rows, rooms) in enumerate(zip(requests, proposed, strict=True)):
            expected = sum(map(caching_allocator.taken, rows, rooms))
            # accept the proposal only if the run confirms the simulation
            if left[index] and tried[index] <= (1 + _OFF_SHARE) * expected:
                found[index], left[index] = rooms if tried[index] < without[index] else (), False
    searched = _searched(taken, without, left)
    return [
        other if open_ else rooms for rooms, other, open_ in zip(found, searched, left, strict=True)
    ]


def propose(requests: Sequence[Request]) -> Pieces:
    """Return the pieces with which these requests reserve the least memory.

    A random search: likely pieces first, then random ones, then variations of the best.

    Args:
        requests: all requests of a stream, in order.
    """
    least, pieces = caching_allocator.taken(requests), Pieces()
    most = caching_allocator.most_at_once(requests)
    # a fixed seed: the same model gets the same pieces in every process
    random = Random(0)
    for count in range(1, _MOST_ROOMS + 1):
        best_size, best, found_at = least, Pieces(), 0
        likely = list(_likely(requests, count, most))
        for trial in range(min(_COMPUTED, _MOST_REQUESTS // max(1, len(requests)))):
            if best_size <= (1 + _ENOUGH_SHARE) * most:
                return best
            if trial - found_at > _IN_VAIN:
                break
            if trial < len(likely):
                tried = likely[trial]
            elif trial < len(likely) + _DRAWN or not best:
                tried = _drawn(random, count, most)
            else:
                tried = _varied(random, best, most)
            size = caching_allocator.taken(requests, tried)
            if size < best_size:
                best_size, best, found_at = size, tried, trial
        if best_size < least:
            least, pieces = best_size, best
    return pieces


def _likely(requests: Sequence[Request], count: int, most: int) -> Iterator[Pieces]:
    """Yield candidates that often fit: a piece of the peak size, or two pieces.

    Of two pieces, one has the size of a large tensor, and the other holds the rest or the whole
    peak. Or both have sizes of large tensors, which then alternate between the two.
    """
    if count == 1:
        yield (_room(most),)
        return
    sizes = sorted({_room(request.size) for request in requests if request.size}, reverse=True)
    for size in sizes[:_LIKELY]:
        yield from (
            (_room(whole), size)
            for whole in (most - size, most)
            if whole >= caching_allocator.LEAST_ROOM_BYTES
        )
    yield from (
        pair for pair in combinations_with_replacement(sizes[:_PAIRED], 2) if sum(pair) >= most
    )


def _drawn(random: Random, count: int, most: int) -> Pieces:
    """Return random pieces whose sum is close to the peak."""
    parts = [random.random() for _ in range(count)]
    size = random.uniform(0.85, 1.05) * most / sum(parts)
    return tuple(_room(part * size) for part in parts)


def _varied(random: Random, pieces: Pieces, most: int) -> Pieces:
    """Return the pieces with one of them resized, or with bytes moved to another one."""
    changed: list[float] = list(pieces)
    here, there = random.randrange(len(pieces)), random.randrange(len(pieces))
    if random.random() < 0.6:
        changed[here] *= random.uniform(0.85, 1.15)
    if here != there and random.random() < 0.5:
        moved = random.uniform(-0.1, 0.1) * most
        changed[here], changed[there] = changed[here] + moved, changed[there] - moved
    return tuple(map(_room, changed))


def _room(size: float) -> int:
    units = -(-int(size) // caching_allocator.PIECE_UNIT_BYTES)
    return max(caching_allocator.LEAST_ROOM_BYTES, units * caching_allocator.PIECE_UNIT_BYTES)


def _searched(taken: Taken, without: Sequence[int], worth: Sequence[bool]) -> list[Rooms]:
    """Return one piece for each pass in ``worth``, found by bisection over real runs."""
    least, best = list(without), [0] * len(without)
    enough, scarce = list(least), [int(LEAST_SHARE * size) for size in least]
    for _ in range(TRIALS if any(worth) else 0):
        middles = [(low + high) // 2 for low, high in zip(scarce, enough, strict=True)]
        tried = [_room(size) * pays for size, pays in zip(middles, worth, strict=True)]
        for index, (piece, size) in enumerate(zip(tried, taken(_as_rooms(tried)), strict=True)):
            if worth[index] and size < least[index]:
                best[index], least[index] = piece, size
            # A pass that reserves much beyond the piece needs a larger one; otherwise a smaller
            # piece may do.
            if size - piece > _BESIDE_SHARE * piece:
                scarce[index] = piece
            else:
                enough[index] = piece
    return _as_rooms(best)


def _as_rooms(pieces: Sequence[int]) -> list[Rooms]:
    return [((piece,),) if piece else () for piece in pieces]
