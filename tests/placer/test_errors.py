from __future__ import annotations

import pytest
from torch import nn

from placer.errors import kind_of


@pytest.mark.parametrize(
    ("given", "told"), [(1, "an int"), (None, "None"), (nn.Linear(1, 1), "a Linear"), ([], "a list")]
)
def test_a_value_is_told_by_its_kind(given: object, told: str) -> None:
    assert kind_of(given) == told
