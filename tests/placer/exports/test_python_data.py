"""Lists and dictionaries as users of Python engines write and print them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import SplitPoint

from placer.errors import InputError
from placer.exports.python_data import python_data, whole_numbers


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("[1, 2]", [1, 2]),
        (' balance = (1, "a",)\n', (1, "a")),
        ('{"a": true}', {"a": True}),
        ("{'': 0, 'a': None}", {"": 0, "a": None}),
        (repr({"a": torch.device("cuda", 1)}), {"a": "cuda:1"}),
        (repr([torch.device("cpu")]), ["cpu"]),
        ("[torch.device('cuda:1'), torch.device(\"cuda\", 0)]", ["cuda:1", "cuda:0"]),
        (repr({"a": SplitPoint.END}), {"a": "END"}),
        ("{'a': SplitPoint.BEGINNING}", {"a": "BEGINNING"}),
        (repr(OrderedDict(a=1, b="cpu")), {"a": 1, "b": "cpu"}),
    ],
)
def test_json_and_python_literals_are_read(text: str, data: Any) -> None:
    assert python_data(text, "it", "[1]") == data


@settings(max_examples=50)
@given(st.text())
@example("[" * 100_000)
@example("OrderedDict(1)")
@example("{[]: 1}")
@example("1" * 10_000)
@example("[0x" + "f" * 10_000 + "]")
@example("__import__('os')")
def test_other_text_is_refused_with_an_example(text: str) -> None:
    try:
        python_data(text, "the balance", "[2, 3]")
    except InputError as error:
        assert str(error).endswith("give a text such as [2, 3]")


@pytest.mark.parametrize("data", [3, "12", [1.0], [True], {1: 2}, None])
def test_only_lists_of_integers_are_whole_numbers(data: Any) -> None:
    assert whole_numbers(data) is None
