"""Text bars of a model's time and memory: the largest layers, and the total of the others."""

from __future__ import annotations

from collections.abc import Mapping

from placer.schema import Layer, Profile
from placer.utils.units import Text, bytes_text, ms_text

# layers listed, width of a full bar, and width of a name, in characters
_SHOWN = 8
_WIDTH = 24
_NAME = 26


def share_texts(profile: Profile) -> list[str]:
    """Return headings and bars for the time on each device type, then for memory.

    Returns:
        Lines; empty for a model of one layer.
    """
    if len(profile.layers) < 2:
        return []
    lines = []
    for kind in sorted({kind for layer in profile.layers for kind in layer.forward_ms}):
        times = {layer.name: layer.both_ms(kind) for layer in profile.layers}
        lines += [f"most time on {kind}", *_bars(times, ms_text)]
    return [
        *lines,
        "most memory",
        *_bars({layer.name: kept_bytes(layer) for layer in profile.layers}, bytes_text),
    ]


def kept_bytes(layer: Layer) -> int:
    """Return the bytes of a layer's state and saved tensors."""
    state = layer.param_bytes + layer.grad_bytes + layer.optimizer_bytes + layer.buffer_bytes
    return state + layer.saved_bytes


def _bars(values: Mapping[str, float], text: Text) -> list[str]:
    total = sum(values.values())
    if not total:
        return [f"  {_name('all')} {text(0.0)}"]
    # a stable sort: equal layers stay in execution order
    largest = sorted(values, key=lambda name: -values[name])[:_SHOWN]
    rows = [(name, values[name]) for name in largest]
    if len(values) > _SHOWN:
        rest = total - sum(value for _, value in rows)
        # rounding may make the rest slightly negative
        rows.append((f"{len(values) - _SHOWN} others", max(0.0, rest)))
    most = max(value for _, value in rows)
    return [
        f"  {_name(name)} {'█' * round(_WIDTH * value / most):{_WIDTH}} "
        f"{value / total:4.0%}  "
        f"{text(value)}"
        for name, value in rows
    ]


def _name(name: str) -> str:
    short = name if len(name) <= _NAME else f"{name[:12]}…{name[-13:]}"
    return f"{short:{_NAME}}"
