"""Links over which a value takes longer than any time that is reckoned with."""

from __future__ import annotations

from placer.errors import InputError
from placer.schema import PlacementRequest

LONGEST_MS = 1e9
"""No layer may take longer, nor may a transfer, nor all that one device does."""


def refuse_slow_links(request: PlacementRequest) -> None:
    """Every value, and every gradient, passes every link in a time that can be reckoned with.

    Raises:
        InputError: one does not; it names the link and the layer that makes the value.
    """
    sizes = [
        (max(edge.bytes, edge.gradient_bytes, 1), edge.source) for edge in request.profile.edges
    ]
    if not sizes:
        return
    size_bytes, source = max(sizes, key=lambda one: one[0])
    for link in request.placed_on.links:
        time_ms = link.transfer_ms(size_bytes)
        if time_ms > LONGEST_MS:
            raise InputError(
                f"{size_bytes} bytes of layer {source!r} would take {time_ms:.3g} ms over link {link.source!r} -> "
                f"{link.target!r} (bandwidth_bytes_per_s = {link.bandwidth_bytes_per_s:g}, latency_s = "
                f"{link.latency_s:g}); no more than 1e9 can be placed: leave out a link that no value may pass"
            )
