"""No client takes all of what is bounded."""

from __future__ import annotations

import pytest

from placer_server.problem import Problem
from placer_server.shares import Shares


def test_a_client_holds_its_share_and_leaves_the_rest_to_others():
    shares = Shares(4, 0.75, "streams are open", retry_s=3)
    for _ in range(3):
        shares.take("greedy")
    with pytest.raises(Problem, match="3 streams are open for you") as refused:
        shares.take("greedy")
    assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "3"})
    shares.take("other")
    with pytest.raises(Problem, match="4 streams are open, which is all"):
        shares.take("third")
    shares.give_back("greedy")
    shares.take("third")


def test_a_place_is_given_back_whatever_happens():
    shares = Shares(1, 1.0, "streams are open", retry_s=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), shares.held("a"):
            raise ZeroDivisionError
    with shares.held("a"), pytest.raises(Problem):
        shares.take("a")
