"""Counts of blocks: what they say about layers, written and read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_requests import examples

from placer.errors import InputError, PlacementError
from placer.exports.block_counts import BlockCounts
from placer.exports.plan import Plan


class Counts(BlockCounts):
    """Numbers of blocks, separated by spaces."""

    name = "vllm"
    title = "F"
    source = "this file"

    def text(self, plan: Plan) -> str:
        return " ".join(map(str, self.counts(plan)))

    def read(self, text: str, layers: Sequence[str], devices: Sequence[str]) -> dict[str, str]:
        return self.placed([int(count) for count in text.split()], layers, devices)


COUNTS = Counts()


def plan(devices: str, *layers: str) -> Plan:
    return Plan(dict(zip(layers, devices, strict=True)), {})


def test_layers_around_the_blocks_go_with_the_first_and_the_last_stage() -> None:
    given = plan("xxxyzz", "embed", "h.0", "h.1", "h.2", "h.3", "norm")
    assert COUNTS.text(given) == "2 1 1"
    layers = list(given.layer_devices)
    assert COUNTS.read("2 1 1", layers, "xyz") == given.layer_devices


def test_blocks_that_share_a_merged_layer_count_each() -> None:
    given = plan("xxy", "h.0", "h.0+h.1", "h.2")
    assert COUNTS.text(given) == "2 1"


def test_a_block_without_layers_counts_for_the_block_before_it() -> None:
    assert COUNTS.text(plan("xyy", "h.0", "h.2", "h.3")) == "2 2"
    assert COUNTS.text(plan("xy", "h.1", "h.2")) == "2 1"


def test_the_model_also_counts_blocks_without_layers_at_the_end() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Module()
    model.h = torch.nn.ModuleList([torch.nn.Identity() for _ in range(5)])
    given = Plan({"h.0": "x", "h.2": "y"}, {}, model=model)
    assert COUNTS.text(given) == "2 3"


def test_a_model_without_the_list_is_not_the_model_that_was_placed() -> None:
    torch = pytest.importorskip("torch")
    given = Plan({"h.0": "x", "h.2": "y"}, {}, model=torch.nn.Linear(1, 1))
    with pytest.raises(PlacementError, match="Linear has no list of blocks 'h'"):
        COUNTS.text(given)


@pytest.mark.parametrize(
    ("layers", "have"),
    [(("embed", "head"), "none"), (("encoder.0", "decoder.0"), "several, 'encoder', 'decoder'")],
)
def test_a_model_needs_one_list_of_blocks(layers: tuple[str, ...], have: str) -> None:
    with pytest.raises(PlacementError, match=f"this model has {have}: use a format that names"):
        COUNTS.units(layers)


def test_blocks_run_in_the_order_of_their_numbers() -> None:
    with pytest.raises(PlacementError, match=r"runs 'h\.0' after 'h\.1'"):
        COUNTS.units(["h.1", "h.0"])


def test_the_blocks_of_a_sequential_model_are_its_elements() -> None:
    assert COUNTS.text(plan("xyy", "0", "1", "2")) == "1 2"


def test_a_stage_without_blocks_at_an_end_has_the_layers_there() -> None:
    layers = ["embed", "h.0", "h.1", "norm", "head"]
    assert COUNTS.read("0 2 0", layers, "xyz") == dict(zip(layers, "xyyzz", strict=True))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("1 1 1 1", "states 4 stages, and there are 3 devices"),
        ("2 2", "states 4 blocks in total, and the model has 3 blocks"),
        ("1 2", r"cuts before 'h\.1', which shares calls with 'h\.0'"),
    ],
)
def test_counts_that_do_not_fit_are_refused(text: str, fault: str) -> None:
    with pytest.raises(InputError, match=f"^F {fault}"):
        COUNTS.read(text, ["h.0", "h.1", "h.0@1", "h.2"], "xyz")


@examples(300)
@given(
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(sum),
    before=st.integers(0, 2),
    after=st.integers(0, 2),
)
def test_read_counts_are_written_again_without_empty_stages(
    counts: list[int], before: int, after: int
) -> None:
    layers = [f"a{i}" for i in range(before)]
    layers += [f"h.{i}.{part}" for i in range(sum(counts)) for part in "xy"]
    layers += [f"b{i}" for i in range(after)]
    read = COUNTS.read(" ".join(map(str, counts)), layers, "0123")
    ends_alone = (before and not counts[0]) or (after and not counts[-1])
    if ends_alone:  # no other number of stages says this
        with pytest.raises(PlacementError, match="on one device"):
            COUNTS.text(Plan(read, {}))
        return
    assert COUNTS.text(Plan(read, {})) == " ".join(str(count) for count in counts if count)
