"""The cost of verifying how a batch is cut: 1,000 GPT training steps over many sequence lengths.

``train_step`` verifies the first batch of each kind, whatever its sizes, so the first steps take
longer. Flows with verification and without take turns; each trains a fresh copy of the model from
its first step.
"""

from __future__ import annotations

import copy
import os
from statistics import median
from time import perf_counter
from typing import Any

from .. import record

STEPS, REPEATS, TARGET_PERCENT = 1000, 7, 1.0
BATCH, CHUNKS, LENGTHS, VOCABULARY = 8, 2, range(16, 65), 256


def run() -> list[dict[str, Any]]:
    """Compare 1,000 training steps with verification and without, on two devices."""
    from ..executor import cases

    cases.prepare()
    steps, repeats = (20, 2) if bool(os.environ.get("PLACER_EXECUTOR_TINY")) else (STEPS, REPEATS)
    times = [
        {verify: _times(verify, steps) for verify in order}
        for order in ([(False, True), (True, False)] * repeats)[:repeats]
    ]
    costs = [100 * (sum(one[True]) / sum(one[False]) - 1) for one in times]
    firsts = [1e3 * (one[True][0] - one[False][0]) for one in times]
    case = (
        f"GPT, 2 layers, d=64, {BATCH} x {LENGTHS[0]} to {LENGTHS[-1]} tokens, "
        f"{CHUNKS} micro-batches, 2 devices"
    )
    return [
        _row(
            case,
            f"{steps} training steps, verified, over the same steps unverified",
            "%",
            costs,
            TARGET_PERCENT,
        ),
        _row(case, "the first step, verified, beyond an unverified one", "ms", firsts, None),
        _row(
            case,
            "a later step, the median",
            "ms",
            [1e3 * median(one[True][1:]) for one in times],
            None,
        ),
    ]


def _times(verify: bool, steps: int) -> list[float]:
    """Return the time of each step of a fresh copy of the model, in s."""
    import torch

    from placer import BatchOptions, DataFlow, devices
    from placer.zoo import gpt

    from ..executor import cases

    torch.manual_seed(0)
    places = cases.places(2)
    model = copy.deepcopy(
        gpt(layers=2, width=64, heads=2, context=LENGTHS[-1], vocabulary=VOCABULARY)
    )
    flow = DataFlow(model, [str(place) for place in places], fine_grained=True)
    half = len(flow.layer_gpus) // 2
    flow.layer_gpus.update(
        {name: str(places[number >= half]) for number, name in enumerate(list(flow.layer_gpus))}
    )
    flow.batch_options = BatchOptions(verify=verify)
    flow.update_flow()
    step = flow.train_step(cases.token_loss, torch.optim.SGD(flow.parameters(), lr=1e-3))
    lengths = torch.randint(LENGTHS[0], LENGTHS[-1] + 1, (steps,)).tolist()
    found = []
    for length in lengths:
        tokens = torch.randint(VOCABULARY, (BATCH, length), device=places[0])
        began = perf_counter()
        step(tokens, tokens, chunks=CHUNKS)
        for place in places:
            devices.synchronise(place)
        found.append(perf_counter() - began)
    return found


def _row(
    case: str, measure: str, unit: str, values: list[float], target: float | None
) -> dict[str, Any]:
    value = float(f"{median(values):.4g}")
    return record.row(case, measure, unit, value, spread=(min(values), max(values)), target=target)
