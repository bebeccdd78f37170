"""A check for DistributedDataParallel, which would never see the gradients of a training step.

It adds up the gradients of all processes by hooks in C++ on the parameters' gradients. The passes
of a training step are recorded over aliases of the parameters, which have no such hooks: each
process would go on with its own gradients.
"""

from __future__ import annotations

import gc
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from placer.errors import InputError

_SEEN, _CLEARED = "placer has seen it", "placer has found no DistributedDataParallel that holds it"
"""Notes on a gradient accumulator."""


def refuse_data_parallel(module: nn.Module) -> None:
    """Refuse a model with parameters that DistributedDataParallel holds.

    Nothing leads from a model to its wrapper, so the function looks through all objects of the
    process. That takes a tenth of a second. It does so only while something holds the gradient
    accumulator of the first trained parameter, as DistributedDataParallel does: once for each
    accumulator.

    Args:
        module: the model.

    Raises:
        InputError: DistributedDataParallel holds a parameter.
    """
    # without, there can be none
    if not (dist.is_available() and dist.is_initialized()):
        return
    if any(isinstance(child, DistributedDataParallel) for child in module.modules()):
        raise _refusal()
    trained = next(
        (parameter for parameter in module.parameters() if parameter.requires_grad), None
    )
    if trained is None or not _is_held(trained):
        return
    notes = _notes(trained)
    if _CLEARED not in notes:
        own = {id(parameter) for parameter in module.parameters()}
        if any(_holds(other, own) for other in gc.get_objects()):
            raise _refusal()
        notes[_CLEARED] = True


def _refusal() -> InputError:
    return InputError(
        "DistributedDataParallel holds parameters of this flow, and reduces only the gradients of "
        "its own backward passes: a training step would leave each process with its own gradients. "
        "Place the model, wrap the flow, ddp = DistributedDataParallel(flow), and train without "
        "train_step: loss_fn(ddp(inputs), target).backward(), then optimizer.step()"
    )


def _is_held(parameter: nn.Parameter) -> bool:
    """Return whether something else holds the parameter's gradient accumulator.

    Autograd makes an accumulator when one is needed, and releases it with the last graph, or hook,
    that has it.
    """
    _notes(parameter)[_SEEN] = True
    return _SEEN in _notes(parameter)


def _notes(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the notes on the parameter's gradient accumulator; a new one has none."""
    # torch declares a method
    notes: dict[str, Any] = cast(Any, get_gradient_edge(parameter).node).metadata
    return notes


def _holds(other: object, parameters: set[int]) -> bool:
    # ``isinstance`` runs code of some objects: of a dead proxy it raises. The type alone is safe.
    is_one = DistributedDataParallel in type(other).__mro__
    return is_one and any(id(one) in parameters for one in cast(nn.Module, other).parameters())
