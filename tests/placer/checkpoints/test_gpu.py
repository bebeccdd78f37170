"""On real GPUs: checkpoints are loaded onto the devices of a placement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_folders import placed, save_shards
from torch import nn

import placer
from placer import DataFlow

pytestmark = pytest.mark.gpu
PLACES = [f"cuda:{index}" for index in range(torch.cuda.device_count())]


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_every_weight_is_loaded_onto_its_gpu_and_stays_there(suffix: str, tmp_path: Path) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.BatchNorm1d(64)).eval()

    saved, batch = make(), torch.randn(8, 64)
    save_shards(saved.state_dict(), tmp_path, suffix)
    split = {str(number): PLACES[0 if number < 2 else -1] for number in range(5)}
    with placer.on_meta():
        model = make()
    placer.load(model, placed(split), tmp_path, progress=False)
    state = model.state_dict()
    assert {name: str(value.device) for name, value in state.items()} == {
        name: split[name[0]] for name in state
    }
    before = {name: value.data_ptr() for name, value in state.items()}
    flow = DataFlow(model)
    flow.update_flow(placed(split))
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    with torch.no_grad():
        torch.testing.assert_close(flow(batch).cpu(), saved(batch), atol=1e-4, rtol=1e-3)
