"""A request of four layers on two devices, and a map of it."""

from __future__ import annotations

from placer.schema import PlacementRequest
from placer_server.openapi import examples

EVEN = {"embed": "cuda:0", "block.0": "cuda:0", "block.1": "cuda:1", "head": "cuda:1"}


def example(name="throughput", **changes):
    return PlacementRequest.model_validate({**examples.requests()[name]["value"], **changes})
