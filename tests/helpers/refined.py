"""Models that are refined by a clock that counts floating-point operations instead of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import placer
from placer import Placement, PlacementRequest, Profile, zoo

PLACES = ["cpu:0", "cpu:1"]
TOKENS = torch.arange(32).reshape(2, 16)


def flops(run: Callable[[], Any]) -> float:
    # The counter does not know the product that adds in place, which is how weight gradients are
    # made apart.
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **rest: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        run()
    return float(counter.get_total_flops())


def flops_clock(
    passes: Sequence[Callable[[], None]], device: torch.device, repeats: int
) -> list[float]:
    return [flops(run) for run in passes]


def small_gpt() -> nn.Module:
    return zoo.gpt(layers=2, width=32, heads=2, context=16, vocabulary=50)


def placed(model: nn.Module, x: Any, training: bool) -> tuple[Profile, Placement]:
    return _placed_gpt(training) if x is TOKENS else _placed_now(model, x, training)


@cache
def _placed_gpt(training: bool) -> tuple[Profile, Placement]:
    """Those of every ``small_gpt()``."""
    return _placed_now(small_gpt(), TOKENS, training)


def _placed_now(model: nn.Module, x: Any, training: bool) -> tuple[Profile, Placement]:
    found = placer.profile(model, x, PLACES, training=training, progress=False, repeats=1)
    return found, placer.solve(PlacementRequest(profile=found, chunks=2))


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def refined_by_flops(model: nn.Module, x: Any, training: bool, **options: Any) -> placer.Refinement:
    found, placement = placed(model, x, training)
    return placer.refine(placement, model, x, profile=found, timer=flops_clock, **options)


def device_kind(found: placer.Refinement) -> str:
    (kind,) = found.profile.layers[0].forward_ms
    return kind
