"""The results of micro-batches, joined to those of the batch."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from placer.errors import InputError
from placer.graph.export import Exported
from placer.graph.layers import Value
from placer.graph.reduced import Reduction
from placer.graph.structure import Structure


class Kind(enum.Enum):
    """What an output of a micro-batch is."""

    SAMPLES = "its samples: one of its dimensions is the batch"
    AMOUNT = "a number that grows with the samples, as theirs does, or their sum"
    COUNTED = "another number that follows from how many samples there are"
    CONSTANT = "made of no input"
    LARGEST = "the largest number of its samples"
    SMALLEST = "the smallest one"
    TOGETHER = "made of its samples together, so that those of parts do not tell that of the whole"
    WHOLE = "made of the micro-batch as a whole"


OTHERS_OF_ONE = (
    "micro-batches of one sample have other results than larger ones, numbers that follow from the batch say; "
    "choose chunks by which each has two samples or more"
)


@dataclass(frozen=True)
class Output:
    """How the results of micro-batches make that of the batch.

    Attributes:
        kind: what it is.
        dim: of samples, which dimension they are.
    """

    kind: Kind
    dim: int = 0


def output_of(name: str, value: Value | None, exported: Exported) -> Output:
    """What an output is by its graph.

    Args:
        name: of the output.
        value: as the graph's layers have it; None of what is none of theirs.
        exported: the graph.
    """
    if name in exported.sample_dims:
        dim = exported.sample_dims[name]
        return Output(Kind.TOGETHER) if dim is None else Output(Kind.SAMPLES, dim)
    if value is not None and value.batch_dim == 0:
        return Output(Kind.SAMPLES)
    if name in exported.reductions:
        return Output(_REDUCED[exported.reductions[name]])
    if name in exported.amounts:
        return Output(Kind.AMOUNT if exported.amounts[name] else Kind.COUNTED)
    if not exported.batch_symbols and value is not None and value.dtype is None and not value.from_values:
        return Output(Kind.COUNTED)  # the graph fixed a size, which was open before
    return Output(Kind.CONSTANT if name in exported.constants else Kind.WHOLE)


_REDUCED = {
    Reduction.SUM: Kind.AMOUNT,
    Reduction.MEAN: Kind.WHOLE,
    Reduction.LARGEST: Kind.LARGEST,
    Reduction.SMALLEST: Kind.SMALLEST,
    Reduction.TOGETHER: Kind.TOGETHER,
}


def gather(
    parts: Sequence[Any],
    output: Output,
    weights: Sequence[int],
    path: str,
    way_out: str = "call the flow with chunks=1",
) -> Any:
    """Join one output of all micro-batches.

    Args:
        parts: the output of each, on one device.
        output: samples are concatenated; what is made of no input is that of any, if it is one and the same.
        weights: samples in each micro-batch; numbers are averaged by them, as a loss that is a mean over samples is.
        path: where the output stands in the result, for messages.
        way_out: for messages.

    Raises:
        InputError: the output belongs to a micro-batch as a whole and is no number, or is a number that those of parts
            do not tell.
    """
    first, kind = parts[0], output.kind
    if kind is Kind.AMOUNT:
        return sum(parts)
    if kind is Kind.COUNTED and len(parts) > 1:
        raise InputError(
            f"output {path or '(the result)'} is a number that follows from how many samples there are, and the "
            f"micro-batches' do not add up to the batch's; {way_out}"
        )
    if all(part is first for part in parts):
        return first
    if kind is Kind.TOGETHER:
        raise InputError(
            f"output {path or '(the result)'} is made of a micro-batch's samples together, and the micro-batches' do "
            f"not tell the batch's; {way_out}"
        )
    if kind in (Kind.LARGEST, Kind.SMALLEST):
        together = torch.stack(list(parts))
        return together.amax() if kind is Kind.LARGEST else together.amin()
    if kind is Kind.SAMPLES:
        unlike = next((part for part in parts if _beside(part, output.dim) != _beside(first, output.dim)), None)
        if unlike is not None:
            raise InputError(
                f"output {path or '(the result)'} has shape {tuple(first.shape)} for one micro-batch and "
                f"{tuple(unlike.shape)} for another, which cannot be joined; {way_out}"
            )
        return torch.cat(list(parts), output.dim)
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


def _beside(part: Tensor, dim: int) -> tuple[int, ...]:
    """The sizes of its other dimensions."""
    return (*part.shape[:dim], *part.shape[dim + 1 :])


def join(
    results: Sequence[Sequence[Any]], outputs: Sequence[Output], weights: Sequence[int], paths: Sequence[str]
) -> list[Any]:
    """Join the outputs of all micro-batches, see ``gather``.

    Args:
        results: the outputs of each micro-batch.
        outputs: what each is.
        weights: samples in each micro-batch.
        paths: where each output stands in the result.
    """
    if len({len(result) for result in results}) > 1:
        raise InputError(OTHERS_OF_ONE)
    columns = zip(*results, strict=True)
    return [gather(parts, output, weights, path) for parts, output, path in zip(columns, outputs, paths, strict=True)]


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
