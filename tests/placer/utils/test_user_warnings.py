from __future__ import annotations

import warnings

import torch
from torch import nn

from placer import DataFlow


class _Asks(nn.Module):
    """Cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        result: torch.Tensor = self.last(y if y.sum() > 0 else -y)
        return result


def test_a_warning_names_the_line_of_the_caller() -> None:
    flow = DataFlow(_Asks(), ["cpu:0", "cpu:1"])
    flow.update_flow()
    step = flow.train_step(nn.functional.mse_loss)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step(torch.ones(4, 4), torch.ones(4, 1), chunks=2)
        step(torch.ones(4, 4), torch.ones(4, 1), chunks=2)
    (warning,) = told  # once, not for every step
    assert "micro-batches run one after another" in str(warning.message)
    assert "data-dependent" in str(warning.message).lower()
    assert warning.filename == __file__
