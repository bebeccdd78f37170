"""State on other devices: a capture needs its shapes only."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from placer.capture.capture import capture_graph
from placer.capture.export.tracing_environment import _without_memory, capture_device
from placer.zoo.resnet import BasicBlock, ResNet

CPU = torch.device("cpu")


def test_state_without_memory_is_captured_as_state_with_values() -> None:
    model, x = ResNet(BasicBlock, [1, 1, 1, 1], 5), torch.randn(2, 3, 32, 32)
    bare = copy.deepcopy(model)
    for child in bare.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = nn.Parameter(_without_memory(parameter, CPU))
    assert all(not parameter.untyped_storage().nbytes() for parameter in bare.parameters())
    assert capture_graph(bare, x).hash == capture_graph(model, x).hash


def test_state_in_one_place_is_captured_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert capture_device(nn.Linear(2, 2), []) == CPU
    assert capture_device(nn.Linear(2, 2, device="meta"), []) == torch.device("meta")
    spread = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert capture_device(spread, []) == CPU
    monkeypatch.setattr("placer.devices.default_kind", lambda: "cuda")
    # asked there, whatever comes of it
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    assert capture_device(spread, []) == torch.device("cuda", 0)
