"""Predicted and measured times of a token and of the prompt, and memory, on at most two devices."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from .. import record
from . import models
from .engine import Engine, Way, shown

PREDICTED = "predicted"
"""The name of the case."""

_TURNS = 5
"""Most turns; each takes a second."""

_MOST_TIME_ERROR, _MOST_MEMORY_ERROR = 8.0, 5.0
"""The requested errors in percent."""


def rows(turns: int) -> Iterator[dict[str, Any]]:
    """Yield the errors of predictions, in percent of what is measured.

    Args:
        turns: how often the text is generated.
    """
    import placer

    from ..executor import cases

    places = models.places()
    length, new = (8, 12) if cases.is_small() else (512, 64)
    before = [_allocated(place) for place in places]
    model = models.small_llama(cases.is_small())
    name = models.name_of(model, cases.is_small())
    (ids,) = models.prompts(1, 1, length, places[0])
    text = placer.GenerationOptions(prompt_tokens=length, new_tokens=new)
    placement = placer.suggest(
        model,
        ids,
        devices=list(places),
        objective="generation",
        generation=text,
        constraints=placer.Constraints(min_devices=len(places)),
    )
    predicted = placement.generation
    assert predicted is not None and predicted.token_ms is not None
    first_ms = predicted.first_token_ms + (predicted.host_ms or 0.0)
    flow = placer.DataFlow(model, list(places), inference_only=True)
    flow.update_flow(placement)
    with flow.applied() as applied:
        engine = Engine(Way(applied), ids)
        engine.turn(new)  # recorded at the capacity of the whole text
        for times in (engine.prompt_ms, engine.whole_ms):
            times.clear()
        _forget_peaks(places)
        for _ in range(min(turns, _TURNS)):
            engine.turn(new)
    used = [_peak(place) - size for place, size in zip(places, before, strict=True)]
    flow.undo()
    case = f"{name}, predictions, 1 x {length} tokens and {new} more, {models.shown_places()}"
    measured = (
        ("a token", predicted.token_ms, median(engine.token_ms(new))),
        ("the prompt and the first token", first_ms, median(engine.prompt_ms)),
    )
    for what, foreseen, found in measured:
        yield _row(case, f"{what}, predicted", "ms", foreseen, found, _MOST_TIME_ERROR)
    loads = [load.memory.total_bytes for load in placement.devices]
    for load, size, place in zip(loads, used, places, strict=True):
        if place.type != "cuda":
            continue
        what = f"peak memory of {place}, predicted"
        yield _row(case, what, "GiB", load / 2**30, size / 2**30, _MOST_MEMORY_ERROR)


def _row(
    case: str, measure: str, unit: str, predicted: float, measured: float, most: float
) -> dict[str, Any]:
    from ..executor import cases

    error = 100 * (predicted / measured - 1)
    return record.row(
        case,
        measure,
        "%",
        shown(error),
        target=most if cases.on_gpus() else None,
        met=abs(error) <= most if cases.on_gpus() else None,
        figures={f"predicted {unit}": shown(predicted), f"measured {unit}": shown(measured)},
    )


def _forget_peaks(places: list[Any]) -> None:
    import torch

    for place in places:
        if place.type == "cuda":
            torch.cuda.reset_peak_memory_stats(place)


def _allocated(place: Any) -> int:
    """Return the bytes in use on a GPU; 0 on the host."""
    import torch

    return torch.cuda.memory_allocated(place) if place.type == "cuda" else 0


def _peak(place: Any) -> int:
    """Return the most bytes in use on a GPU since ``_forget_peaks``; 0 on the host."""
    import torch

    return torch.cuda.max_memory_allocated(place) if place.type == "cuda" else 0
