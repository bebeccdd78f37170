"""Comparison of placements, timelines, gradients and responses with frozen results.

A refactoring must change none of them. ``differences.md`` says how to record an intended change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from public_api import Service
from suite import cases, compared, digest, listed_differences, read_frozen, result

CASES = cases()

# Models that take seconds, whose parts others of the list have.
LONG = {
    "model/dictionary inputs",
    "model/dropout of 0",
    "model/lstm",
    "model/residual cnn",
    "model/transformer encoder",
    "model/u-net with skips",
}


@pytest.fixture(scope="module")
def frozen() -> dict[str, dict[str, Any]]:
    return read_frozen()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service() as found:
        yield found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in LONG)) for name in CASES],
)
@pytest.mark.filterwarnings("ignore:the model is not captured")
def test_a_case_gives_what_it_gave_when_it_was_frozen(
    name: str, frozen: dict[str, dict[str, Any]], service: Service
) -> None:
    found = compared(name, frozen[name]["result"], result(CASES[name], service))
    assert not found, f"{len(found)} differences from the frozen result:\n" + "\n".join(found[:20])


def test_every_frozen_case_exists(frozen: dict[str, dict[str, Any]]) -> None:
    assert list(frozen) == sorted(CASES)


def test_the_table_of_differences_names_the_cases_that_were_frozen_again(
    frozen: dict[str, dict[str, Any]],
) -> None:
    changed = {name for name, case in frozen.items() if digest(case["result"]) != case["first"]}
    assert changed <= set(listed_differences()) <= set(CASES)
