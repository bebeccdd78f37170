"""Values that a text gives to modules, and their lookup by layer."""

from __future__ import annotations

from placer.exports.path_table import PathTable


def test_a_layer_has_the_value_of_the_innermost_path_around_it() -> None:
    table = PathTable({"": 0, "a": 1, "a.b": 2, "ab": 3})
    assert table.of("a.b.c") == {2: "a.b"}
    assert table.of("a.c@1") == {1: "a"}
    assert table.of("abc") == {0: ""}


def test_a_layer_also_has_the_values_of_its_parts() -> None:
    table = PathTable({"a": 1, "a.b": 1, "a.c.d": 2, "a.c.e": 2})
    assert table.of("a") == {1: "a", 2: "a.c.d"}
    assert table.of("a.b+a.c.e") == {1: "a.b", 2: "a.c.e"}
    assert table.of("(model)") == {1: "a", 2: "a.c.d"}
    assert table.of("x") == {}
