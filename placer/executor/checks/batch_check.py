"""Verification that a batch may be split: small results, whole and split, compared once.

    first samples of a batch ──▶ whole ─────────────▶ result ──┐
             └────────────────▶ two micro-batches ──▶ joined ──┴▶ equal: keep the joining rules
                                                                 different: BatchError with the
                                                                 name of the output

A kind of batches comprises all with equal structure, dtypes and numbers of dimensions, whatever
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
from placer.capture.python_state.hook_effects import restored_hooks
from placer.capture.python_state.isolated_runs import isolated_run
from placer.capture.python_state.module_hooks import user_hooks, without_hooks
from placer.capture.pytrees import flatten_inputs
from placer.errors import BatchError, InputError
from placer.executor.checks.carried_state import CarriedState, CarriedStateError
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
from placer.schema.options import OTHERS, Cut
from placer.utils.bounded_dict import BoundedDict
from placer.utils.user_warnings import warn

Run = Callable[[Call], Any]
"""Runs the placed model on positional and keyword arguments."""
Weights = Callable[[int], Tensor | None]
"""A function from the number of samples to the weight of each, shape ``(N,)``; None for equal
weights."""

# Samples per micro-batch of the comparison, if the batch has that many: code may treat a single
# sample differently.
_SLICE = 2
# Maximum number of compared batches if first results, such as zeros, fit several rules.
_LOOKS = 3


@dataclass
class _Kind:
    """The results of comparisons of one kind of batches.

    Attributes:
        joining: how results are joined.
        looks: number of compared batches.
        is_decided: whether no further batch has to decide between several rules.
        sizes: the micro-batch sizes that the result applies to; None for all.
        uneven: the quantities of which micro-batches had unequal shares.
    """

    joining: Joining
    looks: int
    is_decided: bool
    sizes: tuple[int, ...] | None
    uneven: Uneven = frozenset()

    def covers(self, sizes: Sequence[int], now: Uneven) -> bool:
        """Return whether the result applies to a batch, so that it need not be compared.

        Args:
            sizes: samples in each of its micro-batches.
            now: the quantities of which its micro-batches have unequal shares.
        """
        return self.is_decided and self.sizes in (None, tuple(sizes)) and now <= self.uneven

    def add(self, earlier: _Kind) -> None:
        """Add the comparisons of earlier batches of this kind."""
        self.uneven |= earlier.uneven
        self.looks += earlier.looks
        self.is_decided |= self.looks >= _LOOKS


@dataclass(frozen=True)
class _Batch:
    """A batch, its division into micro-batches, and the function that runs it.

    Attributes:
        call: the arguments.
        parameters: the signature of the model's forward method.
        layout: the batch dimensions.
        sizes: samples in each micro-batch.
        run: runs the model.
    """

    call: Call
    parameters: Parameters
    layout: BatchLayout
    sizes: Sequence[int]
    run: Run

    @property
    def tensors(self) -> list[Any]:
        """The tensors and other leaves of the arguments."""
        return flatten_inputs(*self.call)[0]

    def cut(self, sizes: Sequence[int]) -> list[Call]:
        """Return the arguments of micro-batches with these numbers of samples."""
        return self.layout.cut_call(self.call, self.parameters, sizes)


@dataclass(frozen=True)
class _Results:
    """The results of a batch's first samples, whole and split.

    Attributes:
        sizes: samples in each part.
        whole: the result of the whole.
        parts: the results of the parts.
        counted: the numbers of labels that count in means, for the whole and each part.
    """

    sizes: Sequence[int]
    whole: Any
    parts: list[Any]
    counted: list[list[float]]

    def compare(
        self, declared: Joining, closeness: Closeness, weights: Tensor | None
    ) -> tuple[Joining, bool, BatchError | None]:
        """Compare the joined results of the parts with the result of the whole.

        Args:
            declared: the declared rules.
            closeness: which values are equal up to rounding.
            weights: of each sample of the batch in a mean; None for equal weights.

        Returns:
            The rules; whether several rules fit; and the error if none does.
        """
        shares = _of_parts(weights, self.sizes)
        joining, differences, is_open = find_rules(
            self.whole, self.parts, self.sizes, declared, closeness, shares
        )
        refusal = _refusal(differences[0], closeness) if differences else None
        if refusal is None and joining.reduces_floats:
            unlike = unlike_counts(self.counted[0], self.counted[1:], shares or self.sizes)
            refusal = None if unlike is None else _unlike_counts_error(self.sizes, unlike)
        return joining, is_open, refusal


class BatchChecks:
    """The kinds of batches that were compared so far.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: BoundedDict[Hashable, _Kind] = BoundedDict()
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
        """Return how the results of micro-batches are joined, after verifying it.

        Args:
            call: the arguments of the batch.
            parameters: the signature of the model's forward method.
            layout: the batch dimensions.
            sizes: samples in each micro-batch.
            options: the declared batch layout.
            mode: further distinctions between batches, such as training mode.
            run: runs the model.
            weigh: a function from the number of samples to the weight of each in a mean; None for
                equal weights.
            can_be_run: whether the model can run under a mode that watches operations.

        Raises:
            BatchError: if the micro-batches give other results than the batch.
        """
        declared = Joining.from_options(options)
        if not options.verify or len(sizes) < 2:
            return declared
        batch = _Batch(call, parameters, layout, sizes, run)
        key = mode, options.model_dump_json(), _kind_of(call_values(call, parameters), layout)
        known = self._known.get(key)
        now = self._unequal_shares(batch, key, known)
        if known is None or not known.covers(sizes, now):
            if not can_be_run():
                return declared
            found = self._look_and_advise(batch, options, declared, weigh)
            if found is None:  # nothing is known of the kind: its next batch is compared
                return declared
            found.uneven = now
            if known is not None:
                found.add(known)
            known = self._known[key] = found
        return dataclasses.replace(declared, found=known.joining.found)

    def _unequal_shares(self, batch: _Batch, key: Hashable, known: _Kind | None) -> Uneven:
        """Return the quantities of which the micro-batches have unequal shares."""
        if known is not None and not known.joining.reduces_floats:
            return frozenset()  # every result belongs to one sample
        labels = batch.tensors, batch.layout, batch.sizes
        before = frozenset() if known is None else known.uneven
        waits = known is None or self._late.is_due(key, *labels, before)
        return uneven(*labels, waits=waits, known=before)

    def _look_and_advise(
        self, batch: _Batch, options: BatchOptions, declared: Joining, weigh: Weights
    ) -> _Kind | None:
        """Compare a batch; extend an error by a declaration that works, if one is found."""
        try:
            return self._look(batch, declared, weigh)
        except CarriedStateError as error:
            raise BatchError(str(error)) from None
        except BatchError as error:
            raise self._with_advice(error, batch, options) from error.__cause__

    def _with_advice(self, error: BatchError, batch: _Batch, options: BatchOptions) -> BatchError:
        """Return the error extended by the layout and, if found, a declaration that works."""
        others = _others(batch.call, batch.parameters, batch.layout, options)
        right = next((one for one in others if self._holds(batch, one)), None)
        advice = f"{_spelt(right)} gives the batch's results" if right is not None else _WAYS_OUT
        return BatchError(
            f"{error}. The inputs were cut: {batch.layout.description()}. {advice}; chunks=1 does "
            "not cut the batch, and BatchOptions(verify=False) turns this check off"
        )

    def _holds(self, batch: _Batch, options: BatchOptions) -> bool:
        """Return whether the batch may be split as these options declare."""
        try:
            layout = call_layout(
                batch.call, *flatten_inputs(*batch.call), options, batch.parameters
            )
            if layout.size < 2:
                return False
            sizes = [layout.size // 2, layout.size - layout.size // 2]
            other = dataclasses.replace(batch, layout=layout, sizes=sizes)
            return self._look(other, Joining.from_options(options), lambda size: None) is not None
        except InputError:
            return False

    @torch.no_grad()
    def _look(self, batch: _Batch, declared: Joining, weigh: Weights) -> _Kind | None:
        """Compare a batch; return None if the model fails on it, which its run will show.

        Raises:
            BatchError: if its micro-batches give other results.
        """
        found, failure = self._compare(batch, declared, weigh)
        if isinstance(failure, torch.OutOfMemoryError):
            _warn_of_failure(failure)
        elif failure is not None and found is None:
            if not self._runs(batch):
                return None
            _warn_of_failure(failure)
        return found or _Kind(declared, 1, True, None)

    def _compare(
        self, batch: _Batch, declared: Joining, weigh: Weights
    ) -> tuple[_Kind | None, Exception | None]:
        """Compare a few samples of a batch and, unless these are conclusive, the whole batch.

        Returns:
            The result; and the last failure of the model if a comparison was not possible.
        """
        closeness = Closeness.for_tensors([*self._module.parameters(), *batch.tensors])
        refusal: BatchError | None = None
        failure: Exception | None = None
        found: _Kind | None = None
        few = _few(batch.sizes)
        # few samples first: the whole batch may need too much memory
        for some in _distinct(few, list(batch.sizes)):
            try:
                results = self._run(batch, some)
            except _CutError as error:
                refusal = refusal or error.refusal()
                continue
            except CarriedStateError:
                raise
            except Exception as error:
                # the model's own code may raise anything, perhaps only for few samples
                failure = error
                continue
            weights = weigh(batch.layout.size)
            joining, is_open, difference = results.compare(declared, closeness, weights)
            if difference is not None:
                refusal = difference
                continue
            # Few samples showed a difference and these sizes do not: the result holds only for
            # these sizes.
            only = tuple(batch.sizes) if refusal is not None else None
            found = _Kind(joining, 1, not is_open, only)
            # the other samples may have other numbers of labels that count
            if some != few or not joining.reduces_floats:
                return found, None
        if refusal is not None:
            raise refusal
        return found, failure

    def _run(self, batch: _Batch, sizes: Sequence[int]) -> _Results:
        """Run the first samples of a batch, whole and split into parts of these sizes.

        The user's hooks run, too, since they may change results, unless they fail here.
        """
        if user_hooks(self._module):
            try:
                return self._run_apart(batch, sizes, has_hooks=True)
            except (_CutError, CarriedStateError, torch.OutOfMemoryError):
                raise
            except Exception:
                # a hook may raise anything, for example because there are no gradients here
                pass
        return self._run_apart(batch, sizes)

    def _run_apart(self, batch: _Batch, sizes: Sequence[int], has_hooks: bool = False) -> _Results:
        """Run the first samples, with or without the user's hooks."""
        total, draws = sum(sizes), RandomNumbers()
        rest = [batch.layout.size - total] if batch.layout.size > total else []
        (first, *_), cuts = (batch.cut([*some, *rest]) for some in ([total], sizes))
        watches = [LabelWeights() for _ in (total, *sizes)]
        state = CarriedState(self._module)
        with self._apart(has_hooks), operations_in_eval_mode(), draws.recorded(), watches[0]:
            whole = batch.run(_copied(first))
            state.note_batch()
        parts, start = [], 0
        # the parts run in order, and each sees the attributes and buffers that earlier parts left
        with self._apart(has_hooks), operations_in_eval_mode():
            for part, size, watch in zip(cuts, sizes, watches[1:], strict=False):
                try:
                    with draws.replayed(start, size, total), watch:
                        parts.append(batch.run(_copied(part)))
                except Exception as error:
                    raise _CutError from error
                start += size

            def run_last() -> Any:
                with draws.replayed(total - sizes[-1], sizes[-1], total):
                    return batch.run(_copied(cuts[len(sizes) - 1]))

            state.check(parts[-1], run_last)
        return _Results(sizes, whole, parts, [watch.counted for watch in watches])

    def _runs(self, batch: _Batch) -> bool:
        """Return whether the model runs on the first micro-batch, unobserved."""
        first, *_ = batch.cut(batch.sizes)
        try:
            with self._apart():
                batch.run(_copied(first))
        except Exception:  # the model's own code may raise anything
            return False
        return True

    @contextmanager
    def _apart(self, has_hooks: bool = False) -> Iterator[None]:
        """Run on the model's current state, and restore it afterwards."""
        hooks = restored_hooks if has_hooks else without_hooks
        with isolated_run(self._module), hooks(self._module):
            yield


class _CutError(Exception):
    """A failure of a micro-batch where the whole batch succeeded."""

    def refusal(self) -> BatchError:
        """Return the error for the user."""
        error = self.__cause__
        refused = BatchError(
            f"the model runs on the whole batch and fails on a part: {type(error).__name__}: "
            f"{error}"
        )
        refused.__cause__ = error
        return refused


_WAYS_OUT = (
    "If the samples lie elsewhere, declare where, as batch_options=BatchOptions(inputs=1) for "
    "dimension 1, "
    "{'images': 'items'} for a list of samples or {'table': None} for what is not cut; if results "
    "are joined "
    "otherwise, outputs={'loss': 'sum'}; if one is a mean over labels of which samples have "
    "unequal numbers, give the "
    "weight of each sample, for labels of shape (samples, length): "
    "weigh=lambda inputs, target: (inputs['labels'] != -100).sum(1)"
)


def _others(
    call: Call, parameters: Parameters, layout: BatchLayout, options: BatchOptions
) -> Iterator[BatchOptions]:
    """Yield other ways to split a batch.

    These are the second dimension, items of lists, and single inputs that stay whole.
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
    """Yield splits of further tensors along dimensions whose size is the number of samples."""
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
    """Return the error for a value of a batch that its micro-batches do not reproduce.

    Args:
        what: the value.
        one: its value for the batch.
        other: its value from the micro-batches.
        tolerance: relative.
        ways_out: what to declare or call instead.
    """
    return BatchError(
        f"{what} of a batch is not what its micro-batches give: {shown(one, other)} (more than "
        f"rounding, {tolerance:g} of it){ways_out and f'. {ways_out}'}"
    )


def _refusal(difference: Difference, closeness: Closeness) -> BatchError:
    name = f"output {difference.name!r}" if difference.name else "the result"
    return difference_error(name, difference.whole, difference.joined, closeness.tolerance)


def _of_parts(weights: Tensor | None, sizes: Sequence[int]) -> list[float] | None:
    """Return the weight of each micro-batch: the sum over its samples."""
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
    """Return a call's arguments with copied tensors, since forward may write to them."""
    tensors, structure = flatten_inputs(*call)
    again: Call = structure.unflatten(
        [one.detach().clone() if isinstance(one, Tensor) else one for one in tensors]
    )
    return again


def _kind_of(values: dict[str, Any], layout: BatchLayout) -> Hashable:
    """Return the key of a kind of batches, independent of sizes and list lengths."""
    tensors, structure = flatten_inputs((), values)
    return structure.paths if not layout.lists else tuple(values), frozenset(
        (one.dim(), one.dtype) if isinstance(one, Tensor) else type(one) for one in tensors
    )


def _unlike_counts_error(sizes: Sequence[int], counts: Sequence[float]) -> BatchError:
    """Return the error for micro-batches that have unequal numbers of labels."""
    shown = [int(count) if count == int(count) else count for count in counts]
    return BatchError(
        "the model's own loss is a mean over labels that count, and micro-batches of "
        f"{sizes} samples have {shown} of them"
    )


def _distinct(few: list[int], sizes: list[int]) -> list[list[int]]:
    return [few] if few == sizes else [few, sizes]


def _warn_of_failure(failure: Exception) -> None:
    if isinstance(failure, torch.OutOfMemoryError):
        warn(f"micro-batches were not compared with a whole batch, for want of memory: {failure}")
    else:
        warn(
            "micro-batches were not compared with a whole batch, because its run failed: "
            f"{type(failure).__name__}: {failure}"
        )
