"""Images per second through a UNet of Stable Diffusion XL's shapes: two devices, and one.

The same batches go through ``flow.stream`` with the layers on two devices, through ``flow.stream``
with all layers on one, and through the model itself on one. The three take turns. A time is of a
whole stream, with filling and draining the devices. An image counts once for each UNet pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

from .. import record
from .engine import shown

UNET = "unet"
"""The name of the case."""

_LEAST_RATIO = 1.8
"""The requested ratio: two devices that are idle for a tenth of the time."""

_GRANULARITY = "fine"
"""A whole transformer takes up to a tenth of the time, so a cut may have to go through one."""

TWO, ONE, EAGER = "two devices", "flow.stream on one device", "eager on one device"


def rows(turns: int) -> Iterator[dict[str, Any]]:
    """Yield the images per second, their ratio, and the largest difference of results.

    Args:
        turns: how often each way runs.
    """
    import torch

    from ..executor import cases
    from .sdxl_unet import TINY, SDXLUNet, Sizes, batch

    places = cases.places(2)
    sizes, images, count = (TINY, 2, 4) if cases.is_small() else (Sizes(), 4, 32)
    dtype = torch.float32 if cases.is_small() else torch.bfloat16
    torch.manual_seed(0)
    with cases.home():
        model = SDXLUNet(sizes).to(dtype).eval()
        batches = [batch(sizes, images, dtype) for _ in range(4)] * (count // 4)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    other = copy.deepcopy(model)
    flows = {ONE: _on_one(model, places[0]), TWO: _on_two(other, batches[0], places)}
    ways: dict[str, Callable[[], list[Any]]] = {
        TWO: lambda: list(flows[TWO].stream(batches)),
        ONE: lambda: list(flows[ONE].stream(batches)),
        EAGER: lambda: [model(*one) for one in batches],
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    results = {}
    with torch.no_grad():
        for way in ways.values():
            way()
        for turn in range(turns):
            for name in list(ways) if turn % 2 == 0 else reversed(ways):
                _wait(places)
                began = perf_counter()
                results[name] = ways[name]()
                _wait(places)
                rates[name].append(count * images / (perf_counter() - began))
                results[name] = [result.to(cases.home()) for result in results[name][:4]]
    kind = "tiny SDXL-like UNet" if cases.is_small() else "SDXL's UNet, 1024 px, bf16"
    case = f"{kind}, {count} batches of {images} images in a stream, 2 devices"
    value = {name: median(found) for name, found in rates.items()}
    two, one = rates[TWO], max(value[ONE], value[EAGER])
    yield record.row(
        case,
        "images per second, a UNet pass each",
        "images/s",
        shown(value[TWO]),
        spread=(shown(min(two)), shown(max(two))),
        peers={name: shown(value[name]) for name in (ONE, EAGER)},
    )
    yield record.row(
        case,
        "images per second, over the faster way on one device",
        "x",
        round(value[TWO] / one, 3),
        spread=(round(min(two) / one, 3), round(max(two) / one, 3)),
        target=_LEAST_RATIO if cases.on_gpus() and not cases.is_small() else None,
        smaller_is_better=False,
    )
    for name in (ONE, EAGER):
        apart = max(map(_apart, results[TWO], results[name]))
        yield record.row(case, f"largest difference of results, {name}", "%", shown(100 * apart))
    for flow in flows.values():
        flow.undo()


def _on_one(model: Any, place: Any) -> Any:
    """Return a flow with all layers on one device."""
    from placer import DataFlow

    flow = DataFlow(model, [place])
    flow.update_flow()
    return flow


def _on_two(model: Any, inputs: Any, places: list[Any]) -> Any:
    """Return a flow with the placement that Placer suggests."""
    import placer

    found = placer.suggest(
        model,
        inputs,
        devices=places,
        training=False,
        progress=False,
        granularity=_GRANULARITY,
    )
    loads = ", ".join(f"{load.device}: {load.load_ms:.1f} ms" for load in found.devices)
    print(f"SDXL-like UNet on two devices, a batch: {loads} ({found.status})")
    flow = placer.DataFlow(model, places)
    flow.update_flow(found)
    return flow


def _wait(places: list[Any]) -> None:
    from ..executor import timing

    timing.wait(places)


def _apart(one: Any, other: Any) -> float:
    """Return the largest difference of two results, as a share of the largest value."""
    return float((one - other).abs().max() / other.abs().max())
