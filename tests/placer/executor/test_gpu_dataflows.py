"""On real GPUs: a pipeline of several models runs split as it does unsplit, and shares memory."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusion import Pipeline, requests
from torch import Tensor, nn

from placer import DataFlows, ModelUse, suggest_together
from placer.schema import Constraints

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]

PINNED = {
    "text_encoder/embed": "cuda:1",
    "text_encoder/image": "cuda:0",
    "unet/inc": "cuda:0",
    "unet/down4": "cuda:1",
    "unet/outc": "cuda:0",
    "decoder/0": "cuda:1",
}


def test_a_pipeline_runs_split_as_it_does_unsplit() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pipeline = Pipeline()
    for model in pipeline.models().values():
        model.cuda(0)
    expected = [pipeline(*request) for request in requests("cuda:0")]
    placement = suggest_together(
        pipeline.uses("cuda:0"),
        devices=2,
        constraints=Constraints(pinned=PINNED),
        granularity="submodule",
        cache=False,
        progress=False,
    )
    flows = DataFlows(pipeline.models(), placement, 2)
    assert len({one.device for one in pipeline.unet.parameters()}) == 2
    with flows.applied():
        for _ in range(6):  # calls that come again may be recorded
            found = [pipeline(*request) for request in requests("cuda:0")]
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    flows.undo()
    assert {one.device.index for one in pipeline.unet.parameters()} == {0}


GIB = 2**30


class _Wide(nn.Module):
    """A layer between whose operations there are two results of 1 GiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1024, 1024)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.layer(x).repeat(1, 256)
        result: Tensor = torch.tanh(wide).unflatten(1, (256, 1024)).mean(dim=1)
        return result


@pytest.mark.alone
def test_recordings_of_one_model_make_room_for_another() -> None:
    x = torch.randn(1024, 1024, device="cuda:0")
    models = {name: _Wide().cuda(0).eval() for name in ("one", "other")}
    with torch.no_grad():
        expected = {name: copy.deepcopy(model)(x) for name, model in models.items()}
    uses = {name: ModelUse(model, x) for name, model in models.items()}
    placement = suggest_together(uses, devices=1, cache=False, progress=False)
    flows = DataFlows(models, placement, 1)
    one, other = flows["one"], flows["other"]
    for result in one.stream([x, x, x]):
        torch.testing.assert_close(result, expected["one"], atol=1e-4, rtol=1e-4)
    assert one.calls.streams.pipelines()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(0)
    ballast = torch.empty(free - GIB, dtype=torch.uint8, device="cuda:0")
    with torch.no_grad():
        found = other(x)
    del ballast
    torch.testing.assert_close(found, expected["other"], atol=1e-4, rtol=1e-4)
    assert not one.calls.streams.pipelines()
    flows.undo()
