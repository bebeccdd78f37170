"""The results of micro-batches, joined to those of the batch."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from placer.errors import InputError
from placer.graph.export import Exported
from placer.graph.layers import Value
from placer.graph.structure import Structure


class Kind(enum.Enum):
    """What an output of a micro-batch is."""

    SAMPLES = "its samples: its first dimension is the batch"
    AMOUNT = "a number that grows with the samples, as theirs does"
    COUNTED = "another number that follows from how many samples there are"
    CONSTANT = "made of no input"
    WHOLE = "made of the micro-batch as a whole"


def output_kind(name: str, value: Value | None, exported: Exported) -> Kind:
    """What an output is by its graph.

    Args:
        name: of the output.
        value: as the graph's layers have it; None of what is none of theirs.
        exported: the graph.
    """
    if value is not None and value.batch_dim == 0:
        return Kind.SAMPLES
    if name in exported.amounts:
        return Kind.AMOUNT if exported.amounts[name] else Kind.COUNTED
    if not exported.batch_symbols and value is not None and value.dtype is None and not value.from_values:
        return Kind.COUNTED  # the graph fixed a size, which was open before
    return Kind.CONSTANT if name in exported.constants else Kind.WHOLE


def gather(
    parts: Sequence[Any], kind: Kind, weights: Sequence[int], path: str, way_out: str = "call the flow with chunks=1"
) -> Any:
    """Join one output of all micro-batches.

    Args:
        parts: the output of each, on one device.
        kind: samples are concatenated; what is made of no input is that of any, if it is one and the same.
        weights: samples in each micro-batch; numbers are averaged by them, as a loss that is a mean over samples is.
        path: where the output stands in the result, for messages.
        way_out: for messages.

    Raises:
        InputError: the output belongs to a micro-batch as a whole and is no number, or is a number that those of parts
            do not tell.
    """
    first = parts[0]
    if kind is Kind.AMOUNT:
        return sum(parts)
    if kind is Kind.COUNTED and len(parts) > 1:
        raise InputError(
            f"output {path or '(the result)'} is a number that follows from how many samples there are, and the "
            f"micro-batches' do not add up to the batch's; {way_out}"
        )
    if all(part is first for part in parts):
        return first
    if kind is Kind.SAMPLES:
        return torch.cat(list(parts))
    if isinstance(first, Tensor) and first.dim() == 0 and first.is_floating_point():
        total = sum(weights)
        return torch.stack([part * (weight / total) for part, weight in zip(parts, weights, strict=True)]).sum()
    if not isinstance(first, Tensor) and all(part == first for part in parts):
        return first
    if kind is Kind.CONSTANT and all(torch.equal(part, first) for part in parts):
        return first
    raise InputError(
        f"output {path or '(the result)'} has no batch dimension, so the micro-batches' results cannot be joined; "
        f"{way_out}"
    )


def join(
    results: Sequence[Sequence[Any]], kinds: Sequence[Kind], weights: Sequence[int], paths: Sequence[str]
) -> list[Any]:
    """Join the outputs of all micro-batches, see ``gather``.

    Args:
        results: the outputs of each micro-batch.
        kinds: what each output is.
        weights: samples in each micro-batch.
        paths: where each output stands in the result.
    """
    if len({len(result) for result in results}) > 1:
        raise InputError(
            "micro-batches of one sample have other results than larger ones, numbers that follow from the batch say; "
            "choose chunks by which each has two samples or more"
        )
    columns = zip(*results, strict=True)
    return [gather(parts, kind, weights, path) for parts, kind, path in zip(columns, kinds, paths, strict=True)]


def refuse_sizes(
    structures: Sequence[Structure], weights: Sequence[int], way_out: str = "call the flow with chunks=1"
) -> None:
    """Refuse numbers in results that may be how many samples a micro-batch has, where no graph tells what they are.

    Args:
        structures: of the result of each micro-batch.
        weights: samples in each.
        way_out: for messages.

    Raises:
        InputError: a number is that of each micro-batch's samples, or differs between them.
    """
    if len(weights) < 2:
        return
    for places in zip(*(structure.numbers for structure in structures), strict=False):
        (path, first), numbers = places[0], [number for _, number in places]
        if numbers == list(weights) or any(number != first for number in numbers):
            raise InputError(
                f"output {path or '(the result)'} is {first}, which may be how many samples the first micro-batch "
                f"has, so that it would be another for the whole batch; {way_out}"
            )
