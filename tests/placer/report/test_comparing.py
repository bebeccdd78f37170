from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.console import Console

from placer.errors import InputError
from placer.report.comparing import (
    Change,
    Move,
    PlacementComparison,
    ProfileComparison,
    compare,
    comparison_table,
)
from placer.schema import Placement, Profile, Replica

Make = Callable[..., Profile]
Place = Callable[..., Placement]


def text(found: ProfileComparison | PlacementComparison) -> str:
    console = Console(width=140, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(comparison_table(found))
    return captured.get()


def profiles(first: Profile, second: Profile) -> ProfileComparison:
    found = compare(first, second)
    assert isinstance(found, ProfileComparison)
    return found


def test_each_layers_time_is_held_against_the_others(make_profile: Make) -> None:
    found = profiles(make_profile({"a": 1.0, "b": 2.0}), make_profile({"a": 1.5, "b": 2.0}))
    times = {layer.name: layer.time_ms["H200"] for layer in found.layers}
    assert (times["a"].first, times["a"].second, times["a"].ratio) == (3.0, 4.5, 1.5)
    assert [name for name, time in times.items() if time.notable] == ["a"]
    assert (found.time_ms["H200"].first, found.time_ms["H200"].second) == (9.0, 10.5)


def test_what_is_within_the_timings_own_spread_is_not_notable(make_profile: Make) -> None:
    noisy = [make_profile({"a": time}) for time in (1.0, 1.2)]
    noisy = [
        found.model_copy(
            update={"layers": (found.layers[0].model_copy(update={"spread": {"H200": 0.15}}),)}
        )
        for found in noisy
    ]
    assert not profiles(*noisy).layers[0].time_ms["H200"].notable


def test_layers_that_only_one_has_are_listed(make_profile: Make) -> None:
    found = profiles(make_profile({"a": 1.0, "old": 2.0}), make_profile({"a": 1.0, "new": 3.0}))
    by_name = {layer.name: layer.time_ms["H200"] for layer in found.layers}
    assert list(by_name) == ["a", "old", "new"]
    assert by_name["old"] == Change(first=6.0, second=None, notable=True)
    assert by_name["new"] == Change(first=None, second=9.0, notable=True)


def test_profiles_of_other_devices_stand_side_by_side(make_profile: Make) -> None:
    found = profiles(make_profile({"a": 1.0}, "H200"), make_profile({"a": 2.0}, "A100"))
    assert found.time_ms["H200"].second is None
    assert found.time_ms["A100"].first is None


def test_what_they_were_made_with_is_told_where_it_differs(make_profile: Make) -> None:
    found = profiles(
        make_profile({"a": 1.0}, batch_size=8), make_profile({"a": 1.0}, batch_size=16)
    )
    assert found.settings == {"batch_size": ("8", "16")}
    assert "batch_size: 8 | 16" in text(found)


def test_memory_is_compared_as_a_whole(make_profile: Make) -> None:
    first, second = make_profile({"a": 1.0}), make_profile({"a": 1.0})
    larger = second.layers[0].model_copy(update={"saved_bytes": 9 * 1024})
    found = profiles(first, second.model_copy(update={"layers": (larger,)}))
    assert (found.memory_bytes.first, found.memory_bytes.second) == (8 * 1024, 16 * 1024)
    assert "2.00" in text(found)


def test_layers_that_moved_are_told_in_runs(make_placement: Place) -> None:
    loads = {"cuda:0": 3.0, "cuda:1": 3.0}
    first = make_placement(dict.fromkeys("abc", "cuda:0") | dict.fromkeys("de", "cuda:1"), loads)
    second = make_placement(
        {"a": "cuda:0"} | dict.fromkeys("bcd", "cuda:1") | {"e": "cuda:0"}, loads
    )
    found = compare(first, second)
    assert isinstance(found, PlacementComparison)
    assert found.moves == [
        Move(layers=["b", "c"], source="cuda:0", target="cuda:1"),
        Move(layers=["e"], source="cuda:1", target="cuda:0"),
    ]
    assert "b … c (2 layers): cuda:0 -> cuda:1" in text(found)


def test_values_loads_and_memory_of_placements_are_compared(make_placement: Place) -> None:
    found = compare(
        make_placement({"a": "cuda:0"}, {"cuda:0": 4.0}),
        make_placement({"a": "cuda:0"}, {"cuda:0": 3.0, "cuda:1": 1.0}),
    )
    assert isinstance(found, PlacementComparison)
    assert found.objective_value.ratio == 0.75
    assert found.load_ms["cuda:0"].ratio == 0.75
    assert found.load_ms["cuda:1"].first is None
    assert "moved       nothing" in text(found)


def test_values_of_different_objectives_are_not_compared(make_placement: Place) -> None:
    first = make_placement({"a": "cuda:0"}, {"cuda:0": 4.0})
    found = compare(first, first.model_copy(update={"objective": "latency"}))
    assert isinstance(found, PlacementComparison)
    assert found.objective_value.second is None
    assert found.settings == {"objective": ("throughput", "latency")}


def test_a_profile_and_a_placement_cannot_be_compared(
    make_profile: Make, make_placement: Place
) -> None:
    with pytest.raises(InputError, match="a profile and a placement cannot be compared"):
        compare(make_profile({"a": 1.0}), make_placement({"a": "cuda:0"}, {"cuda:0": 1.0}))


def test_a_layer_that_more_devices_hold_has_moved(make_placement: Place) -> None:
    first = make_placement({"a": "cuda:0", "b": "cuda:0"}, {"cuda:0": 2.0})
    members = tuple(Replica(device=f"cuda:{number}", samples=1) for number in (0, 1))
    second = first.model_copy(update={"replicas": {"cuda:0": members}})
    (move,) = compare(first, second).moves
    assert (move.layers, move.source, move.target) == (["a", "b"], "cuda:0", "cuda:0, cuda:1")
