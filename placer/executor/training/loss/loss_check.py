"""Verification that micro-batch losses give the batch's loss, once per kind of batch.

    results of micro-batches ──▶ joined ──▶ loss_fn(joined, whole target) ──┐
    losses of micro-batches  ──▶ joined ──────────────────────────────────┴▶ equal, or BatchError

No forward pass of the model is needed. The comparison distinguishes a sum from a mean, and detects
interactions of samples within the loss and unequal numbers of ignored labels. Losses can agree by
chance, for example in an untrained model whose labels are all equally likely. Therefore the
gradients of the losses with respect to the results are compared, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.capture.batch_dims.declared_layout import other_dims, spelt_target
from placer.capture.loss_functions import require_real_number
from placer.capture.python_state import host_rng
from placer.capture.python_state.comparable_runs import RandomNumbers, operations_in_eval_mode
from placer.capture.pytrees import detached_nest, flatten
from placer.errors import InputError
from placer.executor.checks.batch_check import difference_error
from placer.executor.checks.label_counts import LateCounts, Uneven, uneven
from placer.executor.checks.tolerances import Closeness
from placer.executor.engine.fill_drain import to_device_nest
from placer.executor.output_joining import Joining, find_rules, join
from placer.executor.training.loss.label_weights import LabelWatch
from placer.executor.training.loss.loss_weights import Goals, Weighed, Weighing
from placer.executor.training.training_batch import Batch
from placer.utils.bounded_dict import BoundedDict
from placer.utils.dtypes import is_differentiable
from placer.utils.user_warnings import warn

# Minimum size assumed for results when judging whether gradients matter, because some start at
# zero.
_FLOOR = 1e-2


class LossChecks:
    """The kinds of batches whose loss was compared so far.

    Args:
        loss_fn: the loss of a micro-batch.
    """

    def __init__(self, loss_fn: Weighing) -> None:
        self._loss_fn = loss_fn
        self._known: BoundedDict[Hashable, tuple[Joining, Uneven, Uneven]] = BoundedDict()
        self._left_out: set[int] = set()
        self._late = LateCounts()

    def wants(self, batch: Batch) -> bool:
        """Return whether to compare a batch: split, and new in kind or in unequal labels."""
        is_cut = self._loss_fn.options.verify and len(batch.sizes) > 1
        if not is_cut:
            return False
        known = self._known.get(_kind(batch))
        if known is None:
            return True
        return any(_uneven(batch, self._left_out, self._is_due(batch, *known[1:]), known[1:]))

    def _is_due(self, batch: Batch, inputs: Uneven, target: Uneven) -> bool:
        """Return whether to read labels on accelerators at once."""
        if getattr(self._loss_fn.options.weigh, "may_give_none", False):
            return False  # torch's own mean losses determine their weights for every batch
        kind, goals, sizes, left_out = _kind(batch), batch.goals, batch.sizes, self._left_out
        # no short-circuit: each call also starts to copy its labels
        is_due = self._late.is_due(
            (kind, "target"), goals.leaves, goals.layout, sizes, target, left_out
        )
        has_floats = batch.joining.reduces_floats
        is_due |= self._late.is_due(
            (kind, "inputs"), batch.tensors, batch.layout, sizes, inputs, left_out, has_floats
        )
        return is_due

    def leave_out(self, batch: Batch) -> None:
        """Compare no batch of this kind."""
        self._note(batch, Joining.from_options(self._loss_fn.options))

    def known(self, batch: Batch) -> Joining:
        """Return how further values of the loss are joined."""
        known = self._known.get(_kind(batch))
        return known[0] if known is not None else Joining.from_options(self._loss_fn.options)

    def joining(
        self,
        batch: Batch,
        loss: Tensor,
        made: Sequence[tuple[Any, dict[str, Any]]],
        labels: LabelWatch,
    ) -> Joining:
        """Compare the loss of a batch, and return how further values of the loss are joined.

        Args:
            batch: the batch.
            loss: the joined loss of its micro-batches.
            made: for each micro-batch, the model's result and the further values of the loss.
            labels: observes which labels the loss counts.

        Raises:
            BatchError: if the loss of the whole batch, or a further value, differs.
        """
        found = compare_losses(
            self._loss_fn, batch.goals, batch.sizes, batch.joining, loss, made, labels
        )
        self._left_out |= labels.left_out()
        self._note(batch, found)
        return found

    def _note(self, batch: Batch, joining: Joining) -> None:
        inputs, target = _uneven(batch, self._left_out, waits=True)
        _, inputs_before, target_before = self._known.get(
            _kind(batch), (joining, frozenset(), frozenset())
        )
        self._known[_kind(batch)] = joining, inputs | inputs_before, target | target_before


@dataclass(frozen=True)
class _Comparison:
    """A batch whose loss is compared with the losses of its micro-batches.

    Attributes:
        loss_fn: the loss of a micro-batch.
        goals: the target of the batch.
        sizes: samples in each micro-batch.
        joining: how results are joined.
        results: the model's result for each micro-batch.
        weights: of each micro-batch in a mean; ``sizes`` if None.
        place: the device of the loss.
        closeness: equality up to rounding.
    """

    loss_fn: Weighing
    goals: Goals
    sizes: Sequence[int]
    joining: Joining
    results: Sequence[Any]
    weights: Sequence[Tensor] | None
    place: torch.device
    closeness: Closeness

    def parts(self) -> list[Any]:
        """Return the results of the micro-batches on the device of the loss."""
        return [to_device_nest(result, self.place) for result in self.results]

    def target(self) -> Any:
        """Return the target, with its weights if any, on the device of the loss."""
        return to_device_nest(self.goals.structure.unflatten(self.goals.leaves), self.place)

    def loss_of_batch(self, parts: Sequence[Any], target: Any) -> Tensor:
        """Return the loss of the batch from the results of micro-batches and the target."""
        plain = target.target if isinstance(target, Weighed) else target
        whole = join(parts, self.sizes, self.joining, self.weights)
        return self.loss_fn.plain(whole, plain)[0]

    def targets(self, target: Any) -> list[Any]:
        """Return the target of each micro-batch."""
        return [goal[""] for goal in self.goals.layout.cut_values({"": target}, self.sizes)]


def compare_losses(
    loss_fn: Weighing,
    goals: Goals,
    sizes: Sequence[int],
    joining: Joining,
    loss: Tensor,
    made: Sequence[tuple[Any, dict[str, Any]]],
    labels: LabelWatch,
) -> Joining:
    """Compare a batch's loss with its micro-batches' losses, without running the model.

    Args:
        loss_fn: the loss of a micro-batch.
        goals: the target of the batch.
        sizes: samples in each micro-batch.
        joining: how results are joined.
        loss: the joined loss of the micro-batches.
        made: for each micro-batch, the model's result and the further values of the loss.
        labels: observes which labels the loss counts.

    Returns:
        How further values are joined.

    Raises:
        BatchError: if the loss of the whole batch, or a further value, differs.
    """
    target = goals.structure.unflatten(goals.leaves)
    if isinstance(target, Weighed):
        target = target.target
    weights = loss_fn.means(goals, sizes)
    whole = join([result for result, _ in made], sizes, joining, weights)
    place = devices.location(loss)
    # the current device, which a bare "cuda" in loss_fn refers to
    with host_rng.restored_generators(), devices.Lane(place, caller=True):
        outputs, goal = to_device_nest(whole, place), to_device_nest(target, place)
        try:
            # a loss may compute gradients of its own leaves, or of the results
            with labels, torch.enable_grad():
                expected, values = _loss_of_leaves(loss_fn, outputs, goal)
        except Exception as error:
            # a user's function may raise anything on results without a graph
            warn(
                "the loss of micro-batches was not compared with the whole batch's loss, which "
                f"fails: {type(error).__name__}: {error}"
            )
            return Joining.from_options(loss_fn.options)
        expected, values = detached_nest((expected, values))
    if loss_fn.options.weigh is None:
        labels.look(expected, goal, goals.layout)
    closeness = Closeness.for_tensors([*flatten(whole)[0], loss, expected])
    results = [result for result, _ in made]
    comparison = _Comparison(loss_fn, goals, sizes, joining, results, weights, place, closeness)
    if not closeness(loss, expected) and not _is_random(comparison):
        ways_out = _target_advice(
            comparison, expected, _ways_out(loss_fn, len(sizes), expected, loss)
        )
        raise difference_error("the loss", expected, loss, closeness.tolerance, ways_out)
    with host_rng.restored_generators(), devices.Lane(place, caller=True):
        _compare_gradients(comparison)
    declared = Joining.from_options(loss_fn.options)
    found, differences, _ = find_rules(
        values, [one for _, one in made], sizes, declared, closeness, weights
    )
    for one in differences:
        what = f"the value {one.name!r} of loss_fn"
        ways_out = (
            f"declare how it is joined, as BatchOptions(outputs={{{one.name!r}: 'list'}}) for a "
            "list with the value of each micro-batch, or give chunks=1; if it was made by int() or "
            ".item(), give the tensor instead"
        )
        raise difference_error(what, one.whole, one.joined, closeness.tolerance, ways_out)
    return found


def _loss_of_leaves(loss_fn: Weighing, outputs: Any, goal: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss of results without a graph; if that fails, of results that have one.

    Without a graph, a loss that selects its terms by ``requires_grad`` has none.
    """
    try:
        return _number_and_values(loss_fn, outputs, goal)
    except (RuntimeError, InputError):
        leaves = _differentiable(outputs)
        if not leaves:
            raise
    return _number_and_values(loss_fn, _with_copies(outputs, leaves), goal)


def _number_and_values(loss_fn: Weighing, outputs: Any, goal: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss, which must be one number, and its further values."""
    loss, values = loss_fn.plain(outputs, goal)
    require_real_number(loss)
    return loss, values


def _is_random(batch: _Comparison) -> bool:
    """Return whether the losses agree when both draw the same random numbers."""
    draws, target, parts = RandomNumbers(), batch.target(), batch.parts()
    shares = batch.loss_fn.shares(batch.sizes)
    found: list[Tensor] = []
    start = 0
    try:
        with (
            host_rng.restored_generators(),
            devices.Lane(batch.place, caller=True),
            torch.no_grad(),
            operations_in_eval_mode(),
        ):
            with draws.recorded():
                expected = batch.loss_of_batch(parts, target)
            for part, goal, size, share in zip(
                parts, batch.targets(target), batch.sizes, shares, strict=True
            ):
                with draws.replayed(start, size, sum(batch.sizes)):
                    found.append(batch.loss_fn(part, goal)[0] * share)
                start += size
            return batch.closeness(torch.stack(found).sum(), expected)
    except Exception:
        # a user's function may raise or return anything; then its earlier values are compared
        return False


def _compare_gradients(batch: _Comparison) -> None:
    """Compare the gradients of both losses with respect to the model's results.

    Nothing is compared if the gradients cannot be computed separately from the model, or for lack
    of memory.

    Raises:
        BatchError: if a gradient differs.
    """
    parts, tolerance = batch.parts(), batch.closeness.tolerance
    leaves = [_differentiable(part) for part in parts]
    try:
        with torch.enable_grad(), operations_in_eval_mode():
            loss, expected, found = _both_gradients(batch, parts, leaves)
    except InputError:
        raise
    except (RuntimeError, TypeError, ValueError):
        # for example, a loss that computes gradients itself
        return
    # A result with rule "same" is taken from the first micro-batch, which then has the whole
    # gradient; the others have none.
    left_out = _taken_from_the_first(leaves, expected)
    kept = [number for number in range(len(expected)) if number not in left_out]
    if not kept:
        return
    results_of = [leaf.detach() for some in leaves for leaf in some]
    pairs = [
        (_filled(expected[number], results_of[number]), _filled(found[number], results_of[number]))
        for number in kept
    ]
    size = max(_norm([one for one, _ in pairs]), _norm([other for _, other in pairs]))
    values = [results_of[number] for number in kept]
    floor = _FLOOR * math.sqrt(sum(map(Tensor.numel, values)))
    reach = size * max(_norm(values), floor)
    # gradients that change the loss by less than its rounding do not matter
    matters = reach > tolerance * sum(batch.sizes) * abs(float(loss))
    if matters and _norm([one - other for one, other in pairs]) > tolerance * size:
        one, other = max(pairs, key=lambda pair: _norm([pair[0] - pair[1]]))
        ways_out = _target_advice(batch, loss, _GENERAL_WAYS_OUT)
        raise difference_error("the gradient of the loss", one, other, tolerance, ways_out)


def _both_gradients(
    batch: _Comparison, parts: Sequence[Any], leaves: Sequence[Sequence[Tensor]]
) -> tuple[Tensor, list[Tensor | None], list[Tensor | None]]:
    """Return the loss of the batch and the gradients of both losses.

    Args:
        batch: the batch.
        parts: the results, on the device of the loss.
        leaves: for each result, the tensors to differentiate with respect to.

    Returns:
        The loss of the batch; the gradients of the batch's loss; and the gradients of the
        micro-batches' losses.
    """
    target, total = batch.target(), sum(batch.sizes)
    whole = [_with_copies(part, some) for part, some in zip(parts, leaves, strict=True)]
    draws = RandomNumbers()
    with draws.recorded():
        loss = batch.loss_of_batch(whole, target)
    expected = _gradients(loss, [leaf for some in leaves for leaf in some], total)
    found: list[Tensor | None] = []
    start = 0
    shares = batch.loss_fn.shares(batch.sizes)
    for part, some, goal, size, share in zip(
        parts, leaves, batch.targets(target), batch.sizes, shares, strict=True
    ):
        with draws.replayed(start, size, total):
            part_loss = batch.loss_fn(_with_copies(part, some), goal)[0]
        found += _gradients(part_loss, some, total * share)
        start += size
    return loss.detach(), expected, found


def _differentiable(nest: Any) -> list[Tensor]:
    """Return copies of a nest's floating-point tensors that require gradients."""
    some = [leaf for leaf in flatten(nest)[0] if is_differentiable(leaf)]
    return [leaf.detach().requires_grad_() for leaf in some]


def _with_copies(nest: Any, leaves: Sequence[Tensor]) -> Any:
    """Return a nest with copies of these tensors, which a loss may write to."""
    given = iter(leaves)
    old, structure = flatten(nest)
    return structure.unflatten(
        [next(given).clone() if is_differentiable(leaf) else leaf for leaf in old]
    )


def _gradients(loss: Tensor, leaves: Sequence[Tensor], scale: float) -> list[Tensor | None]:
    """Return gradients times a scale that keeps them representable in float16."""
    if not loss.requires_grad or not leaves:
        return [None] * len(leaves)
    return list(torch.autograd.grad(loss, leaves, torch.full_like(loss, scale), allow_unused=True))


def _filled(gradient: Tensor | None, result: Tensor) -> Tensor:
    """Return the gradient with respect to a result, or zeros."""
    return torch.zeros_like(result) if gradient is None else gradient.detach()


def _norm(tensors: Sequence[Tensor]) -> float:
    """Return the norm of all elements, without copies in another precision."""
    wide = [
        torch.float64 if one.dtype in (torch.float64, torch.complex128) else torch.float32
        for one in tensors
    ]
    parts = [
        torch.linalg.vector_norm(one.abs() if one.is_complex() else one, dtype=dtype)
        for one, dtype in zip(tensors, wide, strict=True)
    ]
    return math.hypot(*map(float, parts))


def _taken_from_the_first(
    leaves: Sequence[Sequence[Tensor]], expected: Sequence[Tensor | None]
) -> set[int]:
    """Return the positions of results that the loss reads only for the first micro-batch."""
    count = len(leaves[0])
    if any(len(some) != count for some in leaves):
        return set()
    return {
        place + count * number
        for place in range(count)
        if all(one is None for one in expected[place + count :: count])
        for number in range(len(leaves))
    }


_GENERAL_WAYS_OUT = (
    "If it is a mean that leaves samples or labels out, give the weight of each sample, as "
    "batch_options=BatchOptions(weigh=f); if it is a sum over samples, reduction='sum'; if it "
    "compares samples with one another, chunks=1; BatchOptions(verify=False) turns this check off"
)


def _target_advice(batch: _Comparison, expected: Tensor, otherwise: str) -> str:
    """Return advice to declare another dimension of the target, if it gives the batch's loss.

    Args:
        batch: the batch.
        expected: its loss.
        otherwise: the advice if no other dimension works.
    """
    layout, options = batch.goals.layout, batch.loss_fn.options
    others = other_dims(batch.goals.leaves, layout)
    if not others:
        return otherwise
    for place, dim in others:
        loss = _loss_along(batch, place, dim)
        if loss is not None and batch.closeness(loss, expected):
            spelt = spelt_target(options, layout, place, dim)
            return f"Micro-batches cut {layout.description()}; {spelt} gives the batch's loss"
    spelt = spelt_target(options, layout, *others[0])
    return f"{otherwise}. If the samples of the target lie elsewhere, give {spelt}"


def _loss_along(batch: _Comparison, place: int, dim: int) -> Tensor | None:
    """Return the loss with a target tensor split along another dimension; None on failure."""
    target, layout, sizes = batch.target(), batch.goals.layout, batch.sizes
    if isinstance(target, Weighed):  # sample weights were computed along the dimension in question
        return None
    other = replace(layout, dims=(*layout.dims[:place], dim, *layout.dims[place + 1 :]))
    goals = [goal[""] for goal in other.cut_values({"": target}, sizes)]
    try:
        with (
            host_rng.restored_generators(),
            devices.Lane(batch.place, caller=True),
            torch.no_grad(),
        ):
            each = [
                batch.loss_fn(part, goal)[0]
                for part, goal in zip(batch.parts(), goals, strict=True)
            ]
            shares = batch.loss_fn.shares(sizes)
            return torch.stack(
                [loss * share for loss, share in zip(each, shares, strict=True)]
            ).sum()
    except Exception:  # a user's function may raise or return anything on another split
        return None


def _ways_out(loss_fn: Weighing, count: int, expected: Tensor, loss: Tensor) -> str:
    ratio = float(expected) / float(loss) if float(loss) else 0.0
    is_sum = loss_fn.options.reduction == "mean" and abs(ratio - count) < 0.01 * count
    if is_sum:
        return (
            "It is a sum over samples: declare that, as batch_options=BatchOptions(reduction='sum')"
        )
    return _GENERAL_WAYS_OUT


def _kind(batch: Batch) -> Hashable:
    """Return the kind of a batch: structure, dtypes and dimensions, without sizes."""
    leaves = [*batch.tensors, *batch.goals.leaves]
    kinds = frozenset(
        (leaf.dim(), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves
    )
    if batch.has_lists:
        return kinds
    return batch.inputs.paths, batch.goals.structure.paths, batch.goal_dims, kinds


def _uneven(
    batch: Batch,
    left_out: Collection[int],
    waits: bool,
    known: tuple[Uneven, Uneven] = (frozenset(), frozenset()),
) -> tuple[Uneven, Uneven]:
    """Return the unequal shares of micro-batches, in the inputs and in the target.

    The model may return a mask or lengths that it derives from its inputs.
    """
    goals, sizes, has_floats = batch.goals, batch.sizes, batch.joining.reduces_floats
    return (
        uneven(batch.tensors, batch.layout, sizes, left_out, waits, known[0], has_floats),
        uneven(goals.leaves, goals.layout, sizes, left_out, waits, known[1]),
    )
