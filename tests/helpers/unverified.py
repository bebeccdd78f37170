"""Flows that run only what the caller asks for: where runs are counted, or micro-batches depend on
one another."""

from __future__ import annotations

from placer import BatchOptions, DataFlow


def unverified(flow: DataFlow) -> DataFlow:
    """Return the flow, which verifies neither micro-batches nor captured graphs."""
    flow.batch_options = BatchOptions(verify=False)
    flow.placed.captures.compare = lambda capture, part: ""
    return flow
