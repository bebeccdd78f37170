"""No client occupies all of a bounded number of places."""

from __future__ import annotations

import pytest

from placer_server.problem import Problem
from placer_server.quota import Quota


def test_a_client_holds_its_share_and_leaves_the_rest_to_others():
    quota = Quota(4, 0.75, "streams", retry_s=3)
    for _ in range(3):
        quota.take("greedy")
    with pytest.raises(Problem, match="3 streams of this client are active") as refused:
        quota.take("greedy")
    assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "3"})
    quota.take("other")
    with pytest.raises(Problem, match="4 streams are active, which is the limit"):
        quota.take("third")
    quota.give_back("greedy")
    quota.take("third")


def test_a_place_is_given_back_whatever_happens():
    quota = Quota(1, 1.0, "streams", retry_s=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), quota.held("a"):
            raise ZeroDivisionError
    with quota.held("a"), pytest.raises(Problem):
        quota.take("a")
