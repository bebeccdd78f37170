"""Verification of a captured graph: one run each of graph and model, with gradients in training.

    example ──▶ the model, through hooks ──▶ results, gradients ──┐
       └──────▶ the graph's segments ──────▶ results, gradients ──┴▶ equal?

A model whose graph differs runs through hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.batch_dims.batch_layout import Call, Part
from placer.capture.export import nested_ops
from placer.capture.export.export import Exported
from placer.capture.python_state.comparable_runs import RandomNumbers, operations_in_eval_mode
from placer.capture.python_state.isolated_runs import isolated_run
from placer.capture.python_state.module_hooks import without_hooks
from placer.capture.pytrees import flatten
from placer.executor.checks.tolerances import Closeness, shown
from placer.executor.state.parameter_hooks import has_hooks

# Samples that suffice for a graph with a symbolic batch size.
_SAMPLES = 2

Run = Callable[[Call], tuple[Any, Any]]
"""Runs a call and returns the result, and the arguments after in-place changes."""


def difference(module: nn.Module, exported: Exported, part: Part, eager: Run, captured: Run) -> str:
    """Return the first difference between a graph and its model; empty if they agree.

    Args:
        module: the model.
        exported: the graph.
        part: inputs that the graph covers.
        eager: runs the model.
        captured: runs the graph.
    """
    # higher-order operations compile their bodies, which dispatch modes must not watch
    if nested_ops.has_nested_graphs(exported.module):
        return ""
    state = [*module.parameters(), *module.buffers()]
    if any(tensor.is_meta for tensor in (*state, *part.tensors) if isinstance(tensor, Tensor)):
        return ""  # the model is captured again once it has values
    trained = [one for one in module.parameters() if one.requires_grad] if _trains(module) else []
    for some in (_few(exported, part), part):
        for gradients in (trained, []) if trained else ([],):
            try:
                return _difference(module, some, gradients, eager, captured)
            except torch.OutOfMemoryError:  # inference may still fit
                devices.release_cache()
            except Exception:
                # the model's own code may raise anything, perhaps only for few samples; a real run
                # will show it
                break
    return ""


def _difference(
    module: nn.Module, part: Part, trained: Sequence[Tensor], eager: Run, captured: Run
) -> str:
    closeness = Closeness.for_tensors([*module.parameters(), *part.tensors])
    draws, found = RandomNumbers(), []
    for run, drawn in ((eager, draws.recorded), (captured, draws.replayed)):
        with isolated_run(module), without_hooks(module), torch.inference_mode(False):
            with operations_in_eval_mode(), drawn(), torch.set_grad_enabled(bool(trained)):
                result, left = run(_copied(part))
                leaves, structure = flatten((result, left))
                found.append((leaves, structure.paths, _gradients(leaves, trained)))
    (results, paths, gradients), (others, other_paths, other_gradients) = found
    if paths != other_paths:
        return "its graph returns results of another structure than the model"
    for path, one, other in zip(paths, results, others, strict=True):
        if not closeness(other, one):
            where = (
                f"output {path[3:]}"
                if path.startswith("[0]")
                else f"what forward leaves in its inputs ({path[3:]})"
            )
            return f"its graph gives other results than the model: {where} is {shown(one, other)}"
    names = [
        name
        for name, parameter in module.named_parameters()
        if any(parameter is one for one in trained)
    ]
    if len(gradients) != len(other_gradients):
        return "its graph has gradients where the model has none, or none where the model has some"
    # none if no result has a gradient
    for name, one, other in zip(names, gradients, other_gradients, strict=False):
        if not closeness(other, one):
            norms = f"{float(other[0]):.6g} instead of {float(one[0]):.6g}"
            return (
                "its graph gives another gradient than the model: "
                f"the gradient of {name!r} has a norm of {norms}"
            )
    return ""


def _trains(module: nn.Module) -> bool:
    """Return whether gradients are compared: in training, without gradient hooks of the user."""
    return module.training and not any(map(has_hooks, module.parameters()))


def _few(exported: Exported, part: Part) -> Part:
    """Return the first samples of the inputs, if the graph covers so few."""
    if not exported.batch_symbols:
        return part
    each = zip(part.tensors, part.dims, strict=True)
    few = part._replace(
        tensors=[one if dim is None else one.narrow(dim, 0, _SAMPLES) for one, dim in each]
    )
    return few if exported.covers(few.tensors) else part


def _copied(part: Part) -> Call:
    tensors = [one.detach().clone() if isinstance(one, Tensor) else one for one in part.tensors]
    call: Call = part.inputs.unflatten(tensors)
    return call


def _gradients(leaves: Iterable[Any], trained: Sequence[Tensor]) -> list[Tensor]:
    """Return norm and sum of each gradient of a loss with different weights for all results."""
    roots = [one for one in leaves if isinstance(one, Tensor) and one.requires_grad]
    if not trained or not roots:
        return []
    # equal weights would hide errors that cancel, such as permuted results
    weights = [_unlike(one) for one in roots]
    found = torch.autograd.grad(roots, trained, weights, allow_unused=True)
    nothing = torch.zeros(2, dtype=torch.float64)
    return [nothing if one is None else _fingerprint(one) for one in found]


def _unlike(root: Tensor) -> Tensor:
    count = torch.arange(root.numel(), device=root.device, dtype=torch.float64)
    return (count % 7 - 2.5).reshape(root.shape).to(root.dtype)


def _fingerprint(gradient: Tensor) -> Tensor:
    gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
    flat = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).double().flatten()
    return devices.move(torch.stack([flat.norm(), flat.sum()]), devices.HOST)
