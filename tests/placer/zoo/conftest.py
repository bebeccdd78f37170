from __future__ import annotations

import contextlib
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="session")
def torchvision_models() -> ModuleType:
    """torchvision's models, also where torchvision was installed without its compiled operators."""
    _keep.append(torch.library.Library("torchvision", "DEF"))
    for operator in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms() -> ()",
    ):
        # defined: the compiled operators are there
        with contextlib.suppress(RuntimeError):
            _keep[0].define(operator)
    return pytest.importorskip("torchvision.models")


_keep: list[torch.library.Library] = []  # a library's operators go when it does
