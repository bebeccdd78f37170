from __future__ import annotations

from collections.abc import Callable

from placer.report import explain
from placer.report.shares import share_texts
from placer.schema import Profile

Make = Callable[..., Profile]


def test_the_layers_that_take_most_come_first_with_their_share(make_profile: Make) -> None:
    lines = share_texts(make_profile({"a": 1.0, "b": 3.0}))
    assert lines[0] == "most time on H200"
    assert [line.split()[0] for line in lines[1:3]] == ["b", "a"]
    assert "75%  9.00 ms" in lines[1] and "25%  3.00 ms" in lines[2]
    assert lines[1].count("█") == 3 * lines[2].count("█")


def test_all_others_are_one_bar_so_that_shares_add_up(make_profile: Make) -> None:
    lines = share_texts(make_profile({f"l{index}": 1.0 for index in range(40)}))
    bars = lines[1 : lines.index("most memory")]
    assert "32 others" in bars[-1] and "80%" in bars[-1]
    assert len(bars) == 9


def test_memory_is_told_beside_time(make_profile: Make) -> None:
    lines = share_texts(make_profile({"a": 1.0, "b": 1.0}))
    assert "50%  5.0 KiB" in lines[lines.index("most memory") + 1]


def test_long_names_are_cut_in_the_middle(make_profile: Make) -> None:
    long = "model.encoder.layers.11.self_attention.projection"
    (line,) = [
        line for line in share_texts(make_profile({long: 2.0, "b": 1.0})) if "projection" in line
    ][:1]
    assert "model.encode…on.projection" in line


def test_layers_that_take_nothing_have_no_bars(make_profile: Make) -> None:
    assert "█" not in "".join(share_texts(make_profile({"a": 0.0, "b": 0.0}))[:2])


def test_one_layer_alone_has_no_shares(make_profile: Make) -> None:
    assert share_texts(make_profile({"a": 1.0})) == []


def test_a_profiles_table_has_them_below(make_profile: Make) -> None:
    assert "most time on H200" in explain(make_profile({"a": 1.0, "b": 3.0}))
