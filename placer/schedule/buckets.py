"""Reductions of gradients: the buckets, and the cost of additions.

A bucket consists of the layers of a stage whose gradients replicas reduce together.
A backward pass runs the layers of a stage in reverse, so the gradients of the last layers are
complete first. They can be reduced while the pass goes on::

    layers            l0   l1   l2   l3   l4   l5
    backward pass     <-------------------------      gradients of l5 are complete first
    buckets           [ 2     ]  [  1  ]  [  0  ]     bucket 0 is reduced while l3 .. l0 still run

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
VLDB 2020, section 3.2.3.
"""

from __future__ import annotations

from collections.abc import Sequence

BUCKET_BYTES = 64 * 2**20
"""Bytes of gradients from which a bucket is reduced. Over NVLink, 4 replicas exchange parts of
16 MiB, which reach three quarters of the bandwidth; larger buckets would leave more to reduce
after the last backward pass."""

ADD_BYTES_PER_S = 2e12
"""Bytes per second of an addition of gradients, which reads two of them and writes one. It is about
60% of an H100's memory bandwidth. A device with slower memory has slower links, too, so additions
never take much of the time of a reduction."""


def gradient_buckets(grad_bytes: Sequence[int]) -> list[range]:
    """Return the buckets of a stage, in the order in which their gradients are complete.

    Args:
        grad_bytes: the bytes of the gradients of each layer, in execution order.

    Returns:
        For each bucket the positions of its layers. From the last layer on, a bucket takes layers
        until it has ``BUCKET_BYTES``; so only the last bucket may have less. Layers without
        gradients belong to the bucket of the layer behind them, or to none.
    """
    buckets: list[range] = []
    end, size = len(grad_bytes), 0
    for place in range(len(grad_bytes) - 1, -1, -1):
        size += grad_bytes[place]
        if size >= BUCKET_BYTES:
            buckets.append(range(place, end))
            end, size = place, 0
    if size:
        buckets.append(range(0, end))
    return buckets
