"""Whether a batch may be cut into micro-batches: what a small one of its kind gives whole and cut,
compared once.

    first samples of a batch ──▶ whole ─────────────▶ result ──┐
             └───────────────▶ two micro-batches ──▶ joined ──┴▶ equal: the rules by which results
             are joined
                                                              └▶ unlike: BatchError, which names the
                                                              output

Batches are of one kind that have the same structure, types and numbers of dimensions, whatever
their sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from placer.capture.batch_dims.batch_layout import BatchLayout, Call, Parameters, call_values
from placer.capture.batch_dims.declared_layout import call_layout
from placer.capture.python_state.comparable_runs import RandomNumbers, operations_in_eval_mode
from placer.capture.python_state.isolated_runs import BufferValues, isolated_run
from placer.capture.python_state.module_hooks import without_hooks
from placer.capture.pytrees import flatten_inputs
from placer.errors import BatchError, InputError
from placer.executor.checks.label_counts import (
    LabelWeights,
    LateCounts,
    Uneven,
    uneven,
    unlike_counts,
)
from placer.executor.checks.tolerances import Closeness, shown
from placer.executor.output_joining import Difference, Joining, find_rules
from placer.schema import BatchOptions
from placer.schema.batch_options import OTHERS, Cut
from placer.utils.user_warnings import warn

Run = Callable[[Call], Any]
"""Runs the model, as it is placed, on positional and keyword arguments."""
Weights = Callable[[int], Tensor | None]
"""From the number of samples in a batch to the weight of each, shape ``(N,)``; None if all weigh
alike."""

# Samples in a micro-batch of the comparison, if the batch's have as many: code may treat a single
# sample apart.
_SLICE = 2
_KNOWN = 1000
# Batches that are compared where results of the first ones, such as zeros, leave several rules
# open.
_LOOKS = 3


@dataclass
class _Kind:
    """What was seen of a kind of batches.

    Attributes:
        joining: how results are joined.
        looks: batches that were compared.
        is_decided: whether no other batch has to decide between several rules.
        sizes: of the micro-batches for which that holds; None for all.
        uneven: what micro-batches had unequal shares of.
    """

    joining: Joining
    looks: int
    is_decided: bool
    sizes: tuple[int, ...] | None
    uneven: Uneven = frozenset()


class BatchChecks:
    """The kinds of batches that were compared so far.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: dict[Hashable, _Kind] = {}
        self._late = LateCounts()

    def joining(
        self,
        call: Call,
        parameters: Parameters,
        layout: BatchLayout,
        sizes: Sequence[int],
        options: BatchOptions,
        mode: Hashable,
        run: Run,
        weigh: Weights = lambda size: None,
        can_be_run: Callable[[], bool] = lambda: True,
    ) -> Joining:
        """Return how the results of these micro-batches are joined, once it is seen that they give
        the batch's.

        Args:
            call: the arguments of the batch.
            parameters: of the model's forward method.
            layout: where their samples lie.
            sizes: samples in each micro-batch.
            options: what was declared.
            mode: what else tells batches apart, such as whether the model trains.
            run: runs the model.
            weigh: from the number of samples to the weight of each in a mean; None if all weigh
                alike.
            can_be_run: whether the model can run where its operations are watched.

        Raises:
            BatchError: the micro-batches give something else than the batch.
        """
        declared = Joining.of(options)
        if not options.verify or len(sizes) < 2:
            return declared
        key = mode, options.model_dump_json(), _kind_of(call_values(call, parameters), layout)
        known = self._known.get(key)
        # else each sample has results of its own
        matters = known is None or known.joining.reduces_floats
        tensors = flatten_inputs(*call)[0]
        waits = known is None or (
            matters and self._late.is_due(key, tensors, layout, sizes, known.uneven)
        )
        now = uneven(tensors, layout, sizes, waits=waits) if matters else frozenset()
        if (
            known is None
            or not known.is_decided
            or known.sizes not in (None, tuple(sizes))
            or not now <= known.uneven
        ):
            if not can_be_run():
                return declared
            try:
                found = self._look(call, parameters, layout, sizes, declared, run, weigh)
            except BatchError as error:
                raise self._with_advice(
                    error, call, parameters, layout, options, run
                ) from error.__cause__
            found.uneven = now
            if known is not None:
                found.uneven |= known.uneven
                found.looks += known.looks
                found.is_decided |= found.looks >= _LOOKS
            if len(self._known) >= _KNOWN:
                self._known.clear()
            known = self._known[key] = found
        return dataclasses.replace(declared, found=known.joining.found)

    def _with_advice(
        self,
        error: BatchError,
        call: Call,
        parameters: Parameters,
        layout: BatchLayout,
        options: BatchOptions,
        run: Run,
    ) -> BatchError:
        """Return an error that states how the batch was cut, and a declaration that is seen to be
        right.
        """
        right = next(
            (
                one
                for one in _others(call, parameters, layout, options)
                if self._holds(call, parameters, one, run)
            ),
            None,
        )
        advice = f"{_spelt(right)} gives the batch's results" if right is not None else _WAYS_OUT
        return BatchError(
            f"{error}. The inputs were cut: {layout.description()}. {advice}; chunks=1 does not cut the batch, and "
            "BatchOptions(verify=False) takes micro-batches as they are"
        )

    def _holds(self, call: Call, parameters: Parameters, options: BatchOptions, run: Run) -> bool:
        """Return whether a batch may be cut as these options say."""
        try:
            layout = call_layout(call, *flatten_inputs(*call), options, parameters)
            if layout.size < 2:
                return False
            sizes = [layout.size // 2, layout.size - layout.size // 2]
            self._look(call, parameters, layout, sizes, Joining.of(options), run, lambda size: None)
        except InputError:
            return False
        return True

    def forget(self) -> None:
        """Compare every kind again: the model is another."""
        self._known.clear()

    @torch.no_grad()
    def _look(
        self,
        call: Call,
        parameters: Parameters,
        layout: BatchLayout,
        sizes: Sequence[int],
        declared: Joining,
        run: Run,
        weigh: Weights,
    ) -> _Kind:
        closeness = Closeness.of([*self._module.parameters(), *flatten_inputs(*call)[0]])
        refusal: BatchError | None = None
        failure: Exception | None = None
        found: _Kind | None = None
        few = _few(sizes)
        # the whole batch may need too much memory
        for some in [few] if few == list(sizes) else [few, list(sizes)]:
            try:
                whole, parts, counted = self._run(call, parameters, layout, some, run)
            except _CutError as error:
                refusal = refusal or error.refusal()
                continue
            except Exception as error:
                # whatever the model's own code raises, on few samples perhaps
                failure = error
                continue
            weights = _of_parts(weigh(layout.size), some)
            joining, differences, is_open = find_rules(
                whole, parts, some, declared, closeness, weights
            )
            unlike = (
                unlike_counts(counted[0], counted[1:], weights or some)
                if joining.reduces_floats
                else None
            )
            if not differences and unlike is not None:
                refusal = BatchError(
                    f"the model's own loss is a mean over labels that count, and micro-batches of {some} samples have "
                    f"{[int(count) if count == int(count) else count for count in unlike]} of them"
                )
                continue
            if not differences:
                # What few samples do not show may be so of these sizes alone.
                found = _Kind(
                    joining, 1, not is_open, tuple(sizes) if refusal is not None else None
                )
                if some == few and joining.reduces_floats:
                    # the labels of the other samples may count in other numbers
                    continue
                return found
            refusal = _refusal(differences[0], closeness)
        if refusal is not None:
            raise refusal
        # of anything else the real run tells
        if isinstance(failure, torch.OutOfMemoryError):
            warn(
                f"micro-batches were not compared with a whole batch, for want of memory: {failure}"
            )
        return found or _Kind(declared, 1, True, None)

    def _run(
        self,
        call: Call,
        parameters: Parameters,
        layout: BatchLayout,
        sizes: Sequence[int],
        run: Run,
    ) -> tuple[Any, list[Any], list[list[float]]]:
        """Run the first samples of a batch, whole and cut.

        Returns:
            The result of the whole; those of the parts; and the labels that count in means of the
            whole and each part.
        """
        total, draws = sum(sizes), RandomNumbers()
        rest = [layout.size - total] if layout.size > total else []
        (first, *_), cuts = (
            layout.cut_call(call, parameters, [*some, *rest]) for some in ([total], sizes)
        )
        watches = [LabelWeights() for _ in (total, *sizes)]
        with self._apart(), operations_in_eval_mode(), draws.recorded(), watches[0]:
            whole = run(_copied(first))
        parts, start = [], 0
        # One after another: what a part leaves in attributes, the next one finds. Statistics that
        # buffers gather are left out, as those of batch normalisation are: micro-batches have their
        # own in any pipeline.
        buffers = BufferValues(self._module)
        with self._apart(), operations_in_eval_mode():
            for part, size, watch in zip(cuts, sizes, watches[1:], strict=False):
                try:
                    with draws.replayed(start, size, total), watch:
                        parts.append(run(_copied(part)))
                except Exception as error:
                    raise _CutError from error
                buffers.restore()
                start += size
        return whole, parts, [watch.counted for watch in watches]

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Let a run begin with the model as it is, and leave no trace."""
        with isolated_run(self._module), without_hooks(self._module):
            yield


class _CutError(Exception):
    """A micro-batch failed, where the whole batch did not."""

    def refusal(self) -> BatchError:
        """Return the error for the user."""
        error = self.__cause__
        refused = BatchError(
            f"the model runs on the whole batch and fails on a part: {type(error).__name__}: {error}"
        )
        refused.__cause__ = error
        return refused


_WAYS_OUT = (
    "If the samples lie elsewhere, declare where, as batch_options=BatchOptions(inputs=1) for dimension 1, "
    "{'images': 'items'} for a list of samples or {'table': None} for what is not cut; if results are joined "
    "otherwise, outputs={'loss': 'sum'}; if one is a mean over labels of which samples have unequal numbers, give the "
    "weight of each sample, weigh=lambda inputs, target: (inputs['labels'] != -100).sum(1)"
)


def _others(
    call: Call, parameters: Parameters, layout: BatchLayout, options: BatchOptions
) -> Iterator[BatchOptions]:
    """Yield other ways to cut a batch: along the second dimension, by the items of lists, or one
    input whole.
    """
    values = call_values(call, parameters)
    if isinstance(options.inputs, dict):
        declared = options.inputs
    else:
        declared = {} if options.inputs == 0 else {OTHERS: options.inputs}
    lists = [
        name
        for name, value in values.items()
        if isinstance(value, (list, tuple)) and len(value) > 1
    ]
    if lists:
        yield options.model_copy(update={"inputs": {**declared, **dict.fromkeys(lists, "items")}})
    if isinstance(options.inputs, int):
        yield options.model_copy(update={"inputs": 1 if options.inputs == 0 else 0})
    for place in layout.undeclared() if len(layout.undeclared()) > 1 else ():
        yield options.model_copy(update={"inputs": {**declared, layout.names[place]: None}})
    for inputs in _by_size(call, layout, declared):
        yield options.model_copy(update={"inputs": inputs})


def _by_size(call: Call, layout: BatchLayout, declared: dict[str, Cut]) -> Iterator[dict[str, Cut]]:
    """Yield cuts of other tensors along a dimension that has as many entries as the batch has
    samples.
    """
    others: dict[str, list[int]] = {}
    for tensor, dim, name in zip(flatten_inputs(*call)[0], layout.dims, layout.names, strict=True):
        shape = tensor.shape if isinstance(tensor, Tensor) and name not in declared else ()
        fits = [place for place, size in enumerate(shape) if size == layout.size and place != dim]
        if fits:
            others[name] = fits
    if len(others) > 1:
        yield {**declared, **{name: fits[0] for name, fits in others.items()}}
    for name, fits in others.items():
        for place in fits:
            yield {**declared, name: place}


def _spelt(options: BatchOptions) -> str:
    return f"batch_options=BatchOptions(inputs={options.inputs!r})"


def difference_error(
    what: str, one: Any, other: Any, tolerance: float, ways_out: str = ""
) -> BatchError:
    """Return the error for values of a batch that its micro-batches do not give.

    Args:
        what: the value.
        one: of the batch.
        other: of its micro-batches.
        tolerance: relative.
        ways_out: what to declare or call instead.
    """
    return BatchError(
        f"{what} of a batch is not what its micro-batches give: {shown(one, other)} (more than rounding, "
        f"{tolerance:g} of it){ways_out and f'. {ways_out}'}"
    )


def _refusal(difference: Difference, closeness: Closeness) -> BatchError:
    name = f"output {difference.name!r}" if difference.name else "the result"
    return difference_error(name, difference.whole, difference.joined, closeness.tolerance)


def _of_parts(weights: Tensor | None, sizes: Sequence[int]) -> list[float] | None:
    """Return the weight of each micro-batch from those of the samples."""
    if weights is None:
        return None
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        float(weights[start : start + size].sum())
        for start, size in zip(starts, sizes, strict=True)
    ]


def _few(sizes: Sequence[int]) -> list[int]:
    """Return the sizes of two small micro-batches."""
    return [min(_SLICE, *sizes)] * 2


def _copied(call: Call) -> Call:
    """Return the arguments of a call with copies of the tensors, as forward may write to them."""
    tensors, structure = flatten_inputs(*call)
    again: Call = structure.unflatten(
        [one.detach().clone() if isinstance(one, Tensor) else one for one in tensors]
    )
    return again


def _kind_of(values: dict[str, Any], layout: BatchLayout) -> Hashable:
    """Return what tells kinds of batches apart: nothing of sizes, nor how many samples are in a
    list.
    """
    tensors, structure = flatten_inputs((), values)
    return structure.paths if not layout.lists else tuple(values), frozenset(
        (one.dim(), one.dtype) if isinstance(one, Tensor) else type(one) for one in tensors
    )
