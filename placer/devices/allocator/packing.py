"""The pieces of memory with which a pass takes the least in all.

Which they are is looked for among many by the allocator's rules, where it is known what the pass
asks for, and then tried. Where that is not known, or a trial shows that other rules hold, one piece
is looked for by trials alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations_with_replacement
from random import Random

from placer.devices.allocator import caching_allocator
from placer.devices.allocator.caching_allocator import Request

Pieces = tuple[int, ...]
"""Sizes, in bytes, of what is there before a pass begins; none: it takes piece by piece."""

Rooms = tuple[Pieces, ...]
"""By stream of a pass, what is there of its own: no stream is served from what another one has
freed."""

Taken = Callable[[Sequence[Rooms]], Sequence[int]]
"""Given the pieces of each pass, what each then takes in all, in bytes."""

TRIALS = 5
"""They find one piece to one part in fifty of what is taken without one."""

LEAST_SHARE = 0.4
"""No piece smaller than this share of what is taken without one is tried."""

WORTH_BYTES = 24 * 2**20
"""What takes less is left as it is."""

# Small tensors always lie beside the piece, so that so much of it beside it does not tell that it
# is too small.
_BESIDE_SHARE = 0.02

# Further off, what was computed was computed by rules that do not hold.
_OFF_SHARE = 0.02

# More gained nothing more on Inception-v3, ResNet-101 and a U-Net.
_MOST_ROOMS = 2

_DRAWN = 60
# So many choices of pieces are drawn, and so many are computed in all, for each number of them.
_COMPUTED = 300

# So many sizes of tensors, the largest, are tried beside what is there else.
_LIKELY = 30

# And so many beside each other.
_PAIRED = 5

# After so many that were no better no more are computed.
_IN_VAIN = 100

# So many requests are gone through at the most for each number of pieces.
_MOST_REQUESTS = 300_000

_ENOUGH_SHARE = 0.002


def fit(
    taken: Taken, without: Sequence[int], asked: Sequence[Sequence[Sequence[Request]]] | None = None
) -> list[Rooms]:
    """By pass, the pieces with which it takes the least.

    Args:
        taken: runs the passes.
        without: what each takes without pieces, in bytes.
        asked: what each asks for, by stream; None where that is not known.
    """
    found: list[Rooms] = [()] * len(without)
    left = [size >= WORTH_BYTES for size in without]
    if asked is not None:
        proposed = [
            tuple(map(propose, rows)) if pays else ()
            for rows, pays in zip(asked, left, strict=True)
        ]
        tried = taken(proposed) if any(map(any, proposed)) else without
        for index, (rows, rooms) in enumerate(zip(asked, proposed, strict=True)):
            said = sum(map(caching_allocator.taken, rows, rooms))
            if left[index] and tried[index] <= (1 + _OFF_SHARE) * said:
                found[index], left[index] = rooms if tried[index] < without[index] else (), False
    searched = _searched(taken, without, left)
    return [
        other if open_ else rooms for rooms, other, open_ in zip(found, searched, left, strict=True)
    ]


def propose(asked: Sequence[Request]) -> Pieces:
    """The pieces with which these requests take the least, of many that are drawn and varied.

    Args:
        asked: all requests of a stream.
    """
    least, pieces = caching_allocator.taken(asked), Pieces()
    most = caching_allocator.most_at_once(asked)
    random = Random(0)
    for count in range(1, _MOST_ROOMS + 1):
        best_size, best, came = least, Pieces(), 0
        likely = list(_likely(asked, count, most))
        for trial in range(min(_COMPUTED, _MOST_REQUESTS // max(1, len(asked)))):
            if best_size <= (1 + _ENOUGH_SHARE) * most:
                return best
            if trial - came > _IN_VAIN:
                break
            if trial < len(likely):
                tried = likely[trial]
            elif trial < len(likely) + _DRAWN or not best:
                tried = _drawn(random, count, most)
            else:
                tried = _varied(random, best, most)
            size = caching_allocator.taken(asked, tried)
            if size < best_size:
                best_size, best, came = size, tried, trial
        if best_size < least:
            least, pieces = best_size, best
    return pieces


def _likely(asked: Sequence[Request], count: int, most: int) -> Iterator[Pieces]:
    """Pieces as large as what is there at once; of two, one is as large as a tensor that is asked
    for, or beside.

    Or both are: then tensors of several sizes change places in them, turn by turn.
    """
    if count == 1:
        yield (_room(most),)
        return
    sizes = sorted({_room(request.size) for request in asked if request.size}, reverse=True)
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
    """Pieces that are together about as large as what is there at once."""
    parts = [random.random() for _ in range(count)]
    size = random.uniform(0.85, 1.05) * most / sum(parts)
    return tuple(_room(part * size) for part in parts)


def _varied(random: Random, pieces: Pieces, most: int) -> Pieces:
    """The same, but one piece is larger or smaller; another one may make up for it."""
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
    """One piece for each pass that is worth it, by trials that halve the sizes that are left."""
    least, best = list(without), [0] * len(without)
    enough, scarce = list(least), [int(LEAST_SHARE * size) for size in least]
    for _ in range(TRIALS if any(worth) else 0):
        middles = [(low + high) // 2 for low, high in zip(scarce, enough, strict=True)]
        tried = [_room(size) * pays for size, pays in zip(middles, worth, strict=True)]
        for index, (piece, size) in enumerate(zip(tried, taken(_as_rooms(tried)), strict=True)):
            if worth[index] and size < least[index]:
                best[index], least[index] = piece, size
            if size - piece > _BESIDE_SHARE * piece:
                scarce[index] = piece
            else:
                enough[index] = piece
    return _as_rooms(best)


def _as_rooms(pieces: Sequence[int]) -> list[Rooms]:
    return [((piece,),) if piece else () for piece in pieces]
