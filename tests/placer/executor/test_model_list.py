"""Every model that must run split does so, with the outputs, gradients and buffers of the unsplit
one."""

from __future__ import annotations

import pytest
import torch
from covering import named
from model_list import CASES, LANGUAGE, SMALL, VISION, Case, converted
from small_requests import THOROUGH
from splitting import assert_split_equals_unsplit

MODES = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


# Models that other tests run split, in training steps, streams or generations, and those like
# another one.
FURTHER = [
    *("unet", "unet_bilinear", "gpt", "gpt_tied", "lstm_time_first", "skips"),
    *("LlamaForCausalLM", "MixtralForCausalLM", "T5ForConditionalGeneration"),
]


@pytest.mark.covering
@MODES
@pytest.mark.parametrize("kind", ["fine", "submodule", "placement"])
@pytest.mark.parametrize("case", named({case.name: case for case in (*SMALL, *LANGUAGE)}, FURTHER))
def test_split_equals_unsplit_under_every_kind_of_map(
    case: Case, kind: str, training: bool
) -> None:
    _compare(case, training, [kind])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "training", [True, pytest.param(False, marks=THOROUGH)], ids=["train", "eval"]
)
@pytest.mark.parametrize("case", VISION, ids=str)
def test_split_equals_unsplit_on_large_vision_models(case: Case, training: bool) -> None:
    _compare(case, training, ["fine"] if training else ["placement"])


def _compare(case: Case, training: bool, kinds: list[str]) -> None:
    args, kwargs = converted(case.inputs(training), torch.float64)
    assert_split_equals_unsplit(case.make, args, kwargs, training=training, kinds=kinds)


def test_the_list_has_every_model_that_was_promised() -> None:
    assert len(CASES) == len(SMALL) + len(LANGUAGE) + len(VISION) == 32
