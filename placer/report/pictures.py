"""Pictures of profiles and placements: time and memory by layer, and by device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from placer.report.charts import Bar, Chart, Part, bars, columns, drawing, legend
from placer.schema import Estimate, Layer, MemoryUse, Placement, Profile
from placer.utils.units import Text, bytes_text, ms_text

_MEMORY: dict[str, Callable[[Layer], int]] = {
    "weights and buffers": lambda layer: layer.param_bytes + layer.buffer_bytes,
    "gradients": lambda layer: layer.grad_bytes,
    "optimizer": lambda layer: layer.optimizer_bytes,
    "kept for backward": lambda layer: layer.saved_bytes,
    "workspace": lambda layer: max(layer.forward_workspace_bytes, layer.backward_workspace_bytes),
}
_USES = {
    "weights and buffers": ("param_bytes", "buffer_bytes"),
    "gradients": ("grad_bytes",),
    "optimizer": ("optimizer_bytes",),
    "kept for backward": ("activation_bytes",),
    "workspace": ("workspace_bytes",),
    "keys and values": ("cache_bytes",),
}


def picture(subject: Profile | Placement | Estimate) -> str:
    """Return a self-contained SVG file.

    It shows time and memory by layer of a profile, or by device of a placement, or the memory of
    each device of an estimate.
    """
    # sections are stacked: heading, legend, chart
    shapes, y = [], 0
    for title, keys, (drawn, height) in _sections(subject):
        names, row = legend(keys, y + 20)
        heading = f'<text x="0" y="{y + 14}">{escape(title)}</text>'
        shapes.append(f'{heading}{names}<g transform="translate(0 {y + 20 + row})">{drawn}</g>')
        y += 20 + row + height + 16
    name = subject.model or "model"
    shown = "Memory" if isinstance(subject, Estimate) else "Time and memory"
    return drawing(f"{shown} of {name}", "".join(shapes), max(1, y), style=True)


def _sections(
    subject: Profile | Placement | Estimate,
) -> list[tuple[str, list[tuple[str, int]], tuple[str, int]]]:
    if isinstance(subject, Profile):
        return [
            (chart.title, _keys(chart.parts), columns(chart)) for chart in layer_charts(subject)
        ]
    shown = [estimate_bars(subject)] if isinstance(subject, Estimate) else device_bars(subject)
    return [(title, bar_keys(rows), bars(rows, text)) for title, rows, text in shown]


def _keys(parts: Sequence[Part]) -> list[tuple[str, int]]:
    return [(part.name, part.color) for part in parts]


def bar_keys(rows: Sequence[Bar]) -> list[tuple[str, int]]:
    """Return the names and colours of the legend of bars."""
    return list(
        dict.fromkeys((name, color) for row in rows for name, color, value in row.values if value)
    )


def layer_charts(profile: Profile) -> list[Chart]:
    """Return charts of time by layer for each device type, then of memory by layer."""
    kinds = sorted({kind for layer in profile.layers for kind in layer.forward_ms})
    labels = [layer.name for layer in profile.layers]
    charts = []
    for kind in kinds:
        parts = [Part("forward", 0, [layer.forward_ms.get(kind, 0.0) for layer in profile.layers])]
        if profile.training:
            backward_ms = [layer.backward_ms.get(kind, 0.0) for layer in profile.layers]
            optimizer_ms = [layer.optimizer_ms.get(kind, 0.0) for layer in profile.layers]
            parts += [Part("backward", 1, backward_ms), Part("optimizer", 2, optimizer_ms)]
        charts.append(Chart(f"Time by layer on {kind}", labels, _filled(parts), ms_text))
    memory = [
        Part(name, color, [float(of(layer)) for layer in profile.layers])
        for color, (name, of) in enumerate(_MEMORY.items())
    ]
    return [*charts, Chart("Memory by layer", labels, _filled(memory), bytes_text)]


def placed_chart(placement: Placement, profile: Profile) -> Chart:
    """Return a chart of time by layer, coloured by the layer's device."""
    types = (
        {device.name: device.type for device in profile.cluster.devices} if profile.cluster else {}
    )
    names = list(dict.fromkeys([*placement.stages, *placement.layer_devices.values()]))
    parts = [
        Part(
            name,
            number % 8,
            [_time_ms(layer, name, placement, types.get(name)) for layer in profile.layers],
        )
        for number, name in enumerate(names)
    ]
    return Chart(
        "Time by layer, by device", [layer.name for layer in profile.layers], parts, ms_text
    )


def _time_ms(layer: Layer, device: str, placement: Placement, kind: str | None) -> float:
    if placement.layer_devices.get(layer.name) != device:
        return 0.0
    # without the device's type, any measured type still shows the proportions
    kind = kind if kind in layer.forward_ms else next(iter(layer.forward_ms), None)
    return layer.forward_ms.get(kind or "", 0.0) + (
        layer.backward_ms.get(kind or "", 0.0) if placement.training else 0.0
    )


def device_bars(placement: Placement) -> list[tuple[str, list[Bar], Text]]:
    """Return bars of each device's time per micro-batch, then of its memory and limit."""
    times = [
        Bar(
            load.device,
            [
                ("compute", 0, load.compute_ms),
                ("send", 1, load.send_ms),
                ("receive", 3, load.receive_ms),
            ],
            f"{ms_text(load.load_ms)}{' ◀ busiest' if load.bottleneck else ''}",
        )
        for load in placement.devices
    ]
    memory = [
        _memory_bar(load.device, _uses(load.memory), load.memory.total_bytes, load.limit_bytes)
        for load in placement.devices
    ]
    return [("Time per micro-batch", times, ms_text), ("Memory", memory, bytes_text)]


def estimate_bars(estimate: Estimate) -> tuple[str, list[Bar], Text]:
    """Return bars of each device's memory and limit, the cache apart."""
    rows = [
        _memory_bar(
            one.device,
            {**_uses(one.memory), "cache": float(one.cache_bytes)},
            one.total_bytes,
            one.limit_bytes,
        )
        for one in estimate.devices
    ]
    return "Memory", rows, bytes_text


def _memory_bar(
    device: str, uses: Mapping[str, float], total_bytes: int, limit_bytes: int | None
) -> Bar:
    limit = "no limit" if limit_bytes is None else bytes_text(limit_bytes)
    values = [(name, color, value) for color, (name, value) in enumerate(uses.items())]
    return Bar(device, values, f"{bytes_text(total_bytes)} of {limit}", limit_bytes)


def _uses(memory: MemoryUse) -> dict[str, float]:
    return {
        name: float(sum(getattr(memory, field) for field in fields))
        for name, fields in _USES.items()
    }


def _filled(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with a positive value; the first part if there is no such part."""
    return [part for part in parts if any(part.values)] or list(parts[:1])
