"""The piece of memory that a pass works in, against passes whose needs are known."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from placer import devices
from placer.devices.fitting import TRIALS, WORTH_BYTES, fit

MIB = 2**20
SIZES = st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 3000), st.integers(0, 5)), min_size=1, max_size=3)


def passes(needs):
    """What passes take: all that they need in one piece if that is large enough, else as without it beside it."""
    tried = []

    def taken(pieces):
        tried.append(list(pieces))
        return [
            piece + small if piece >= need else piece + need + gaps - int(0.3 * piece) + small
            for piece, (need, gaps, small) in zip(pieces, needs, strict=True)
        ]

    return taken, tried


@given(sizes=SIZES)
def test_no_pass_takes_more_than_without_a_piece(sizes):
    needs = [tuple(size * MIB for size in each) for each in sizes]
    taken, _ = passes(needs)
    without = taken([0] * len(needs))
    assert all(new <= old for new, old in zip(taken(fit(taken, without)), without, strict=True))


@given(need=st.integers(200, 4000), share=st.floats(0.1, 1.2))
def test_gaps_are_gone_but_for_a_part_in_twenty(need, share):
    taken, tried = passes([(need * MIB, int(share * need) * MIB, MIB)])
    (piece,) = fit(taken, taken([0]))
    assert need * MIB <= piece <= 1.05 * need * MIB
    assert len(tried) == 1 + TRIALS


def test_what_takes_little_is_not_tried():
    taken, tried = passes([(WORTH_BYTES // 4, WORTH_BYTES // 4, 0)] * 2)
    assert fit(taken, taken([0, 0])) == [0, 0]
    assert len(tried) == 1


@pytest.mark.gpu
def test_a_recorded_pass_takes_in_one_piece_what_it_holds_at_once():
    """Piece by piece a small tensor that stays takes the room of the first large one from the second."""
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
