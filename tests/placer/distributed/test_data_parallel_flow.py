"""A flow inside DistributedDataParallel: what the refusal of its training step names as the way out
is right."""

from __future__ import annotations

import ranked_training as training
import torch
from rank_pool import RankPool
from ranked_models import chain


def test_the_way_out_that_is_named_reduces_gradients_over_processes(ranks: RankPool) -> None:
    torch.manual_seed(0)
    whole, inputs, target, loss_fn = chain()
    loss_fn(whole(inputs), target).backward()
    parts = ranks.run(training.of_wrapped_flow, chain)
    for refusal, gradients in parts:
        assert "loss_fn(ddp(inputs), target).backward()" in refusal
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-10, rtol=1e-10)
