"""Units of a format: which layers a format places together, and under which names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_requests import examples

from placer.exports.units import Unit, block_path, modules_of, units_anywhere, units_in_order


def blocks(*layers: str) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    return [(unit.keys, unit.layers) for unit in units_in_order(layers, block_path)]


@pytest.mark.parametrize(
    ("layer", "modules"),
    [
        ("embed", ["embed"]),
        ("layers.0.mlp@1", ["layers.0.mlp"]),
        ("layers.0+norm@2", ["layers.0", "norm"]),
        ("(model)", [""]),
        ("(model)@1", [""]),
    ],
)
def test_a_layers_name_contains_module_paths(layer: str, modules: list[str]) -> None:
    assert modules_of(layer) == modules


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("model.layers.3.mlp.up_proj", "model.layers.3"),
        ("model.layers.3", "model.layers.3"),
        ("layers.3.experts.7", "layers.3"),
        ("0.conv", "0"),
        ("layers.99999", "layers.99999"),
        ("layers.100000", None),  # all blocks up to it would be counted
        ("layers.\N{SUPERSCRIPT TWO}", None),  # a digit that int() refuses
        ("embed", None),
        ("conv1.weight2d", None),
        ("", None),
    ],
)
def test_the_outermost_number_of_a_path_ends_its_block(module: str, block: str | None) -> None:
    assert block_path(module) == block


def test_unnamed_layers_join_the_unit_before_them_and_at_the_start_the_first() -> None:
    assert blocks(
        "embed", "rotary", "h.0.a", "scale", "h.0.b", "between", "h.1", "norm", "head"
    ) == [
        (("h.0",), ("embed", "rotary", "h.0.a", "scale", "h.0.b", "between")),
        (("h.1",), ("h.1", "norm", "head")),
    ]


def test_a_block_that_is_called_again_includes_all_that_runs_between_its_calls() -> None:
    assert blocks("h.0", "h.1", "h.0@1", "h.2") == [
        (("h.0", "h.1"), ("h.0", "h.1", "h.0@1")),
        (("h.2",), ("h.2",)),
    ]


def test_a_merged_layer_joins_the_blocks_of_all_its_modules() -> None:
    assert blocks("h.0.a", "h.0.b+h.1.a", "h.1.b", "h.2") == [
        (("h.0", "h.1"), ("h.0.a", "h.0.b+h.1.a", "h.1.b")),
        (("h.2",), ("h.2",)),
    ]


def test_interleaved_blocks_are_one_unit() -> None:
    assert blocks("a.0.x", "a.1.x", "a.0.y", "a.1.y", "a.2") == [
        (("a.0", "a.1"), ("a.0.x", "a.1.x", "a.0.y", "a.1.y")),
        (("a.2",), ("a.2",)),
    ]


@pytest.mark.parametrize("layers", [("(model)",), ("embed", "norm", "head")])
def test_a_model_without_named_parts_is_one_unit_without_a_key(layers: tuple[str, ...]) -> None:
    assert blocks(*layers) == [((), layers)]


def test_no_layers_have_no_units() -> None:
    assert blocks() == []
    assert units_anywhere([], str) == []


def test_units_in_any_order_hold_all_layers_of_a_module() -> None:
    found = units_anywhere(["a.x", "b", "a.y", "b@1"], lambda path: path.partition(".")[0])
    assert found == [Unit(("a",), ("a.x", "a.y")), Unit(("b",), ("b", "b@1"))]


def test_a_merged_layer_joins_units_in_any_order() -> None:
    found = units_anywhere(["a", "b", "c", "d", "b+d"], str)
    assert found == [
        Unit(("a",), ("a",)),
        Unit(("b", "d"), ("b", "d", "b+d")),
        Unit(("c",), ("c",)),
    ]


LAYERS = st.lists(
    st.sampled_from(
        [
            "embed",
            "h.0.a",
            "h.0.b",
            "h.0.a@1",
            "h.1",
            "h.1@1",
            "h.2.a",
            "h.0.b+h.1",
            "norm",
            "h.2+norm",
        ]
    ),
    unique=True,
    min_size=1,
)


@examples(300)
@given(layers=LAYERS)
def test_units_in_order_are_the_finest_division_that_keeps_blocks_whole(layers: list[str]) -> None:
    """A cut is allowed where no block has layers on both sides, and a named layer follows."""
    named = [[path for m in modules_of(layer) if (path := block_path(m))] for layer in layers]
    begins = [
        cut
        for cut in range(1, len(layers))
        if named[cut]
        and any(named[:cut])
        and not {key for keys in named[:cut] for key in keys}
        & {key for keys in named[cut:] for key in keys}
    ]
    expected = [
        tuple(layers[begin:end])
        for begin, end in zip([0, *begins], [*begins, len(layers)], strict=True)
    ]
    found = units_in_order(layers, block_path)
    assert [unit.layers for unit in found] == expected


@examples(300)
@given(layers=LAYERS)
def test_units_in_any_order_are_the_connected_layers(layers: list[str]) -> None:
    found = units_anywhere(layers, lambda path: block_path(path) or path)
    assert sorted(layer for unit in found for layer in unit.layers) == sorted(layers)
    keys = [key for unit in found for key in unit.keys]
    assert len(keys) == len(set(keys))
    for unit in found:
        named = {block_path(m) or m for layer in unit.layers for m in modules_of(layer)}
        assert named == set(unit.keys)
