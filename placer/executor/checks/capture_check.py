"""Whether a captured graph does what the model does: both run once on an example, forwards and, in
training, backwards.

example ──▶ the model, through hooks ──▶ results, gradients ──┐
└──────▶ the graph's segments ──────▶ results, gradients ──┴▶ equal, or the model runs through hooks
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
from placer.executor.training.stages.weight_aliases import has_hooks

# Of a graph whose batch size is open so many samples are enough.
_SAMPLES = 2

Run = Callable[[Call], tuple[Any, Any]]
"""Runs a call; gives the result, and the arguments as forward left them."""


def difference(module: nn.Module, exported: Exported, part: Part, eager: Run, captured: Run) -> str:
    """Return in which value a graph differs from its model; an empty string if it does not.

    Args:
        module: the model.
        exported: the graph.
        part: inputs that the graph holds for.
        eager: runs the model.
        captured: runs the graph.
    """
    # such operations compile, which no mode may watch
    if nested_ops.has_nested_graphs(exported.module):
        return ""
    state = [*module.parameters(), *module.buffers()]
    if any(tensor.is_meta for tensor in (*state, *part.tensors) if isinstance(tensor, Tensor)):
        return ""  # it is captured anew when it has values
    trained = [one for one in module.parameters() if one.requires_grad] if _trains(module) else []
    for some in (_few(exported, part), part):
        for gradients in (trained, []) if trained else ([],):
            try:
                return _difference(module, some, gradients, eager, captured)
            except torch.OutOfMemoryError:  # forwards alone may have room
                devices.release_cache()
            except Exception:
                # whatever the model's own code raises, on few samples perhaps; a real run will tell
                break
    return ""


def _difference(
    module: nn.Module, part: Part, trained: Sequence[Tensor], eager: Run, captured: Run
) -> str:
    closeness = Closeness.of([*module.parameters(), *part.tensors])
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
    for name, one, other in zip(names, gradients, other_gradients, strict=bool(trained)):
        if not closeness(other, one):
            norms = f"{float(other[0]):.6g} instead of {float(one[0]):.6g}"
            return f"its graph gives another gradient than the model: that of {name!r} has a norm of {norms}"
    return ""


def _trains(module: nn.Module) -> bool:
    """Return whether gradients are compared: in training, and unless hooks of the user would run."""
    return module.training and not any(map(has_hooks, module.parameters()))


def _few(exported: Exported, part: Part) -> Part:
    """Return the first samples of inputs, if the graph holds for so few."""
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
    """Return norm and sum of each parameter's gradient, of a loss that weighs all results unlike."""
    roots = [one for one in leaves if isinstance(one, Tensor) and one.requires_grad]
    if not trained or not roots:
        return []
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
