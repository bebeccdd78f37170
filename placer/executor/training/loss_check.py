"""Whether the losses of micro-batches give the loss of the batch: seen once for each kind of batch.

    results of micro-batches ──▶ joined ──▶ loss_fn(joined, whole target) ──┐
    losses of micro-batches  ──▶ joined ──────────────────────────────────┴▶ equal, or BatchError

That takes no forward pass. It tells a sum from a mean, and sees samples that meet one another in the loss, and labels
that are left out in unlike numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.executor.batch_check import difference_error
from placer.executor.closeness import Closeness
from placer.executor.joining import Joining, find_rules, join
from placer.executor.training.batch import Batch
from placer.executor.training.counted_labels import LabelWatch
from placer.executor.training.weighing import Goals, Weighed, Weighing
from placer.graph import chance
from placer.graph.structure import detached_nest, flatten
from placer.warned import warn

_KNOWN = 1000


class LossChecks:
    """The kinds of batches whose loss was compared so far.

    Args:
        loss_fn: the loss of a micro-batch.
    """

    def __init__(self, loss_fn: Weighing) -> None:
        self._loss_fn = loss_fn
        self._known: dict[Hashable, Joining] = {}

    def wants(self, batch: Batch) -> bool:
        """Return whether a batch is to be compared: it is cut, and the first of its kind."""
        is_cut = self._loss_fn.options.verify and len(batch.sizes) > 1
        return is_cut and _kind(batch) not in self._known

    def leave_out(self, batch: Batch) -> None:
        """Compare no batch of this kind."""
        self._known[_kind(batch)] = Joining.of(self._loss_fn.options)

    def known(self, batch: Batch) -> Joining:
        """Return how further values of the loss are joined."""
        return self._known.get(_kind(batch)) or Joining.of(self._loss_fn.options)

    def joining(
        self, batch: Batch, loss: Tensor, made: Sequence[tuple[Any, dict[str, Any]]], labels: LabelWatch
    ) -> Joining:
        """Compare the loss of a batch, and return how further values of the loss are joined.

        Args:
            batch: the batch.
            loss: of its micro-batches, joined.
            made: by micro-batch, the model's result and the further values of the loss.
            labels: sees which labels the loss counts.

        Raises:
            BatchError: the loss of the whole batch, or a further value, is another.
        """
        found = compare_losses(self._loss_fn, batch.goals, batch.sizes, batch.joining, loss, made, labels)
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known[_kind(batch)] = found
        return found


def compare_losses(
    loss_fn: Weighing,
    goals: Goals,
    sizes: Sequence[int],
    joining: Joining,
    loss: Tensor,
    made: Sequence[tuple[Any, dict[str, Any]]],
    labels: LabelWatch,
) -> Joining:
    """Compare the loss of a batch with that of its micro-batches, without a further forward pass of the model.

    Args:
        loss_fn: the loss of a micro-batch.
        goals: the target of the batch.
        sizes: samples in each micro-batch.
        joining: how results are joined.
        loss: of the micro-batches, joined.
        made: by micro-batch, the model's result and the further values of the loss.
        labels: sees which labels the loss counts.

    Returns:
        How further values are joined.

    Raises:
        BatchError: the loss of the whole batch, or a further value, is another.
    """
    target = goals.structure.unflatten(goals.leaves)
    if isinstance(target, Weighed):
        target = target.target
    weights = loss_fn.means(goals, sizes)
    whole = join([result for result, _ in made], sizes, joining, weights)
    place = devices.location(loss)
    with chance.given_back(), devices.Lane(place, caller=True):  # "cuda" in loss_fn means this device
        outputs, goal = _on(whole, place), _on(target, place)
        try:
            with labels, torch.enable_grad():  # a loss may differentiate by leaves of its own
                expected, values = loss_fn.plain(outputs, goal)
        except Exception as error:  # whatever a user's function raises on results that have no graph
            warn(
                "the loss of micro-batches was not compared with that of the whole batch, of which it fails: "
                f"{type(error).__name__}: {error}"
            )
            return Joining.of(loss_fn.options)
        expected, values = detached_nest((expected, values))
    if loss_fn.options.weigh is None:
        labels.look(expected, goal, goals.layout)
    closeness = Closeness.of([*flatten(whole)[0], loss, expected])
    if not closeness(loss, expected):
        ways_out = _ways_out(loss_fn, len(sizes), expected, loss)
        raise difference_error("the loss", expected, loss, closeness.tolerance, ways_out)
    declared = Joining.of(loss_fn.options)
    found, differences, _ = find_rules(values, [one for _, one in made], sizes, declared, closeness, weights)
    for one in differences:
        what = f"the value {one.name!r} of loss_fn"
        ways_out = (
            f"declare how it is joined, as BatchOptions(outputs={{{one.name!r}: 'list'}}) for a list with the value of "
            "each micro-batch; or give chunks=1"
        )
        raise difference_error(what, one.whole, one.joined, closeness.tolerance, ways_out)
    return found


def _ways_out(loss_fn: Weighing, count: int, expected: Tensor, loss: Tensor) -> str:
    ratio = float(expected) / float(loss) if float(loss) else 0.0
    is_sum = loss_fn.options.reduction == "mean" and abs(ratio - count) < 0.01 * count
    if is_sum:
        return "It is a sum over samples: declare that, as batch_options=BatchOptions(reduction='sum')"
    return (
        "If it is a mean that leaves samples or labels out, give the weight of each sample, as batch_options="
        "BatchOptions(weigh=f); if it is a sum over samples, reduction='sum'; if it compares samples with one another, "
        "chunks=1; BatchOptions(verify=False) takes it as it is"
    )


def _kind(batch: Batch) -> Hashable:
    """Return what tells kinds of batches apart: structure, types and numbers of dimensions, and nothing of sizes."""
    leaves = [*batch.tensors, *batch.goals.leaves]
    kinds = frozenset((leaf.dim(), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
    if batch.has_lists:
        return kinds
    return batch.inputs.paths, batch.goals.structure.paths, kinds


def _on(nest: Any, place: torch.device) -> Any:
    leaves, structure = flatten(nest)
    return structure.unflatten([devices.move(leaf, place) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
