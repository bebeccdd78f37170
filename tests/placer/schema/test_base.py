import pytest

from placer.schema.base import module_paths, paths_around


@pytest.mark.parametrize(
    ("layer", "paths"),
    [
        ("layers.0", ["layers.0"]),
        ("layers.0@2", ["layers.0"]),
        ("a.b+c@1+a.b@1", ["a.b", "c", "a.b"]),
        ("(model)", ["(model)"]),
    ],
)
def test_the_paths_in_a_layers_name_have_no_numbers_of_calls(layer: str, paths: list[str]) -> None:
    assert module_paths(layer) == paths


@pytest.mark.parametrize(("path", "around"), [("", []), ("a", [""]), ("a.b.c", ["a.b", "a", ""])])
def test_the_modules_around_a_module_begin_with_the_innermost(path: str, around: list[str]) -> None:
    assert paths_around(path) == around


def test_the_modules_around_a_deep_module_are_the_outermost_up_to_a_depth() -> None:
    assert paths_around("a.b.c.d", 2) == ["a.b", "a", ""]
    assert len(paths_around("a." * 5_000 + "a", 100)) == 101
