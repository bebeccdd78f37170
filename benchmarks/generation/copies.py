"""Many sequences on a model that one GPU holds: the shape that Placer picks, and copies of it.

``placer.suggest`` with objective ``generation`` measures both passes, and predicts the tokens per
second of its best placement and of whole copies. The better one is the shape that Placer picks: it
runs in this process, either through ``flow.generate_many`` or as one flow and thread per device.

The peer is one copy on one device alone, times the number of devices. Independent copies are at
most as fast: they share the host and the power supply.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from statistics import median
from time import perf_counter
from typing import Any

from .. import record
from . import models
from .engine import equal_share

COPIES = "copies"
"""The name of the case."""

_TURNS = 5
"""Most turns; each takes a few seconds."""

_LEAST_SHARE = 0.97
"""The requested tokens per second, as a share of independent copies."""

Texts = list[list[list[int]]]


def rows(turns: int) -> Iterator[dict[str, Any]]:
    """Yield the tokens per second of the picked shape and of copies, and whether tokens are equal.

    Args:
        turns: how often each way runs.
    """
    import placer

    from ..executor import cases

    places = cases.places() if cases.on_gpus() else cases.places(2)
    count = len(places)
    batch, length, new = (2, 8, 12) if cases.is_small() else (8, 128, 64)
    model = models.small_llama(cases.is_small())
    groups = models.prompts(count, batch, length, places[0])
    text = placer.GenerationOptions(prompt_tokens=length, new_tokens=new, sequences_in_flight=count)
    placement = placer.suggest(
        model, groups[0], devices=list(places), objective="generation", generation=text
    )
    predicted = placement.generation
    assert predicted is not None and predicted.tokens_per_s is not None
    has_copies = (predicted.copies_tokens_per_s or 0.0) > predicted.tokens_per_s
    flows = [_whole(copy.deepcopy(model), place) for place in places]
    if has_copies:
        shape = f"{count} copies"
        picked: Callable[[], Texts] = lambda: _together(flows, groups, new)  # noqa: E731
    else:
        shape = f"stages on {len({*placement.layer_devices.values()})} devices"
        stages = placer.DataFlow(model, list(places), inference_only=True)
        stages.update_flow(placement)
        picked = lambda: _in_flight(stages, groups, new)  # noqa: E731
    # recordings are made one flow at a time; a second call may record what the first has met
    for _ in range(2):
        expected = [_texts(flow, ids, new) for flow, ids in zip(flows, groups, strict=True)]
    picked()
    rates: dict[str, list[float]] = {"picked": [], "alone": []}
    found = expected
    for _ in range(min(turns, _TURNS)):
        began = perf_counter()
        found = picked()
        rates["picked"].append(count * batch * new / (perf_counter() - began))
        began = perf_counter()
        _texts(flows[0], groups[0], new)
        rates["alone"].append(count * batch * new / (perf_counter() - began))
    rate, alone = (median(rates[name]) for name in ("picked", "alone"))
    case = (
        f"{models.name_of(model, cases.is_small())}, {count} groups of {batch} x {length} tokens"
        f" and {new} more, {count} devices"
    )
    yield record.row(
        case,
        "tokens per second of the shape that Placer picks",
        "tokens/s",
        round(rate, 1),
        spread=(round(min(rates["picked"]), 1), round(max(rates["picked"]), 1)),
        peers={f"one copy alone, times {count}": round(alone, 1)},
        figures={
            "shape": shape,
            "predicted tokens/s of stages": round(predicted.tokens_per_s, 1),
            "predicted tokens/s of copies": round(predicted.copies_tokens_per_s or 0.0, 1),
        },
    )
    yield record.row(
        case,
        f"the shape that Placer picks, in tokens per second of one copy alone, times {count}",
        "x",
        round(rate / alone, 3),
        target=_LEAST_SHARE if cases.on_gpus() and count == 4 else None,
        smaller_is_better=False,
    )
    yield record.row(
        case,
        "tokens of the shape that equal the tokens of one copy alone",
        "%",
        equal_share(chain.from_iterable(found), chain.from_iterable(expected)),
    )


def _whole(model: Any, place: Any) -> Any:
    """Return a flow with all of a model on one device."""
    from placer import DataFlow

    flow = DataFlow(model, [place], inference_only=True)
    flow.update_flow()
    return flow


def _texts(flow: Any, ids: Any, new: int) -> list[list[int]]:
    """Return the texts of one group."""
    with flow.applied() as model:
        found: list[list[int]] = model.generate(ids, **models.options(new)).tolist()
        return found


def _together(flows: list[Any], groups: list[Any], new: int) -> Texts:
    """Return the texts of a group on each flow, all at the same time."""
    with ThreadPoolExecutor(len(flows)) as threads:
        return list(threads.map(lambda pair: _texts(*pair, new), zip(flows, groups, strict=True)))


def _in_flight(flow: Any, groups: list[Any], new: int) -> Texts:
    """Return the texts of all groups, as many in flight."""
    found = flow.generate_many(groups, in_flight=len(groups), **models.options(new))
    return [ids.tolist() for ids in found]
