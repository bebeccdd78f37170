"""Flows that run only what the caller asks for: where runs are counted, or micro-batches depend on
one another."""

from __future__ import annotations

from placer import BatchOptions, DataFlow


def unverified(flow: DataFlow) -> DataFlow:
    """The flow, which compares neither batches with their micro-batches nor graphs with the model."""
    flow.batch_options = BatchOptions(verify=False)
    flow._program.compare = lambda capture, part: ""
    return flow
