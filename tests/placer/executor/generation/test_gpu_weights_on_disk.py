"""On real GPUs: weights that rest on the disk are read while layers compute."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from resting_models import LAYERS, blocks, pair, placed, placement
from torch import Tensor

import placer
from placer import DataFlow, devices
from placer.devices import mapped_files

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]

OPTIONS = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
COUNT = min(2, torch.cuda.device_count())
PLACES = [f"cuda:{place}" for place in range(COUNT)] * (3 - COUNT)
WIDTH = 1024
STAGING_BYTES = 1 << 20  # smaller than a weight: buffers are overwritten while copies run


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_files, "STAGING_BYTES", STAGING_BYTES)


def _ids(seed: int) -> Tensor:
    return torch.randint(3, 55, (2, 7), generator=torch.Generator().manual_seed(seed)).cuda(0)


@pytest.mark.parametrize("first", [LAYERS, 3])
def test_calls_and_texts_are_those_of_one_gpu(first: int, tmp_path: Path) -> None:
    model, reference = pair(WIDTH)
    flow = placed(model, PLACES, blocks([0]), first, blocks([1, 2, 4, 5]), tmp_path)
    reference = reference.cuda(0)
    with torch.no_grad():
        for seed in (1, 2, 3):
            found = flow(input_ids=_ids(seed), use_cache=False).logits
            expected = reference(input_ids=_ids(seed), use_cache=False).logits
            torch.testing.assert_close(found, expected)
    for seed in (1, 2):
        expected = reference.generate(_ids(seed), **OPTIONS)
        with flow.applied() as applied:
            assert applied.generate(_ids(seed), **OPTIONS).tolist() == expected.tolist()
    assert "rest on the disk" in flow.generation_report.not_recorded_because
    flow.undo()
    files = devices.MappedFiles()
    for one in flow.module.parameters():
        assert devices.location(one) == devices.HOST and files.of(one) is None


def test_files_of_a_checkpoint_that_are_not_cached_are_read(tmp_path: Path) -> None:
    model, reference = pair(WIDTH)
    model.save_pretrained(tmp_path)
    where = placement(PLACES, blocks([0]), LAYERS, blocks([1, 2, 4, 5]))
    with placer.on_meta():
        model = type(model)(model.config).eval()
    placer.load(model, where, tmp_path, progress=False)
    flow = DataFlow(model, inference_only=True)
    flow.update_flow(where)
    reference = reference.cuda(0)
    with torch.no_grad():
        for seed in (1, 2, 3):
            with (tmp_path / "model.safetensors").open() as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            found = flow(input_ids=_ids(seed), use_cache=False).logits
            expected = reference(input_ids=_ids(seed), use_cache=False).logits
            torch.testing.assert_close(found, expected)
