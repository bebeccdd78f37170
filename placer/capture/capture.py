"""nn.Module + example inputs -> layer graph."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from placer.capture import granularity as granularities
from placer.capture.batch_dims.batch_layout import DEFAULT, Parameters, layout_of_inputs
from placer.capture.export.export import Exported, export
from placer.capture.granularity import Granularity
from placer.capture.grouping import group
from placer.capture.hook_path.module_trace import trace
from placer.capture.layer_functions import Builder, find_state
from placer.capture.layers import LayerGraph
from placer.capture.pytrees import flatten_inputs
from placer.capture.user_objects import refuse_no_module
from placer.errors import CaptureError, InputError
from placer.schema import BatchOptions


def capture_graph(
    model: nn.Module,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    granularity: Granularity = "auto",
    *,
    hooks: bool = True,
    batch_options: BatchOptions = DEFAULT,
) -> LayerGraph:
    """Capture the layer graph of a model in its present mode, train or eval.

    Args:
        model: any module; it is not changed.
        args: example positional arguments, a tuple, or one tensor.
        kwargs: example keyword arguments.
        granularity: ``"auto"``: what is large is opened, repeated blocks alike; ``"blocks"``: the
            same, but each repeated block is one layer; ``"submodule"``: the model's named children;
            ``"fine"``: every leaf; a depth; or a function of a module's path and the module, True
            for a layer.
        hooks: whether a model that torch.export refuses is traced through forward hooks; that runs
            the model once.
        batch_options: where the samples of the inputs lie.

    Returns:
        The graph. ``captured`` is False where hooks were needed, and ``not_captured_because`` says
        why.

    Raises:
        CaptureError: torch.export refuses the model, and ``hooks`` is False or the model itself
            fails.
        InputError: the model is none, the granularity is not known, or a lazy module has not run
            yet.
    """
    refuse_no_module(model)
    args = args if isinstance(args, tuple) else (args,)
    kwargs = kwargs or {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise InputError(
                f"{name!r} is not initialised; run the model once: lazy modules take their sizes from that"
            )
    layout = layout_of_inputs(
        (args, kwargs), *flatten_inputs(args, kwargs), batch_options, Parameters.of(model)
    )
    try:
        exported = export(model, args, kwargs, layout.dims)
    except CaptureError as error:
        if not hooks:
            raise
        reason = str(error)
    else:
        return layer_graph(exported, model, granularity)
    return trace(
        model, args, kwargs, granularity, reason, layout.size
    )  # not inside: what fails there is no matter of torch.export


def layer_graph(exported: Exported, model: nn.Module, granularity: Granularity) -> LayerGraph:
    """Cut an exported model into layers.

    Args:
        exported: from ``export``; its graph is changed on the way (writes in place are made
            explicit).
        model: the module that was exported.
        granularity: as for ``capture_graph``, or the names of the layers to make.
    """
    graph = exported.module.graph
    operations = [node for node in graph.nodes if node.op == "call_function"]
    opened = granularities.opened(granularity, model, operations)
    state = find_state(exported, model)
    builder = Builder(exported, model, group(graph, opened), state)
    layers = builder.layers()
    values = builder.values()
    wiring = "\n".join(f"{layer.signature} {layer.reads} {layer.writes}" for layer in layers)
    return LayerGraph(
        layers=layers,
        values=values,
        inputs=tuple(node.name for node in exported.placeholders),
        outputs=builder.outputs(),
        colocated=builder.colocated(),
        state=state.tensors,
        constants=state.constants,
        training=model.training,
        batch_size=exported.batch_size,
        granularity=granularities.label(granularity),
        hash=hashlib.sha256(wiring.encode()).hexdigest()[:32],
        model=type(model).__name__,
        result=exported.outputs,
    )
