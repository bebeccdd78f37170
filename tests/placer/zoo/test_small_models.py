from __future__ import annotations

import torch

from placer.zoo import SeqNet, ToyModel


def test_toy_model_is_linear_relu_linear() -> None:
    model = ToyModel()
    x = torch.randn(20, 10)
    hidden = (x @ model.net1.weight.T + model.net1.bias).clamp(min=0)
    torch.testing.assert_close(model(x), hidden @ model.net2.weight.T + model.net2.bias)


def test_seqnet_gives_one_row_of_logits_a_digit() -> None:
    assert SeqNet()(torch.randn(5, 1, 8, 8)).shape == (5, 10)


def test_seqnet_takes_other_sizes_when_told() -> None:
    assert SeqNet(size=28, num_classes=3, width=4)(torch.randn(2, 1, 28, 28)).shape == (2, 3)
