"""Every model that must run split does so, with the outputs, gradients and buffers of the unsplit one."""

from __future__ import annotations

import copy

import pytest
import torch
from model_list import CASES, LANGUAGE, SMALL, VISION, Case, converted
from splitting import assert_same, random_placement, scatter_layers, step, twins

from placer import DataFlow
from placer.testing import logical_devices

MODES = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


@MODES
@pytest.mark.parametrize("case", [*SMALL, *LANGUAGE], ids=str)
def test_split_equals_unsplit_under_every_kind_of_map(case: Case, training: bool) -> None:
    _compare(case, training, ["fine", "submodule", "placement"])


@MODES
@pytest.mark.parametrize("case", VISION, ids=str)
def test_split_equals_unsplit_on_large_vision_models(case: Case, training: bool) -> None:
    _compare(case, training, ["fine"] if training else ["placement"])


def _compare(case: Case, training: bool, maps: list[str]) -> None:
    model, reference = twins(case.make, training)
    args, kwargs = converted(case.inputs(training), torch.float64)
    initial = copy.deepcopy(model.state_dict())
    whole = step(reference, reference, args, kwargs)
    captures = DataFlow(model)._program  # of one mode and shape: every flow below would make the same
    for seed, kind in enumerate(maps):
        with logical_devices(4):
            flow = DataFlow(model, fine_grained=kind == "fine")
            flow._program = captures
            if kind == "placement":
                flow.update_flow(random_placement(flow, args, kwargs, seed))
            else:
                scatter_layers(flow, 4, seed)
            split = step(flow, model, args, kwargs)
            assert flow.not_captured_because == ""
            flow.undo()
            model.load_state_dict(initial)
        assert_same(split, whole)


def test_the_list_has_every_model_that_was_promised() -> None:
    assert len(CASES) == len(SMALL) + len(LANGUAGE) + len(VISION) == 31
