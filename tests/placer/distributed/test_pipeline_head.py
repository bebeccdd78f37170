"""The loss in the process of the last stage: what it reads by itself must be there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from placer.capture.pytrees import flatten
from placer.distributed.pipeline_head import Head
from placer.distributed.replicas import Pipelines
from placer.errors import InputError
from placer.executor.output_joining import Joining
from placer.executor.training.loss.loss_weights import Weighing
from placer.schema import BatchOptions


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_loss_reads_no_parameter_of_another_process(elsewhere: bool) -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 2)

    def decayed(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).pow(2).mean() + (first if elsewhere else last).weight.pow(2).sum()

    output = last(torch.ones(3, 4))
    parcel: Any = SimpleNamespace(value=SimpleNamespace(dtype=output.dtype))
    named = {id(parameter): f"first.{name}" for name, parameter in first.named_parameters()}
    head = Head(
        Weighing(decayed, BatchOptions()),
        flatten(output)[1],
        [parcel],
        Joining(),
        [3],
        torch.device("cpu"),
        named,
        Pipelines(),
    )
    if elsewhere:
        with pytest.raises(
            InputError, match=r"loss_fn reads 'first.weight', which belongs to another process"
        ):
            head.loss(output, torch.zeros(3, 2))
    else:
        assert head.loss(output, torch.zeros(3, 2)).requires_grad
