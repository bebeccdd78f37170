"""How many experts of a mixture each token chooses.

The model runs once on ``meta``, on one token, as for the keys and values of its cache.
"""

from __future__ import annotations

import torch
from torch import nn

from placer.capture.expert_stacks import noted_choices, stacks_in
from placer.estimator.kv_cache import run_on_meta, runnable_on_meta


def experts_per_token(model: nn.Module) -> dict[str, int]:
    """Return, by path of a module of experts, how many of them a token chooses.

    Args:
        model: a model of transformers, which ``keys_and_values`` accepts.
    """
    paths = [*stacks_in(model, {name for name, _ in model.named_parameters()})]
    if not paths:
        return {}
    copied = runnable_on_meta(model)
    one = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    with noted_choices(copied, paths) as found, torch.no_grad():
        run_on_meta(copied, {"input_ids": one})
    return found
