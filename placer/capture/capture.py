"""The entry point of capture: from an nn.Module and example inputs to its layer graph.

model, example inputs
  │
  ├─ export (export/) ──▶ inline regions ──▶ group operations ──▶ layer functions ──▶ LayerGraph
  │                                          (grouping.py)        (layer_functions.py)   ▲
  └─ if export refuses the model: run it and watch its modules (hook_path/) ─────────────┘
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from placer.capture import granularity as granularities
from placer.capture.argument_checks import require_module
from placer.capture.batch_dims.batch_layout import Parameters
from placer.capture.batch_dims.declared_layout import (
    DEFAULT_OPTIONS,
    call_layout,
    require_batch_options,
)
from placer.capture.export.export import Exported, export
from placer.capture.granularity import Granularity
from placer.capture.grouping import group_operations
from placer.capture.hook_path.module_trace import trace_modules
from placer.capture.layer_functions import LayerBuilder, find_state
from placer.capture.layers import LayerGraph, graph_hash
from placer.capture.pytrees import flatten_inputs
from placer.errors import CaptureError, InputError, kind_of
from placer.schema import BatchOptions
from placer.utils.option_checks import require_flags


def capture_graph(
    model: nn.Module,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    granularity: Granularity = "auto",
    *,
    hooks: bool = True,
    batch_options: BatchOptions = DEFAULT_OPTIONS,
) -> LayerGraph:
    """Capture the layer graph of a model in its present mode, train or eval.

    Args:
        model: any module; it is not changed.
        args: example positional arguments: a tuple, or one tensor.
        kwargs: example keyword arguments; none by default.
        granularity: where to cut. ``"auto"`` opens large modules, and repeated blocks alike;
            ``"blocks"`` does the same but keeps each repeated block as one layer; ``"submodule"``
            makes a layer of each named child; ``"fine"`` of each leaf module; an integer gives the
            depth; a function of (path, module) returns True for a layer.
        hooks: whether to trace a model that torch.export refuses through forward hooks. The hook
            path runs the model two or three times.
        batch_options: where the samples of the inputs lie.

    Returns:
        The graph. If hooks were needed, ``captured`` is False and ``not_captured_because`` gives
        the reason.

    Raises:
        CaptureError: torch.export refuses the model, and ``hooks`` is False or the model itself
            fails.
        InputError: ``model`` is not an nn.Module, the granularity is unknown, or a lazy module has
            not run yet.
    """
    require_module(model)
    require_flags(hooks=hooks)
    require_batch_options(batch_options)
    if not isinstance(kwargs, dict | None):
        raise InputError(
            f"kwargs is {kind_of(kwargs)}; give a dict of keyword arguments, or none, and the "
            "granularity by its name: capture_graph(model, args, granularity='fine')"
        )
    args = args if isinstance(args, tuple) else (args,)
    kwargs = kwargs or {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise InputError(
                f"{name!r} is not initialised; run the model once, because lazy modules take their "
                "sizes from the first input"
            )
    # Which dimension of each input is the batch decides which sizes the graph leaves open.
    layout = call_layout(
        (args, kwargs), *flatten_inputs(args, kwargs), batch_options, Parameters.from_module(model)
    )
    try:
        exported = export(model, args, kwargs, layout.dims)
    except CaptureError as error:
        if not hooks:
            raise
        reason = str(error)
    else:
        return layer_graph(exported, model, granularity)
    return trace_modules(
        model,
        args,
        kwargs,
        granularity,
        reason,
        layout.size,
        # Outside of the try block: an error of the hook path is not a refusal by torch.export.
    )


def layer_graph(exported: Exported, model: nn.Module, granularity: Granularity) -> LayerGraph:
    """Cut an exported model into layers.

    Args:
        exported: the result of ``export``. Its graph is changed: writes in place become explicit.
        model: the module that was exported.
        granularity: as for ``capture_graph``, or the names of the layers to make.

    Returns:
        The layer graph.
    """
    graph = exported.module.graph
    operations = [node for node in graph.nodes if node.op == "call_function"]
    opened = granularities.opened_modules(granularity, model, operations)
    state = find_state(exported, model)
    builder = LayerBuilder(exported, model, group_operations(graph, opened), state)
    layers = builder.layers()
    values = builder.values()
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
        granularity=granularities.granularity_name(granularity),
        hash=graph_hash(layers),
        model=type(model).__name__,
        result=exported.outputs,
    )
