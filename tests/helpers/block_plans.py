"""Random placements of models with one list of blocks, cut where a format may cut them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import strategies as st

from placer.exports.format import Format
from placer.exports.plan import Plan

GPUS = tuple(f"cuda:{index}" for index in range(6))


@st.composite
def block_layers(draw: st.DrawFn) -> list[str]:
    """Return layers before, in and after blocks, in execution order."""
    before = ["embed", "positions"][: draw(st.integers(0, 2))]
    after = ["norm", "head"][: draw(st.integers(0, 2))]
    parts = draw(st.sampled_from([[""], [".attention", ".mlp"]]))
    blocks = [f"model.layers.{i}{part}" for i in range(draw(st.integers(1, 9))) for part in parts]
    return [*before, *blocks, *after]


@st.composite
def segmented_plans(draw: st.DrawFn, form: Format, devices: Sequence[str] = GPUS) -> Plan:
    """Return a placement of whole units in segments, each on the next device."""
    layers = draw(block_layers())
    units = form.units(layers)
    inner = range(1, len(units))
    most = len(devices) - 1
    cuts = sorted(draw(st.sets(st.sampled_from(inner), max_size=most)) if inner else [])
    on = {
        layer: device
        for device, (begin, end) in zip(devices, pairwise([0, *cuts, len(units)]), strict=False)
        for unit in units[begin:end]
        for layer in unit.layers
    }
    return Plan(on, {})
