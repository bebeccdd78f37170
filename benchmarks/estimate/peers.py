"""The peers' estimates: accelerate's and torch's."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from ..profiler.cases import Case

ACCELERATE = "accelerate estimate-memory"
MEM_TRACKER = "torch's MemTracker"
_STEPS = 2
"""The first step creates the optimizer's state, so the second one has the peak."""


def estimates(case: Case) -> dict[str, float]:
    """Return each peer's estimate of a case's peak in MiB; accelerate only if it is installed."""
    found = {MEM_TRACKER: mem_tracker_bytes(case)}
    if find_spec("accelerate") is not None:
        found[ACCELERATE] = accelerate_bytes(case)
    return {name: size_bytes / 2**20 for name, size_bytes in found.items()}


def accelerate_bytes(case: Case) -> float:
    """Return what ``accelerate estimate-memory`` prints for the model.

    In training it is the column for Adam: weights, gradients and two moments of the weights' dtype.
    """
    model = case.make(torch.device("meta"))
    size = import_module("accelerate.utils").calculate_maximum_sizes(model)[0]
    usage = import_module("accelerate.commands.estimate").estimate_training_usage
    return float(usage(size, "float32")["step"] if case.training else size)


def mem_tracker_bytes(case: Case) -> float:
    """Return the peak that ``MemTracker`` counts on fake tensors, with Adam in training."""
    place = torch.device("cpu")
    model = case.make(torch.device("meta"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        _fill(model, place)
        inputs, _ = case.batch(place, case.micro_batch)
        optimizer = torch.optim.Adam(model.parameters(), foreach=True) if case.training else None
        tracker = MemTracker()
        tracker.track_external(model, inputs, *([optimizer] if optimizer else []))
        for _ in range(_STEPS if optimizer else 1):
            tracker.reset_mod_stats()
            with tracker, torch.set_grad_enabled(case.training):
                output = model(inputs)
                if optimizer is not None:
                    output.mean().backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
                del output
        snapshot = tracker.get_tracker_snapshot("peak")
    return float(
        max(sum(snapshot[place].values()) - snapshot[place]["Total"] for place in snapshot)
    )


def _fill(model: nn.Module, place: torch.device) -> None:
    """Replace parameters and buffers on ``meta`` by fake tensors of a device."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            fake = torch.empty_like(parameter, device=place)
            setattr(module, name, nn.Parameter(fake, parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=place))
