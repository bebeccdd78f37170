"""A stage module for torch.distributed.pipelining: layers, and the values that they exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.layers import Layer, LayerGraph
from placer.capture.weight_grads.deferred import (
    DeferredGradient,
    DeferWeightGradients,
    GradientQueue,
)
from placer.distributed.autograd_boundary import enter, leave
from placer.distributed.output_reach import Flows
from placer.distributed.recomputed_stage import StateTable, cloned, kept_apart, recomputed
from placer.distributed.stage_line import Line
from placer.distributed.state.partial_modules import Names, plant, slot
from placer.distributed.tensor_codec import Parcel
from placer.executor.segments import read_back
from placer.executor.stage_errors import Trail

MARK = torch.float32
"""Dtype of marks and placeholders, independent of each process's default dtype."""


class Deferred(GradientQueue):
    """A queue of deferred weight gradients.

    Attributes:
        reached: the identities of all weights that a backward pass reached.
        idle: whether nothing is deferred, because gradient hooks must run on time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reached: set[int] = set()
        self.idle = False

    def put(self, addition: DeferredGradient) -> None:
        """Defer a weight gradient."""
        super().put(addition)
        self.reached.update(map(id, addition.weights))


@dataclass(frozen=True)
class Work:
    """One layer, the location of its state, and the values without a later reader."""

    layer: Layer
    state: tuple[StateTable, ...]
    forget: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The work of a stage.

    Attributes:
        works: its layers in execution order.
        arrives: the received values; in the first stage, the model's inputs.
        marks_in: whether marks follow them, whose gradient reports what the loss depends on.
        leaves: the sent values; in the last stage, the model's outputs.
        marks_out: the positions of the sent values that marks describe; empty without marks.
        is_first: whether it receives the batch.
        is_last: whether it makes the model's outputs.
        copied: whether sent values are copied right after their layer.
        device: where it runs.
        deferred: the deferred weight gradients, if the schedule splits backward passes.
        recomputes: whether it saves only the inputs of a micro-batch.
        private: buffers that its layers change, and may read again in backward passes.
        trail: records which of its layers runs.
    """

    works: tuple[Work, ...]
    arrives: tuple[Parcel, ...]
    marks_in: bool
    leaves: tuple[Parcel, ...]
    marks_out: tuple[int, ...]
    is_first: bool
    is_last: bool
    copied: bool
    device: torch.device
    deferred: Deferred | None
    recomputes: bool
    private: tuple[StateTable, ...]
    trail: Trail


class StageModule(nn.Module):
    """One stage, whose parameters and buffers have the model's names.

    Args:
        graph: the model's layers.
        cut: the stages of the model, in a line.
        index: the position of this stage in the line.
        lookup: returns a tensor of the model by name.
        names: of the model's tensors.
        device: where it runs.
        flows: the values that gradients flow back through; empty without training.
        split: whether weight gradients have a pass of their own.
        recomputes: whether it saves only the inputs of a micro-batch; then no weight gradient is
            deferred.
    """

    def __init__(
        self,
        graph: LayerGraph,
        cut: Line,
        index: int,
        lookup: Callable[[str], Tensor],
        names: Names,
        device: torch.device,
        *,
        flows: Flows,
        split: bool,
        recomputes: bool = False,
    ) -> None:
        super().__init__()
        stage, is_last = cut.stages[index], index == len(cut.stages) - 1
        layers = [graph.layers[position] for position in stage.layers]
        used = [name for layer in layers for name in layer.state if name not in graph.constants]
        plant(self, {name: lookup(name) for name in dict.fromkeys(used)}, names)
        constants = {name: graph.state[name].detach().to(device) for name in graph.constants}
        state = [
            tuple(
                (constants, name) if name in constants else slot(self, name) for name in layer.state
            )
            for layer in layers
        ]
        forget = _forget(layers, stage.leaves)
        changed = read_back(graph.layers)
        # one attribute only, because a child module of the model may have any name
        self._plan = Plan(
            works=tuple(
                Work(*parts)  # type: ignore[arg-type]
                for parts in zip(layers, state, forget, strict=True)
            ),
            arrives=_parcels(graph, flows, stage.arrives),
            marks_in=index > 0 and flows.depend(stage.arrives),
            leaves=_parcels(graph, flows, stage.leaves),
            marks_out=() if is_last else _marked(stage.leaves, flows),
            is_first=index == 0,
            is_last=is_last,
            copied=cut.reordered,
            device=device,
            deferred=Deferred() if split else None,
            recomputes=recomputes,
            private=tuple(slot(self, name) for name in dict.fromkeys(used) if name in changed),
            trail=Trail(),
        )

    @property
    def plan(self) -> Plan:
        """Return the work of the stage."""
        return self._plan

    def forward(self, *arrived: Tensor) -> Any:
        """Run one micro-batch.

        Args:
            arrived: in the first stage the model's flat inputs; otherwise the values of the
                previous stage.

        Returns:
            The values for the next stage; in the last stage the model's flat outputs, or its only
            output.
        """
        plan = self._plan
        token, inputs = _received(plan, arrived)
        if plan.recomputes and torch.is_grad_enabled():
            made = recomputed(partial(_computed, plan), inputs, _changed(plan))
        else:
            made = _computed(plan, inputs)
        return _sent(plan, token, made)


def weight_pass(stage: StageModule) -> Callable[[], Callable[..., None]]:
    """Return a ``dw_builder`` for ``PipelineStage``.

    Called after a backward pass, it returns the function that computes the deferred weight
    gradients.

    Args:
        stage: a stage created with ``split``.
    """

    def build() -> Callable[..., None]:
        queue = stage.plan.deferred
        assert queue is not None
        # the next micro-batch's backward pass fills the queue again before this pass runs
        taken = list(queue)
        queue.clear()

        def add(*_: Any) -> None:
            for addition in taken:
                addition.run(queue)
            taken.clear()

        return add

    return build


def examples(parcels: Sequence[Parcel], marked: bool, training: bool) -> tuple[Tensor, ...]:
    """Return meta tensors like those between two stages, so that the library need not run them.

    Args:
        parcels: the values.
        marked: whether marks follow them.
        training: whether the library waits for their gradients.
    """
    crossing = [parcel.example(training) for parcel in parcels]
    if marked or not crossing:
        count = sum(parcel.flows for parcel in parcels) if marked else 1
        crossing.append(torch.empty(count, dtype=MARK, device="meta", requires_grad=training))
    return tuple(crossing)


def _received(plan: Plan, arrived: Sequence[Tensor]) -> tuple[Tensor, list[Any]]:
    if plan.is_first:
        wanted = [parcel.value.shape for parcel in plan.arrives]
        # The micro-batches are views of one batch with a common version counter. ``data`` separates
        # them, so that a layer's in-place write does not invalidate the others.
        inputs = [
            tensor.data if shape else tensor.data[0]
            for tensor, shape in zip(arrived, wanted, strict=True)
        ]
        return torch.zeros((), dtype=MARK, device=plan.device), [
            tensor.to(plan.device) for tensor in inputs
        ]
    flows = [parcel.flows for parcel in plan.arrives]
    # marks, or the placeholder that is sent if there are no values
    flows += [False] * (len(arrived) - len(flows))
    token, inside = enter(arrived, flows, plan.marks_in)
    return token, [
        parcel.unpack(tensor) for parcel, tensor in zip(plan.arrives, inside, strict=False)
    ]


def _computed(plan: Plan, inputs: Sequence[Any]) -> list[Any]:
    """Return the values to send, computed from the received ones."""
    names = [parcel.value.name for parcel in plan.arrives]
    values = dict(zip(names, inputs, strict=True))
    kept = _kept(plan, values, names)
    deferred = None if plan.recomputes else plan.deferred
    apart = torch.is_grad_enabled() and not plan.recomputes
    with (
        DeferWeightGradients(deferred)
        if deferred is not None and not deferred.idle
        else nullcontext(),
        kept_apart(plan.private) if apart else nullcontext(),
    ):
        for work in plan.works:
            plan.trail.enter(work.layer.name)
            _run(work, values, plan, kept)
    plan.trail.layer = None  # later failures belong to no layer
    return [kept.get(parcel.value.name, values.get(parcel.value.name)) for parcel in plan.leaves]


def _changed(plan: Plan) -> list[StateTable]:
    """Return the buffers that the layers change."""
    return [
        place
        for work in plan.works
        for name, place in zip(work.layer.state, work.state, strict=True)
        if name in work.layer.mutated
    ]


def _kept(plan: Plan, values: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return copies of values that pass through, if layers might write to them before sending."""
    leaving = {parcel.value.name for parcel in plan.leaves}
    if not plan.copied:
        return {}
    return {name: cloned(values[name]) for name in names if name in leaving}


def _run(work: Work, values: dict[str, Any], plan: Plan, kept: dict[str, Any]) -> None:
    layer = work.layer
    state = [table[key] for table, key in work.state]
    with devices.current(plan.device):
        made = layer.function(
            plan.device,
            state,  # type: ignore[arg-type]
            [values[name] for name in layer.reads],
        )
    values.update(zip(layer.writes, made, strict=True))
    if plan.copied:
        leaving = {parcel.value.name for parcel in plan.leaves}
        kept.update((name, cloned(values[name])) for name in layer.writes if name in leaving)
    for name in work.forget:
        values.pop(name, None)


def _sent(plan: Plan, token: Tensor, made: Sequence[Any]) -> Any:
    if not plan.is_last:
        packed = [
            parcel.pack(value, plan.device) for parcel, value in zip(plan.leaves, made, strict=True)
        ]
        if plan.marks_out or not packed:
            packed.append(torch.zeros(max(1, len(plan.marks_out)), dtype=MARK, device=plan.device))
        return tuple(leave(token, packed, plan.marks_out))
    # The agreed dtype, as between stages: some versions of the library reject autocast's dtype.
    outputs = [
        value.to(parcel.value.dtype).contiguous()
        if isinstance(value, Tensor)
        else parcel.pack(value, plan.device)
        for parcel, value in zip(plan.leaves, made, strict=True)
    ]
    # each separately, so that nothing flows back through an output that the loss does not use
    outputs = [leave(token, [value])[0] if value.requires_grad else value for value in outputs]
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _marked(names: Sequence[str], flows: Flows) -> tuple[int, ...]:
    """Return the positions of the values that marks describe."""
    return (
        tuple(index for index, name in enumerate(names) if flows.through(name))
        if flows.depend(names)
        else ()
    )


def _forget(layers: Sequence[Layer], leaves: Sequence[str]) -> list[tuple[str, ...]]:
    """Return for each layer the values without a later reader."""
    last = {
        name: index for index, layer in enumerate(layers) for name in (*layer.reads, *layer.writes)
    }
    forget: list[list[str]] = [[] for _ in layers]
    for name in last.keys() - set(leaves):
        forget[last[name]].append(name)
    return [tuple(sorted(names)) for names in forget]


def _parcels(graph: LayerGraph, flows: Flows, names: Sequence[str]) -> tuple[Parcel, ...]:
    """Return how each of these values is sent between stages."""
    return tuple(Parcel.for_value(graph.values[name], flows.through(name)) for name in names)
