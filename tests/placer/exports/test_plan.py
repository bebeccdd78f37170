"""The check that a format can express a placement, and the segments that it finds."""

from __future__ import annotations

import pytest

from placer.errors import PlacementError
from placer.exports.plan import Plan, Segment, placed_units, segments
from placer.exports.units import Unit, block_path, units_in_order


def plan(**devices: str) -> Plan:
    """Return a plan; ``__`` stands for the dot of a module path."""
    return Plan({name.replace("__", "."): device for name, device in devices.items()}, {})


def units(given: Plan) -> list[Unit]:
    return units_in_order(list(given.layer_devices), block_path)


def test_units_on_one_device_in_a_row_are_a_segment() -> None:
    given = plan(embed="x", h__0="x", h__1="y", h__2="y", norm="y")
    assert segments(given, units(given), "F", "advice") == [
        Segment("x", (Unit(("h.0",), ("embed", "h.0")),)),
        Segment("y", (Unit(("h.1",), ("h.1",)), Unit(("h.2",), ("h.2", "norm")))),
    ]


def test_a_cut_inside_a_unit_names_the_unit_its_layers_and_the_advice() -> None:
    given = plan(h__0__a="x", h__0__b="x", h__0__c="y", h__1="y")
    with pytest.raises(
        PlacementError,
        match=r"^F keeps 'h\.0' on one device.*'h\.0\.a' on x, 'h\.0\.c' on y.*: advice$",
    ):
        placed_units(given, units(given), "F", "advice")


def test_a_second_segment_of_a_device_is_refused_with_both_layers() -> None:
    given = plan(h__0="x", h__1="y", h__2="x")
    with pytest.raises(PlacementError, match=r"gives x both 'h\.0' and, .*'h\.2': advice$"):
        segments(given, units(given), "F", "advice")


def test_a_unit_without_a_key_is_called_the_model() -> None:
    given = plan(embed="x", head="y")
    with pytest.raises(PlacementError, match="F keeps the model on one device"):
        placed_units(given, units(given), "F", "advice")


def test_the_number_of_pipelines_is_the_number_of_replicas() -> None:
    assert Plan({"a": "x"}, {}).pipelines == 1
    assert Plan({"a": "x"}, {"x": ["x", "y", "z"]}).pipelines == 3
