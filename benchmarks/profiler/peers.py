"""The alternatives' predictions of the same case: torchgpipe, a roofline, and accelerate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from ..executor.sample import reason, release
from . import chains, roofline
from .cases import Case

TORCHGPIPE = "torchgpipe's balance_by_time"
ROOFLINE = "FlopCounter with a roofline"
ACCELERATE = "accelerate's size estimate"
_TIMED_S = 1.0


class Counted(nn.Identity):
    """A count of the runs of a chain that begins with this module."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).runs += 1
        return x


def estimates(
    case: Case, model: nn.Module, inputs: Tensor
) -> tuple[dict[str, float], dict[str, str]]:
    """Return each peer's prediction by measure, and the reason of each peer without one.

    Args:
        case: the case.
        model: the model, on the device where it is measured.
        inputs: one micro-batch on the same device.

    Returns:
        ``pass_ms NAME``: a micro-batch through all layers, and back in training; ``state_bytes
        NAME``: what parameters take, with gradients and Adam's state in training.
    """
    asked: list[tuple[str, str, Callable[[], float]]] = [
        ("pass_ms", ROOFLINE, lambda: _roofline_ms(case, model, inputs)),
        ("state_bytes", ACCELERATE, lambda: _accelerate_bytes(case, model)),
    ]
    if case.training:
        asked.append(("pass_ms", TORCHGPIPE, lambda: _torchgpipe_ms(model, inputs)))
    values, missing = {}, {}
    for measure, name, run in asked:
        try:
            values[f"{measure} {name}"] = run()
        except Exception as error:
            missing[name] = str(error) if isinstance(error, LookupError) else reason(error)
        release()
    return values, missing


def _roofline_ms(case: Case, model: nn.Module, inputs: Tensor) -> float:
    def run() -> None:
        with torch.set_grad_enabled(case.training):
            output = model(inputs)
        if case.training:
            output.backward(torch.ones_like(output))

    dtype = next(model.parameters()).dtype
    try:
        return roofline.estimate_ms(run, inputs.device, dtype)
    finally:
        model.zero_grad(set_to_none=True)


def _torchgpipe_ms(model: nn.Module, inputs: Tensor) -> float:
    if find_spec("torchgpipe") is None:
        raise LookupError("not installed")
    times = import_module("torchgpipe.balance.profile").profile_times
    try:
        chain = nn.Sequential(Counted(), *chains.units(copy.deepcopy(model)))
    except TypeError as error:
        raise LookupError(f"needs a chain of modules, and {error}") from error
    Counted.runs = 0
    total_us = float(sum(times(chain, inputs, _TIMED_S, inputs.device)))
    return total_us / 1e3 / Counted.runs


def _accelerate_bytes(case: Case, model: nn.Module) -> float:
    if find_spec("accelerate") is None:
        raise LookupError("not installed")
    size, _ = import_module("accelerate.utils").calculate_maximum_sizes(model)
    return float(size) * (
        4 if case.training else 1
    )  # as in accelerate's estimate-memory: Adam takes four times the model
