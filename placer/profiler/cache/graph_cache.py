"""A cache of captured graphs, found by a footprint of the model, to avoid repeated captures.

    model, inputs ──▶ footprint ──▶ cached? ──▶ graph without layer functions
                                                  │
                                     all layers measured before? ──▶ no capture is needed

Layers that must be measured need their functions, and so a capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import torch
from torch import nn

from placer.capture import granularity as granularities
from placer.capture.batch_dims.batch_layout import Call
from placer.capture.batch_dims.declared_layout import DEFAULT_OPTIONS
from placer.capture.fingerprint import footprint
from placer.capture.granularity import Granularity
from placer.capture.layers import Layer, LayerGraph, Value, named_state
from placer.capture.pytrees import flatten
from placer.profiler.cache.file_cache import Cache, key_of
from placer.profiler.conditions import capture_facts
from placer.schema import BatchOptions

_OF_LAYER = (
    "name",
    "modules",
    "module_type",
    "state",
    "mutated",
    "reads",
    "writes",
    "signature",
    "random",
)
_OF_GRAPH = (
    "inputs",
    "outputs",
    "colocated",
    "training",
    "batch_size",
    "granularity",
    "hash",
    "model",
)


class KnownGraphs:
    """The cached graphs of one model for several calls.

    Args:
        cache: the cache; None finds nothing.
        model: in the mode that is profiled.
        calls: positional and keyword arguments, one call per batch size.
        granularity: how layers are formed. A function has no comparable identity, so nothing is
            found then.
        options: the declared batch layout.
    """

    def __init__(
        self,
        cache: Cache | None,
        model: nn.Module,
        calls: Sequence[Call],
        granularity: Granularity,
        options: BatchOptions = DEFAULT_OPTIONS,
    ) -> None:
        self._cache, self._model = cache, model
        self._keys: list[str] = []
        names_outputs = isinstance(options.outputs, dict) and bool(options.outputs)
        if (
            cache is None or callable(granularity) or names_outputs
        ):  # entries do not hold the names of results
            return
        prints = [footprint(model, *call) for call in calls]
        # An empty footprint means that the model has parts whose identity cannot be compared.
        if all(prints):  # all calls use the layers of the first
            whole = sorted(granularities.repeated_blocks(model)) if granularity == "blocks" else []
            facts = capture_facts() | {
                "first": prints[0],
                "granularity": repr(granularity),
                "blocks": whole,
            }
            facts |= (
                {} if options.inputs == DEFAULT_OPTIONS.inputs else {"batch": repr(options.inputs)}
            )
            self._keys = [key_of(footprint=footprint, **facts) for footprint in prints]

    def read(self) -> list[LayerGraph] | None:
        """Return the graphs, whose layers cannot run; None unless all of them are cached."""
        graphs = [self._read(key) for key in self._keys]
        known = [graph for graph in graphs if graph is not None]
        return known if known and len(known) == len(graphs) else None

    def keep(self, graphs: Sequence[LayerGraph]) -> None:
        """Store captured graphs if their layers have reproducible signatures."""
        for key, graph in zip(self._keys, graphs, strict=False):
            if (
                self._cache is not None
                and graph.captured
                and all(layer.signature_is_complete for layer in graph.layers)
            ):
                self._cache.write("graphs", key, _content(graph))

    def _read(self, key: str) -> LayerGraph | None:
        content = None if self._cache is None else self._cache.read("graphs", key)
        try:
            return None if content is None else _graph(content, self._model)
        except (LookupError, TypeError, ValueError, AttributeError):
            return None


def _content(graph: LayerGraph) -> dict[str, Any]:
    """Return a graph as JSON-serialisable data."""
    named = graph.state.items()
    return {
        "layers": [{name: getattr(layer, name) for name in _OF_LAYER} for layer in graph.layers],
        "values": [
            asdict(value) | {"dtype": _dtype_name(value.dtype)} for value in graph.values.values()
        ],
        "bare": graph.result is not None and graph.result.paths == ("",),
        "constants": {
            name: [list(t.shape), _dtype_name(t.dtype)]
            for name, t in named
            if name in graph.constants
        },
        **{name: getattr(graph, name) for name in _OF_GRAPH},
    }


def _graph(content: dict[str, Any], model: nn.Module) -> LayerGraph:
    """Return the graph that the data describe, over the state of this model."""
    constants = {
        name: torch.empty(shape, dtype=_dtype(dtype), device="meta")
        for name, (shape, dtype) in content["constants"].items()
    }
    state = named_state(model) | constants
    layers = [Layer(**_tuples(fields), function=_absent) for fields in content["layers"]]
    if missing := [name for layer in layers for name in layer.state if name not in state]:
        raise KeyError(missing[0])
    values = [
        Value(**_tuples(fields) | {"dtype": _dtype(fields["dtype"])})
        for fields in content["values"]
    ]
    return LayerGraph(
        layers=layers,
        values={value.name: value for value in values},
        state=state,
        constants=frozenset(constants),
        # the structure of a nested result is not stored
        result=flatten(torch.empty(0))[1] if content["bare"] else None,
        **_tuples({name: content[name] for name in _OF_GRAPH}),
    )


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert JSON lists to tuples."""
    return {name: _tuple(value) for name, value in fields.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def _dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _dtype(name: str | None) -> Any:
    return None if name is None else getattr(torch, name)


def _absent(*_: Any) -> NoReturn:
    raise AssertionError("the layers of a graph that was not captured now do not run")
