"""``model_copy(update=...)`` with values that come from JSON or from a user."""

from __future__ import annotations

from typing import Any

import pytest

from placer.errors import InputError
from placer.schema import BatchOptions, Cluster, Constraints, Device, SuggestOptions

DEVICE = {"name": "cpu:0", "type": "cpu", "memory_bytes": 1}
CLUSTER = Cluster(devices=(Device(name="other", type="cpu", memory_bytes=2),))
OPTIONS = SuggestOptions()


def test_a_nested_dictionary_becomes_the_object_that_it_describes() -> None:
    changed = OPTIONS.model_copy(update={"constraints": {"pinned": {"head": "cuda:0"}}})
    assert changed == SuggestOptions(constraints=Constraints(pinned={"head": "cuda:0"}))


def test_dictionaries_in_a_list_become_the_objects_that_they_describe() -> None:
    for devices in ([DEVICE], (DEVICE,)):
        changed = CLUSTER.model_copy(update={"devices": devices})
        assert changed.devices == (Device.model_validate(DEVICE),)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"constraints": {"pined": {}}}, r"SuggestOptions\.constraints\.pined: .*'pinned'"),
        ({"constrains": {}}, r"SuggestOptions\.constrains: .*did you mean 'constraints'"),
        ({"objective": "fast"}, r"SuggestOptions\.objective: should be 'throughput'"),
        ({"chunks": "many"}, r"SuggestOptions\.chunks: .*integer, not 'many'"),
    ],
)
def test_an_invalid_change_is_refused_where_it_is_made(
    update: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        OPTIONS.model_copy(update=update)


def test_functions_stay_the_same_objects() -> None:
    changed = BatchOptions().model_copy(update={"weigh": len, "outputs": {"loss": "mean"}})
    assert (changed.weigh, changed.outputs) == (len, {"loss": "mean"})
