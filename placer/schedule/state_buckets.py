"""Buckets of parameters whose optimizer state rests on the host, as executor and solver share them.

A device steps its parameters bucket by bucket. Two buffers hold the state of two buckets: one is
stepped while the other is copied. A parameter that is larger than a bucket has a third buffer.
"""

BUCKET_BYTES = 64 * 2**20
"""Bytes of state and gradients in a bucket. A host link of 55 GB/s moves them in 1.2 ms, next to
which its latency is small. Two buckets are a small part of a device's memory."""

BUFFERS = 2
"""Buffers of a device, in addition to the one for a parameter that is larger than a bucket."""
