"""``DataFlows``: a pipeline of several models runs split as it does unsplit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusion import Pipeline, requests
from torch import Tensor, nn

from placer import DataFlows, JointPlacement, suggest_together
from placer.errors import InputError, PlacementError
from placer.executor.placed_model import PlacedModel
from placer.schema import Constraints
from placer.testing import logical_devices

PINNED = {
    "text_encoder/embed": "cpu:1",
    "text_encoder/image": "cpu:0",
    "unet/inc": "cpu:0",
    "unet/down4": "cpu:1",
    "unet/outc": "cpu:0",
    "decoder/0": "cpu:1",
}
"""Layers that make every model use both devices, or the other one than its caller."""


@pytest.fixture(scope="module")
def placement() -> JointPlacement:
    with logical_devices(2):
        return suggest_together(
            Pipeline().uses(),
            devices=2,
            constraints=Constraints(pinned=PINNED),
            granularity="submodule",
            repeats=1,
            cache=False,
            progress=False,
        )


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    with logical_devices(2):
        yield Pipeline()


def _images(pipeline: Pipeline) -> list[Tensor]:
    return [pipeline(*request).cpu() for request in requests()]


def test_a_pipeline_runs_split_as_it_does_unsplit(
    placement: JointPlacement, pipeline: Pipeline
) -> None:
    expected = _images(pipeline)
    flows = DataFlows(pipeline.uses(), placement, 2)
    for name in ("text_encoder", "unet"):
        places = {str(one.device) for one in pipeline.models()[name].parameters()}
        assert len(places) == 2, name
    with flows.applied():
        torch.testing.assert_close(_images(pipeline), expected)
    assert [flow.not_captured_because for flow in flows.values()] == [""] * 3


def test_undo_restores_every_model(placement: JointPlacement, pipeline: Pipeline) -> None:
    expected = _images(pipeline)
    before = [one.device for model in pipeline.models().values() for one in model.parameters()]
    flows = DataFlows(pipeline.models(), placement, 2)
    flows.undo()
    after = [one.device for model in pipeline.models().values() for one in model.parameters()]
    assert after == before
    torch.testing.assert_close(_images(pipeline), expected)


def test_it_is_a_mapping_of_flows(placement: JointPlacement, pipeline: Pipeline) -> None:
    flows = DataFlows(pipeline.models(), placement, 2)
    assert list(flows) == ["text_encoder", "unet", "decoder"] and len(flows) == 3
    ids, _ = requests()[0]
    torch.testing.assert_close(flows["text_encoder"](ids).cpu(), Pipeline().text_encoder(ids))


def test_a_placement_that_does_not_fit_leaves_all_models_in_place(
    placement: JointPlacement, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [one.device for model in pipeline.models().values() for one in model.parameters()]
    moved = PlacedModel.moved

    def moved_but_for_the_decoder(self: PlacedModel, *args: object) -> object:
        if self.module is pipeline.decoder:
            raise PlacementError("no room")
        return moved(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(PlacedModel, "moved", moved_but_for_the_decoder)
    with pytest.raises(PlacementError, match="no room"):
        DataFlows(pipeline.models(), placement, 2)
    after = [one.device for model in pipeline.models().values() for one in model.parameters()]
    assert after == before


def test_a_model_that_lacks_memory_gets_the_memory_of_other_recordings(
    placement: JointPlacement, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _images(pipeline)
    flows = DataFlows(pipeline.models(), placement, 2)
    streams, run = flows["unet"].calls.streams, flows["decoder"].calls._run

    def run_if_there_is_memory(*args: Any) -> Any:
        if streams.pipelines():
            raise torch.OutOfMemoryError("no room")
        return run(*args)

    monkeypatch.setattr(flows["decoder"].calls, "_run", run_if_there_is_memory)
    batch = torch.zeros(1, 5, 16, 16)
    assert len(list(flows["unet"].stream([batch, batch]))) == 2
    assert streams.pipelines()
    with flows.applied():
        torch.testing.assert_close(_images(pipeline), expected)
    assert not streams.pipelines()


def test_a_lack_of_memory_that_no_recording_causes_is_raised(
    placement: JointPlacement, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    flows = DataFlows(pipeline.models(), placement, 2)
    attempts = []

    def fail(*args: object) -> None:
        attempts.append(args)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(flows["decoder"].calls, "_run", fail)
    with flows.applied(), pytest.raises(torch.OutOfMemoryError, match="no room"):
        _images(pipeline)
    assert len(attempts) == 1


def test_models_with_other_names_are_refused(placement: JointPlacement, pipeline: Pipeline) -> None:
    models = {"encoder": pipeline.text_encoder, "unet": pipeline.unet}
    with pytest.raises(InputError, match="models names 'encoder', 'unet', but the placement has"):
        DataFlows(models, placement, 2)


def test_a_placement_of_a_single_model_is_refused(
    placement: JointPlacement, pipeline: Pipeline
) -> None:
    with pytest.raises(InputError, match="placement is a Placement; give the JointPlacement"):
        DataFlows(pipeline.models(), placement.joint, 2)  # type: ignore[arg-type]


def test_what_is_not_a_mapping_is_refused(placement: JointPlacement) -> None:
    with pytest.raises(InputError, match="models is a list; give a dict from names to models"):
        DataFlows([nn.Linear(2, 2)], placement, 2)  # type: ignore[arg-type]
