"""Which cases of a product of parameters `make test` runs; `make test-integrations` runs the rest.

    @pytest.mark.covering("model", "schedule")
    @pytest.mark.parametrize("model", ...)
    @pytest.mark.parametrize("schedule", ...)
    @pytest.mark.parametrize("chunks", ...)

The cases that run hold every value of each parameter, and every combination of values of the
parameters that the marker names. They are chosen greedily; among equal ones, cases with more new
pairs of values come first, then those whose values were chosen less often, then the earlier ones.
The other cases get the marker ``exhaustive``.

``covering(every=4)`` lets the first case of each four run instead, and ``covering(every=4,
first=2)`` the third. They are for tests whose module has another test with the same values.

``named(VALUES, further=...)`` gives the values of one parameter by name, some of which are further
cases: they are ``exhaustive``, and the marker chooses among the others."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

MARKER, REST = "covering", "exhaustive"

Setting = tuple[str, int]
"""A parameter and the number of one of its values."""


def mark_rest(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of tests with the marker ``covering`` that `make test` leaves out."""
    products: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker(MARKER) and not item.get_closest_marker(REST):
            products[item.nodeid.partition("[")[0], item.name.partition("[")[0]].append(item)
    for cases in products.values():
        marker = cases[0].get_closest_marker(MARKER)
        assert marker is not None
        if every := marker.kwargs.get("every"):
            kept = set(range(marker.kwargs.get("first", 0), len(cases), every))
        else:
            values = [case.callspec.params for case in cases]  # type: ignore[attr-defined]
            kept = set(choose(values, marker.args))
        for place, case in enumerate(cases):
            if place not in kept:
                case.add_marker(REST)


def named(values: Mapping[str, Any], further: Collection[str] = ()) -> list[Any]:
    """Return the values of a parameter, with their names as ids.

    Args:
        values: by name; a tuple gives several parameters.
        further: names of values that run the same code as others: their cases are exhaustive.
    """
    if unknown := {*further} - {*values}:
        raise ValueError(f"`further` names {sorted(unknown)}, which are not values")
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            id=name,
            marks=getattr(pytest.mark, REST) if name in further else (),
        )
        for name, value in values.items()
    ]


def choose(cases: Sequence[dict[str, Any]], together: Sequence[str] = ()) -> list[int]:
    """Return the places of cases that cover a product of parameters.

    Args:
        cases: the values of each case, by parameter.
        together: parameters of which every combination of values is covered.
    """
    unknown = set(together) - {name for case in cases for name in case}
    if unknown:
        raise ValueError(f"the marker names {sorted(unknown)}, which are not parameters")
    numbers: dict[Any, int] = {}
    settings = [
        [
            (name, numbers.setdefault((name, _key(value)), len(numbers)))
            for name, value in case.items()
        ]
        for case in cases
    ]
    needed = [
        {(one,) for one in case} | {tuple(one for one in case if one[0] in together)}
        for case in settings
    ]
    pairs = [set(itertools.combinations(case, 2)) for case in settings]
    missing, new = set().union(*needed), set().union(*pairs)
    uses: Counter[Setting] = Counter()
    chosen = []
    while missing:
        best = max(
            range(len(cases)),
            key=lambda place: (
                len(needed[place] & missing),
                len(pairs[place] & new),
                -sum(uses[setting] for setting in settings[place]),
                -place,
            ),
        )
        chosen.append(best)
        uses.update(settings[best])
        missing -= needed[best]
        new -= pairs[best]
    return sorted(chosen)


def _key(value: Any) -> Any:
    """What is equal for equal values: 1 and True are not."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value
