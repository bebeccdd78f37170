from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from placer.capture.pytrees import flatten


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    first: Any
    second: Any = None


@dataclass(frozen=True)
class Frozen:
    value: Any


class Plain:
    def __init__(self, held: Any) -> None:
        self.held = held
        self.label = "plain"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and self.held == other.held


tensors = st.integers(1, 3).map(lambda size: torch.zeros(size))
constants = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.floats(allow_nan=False)
)
keys = st.text(max_size=2) | st.integers(0, 3)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=3)
    dicts = st.dictionaries(keys, inner, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        dicts,
        dicts.map(OrderedDict),
        st.builds(Point, inner, inner),
        st.builds(Record, inner, inner),
        st.builds(Frozen, inner),
        st.builds(Plain, inner),
    )


nests = st.recursive(tensors | constants, _containers, max_leaves=8)


def _same(one: Any, other: Any) -> bool:
    """Return whether containers, constants and tensors are equal, object by object."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if hasattr(one, "__dict__"):
        return _same(vars(one), vars(other))
    return bool(one == other)


@given(nests)
def test_what_was_flattened_is_rebuilt(nest: Any) -> None:
    leaves, structure = flatten(nest)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    assert len(structure.paths) == len(leaves)
    assert _same(structure.unflatten(leaves), nest)


@given(nests)
def test_other_tensors_take_the_same_places(nest: Any) -> None:
    leaves, structure = flatten(nest)
    others = [torch.ones(1) for _ in leaves]
    again, same = flatten(structure.unflatten(others))
    assert len(again) == len(others)
    assert all(ours is theirs for ours, theirs in zip(again, others, strict=True))
    assert same.paths == structure.paths


@given(nests)
def test_flattening_changes_nothing_and_gives_equal_keys_again(nest: Any) -> None:
    (first, one), (second, other) = flatten(nest), flatten(nest)
    assert all(ours is theirs for ours, theirs in zip(first, second, strict=True))
    assert one.key == other.key
    hash(one.key)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1,), (2,)),
        ((1,), [1]),
        ((1,), (True,)),
        ({"a": 1}, {"b": 1}),
        ((torch.zeros(1), None), (None, torch.zeros(1))),
        (Point(torch.zeros(1), 1), Point(torch.zeros(1), 2)),
        (Record(torch.zeros(1)), Record(torch.zeros(1), 3)),
    ],
)
def test_unequal_nests_have_unequal_keys(one: Any, other: Any) -> None:
    assert flatten(one)[1].key != flatten(other)[1].key


def test_paths_say_where_each_tensor_stands() -> None:
    x = torch.zeros(1)
    nest = (x, {"mask": [x]}, Record(Point(x, None)), Plain(x))
    assert flatten(nest)[1].paths == ("[0]", "[1]['mask'][0]", "[2].first.x", "[3].held")


def test_the_order_of_a_dict_is_kept() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    leaves, structure = flatten({"b": x, "a": y})
    assert leaves == [x, y]
    assert list(structure.unflatten(leaves)) == ["b", "a"]


def test_a_defaultdict_keeps_its_factory() -> None:
    nest = defaultdict(list, {"a": torch.zeros(1)})
    leaves, structure = flatten(nest)
    rebuilt = structure.unflatten(leaves)
    assert rebuilt["missing"] == []


def test_modules_functions_and_objects_without_tensors_pass_as_they_are() -> None:
    linear, plain = nn.Linear(1, 1), Plain("text")
    leaves, structure = flatten([linear, print, plain])
    assert leaves == []
    rebuilt = structure.unflatten([])
    assert rebuilt[0] is linear and rebuilt[1] is print and rebuilt[2] is plain


def test_an_object_that_holds_itself_ends() -> None:
    plain = Plain(torch.zeros(1))
    plain.me = plain  # type: ignore[attr-defined]
    leaves, _ = flatten(plain)
    assert len(leaves) == 1


def test_a_transformers_output_is_rebuilt() -> None:
    from model_list import torchvision_models

    torchvision_models()  # transformers imports torchvision
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.CausalLMOutputWithPast(logits=torch.zeros(2), hidden_states=(torch.ones(1),))
    leaves, structure = flatten(output)
    rebuilt = structure.unflatten(leaves)
    assert type(rebuilt) is type(output)
    assert rebuilt.logits is output.logits
    assert rebuilt.loss is None
    assert list(rebuilt) == list(output)
