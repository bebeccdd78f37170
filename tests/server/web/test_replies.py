"""Which replies are compressed."""

from __future__ import annotations

import pytest

from placer_server.web.replies import accepts_gzip


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ("gzip", True),
        ("*", True),
        ("br, gzip;q=0.5", True),
        ("*;q=0, gzip", True),
        ("*, gzip;q=0", False),
        ("gzip;q=0, *", False),
        ("br, *;q=0", False),
        ("", False),
    ],
)
def test_gzip_is_judged_by_its_own_entry_before_the_entry_of_all_others(given, accepted):
    assert accepts_gzip(given) is accepted
