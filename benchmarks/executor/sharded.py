"""FSDP2's training step, predicted from a profile and measured.

Each process computes its whole share of the batch as one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from placer import profile
from placer.schema.placement import ShardedStep
from placer.solver.replicas.sharding import sharded_step

from . import cases, contest, ours, replicas
from .cases import Training
from .in_ranks import Peers, Turn
from .sample import Sample, release

PREFIX = "sharded-"
NAMES = ("gpt", "resnet101")


def measure(case: Training, count: int) -> Iterator[Sample]:
    """Yield FSDP2's steps, with the prediction of a step.

    Args:
        case: the training case.
        count: the number of devices.
    """
    cases.prepare()
    name, predicted = PREFIX + case.name, _predicted(case, count)
    release()
    peers = Peers(case.name, count)
    try:
        found, failed = peers.contender([Turn(replicas.FSDP2)])
        yield from (replace(sample, case=name) for sample in failed)
        if found is not None:
            if predicted is not None:
                found.values = {"predicted_ms": [predicted.step_ms]}
            yield from contest.alternate(name, [found])
    finally:
        peers.close()


def _predicted(case: Training, count: int) -> ShardedStep | None:
    """Return the predicted step of one micro-batch per process; None if it does not fit."""
    inputs, target = case.batch(cases.home())
    share = len(inputs) // count
    found = profile(
        case.model(cases.home()).cpu(),
        inputs[:share].cpu(),
        [str(place) for place in cases.places(count)],
        training=True,
        optimizer=cases.sgd,
        granularity=case.granularity,
        progress=False,
        loss_fn=case.loss,
        target=target[:share].cpu(),
    )
    return sharded_step(ours.question([found], count, len(inputs)))
