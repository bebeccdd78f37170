"""Estimates as tables: whether a model fits, the memory of each device, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from placer.report.rendering import Fitting
from placer.schema import DeviceEstimate, Estimate
from placer.utils.units import bytes_text, count_text, devices_text

_COLUMNS: dict[str, tuple[str, ...]] = {
    "parameters": ("param_bytes", "buffer_bytes"),
    "gradients": ("grad_bytes",),
    "optimizer": ("optimizer_bytes",),
    "activations": ("activation_bytes",),
    "workspace": ("workspace_bytes",),
    "cache": (),
}
"""Fields of ``MemoryUse`` by column; the cache has its own field."""

_MOST_ROWS = 64
"""Devices that a table shows; further ones are counted."""


def headline(estimate: Estimate) -> str:
    """Return the answer as one line.

    ``fits on two 24 GiB devices: the fullest uses 21.3 GiB of 23.5 GiB``
    """
    fullest = estimate.fullest
    used = bytes_text(fullest.total_bytes)
    if fullest.memory_bytes is None or fullest.limit_bytes is None:
        what = "the weights need" if estimate.weights_only else "needs"
        return f"{what} {used} on one device{_card_text(estimate)}"
    devices = devices_text([one.memory_bytes or 0 for one in estimate.devices])
    limit = bytes_text(fullest.limit_bytes)
    if estimate.fits:
        verb = "the weights fit" if estimate.weights_only else "fits"
        return f"{verb} on {devices}: the fullest uses {used} of {limit}"
    missing = f"the fullest needs {used} of {limit}"
    if estimate.fits is None:
        return f"no placement on {devices} was found in time: in the best known, {missing}"
    verb = "the weights do not fit" if estimate.weights_only else "does not fit"
    return f"{verb} on {devices}: {missing}"


def estimate_table(estimate: Estimate) -> RenderableType:
    """Return the answer, the memory of each device, and the changes or cards that fit."""
    parts: list[RenderableType] = [
        Text(headline(estimate), style="bold"),
        Fitting(_by_device(estimate), _by_kind(estimate), _by_device(estimate, kinds=False)),
        Text("\n".join(remarks(estimate))),
    ]
    return Group(*parts)


def remarks(estimate: Estimate) -> list[str]:
    """Return lines about what would fit, and about the assumptions."""
    return [*_alternatives(estimate), *_assumptions(estimate)]


def _card_text(estimate: Estimate) -> str:
    if not estimate.cards:
        return ""
    counts = [devices_text([one.memory_bytes] * one.devices, "card") for one in estimate.cards]
    return f"; fits on {' or '.join(counts)}"


def _alternatives(estimate: Estimate) -> Iterator[str]:
    for change in estimate.changes:
        used, limit = bytes_text(change.total_bytes), bytes_text(change.limit_bytes)
        yield f"would fit   {change.change}: the fullest uses {used} of {limit}"
    if estimate.fits is False and not estimate.changes:
        yield "would fit   no single change was found"
    for card in estimate.cards:
        used, limit = bytes_text(card.total_bytes), bytes_text(card.limit_bytes)
        cards = devices_text([card.memory_bytes] * card.devices, "card")
        yield f"fits on     {cards}: the fullest uses {used} of {limit}"


def _assumptions(estimate: Estimate) -> Iterator[str]:
    if not estimate.weights_only:
        yield f"assumes     {', '.join(_mode(estimate))}"
    if estimate.recompute:
        yield f"recompute   {', '.join(estimate.recompute)}"
    if not estimate.proven:
        yield "optimality  not proven in time: another placement may use less memory"
    yield from (f"note        {note}" for note in estimate.notes)


def _mode(estimate: Estimate) -> Iterator[str]:
    if estimate.training:
        yield f"training with {estimate.optimizer or 'no optimizer'}"
        yield count_text(estimate.chunks, "micro-batch", "micro-batches") + (
            f" of {count_text(estimate.batch_size, 'sample')}"
        )
        yield estimate.schedule
    else:
        yield "inference"
        yield count_text(estimate.batch_size, "sample")
    if estimate.generate is not None:
        yield f"a cache of {estimate.generate} tokens"
    if estimate.inputs:
        yield f"inputs {' '.join(estimate.inputs)}"


def _by_device(estimate: Estimate, *, kinds: bool = True) -> Table:
    """Return a table with a row for each device."""
    grid = _table(estimate)
    grid.add_column("device")
    shown = _kinds(estimate) if kinds else []
    for heading in ("layers", *shown, "total / limit"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for one in estimate.devices[:_MOST_ROWS]:
        grid.add_row(
            one.device,
            str(one.layers),
            *(bytes_text(_parts(one, column)) for column in shown),
            f"{bytes_text(one.total_bytes)} / {_limit(one)}",
            style=_style(one),
        )
    if len(estimate.devices) > _MOST_ROWS:
        grid.caption = f"and {len(estimate.devices) - _MOST_ROWS} more devices"
    return grid


def _by_kind(estimate: Estimate) -> Table:
    """Return a table with a column for each device, which is narrow for few devices."""
    grid = _table(estimate)
    grid.add_column("memory")
    for one in estimate.devices:
        grid.add_column(one.device, justify="right", no_wrap=True, style=_style(one))
    grid.add_row("layers", *(str(one.layers) for one in estimate.devices))
    for kind in _kinds(estimate):
        grid.add_row(kind, *(bytes_text(_parts(one, kind)) for one in estimate.devices))
    grid.add_row("total", *(bytes_text(one.total_bytes) for one in estimate.devices))
    grid.add_row("limit", *(_limit(one) for one in estimate.devices))
    return grid


def _table(estimate: Estimate) -> Table:
    return Table(title=f"Memory of {estimate.model or 'model'}", title_justify="left")


def _kinds(estimate: Estimate) -> list[str]:
    """Return the kinds of memory that some device needs."""
    return [kind for kind in _COLUMNS if any(_parts(one, kind) for one in estimate.devices)]


def _limit(one: DeviceEstimate) -> str:
    return "no limit" if one.limit_bytes is None else bytes_text(one.limit_bytes)


def _style(one: DeviceEstimate) -> str:
    return "bold red" if one.missing_bytes else ""


def _parts(one: DeviceEstimate, column: str) -> int:
    if column == "cache":
        return one.cache_bytes
    return sum(getattr(one.memory, field) for field in _COLUMNS[column])
