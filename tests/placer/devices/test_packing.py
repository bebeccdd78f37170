"""The pieces of memory that a pass works in, against passes whose needs are known."""

import sys
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from placer import devices
from placer.devices.allocator import caching_allocator
from placer.devices.allocator.caching_allocator import Request
from placer.devices.allocator.packing import TRIALS, WORTH_BYTES, fit, propose

# the package has a function of that name
recording = sys.modules["placer.devices.recording"]
MIB = 2**20
SIZES = st.lists(
    st.tuples(st.integers(1, 4000), st.integers(0, 3000), st.integers(0, 5)), min_size=1, max_size=3
)


def passes(needs):
    """What passes take: all that they need in one piece if that is large enough, else as without it
    beside it."""
    tried = []

    def taken(rooms):
        pieces = [sum(map(sum, each)) for each in rooms]
        tried.append(pieces)
        return [
            piece + small if piece >= need else piece + need + gaps - int(0.3 * piece) + small
            for piece, (need, gaps, small) in zip(pieces, needs, strict=True)
        ]

    return taken, tried


@given(sizes=SIZES)
def test_no_pass_takes_more_than_without_a_piece(sizes):
    needs = [tuple(size * MIB for size in each) for each in sizes]
    taken, _ = passes(needs)
    without = taken([()] * len(needs))
    assert all(new <= old for new, old in zip(taken(fit(taken, without)), without, strict=True))


@given(need=st.integers(200, 4000), share=st.floats(0.1, 1.2))
def test_by_trials_alone_gaps_are_gone_but_for_a_part_in_twenty(need, share):
    taken, tried = passes([(need * MIB, int(share * need) * MIB, MIB)])
    (((piece,),),) = fit(taken, taken([()]))
    assert need * MIB <= piece <= 1.05 * need * MIB
    assert len(tried) == 1 + TRIALS


def test_what_takes_little_is_not_tried():
    taken, tried = passes([(WORTH_BYTES // 4, WORTH_BYTES // 4, 0)] * 2)
    for asked in (None, [[spoiled(5)], [spoiled(5)]]):
        assert fit(taken, taken([(), ()]), asked) == [(), ()]
    assert len(tried) == 2


def spoiled(size):
    """A small tensor that stays takes the room of a large one from the next."""
    mib = size * MIB
    return [Request(0, mib), Request(0), Request(1, 3 * MIB), Request(2, mib), Request(2)]


def drawn(random, length, first=0):
    """Tensors that come and go; about a third of them stay."""
    there, asked = [], []
    for tensor in range(first, first + length):
        asked.append(
            Request(tensor, random.choice([1, 7, 30, 64, 200]) * MIB + random.randrange(MIB))
        )
        there.append(tensor)
        while there and random.random() < 0.4:
            asked.append(Request(there.pop(random.randrange(len(there)))))
    return asked


def test_what_is_asked_for_tells_the_pieces_in_one_trial():
    asked = [[spoiled(400), spoiled(200)], [spoiled(300), []]]
    tried = []

    def taken(rooms):
        tried.append(rooms)
        return [
            sum(
                caching_allocator.taken(row, dict(enumerate(own)).get(stream, ()))
                for stream, row in enumerate(rows)
            )
            for rows, own in zip(asked, rooms, strict=True)
        ]

    found = fit(taken, taken([(), ()]), asked)
    assert len(tried) == 2
    for rows, rooms in zip(asked, found, strict=True):
        for row, pieces in zip(rows, rooms, strict=True):
            assert caching_allocator.taken(row, pieces) <= 1.02 * caching_allocator.most_at_once(
                row
            )
            assert not row or caching_allocator.taken(row) > 1.9 * caching_allocator.most_at_once(
                row
            )


LARGE = [
    77,
    -1,
    72,
    72,
    -2,
    72,
    -3,
    152,
    -5,
    72,
    144,
    -7,
    -4,
    72,
    -6,
    72,
    -8,
    218,
    -10,
    144,
    216,
    -12,
    -9,
    72,
    36,
]
SMALL = [
    4,
    4,
    -1,
    77,
    -3,
    72,
    -2,
    72,
    -4,
    72,
    -5,
    152,
    -7,
    72,
    144,
    -9,
    -6,
    72,
    -8,
    72,
    -10,
    218,
    -12,
    144,
    216,
    -14,
]
"""MiB that a U-Net's last layers asked for backwards on an H200, or which of them went, without
small ones and with."""


@pytest.mark.parametrize(("sizes", "reached"), [(LARGE, 504), (SMALL, 432)])
def test_pieces_as_large_as_a_tensor_are_proposed_beside_one_for_the_rest(sizes, reached):
    asked, came = [], 0
    for size in sizes:
        came += size > 0
        asked.append(Request(came, size * MIB) if size > 0 else Request(-size))
    assert caching_allocator.most_at_once(asked) == 432 * MIB
    assert (
        caching_allocator.taken(asked, propose(asked))
        <= reached * MIB
        < caching_allocator.taken(asked)
    )


@settings(max_examples=20, deadline=None)
@given(random=st.randoms(use_true_random=False), length=st.integers(5, 60))
def test_a_proposal_takes_no_more_than_no_pieces_and_no_less_than_is_there_at_once(random, length):
    asked = drawn(random, length)
    size = caching_allocator.taken(asked, propose(asked))
    assert caching_allocator.most_at_once(asked) <= size <= caching_allocator.taken(asked)


def test_pieces_for_what_is_recorded_twice_serve_it_the_second_time_as_well():
    asked = [
        Request(0, 72 * MIB),
        Request(1, 72 * MIB),
        Request(0),
        Request(2, 96 * MIB),
        Request(2),
        Request(1),
    ]
    twice = caching_allocator.repeated(asked, 2)
    assert (
        caching_allocator.taken(twice, propose(twice))
        <= 200 * MIB
        < 235 * MIB
        < caching_allocator.taken(twice)
    )


def test_of_a_history_what_comes_and_goes_on_one_stream_counts():
    rows = [
        ("alloc", 1, 64, 7),
        ("alloc", 2, 32, 8),
        ("free_requested", 1, 64, 7),
        ("free_completed", 1, 64, 7),
    ]
    rows += [("segment_alloc", 3, 2**21, 7), ("alloc", 1, 16, 7), ("free_completed", 2, 32, 8)]
    history = [dict(zip(("action", "addr", "size", "stream"), row, strict=True)) for row in rows]
    assert [*recording._requests(history, 7)] == [Request(1, 64), Request(1), Request(1, 16)]


def test_where_other_rules_hold_than_those_of_torch_trials_alone_tell():
    asked = [[spoiled(400)]]
    taken, tried = passes([(800 * MIB, 500 * MIB, MIB)])
    (((piece,),),) = fit(taken, taken([()]), asked)
    assert 800 * MIB <= piece <= 840 * MIB
    assert len(tried) == 2 + TRIALS


def test_a_pass_of_which_the_rules_tell_right_is_not_searched_again_for_one_of_which_they_do_not():
    right, searched = spoiled(400), []
    others, _ = passes([(800 * MIB, 500 * MIB, MIB)])

    def taken(rooms):
        searched.append(rooms)
        return [
            sum(caching_allocator.taken(right, own) for own in rooms[0] or [()]),
            *others(rooms[1:]),
        ]

    found = fit(taken, taken([(), ()]), [[right], [spoiled(400)]])
    assert found[0] == (propose(right),)
    assert len(searched) == 2 + TRIALS
    assert all(rooms[0] == () for rooms in searched[2:])


@pytest.mark.gpu
def test_a_recorded_pass_takes_in_one_piece_what_it_holds_at_once():
    """Piece by piece a small tensor that stays takes the room of the first large one from the
    second."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    place, kept = torch.device("cuda", 0), []

    def run() -> None:
        kept.clear()
        torch.empty(400 * MIB, dtype=torch.uint8, device=place)
        kept.append(torch.zeros(3 * MIB, dtype=torch.uint8, device=place))
        torch.empty(400 * MIB, dtype=torch.uint8, device=place)

    rooms = devices.fitting_rooms([run], place)
    kept.clear()
    sizes = []
    for given_rooms in ([], rooms):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(place)
        (replay,) = devices.record([run], place, rooms=given_rooms)
        torch.cuda.empty_cache()
        sizes.append(torch.cuda.memory_reserved(place) - before)
        replay()
    assert sizes[0] > 790 * MIB
    assert sizes[1] < 430 * MIB


def bytes_of_recordings(place):
    """The reserved bytes of all pools of recordings; generators' numbers lie in no such pool."""
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == place.index and segment["segment_pool_id"] != (0, 0)
    )


@pytest.mark.gpu
def test_torchs_allocator_takes_what_its_rules_say(monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    place, random = torch.device("cuda", 0), Random(0)
    asked = [*spoiled(300), *drawn(random, 40, first=3)]
    there = {}

    def run() -> None:
        there.clear()
        for request in asked:
            if request.size is None:
                there.pop(request.tensor, None)
            else:
                there[request.tensor] = torch.empty(request.size, dtype=torch.uint8, device=place)

    seen = []
    monkeypatch.setattr(
        recording, "fit", lambda taken, without, known: seen.extend([without, known]) or [()]
    )
    devices.fitting_rooms([run], place)
    (without,), ((known, beside),) = seen
    assert not beside
    sizes = [request.size for request in known if request.size is not None]
    # Beside them are a generator's numbers, 8 bytes each, which lie elsewhere.
    assert [size for size in sizes if size > 8] == [
        request.size for request in asked if request.size is not None
    ]
    assert without == caching_allocator.taken(asked)
    for rooms in ((300 * MIB,), (300 * MIB, 500 * MIB), propose(asked)):
        there.clear()
        torch.cuda.empty_cache()
        before = bytes_of_recordings(place)
        kept = devices.record([run], place, rooms=[(rooms,)], warm=True)
        assert bytes_of_recordings(place) - before == caching_allocator.taken(asked, rooms)
        kept[0]()
        del kept


@pytest.mark.gpu
def test_passes_that_share_their_memory_take_no_more_than_one_of_them():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    place = torch.device("cuda", 0)

    def run():
        first, second = (torch.empty(72 * MIB, dtype=torch.uint8, device=place) for _ in range(2))
        del first
        third = torch.empty(96 * MIB, dtype=torch.uint8, device=place)
        del third, second

    sizes = []
    for shared in ([], [0]):
        rooms = devices.fitting_rooms([run], place, shared)
        torch.cuda.empty_cache()
        before, pool = torch.cuda.memory_reserved(place), devices.memory_pool(place)
        replays = [
            devices.record([run], place, pools=[pool], rooms=rooms, warm=True)[0] for _ in range(3)
        ]
        sizes.append(torch.cuda.memory_reserved(place) - before)
        del replays
    assert sizes[1] <= 210 * MIB and sizes[1] <= sizes[0]


@pytest.mark.gpu
def test_each_branch_of_a_pass_has_pieces_of_its_own():
    """What one stream has freed serves no other one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    place = torch.device("cuda", 0)

    def branch(size):
        def work():
            torch.empty(size * MIB, dtype=torch.uint8, device=place)
            kept = torch.zeros(3 * MIB, dtype=torch.uint8, device=place)
            torch.empty(size * MIB, dtype=torch.uint8, device=place)
            del kept

        return work

    def run():
        devices.side_by_side([branch(400), branch(300)], place)

    (rooms,) = devices.fitting_rooms([run], place)
    assert len(rooms) == 2 and all(rooms)
    for given_rooms, least, most in (((), 1390, 1450), (rooms, 690, 730)):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(place)
        (replay,) = devices.record([run], place, rooms=[given_rooms])
        torch.cuda.empty_cache()
        assert least * MIB < torch.cuda.memory_reserved(place) - before < most * MIB
        replay()
        del replay
