"""Comparison of two profiles or two placements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby

from pydantic import BaseModel, ConfigDict
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from placer.errors import InputError
from placer.report.explain import value_text
from placer.report.shares import kept_bytes
from placer.schema import DeviceLoad, Layer, Placement, Profile
from placer.schema.placement import holders
from placer.utils.units import bytes_text, ms_text

_WHICH = ("first", "second")

# Smallest relative change that is marked, if it also exceeds the spread of the timings.
_NOTABLE = 0.05

_SETTINGS = (
    "model",
    "training",
    "optimizer",
    "with_loss",
    "batch_size",
    "granularity",
    "graph_hash",
)


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True)


class Change(_Result):
    """A quantity in both; None where one does not have it.

    Attributes:
        first: its value in the first.
        second: its value in the second.
        notable: whether they differ by more than the noise of measurements.
    """

    first: float | None
    second: float | None
    notable: bool = False

    @property
    def ratio(self) -> float | None:
        """Return the second over the first; None if it is undefined."""
        return self.second / self.first if self.first and self.second is not None else None


class LayerChanges(_Result):
    """One layer in two profiles.

    Attributes:
        name: of the layer.
        time_ms: forward plus backward time in ms, by device type.
        memory_bytes: state, saved activations, and workspace.
    """

    name: str
    time_ms: dict[str, Change]
    memory_bytes: Change


class ProfileComparison(_Result):
    """A comparison of two profiles.

    Attributes:
        settings: the conditions that differ, as text.
        time_ms: total of all layers in ms, by device type.
        memory_bytes: total of all layers.
        layers: in the order of the first, then the layers that only the second has.
    """

    settings: dict[str, tuple[str, str]]
    time_ms: dict[str, Change]
    memory_bytes: Change
    layers: list[LayerChanges]


class Move(_Result):
    """Consecutive layers with the same change of device.

    Attributes:
        layers: their names, in execution order.
        source: the device in the first; None if the first does not have the layers.
        target: the device in the second.
    """

    layers: list[str]
    source: str | None
    target: str | None


class PlacementComparison(_Result):
    """A comparison of two placements.

    Attributes:
        settings: the conditions that differ, as text.
        objective: the common objective; empty if they differ.
        objective_value: in the objective's unit; compared only for a common objective.
        bound: the proven bound.
        load_ms: busy time per micro-batch of each device.
        memory_bytes: peak memory of each device.
        moves: the layers on other devices.
    """

    settings: dict[str, tuple[str, str]]
    objective: str = ""
    objective_value: Change
    bound: Change
    load_ms: dict[str, Change]
    memory_bytes: dict[str, Change]
    moves: list[Move]


Comparison = ProfileComparison | PlacementComparison


def compare(first: object, second: object) -> Comparison:
    """Compare two profiles or two placements.

    Raises:
        InputError: if they are of different or unsupported kinds.
    """
    if isinstance(first, Profile) and isinstance(second, Profile):
        return _profiles(first, second)
    if isinstance(first, Placement) and isinstance(second, Placement):
        return _placements(first, second)
    kinds = f"a {type(first).__name__.lower()} and a {type(second).__name__.lower()}"
    raise InputError(f"{kinds} cannot be compared; give two profiles or two placements")


def _profiles(first: Profile, second: Profile) -> ProfileComparison:
    here, there = ({layer.name: layer for layer in profile.layers} for profile in (first, second))
    kinds = sorted({kind for layer in (*first.layers, *second.layers) for kind in layer.forward_ms})
    layers = [_layer(name, here.get(name), there.get(name), kinds) for name in {**here, **there}]
    return ProfileComparison(
        settings=_differing(first, second, _SETTINGS),
        time_ms={kind: _change(_total_ms(first, kind), _total_ms(second, kind)) for kind in kinds},
        memory_bytes=_change(_total_bytes(first), _total_bytes(second)),
        layers=layers,
    )


def _layer(
    name: str, first: Layer | None, second: Layer | None, kinds: Sequence[str]
) -> LayerChanges:
    each = [layer for layer in (first, second) if layer is not None]
    times = {}
    for kind in kinds:
        # the difference of two measurements has the noise of both
        spread = sum(layer.spread.get(kind, 0.0) for layer in each)
        times[kind] = _change(_time_ms(first, kind), _time_ms(second, kind), spread)
    return LayerChanges(
        name=name, time_ms=times, memory_bytes=_change(_memory_bytes(first), _memory_bytes(second))
    )


def _change(first: float | None, second: float | None, spread: float = 0.0) -> Change:
    if first is None or second is None:
        return Change(first=first, second=second, notable=first is not second)
    # relative to the larger one, so that the order of the two does not matter
    apart = abs(second - first) / max(abs(first), abs(second), 1e-12)
    return Change(first=first, second=second, notable=apart > max(_NOTABLE, spread))


def _total_ms(profile: Profile, kind: str) -> float | None:
    known = [time for layer in profile.layers if (time := _time_ms(layer, kind)) is not None]
    return sum(known) if known else None


def _total_bytes(profile: Profile) -> float:
    """Return the memory of all layers, with the largest workspace, as one layer runs at a time."""
    return sum(map(kept_bytes, profile.layers)) + max(
        map(_workspace_bytes, profile.layers), default=0
    )


def _time_ms(layer: Layer | None, kind: str) -> float | None:
    return layer.both_ms(kind) if layer is not None and kind in layer.forward_ms else None


def _memory_bytes(layer: Layer | None) -> float | None:
    return None if layer is None else kept_bytes(layer) + _workspace_bytes(layer)


def _workspace_bytes(layer: Layer) -> int:
    return max(layer.forward_workspace_bytes, layer.backward_workspace_bytes)


def _placements(first: Placement, second: Placement) -> PlacementComparison:
    alike = first.objective == second.objective
    return PlacementComparison(
        settings=_differing(
            first,
            second,
            ("model", "status", "objective", "training", "batch_size", "chunks", "schedule"),
        ),
        objective=first.objective if alike else "",
        objective_value=_change(first.objective_value, second.objective_value if alike else None),
        bound=_change(first.bound, second.bound if alike else None),
        load_ms=_by_device(first, second, lambda load: load.load_ms),
        memory_bytes=_by_device(first, second, lambda load: load.memory.total_bytes),
        moves=_moves(
            holders(first.layer_devices, first.replicas),
            holders(second.layer_devices, second.replicas),
        ),
    )


def _by_device(
    first: Placement, second: Placement, of: Callable[[DeviceLoad], float]
) -> dict[str, Change]:
    """Return the changes of a figure of the devices' loads."""
    here, there = ({load.device: of(load) for load in one.devices} for one in (first, second))
    return {name: _change(here.get(name), there.get(name)) for name in here | there}


def _moves(first: Mapping[str, str], second: Mapping[str, str]) -> list[Move]:
    """Return runs of layers with the same change; unmoved layers are left out."""
    pairs = [(name, first.get(name), second.get(name)) for name in {**first, **second}]
    # consecutive layers with the same change form one move
    runs = groupby(pairs, key=lambda pair: pair[1:])
    return [
        Move(layers=[name for name, _, _ in run], source=source, target=target)
        for (source, target), run in runs
        if source != target
    ]


def _differing(first: object, second: object, fields: Sequence[str]) -> dict[str, tuple[str, str]]:
    pairs = {field: (str(getattr(first, field)), str(getattr(second, field))) for field in fields}
    return {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}


def comparison_table(found: Comparison, names: tuple[str, str] | None = None) -> RenderableType:
    """Return the comparison as a rich table; notable changes are bold.

    Args:
        found: from ``compare``.
        names: headings of the first and the second, such as their files.
    """
    settings = (
        []
        if names is None
        else [f"{which:<10}  {name}" for which, name in zip(_WHICH, names, strict=True)]
    )
    settings += [f"{name}: {first} | {second}" for name, (first, second) in found.settings.items()]
    parts: list[RenderableType] = []
    if settings:
        # never wrapped, because file names in it are copied
        parts.append(Text("\n".join(settings), no_wrap=True, overflow="ignore"))
    parts += (
        _profile_tables(found) if isinstance(found, ProfileComparison) else _placement_tables(found)
    )
    return Group(*parts)


def _profile_tables(found: ProfileComparison) -> list[RenderableType]:
    grid = _grid("Layers", "layer", [*found.time_ms, "memory"])
    for layer in found.layers:
        grid.add_row(*_row(layer.name, layer.time_ms, layer.memory_bytes))
    grid.add_section()
    grid.add_row(*_row("all", found.time_ms, found.memory_bytes))
    return [grid]


def _grid(title: str, name: str, headings: Sequence[str]) -> Table:
    """Return an empty table with three columns for each heading."""
    grid = Table(title=title, title_justify="left")
    grid.add_column(name, overflow="fold")
    for heading in headings:
        for which in (*_WHICH, "ratio"):
            grid.add_column(f"{heading}\n{which}", justify="right", no_wrap=True)
    return grid


def _row(name: str, times: Mapping[str, Change], memory: Change) -> list[Text]:
    cells = [Text(name, style="bold" if any(time.notable for time in times.values()) else "")]
    for time in times.values():
        cells += _cells(time, False)
    return cells + _cells(memory, True)


def _placement_tables(found: PlacementComparison) -> list[RenderableType]:
    grid = _grid("Devices", "device", ["busy", "memory"])
    for name, load in found.load_ms.items():
        grid.add_row(name, *_cells(load, False), *_cells(found.memory_bytes[name], True))
    value = found.objective_value
    shown = partial(_value_text, found.objective)
    ratio = "" if value.ratio is None else f", ratio {value.ratio:.3f}"
    words = [
        f"objective   {shown(value.first)} | {shown(value.second)}{ratio}",
        f"bound       {shown(found.bound.first)} | {shown(found.bound.second)}",
    ]
    words += [
        f"moved       {_named(move.layers)}: {move.source or '-'} -> {move.target or '-'}"
        for move in found.moves
    ]
    return [grid, Text("\n".join(words if found.moves else [*words, "moved       nothing"]))]


def _cells(change: Change, in_bytes: bool) -> list[Text]:
    style = "bold" if change.notable else ""
    shown = bytes_text if in_bytes else ms_text
    values = ["-" if value is None else shown(value) for value in (change.first, change.second)]
    ratio = "" if change.ratio is None else f"{change.ratio:.2f}"
    return [Text(words, style=style) for words in (*values, ratio)]


def _value_text(objective: str, value: float | None) -> str:
    if value is None:
        return "-"
    return value_text(objective, value) if objective else f"{value:.6g}"


def _named(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]} ({len(layers)} layers)"
