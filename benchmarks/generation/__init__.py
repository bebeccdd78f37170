"""Tokens from ``model.generate`` of a language model split over two devices, and of one device.

``flow.applied()`` and accelerate's ``dispatch_model`` use the same map, half of the layers each.
With a single GPU, all layers are on it.
``flow.applied(record=False)`` keeps Placer's own recordings out. On one GPU, transformers' static
cache with torch.compile is a peer, too. All of them run equal models of transformers on the same
prompts and take turns. A row says whether they make the same tokens. Without GPUs, a tiny model on
CPU stand-ins only shows that the benchmark runs.

Further cases, of which all but the first five need two devices or more:

    host       a part of the weights is in the host's memory, on one device
    disk       the same on the disk
    experts    a mixture of experts whose layers are in the host's memory, on one device
    cpu_layers a part of the weights is in the host's memory, and the CPU may compute layers
    predicted  the predictions of times and memory
    large      a model that no single GPU holds: one text
    in_flight  the same model: several groups of sequences at once
    copies     a model that one GPU holds: the shape that Placer picks against whole copies
    unet       a UNet of Stable Diffusion XL's shapes: a stream of images

``PLACER_GENERATION_ENGINES`` names some of the engines and cases, such as ``ours,eager``, and
``PLACER_GENERATION_ROUNDS`` the number of turns, for a short trial. Cases without engines keep the
other rows of earlier runs.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

from .. import record
from . import copies, host, in_flight, models, predicted, unet_stream
from .engine import Engine, Way, equal_share, shown

ROUNDS = int(os.environ.get("PLACER_GENERATION_ROUNDS", "7"))
OURS = "ours"
PEER = "accelerate's dispatch_model"
ONE = "eager on one device"
ALONE = "ours on one device"
OURS_COMPILED = "ours, compiled"
HOOKS = "ours, not recorded"
COMPILED = "static cache and compile on one device"
ENGINES = {
    "ours": OURS,
    "ours_compiled": OURS_COMPILED,
    "hooks": HOOKS,
    "accelerate": PEER,
    "eager": ONE,
    "compiled": COMPILED,
    "alone": ALONE,
}
"""The names of engines in ``PLACER_GENERATION_ENGINES``, and in the rows."""

HOST = "host"
"""The name of the case with weights on the host."""

DISK = "disk"
"""The name of the case with weights on the disk."""

EXPERTS = "experts"
"""The name of the case with experts on the host."""

CPU_LAYERS = "cpu_layers"
"""The name of the case with layers that the CPU computes."""

CASES = (
    HOST,
    DISK,
    EXPERTS,
    CPU_LAYERS,
    predicted.PREDICTED,
    copies.COPIES,
    in_flight.LARGE,
    in_flight.IN_FLIGHT,
    unet_stream.UNET,
)
"""The names of further cases."""

_MOST_READS = {OURS: 2.25, OURS_COMPILED: 1.5}
"""The requested times of a token on two devices, in times of reading all weights once."""

_MOST_OVER_ONE = 1.05
"""The requested time of a token on two devices, in times of Placer on one device."""

_MOST_PROMPT_MS = 20.0
"""The requested time of the prompt and the first token on two devices."""


def run() -> list[dict[str, Any]]:
    """Return the times of tokens, and the rows of further cases."""
    from ..executor import cases

    cases.prepare()
    rows: list[dict[str, Any]] = []
    asked = _asked()
    if not set(asked) <= set(CASES):
        rows += _single()
    alone = {
        HOST: host.rows,
        DISK: partial(host.rows, kind=host.DISK),
        EXPERTS: partial(host.rows, kind=host.EXPERTS),
        CPU_LAYERS: partial(host.rows, kind=host.CPU_LAYERS),
        predicted.PREDICTED: predicted.rows,
    }
    for name, turn in alone.items():
        if name in asked:
            rows += turn(ROUNDS)
            gc.collect()  # flows and their models refer to each other
    if not cases.on_gpus() or len(cases.places()) > 1:
        for turn in _further(asked):
            rows += turn(ROUNDS)
            gc.collect()
    if set(asked) <= set(CASES):
        made = {(row["case"], row["measure"]) for row in rows}
        kept = record.known("generation")
        rows = [row for row in kept if (row["case"], row["measure"]) not in made] + rows
    return rows


def _further(asked: list[str]) -> Iterator[Callable[[int], Iterator[dict[str, Any]]]]:
    """Yield functions that make the rows of the cases that are asked for."""
    if copies.COPIES in asked:
        yield copies.rows
    if unet_stream.UNET in asked:
        yield unet_stream.rows
    if {in_flight.LARGE, in_flight.IN_FLIGHT} & set(asked):
        yield lambda turns: in_flight.rows(turns, asked)


def _asked() -> list[str]:
    """Return the names of the engines and cases that the environment asks for.

    Raises:
        ValueError: A name is none of them.
    """
    names = [*ENGINES, *CASES]
    asked = os.environ.get("PLACER_GENERATION_ENGINES", ",".join(names)).split(",")
    if wrong := [name for name in asked if name not in names]:
        raise ValueError(
            f"{wrong[0]!r} is neither an engine nor a case; there are {', '.join(names)}"
        )
    return asked


def _single() -> list[dict[str, Any]]:
    """Return the time of a token in the loop, of the prompt, and of the first call."""
    import torch

    from ..executor import cases

    model = models.small_llama(cases.is_small())
    label = models.name_of(model, cases.is_small())
    batch, length, new = (2, 8, 6) if cases.is_small() else (1, 512, 64)
    (ids,) = models.prompts(1, batch, length, cases.home())
    with torch.no_grad(), ExitStack() as stack:
        # before the copies take the memory
        least_ms = models.least_token_ms(model)
        engines = {name: Engine(way, ids) for name, way in _ways(model, stack)}
        for turn in range(ROUNDS):
            for name in list(engines) if turn % 2 == 0 else reversed(engines):
                engines[name].turn(new)
        case = f"{label}, {batch} x {length} tokens and {new} more, {models.shown_places()}"
        return [*_rows(case, engines, new), *_ratios(case, engines, new, least_ms)]


def _map(model: Any) -> dict[str, int]:
    """Return a map that puts as many layers on each device."""
    used = range(len(models.places()))
    return {"model.rotary_emb": 0, **models.split(len(model.model.layers), used)}


def _ways(model: Any, stack: ExitStack) -> Iterator[tuple[str, Way]]:
    """Yield the ways to run the model; each keeps a model of its own between turns.

    A copy is split before the next one is made: six whole ones would not fit on a GPU.
    """
    from ..executor import cases

    names = {OURS, *(ENGINES[key] for key in _asked() if key not in CASES)}
    if ONE in names:
        yield ONE, Way(model)
    # transformers compiles on GPUs only
    if COMPILED in names and cases.on_gpus():
        yield COMPILED, Way(model, {"cache_implementation": "static"})
    # torch's own compiler takes minutes on stand-ins
    compiler: bool | str = cases.on_gpus() or "aot_eager"
    given: tuple[tuple[str, dict[str, Any]], ...] = (
        (OURS, {}),
        (OURS_COMPILED, {"compile": compiler}),
        (HOOKS, {"record": False}),
    )
    for name, how in given:
        if name in names:
            split = _ours(copy.deepcopy(model), models.places(), **how)
            yield name, stack.enter_context(split)
    # accelerate does not support CPU stand-ins
    if PEER in names and cases.on_gpus() and find_spec("accelerate") is not None:
        yield PEER, stack.enter_context(_dispatched(copy.deepcopy(model)))
    if ALONE in names and len(models.places()) > 1:
        yield ALONE, stack.enter_context(_ours(copy.deepcopy(model), models.places()[:1]))


@contextmanager
def _ours(model: Any, places: Sequence[Any], **how: Any) -> Iterator[Way]:
    flow = models.placed(model, places)
    yield Way(
        model,
        entered=partial(flow.applied, **how),
        recorded=lambda: (flow.generation_report.recorded, flow.generation_report.hooked),
    )
    report = flow.generation_report
    if how.get("record", True) and report.not_recorded_because:
        print(f"not recorded: {report.not_recorded_because}")
    for note in (*report.compiled, *report.not_compiled_because):
        print(f"compiler: {note}")
    flow.undo()


@contextmanager
def _dispatched(model: Any) -> Iterator[Way]:
    from accelerate import dispatch_model

    yield Way(dispatch_model(model, _map(model), main_device=0, force_hooks=True))


def _rows(case: str, engines: Mapping[str, Engine], new: int) -> Iterator[dict[str, Any]]:
    ours = engines[OURS]
    others = {name: engine for name, engine in engines.items() if name != OURS}
    measures: tuple[tuple[str, Callable[[Engine], list[float]], float | None], ...] = (
        ("a token of each text, in the loop", lambda engine: engine.token_ms(new), None),
        ("the prompt and the first token", lambda engine: engine.prompt_ms, _MOST_PROMPT_MS),
        ("a prompt of a new length and its first token", lambda engine: engine.new_prompt_ms, None),
        ("a first call, four tokens", lambda engine: [engine.first_ms], None),
    )
    for measure, times_of, most in measures:
        peers = {name: shown(median(times_of(engine))) for name, engine in others.items()}
        for name, engine in engines.items():
            times = times_of(engine)
            spread = (shown(min(times)), shown(max(times))) if len(times) > 1 else None
            given: dict[str, Any] = {}
            if name == OURS:
                given = {"peers": peers, "target": most if models.has_targets() else None}
            what = measure if name == OURS else f"{measure}, {name}"
            yield record.row(case, what, "ms", shown(median(times)), spread=spread, **given)
    if ours.way.recorded is not None:
        recorded, rest = ours.way.recorded()
        share = 100.0 * recorded / max(1, recorded + rest)
        yield record.row(case, "tokens after the prompt that replayed a recording", "%", share)
    for name, engine in others.items():
        share = equal_share(ours.tokens, engine.tokens)
        yield record.row(case, f"tokens equal to the tokens of: {name}", "%", share)


def _ratios(
    case: str, engines: Mapping[str, Engine], new: int, least_ms: float
) -> Iterator[dict[str, Any]]:
    """Yield the time of a token in times of its limit, and of Placer on one device."""
    from ..executor import cases

    token_ms = {name: median(engine.token_ms(new)) for name, engine in engines.items()}
    for name, most in _MOST_READS.items():
        if name not in token_ms:
            continue
        what = "a token, in times of reading all weights once"
        yield record.row(
            case,
            what if name == OURS else f"{what}, {name}",
            "x",
            shown(token_ms[name] / least_ms),
            target=most if models.has_targets() else None,
            figures={"ms to read all weights once": shown(least_ms)},
        )
    if ALONE in token_ms:
        yield record.row(
            case,
            "a token, in times of Placer on one device",
            "x",
            shown(token_ms[OURS] / token_ms[ALONE]),
            target=None if cases.is_small() else _MOST_OVER_ONE,
        )
