"""On real GPUs: what a graph costs beside its kernels."""

from __future__ import annotations

import pytest
import torch

from placer import devices


@pytest.mark.gpu
@pytest.mark.alone
def test_a_replay_adds_little_beside_its_kernels() -> None:
    assert 0 <= devices.replay_ms(torch.device("cuda", 0)) < 0.05
