"""Common subexpressions of a pass: an operation that repeats an earlier one is left out.

    layer 0   where(mask, 0, -inf) ── attention          layer 1   where(mask, 0, -inf) ── attention
    becomes   where(mask, 0, -inf) ── attention ────────────────── attention

Layers of one kind derive the same tensors from what all of them are given, and hooks copy what a
module reads whenever it is entered.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from placer.executor.generation.tracing.operation_trace import Operation, Trace, Value, filled


class Distinct(NamedTuple):
    """The operations of a pass that do not repeat others.

    Attributes:
        operations: in order, without operations on Python numbers alone, which a recording keeps.
        omitted: numbers of the values that they leave out.
    """

    operations: list[Operation]
    omitted: set[int]


def distinct(trace: Trace, results: Collection[int]) -> Distinct:
    """Return the operations of a pass, and of equal ones on equal values the first only.

    Args:
        trace: of the pass.
        results: numbers of the values that the caller reads afterwards; each keeps its own memory,
            as does a value that the pass changes in place.
    """
    storages = trace.storages
    own = {storages[number] for number in (*trace.written(), *results)}
    operations = list[Operation]()
    first: dict[Any, Operation] = {}
    same: dict[int, Value] = {}
    for operation in trace.operations:
        operation = _renamed(operation, same)
        if not isinstance(operation.function, torch._ops.OpOverload):
            first = {}  # an action on weights that rest: the same memory gets other numbers
        elif operation.writes:
            written = {storages[number] for number in operation.writes}
            first = {
                key: one
                for key, one in first.items()
                if written.isdisjoint(storages[number] for number in one.reads)
            }
        elif _has_equals(operation) and own.isdisjoint(storages[one] for one in operation.makes):
            known = first.setdefault(_key(operation), operation)
            if known is not operation:
                same.update(zip(operation.makes, map(Value, known.makes), strict=True))
                continue
        if not _is_constant(operation, trace, own):
            operations.append(operation)
    return Distinct(operations, set(same))


def _is_constant(operation: Operation, trace: Trace, own: Collection[int]) -> bool:
    """Return whether the values that an operation makes never change from pass to pass."""
    if all(number in trace.constants for number in operation.makes) and operation.makes:
        return True
    return (
        operation.is_transfer
        and not operation.writes
        and operation.reads[0] in trace.constants
        and trace.storages[operation.makes[0]] not in own
    )


def _has_equals(operation: Operation) -> bool:
    """Return whether an equal operation has equal results, unlike one that draws numbers."""
    return torch.Tag.nondeterministic_seeded not in operation.function.tags


def _key(operation: Operation) -> Any:
    arguments = repr((operation.args, operation.kwargs))
    return operation.function, arguments, operation.device


def _renamed(operation: Operation, same: dict[int, Value]) -> Operation:
    """Return an operation that reads the first one of equal values."""
    if same.keys().isdisjoint(operation.reads):
        return operation
    numbers = {number: same.get(number, Value(number)) for number in operation.reads}
    return replace(
        operation,
        args=filled(operation.args, numbers),
        kwargs=filled(operation.kwargs, numbers),
        reads=[numbers[number].number for number in operation.reads],
    )
