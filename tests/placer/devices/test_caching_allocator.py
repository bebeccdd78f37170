"""The rules of torch's allocator, as its source states them, one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placer.devices.allocator.caching_allocator import Request, most_at_once, repeated, taken

MIB, KIB = 2**20, 2**10


def come(*sizes):
    return [Request(tensor, size) for tensor, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("size", "piece"),
    [
        (1, 2),
        (MIB, 2),
        (MIB + 1, 20),
        (10 * MIB - 512, 20),
        (10 * MIB, 10),
        (10 * MIB + 1, 12),
        (33 * MIB, 34),
    ],
)
def test_a_request_alone_takes_a_piece_of_its_kind(size, piece):
    assert taken(come(size)) == piece * MIB


def test_small_requests_share_pieces_by_units_of_512_bytes():
    assert taken(come(*[512] * 4096)) == 2 * MIB
    assert taken(come(*[513] * 2049)) == 4 * MIB


def test_small_and_large_requests_share_nothing():
    assert taken(come(11 * MIB, KIB)) == (12 + 2) * MIB


def test_a_large_block_is_cut_only_where_more_than_a_mebibyte_is_left():
    assert (
        taken([*come(30 * MIB), Request(0), Request(1, 28 * MIB), Request(2, 2 * MIB)]) == 30 * MIB
    )
    assert (
        taken([*come(30 * MIB), Request(0), Request(1, 29 * MIB), Request(2, 2 * MIB)])
        == (30 + 20) * MIB
    )


def test_the_smallest_block_that_is_large_enough_serves():
    asked = [
        *come(60 * MIB, 20 * MIB),
        Request(0),
        Request(1),
        Request(2, 18 * MIB),
        Request(3, 60 * MIB),
    ]
    assert taken(asked) == 80 * MIB


def test_neighbours_are_joined_when_they_are_free_whatever_the_order():
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        cut = [Request(9, 90 * MIB), Request(9), *come(30 * MIB, 30 * MIB, 30 * MIB)]
        assert (
            taken([*cut, *(Request(tensor) for tensor in order), Request(5, 90 * MIB)]) == 90 * MIB
        )


def test_pieces_are_not_joined():
    assert (
        taken([*come(30 * MIB, 30 * MIB), Request(0), Request(1), Request(2, 60 * MIB)])
        == 120 * MIB
    )


def test_rooms_are_pieces_that_are_there_before():
    gone = [*come(30 * MIB, 30 * MIB), Request(0), Request(1), Request(2, 60 * MIB)]
    assert taken(gone, (60 * MIB,)) == 60 * MIB
    assert taken(gone, (30 * MIB, 60 * MIB)) == 90 * MIB


def test_what_comes_again_may_find_the_blocks_in_an_order_that_does_not_serve():
    """The second large one went into a piece of its own, which serves the first one of the next
    turn."""
    asked = [*come(72 * MIB, 72 * MIB), Request(0), Request(2, 96 * MIB), Request(2), Request(1)]
    assert [taken(repeated(asked, turns), (96 * MIB,)) for turns in (1, 2, 3)] == [
        168 * MIB,
        264 * MIB,
        264 * MIB,
    ]
    assert [taken(repeated(asked, turns), (96 * MIB, 98 * MIB)) for turns in (1, 2, 3)] == [
        194 * MIB
    ] * 3


def test_what_comes_again_is_another_tensor_than_one_that_stayed():
    assert taken(repeated(come(30 * MIB), 3)) == 90 * MIB


def test_what_goes_without_having_come_is_of_other_memory():
    assert taken([Request(7), *come(30 * MIB)]) == 30 * MIB
    assert most_at_once([Request(7), *come(30 * MIB)]) == 30 * MIB


@given(
    st.lists(st.tuples(st.integers(1, 40 * MIB), st.booleans()), min_size=1, max_size=30),
    st.lists(st.integers(10 * MIB, 100 * MIB), max_size=3),
)
def test_no_less_is_taken_than_is_there_at_once(tensors, rooms):
    asked = []
    for tensor, (size, stays) in enumerate(tensors):
        asked += [Request(tensor, size)] + [Request(tensor)] * (not stays)
    assert taken(asked, rooms) >= max(most_at_once(asked), sum(rooms))
