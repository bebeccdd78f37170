"""Samples as rows: the errors of predictions, by case and over all cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from ..executor.sample import Sample, reason
from ..record import row
from . import cases, large, peers

Row = dict[str, Any]
STAGE = "stage time, largest error of the prediction"
STEP = "step time, error of the prediction"
REFINED_STEP = "step time, error of the prediction by the refined profile"
OVER = "a call and its backward pass, peak memory of a device, most predicted above what was used"
UNDER = "a call and its backward pass, peak memory of a device, most predicted below what was used"
STEP_OVER = "steps, memory that a device reserves, most predicted above it"
STEP_UNDER = "steps, memory that a device reserves, most predicted below it"
PASS = "a micro-batch through all stages"
STATE = "parameters, gradients and optimizer state"
PEAK = "a call and its backward pass, peak memory of all devices"
RESERVED = "what the allocator held at the peak beyond that"
COLD, WARM = "profiling", "profiling again, all in the cache"
HELD = "memory held at most, against the largest layer with what training adds to it"
OVERALL = "all cases"
_LIMITS_S = {"resnet101": 20.0, "gpt": 10.0}


def rows(samples: Sequence[Sample]) -> list[Row]:
    """Return the rows of each case, without the rows over all cases; targets need full size."""
    made: list[Row] = []
    for model in cases.known().values():
        for case in cases.of(model):
            made += _readable(case, [sample for sample in samples if sample.case == case.label])
        made += [
            _failed(sample) for sample in samples if sample.case == model.name and sample.failed
        ]
    made += [
        one
        for sample in samples
        if sample.case in (large.label(), large.CASE)
        for one in _too_large(sample)
    ]
    return made


def _readable(case: cases.Case, samples: Sequence[Sample]) -> list[Row]:
    """Return a case's rows; malformed samples lose only that case."""
    try:
        return list(_case(case, samples))
    except (ArithmeticError, LookupError, ValueError) as error:
        return [
            row(case.label, f"no rows: {reason(error)}", "", None),
            *map(_failed, _broken(samples)),
        ]


def _broken(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.failed]


def cases_in_order() -> list[str]:
    """Return the names of all cases in order, each model's failures after its cases."""
    models = cases.known().values()
    names = [
        name for model in models for name in (*(case.label for case in cases.of(model)), model.name)
    ]
    return [*names, large.label(), large.CASE]


def over_all(made: Sequence[Row]) -> list[Row]:
    """Return the rows over all cases: medians and worst values of the cases' rows."""
    found: list[Row] = []
    judged = ((STAGE, 6.0, 2.0), (STEP, 8.0, None), (REFINED_STEP, None, None))
    for measure, worst, middle in judged:
        values = [
            abs(one["value"])
            for one in made
            if one["measure"] == measure and one["value"] is not None
        ]
        if not values:
            continue
        spread = (min(values), max(values))
        found.append(
            _overall(
                f"{measure}: the median of {len(values)} cases", median(values), middle, spread
            )
        )
        found.append(_overall(f"{measure}: the worst of {len(values)} cases", max(values), worst))
    for measure, target in ((STEP_OVER, 5.0), (STEP_UNDER, 2.0), (OVER, 5.0), (UNDER, 2.0)):
        values = [
            one["value"] for one in made if one["measure"] == measure and one["value"] is not None
        ]
        if values:
            found.append(
                _overall(f"{measure}: the worst of {len(values)} cases", max(values), target)
            )
    return [*found, *_peers_over_all(made)]


def _peers_over_all(made: Sequence[Row]) -> Iterator[Row]:
    """Yield the errors of all peers that predict a whole pass or bytes."""
    for measure in (PASS, STATE, PEAK):
        errors: dict[str, list[float]] = {}
        for one in made:
            if one["measure"] == measure and one["value"]:
                for name, value in one["peers"].items():
                    errors.setdefault(name, []).append(100 * abs(value / one["value"] - 1))
        ours = errors.pop("Placer", [])
        if ours:
            others = {name: _rounded(median(values)) for name, values in errors.items()}
            title = f"{measure}: the median error of the predictions"
            yield row(
                OVERALL, title, "%", _rounded(median(ours)), spread=_spread(ours), peers=others
            )


def _overall(
    measure: str, value: float, target: float | None, spread: tuple[float, float] | None = None
) -> Row:
    return row(
        OVERALL,
        measure,
        "%",
        _rounded(value),
        spread=spread and _spread(spread),
        target=_target(target),
    )


def _case(case: cases.Case, samples: Sequence[Sample]) -> Iterator[Row]:
    values = {sample.engine: sample.values for sample in samples if sample.values}
    if "profile" in values:
        yield from _profiling(case, values["profile"])
    if "stages" in values:
        yield from _stages(case, values["stages"], values.get("peers", {}))
    if "step" in values:
        yield from _step(case, values["step"], values.get("stages", {}), values.get("peers", {}))
    if values.get("memory"):
        yield from _memory(case, values["memory"], values.get("peers", {}))
    yield from map(_failed, _broken(samples))


def _profiling(case: cases.Case, values: Mapping[str, Sequence[float]]) -> Iterator[Row]:
    limit_s = _LIMITS_S.get(case.model.name)
    yield row(case.label, COLD, "s", _rounded(values["cold_s"][0]), target=_target(limit_s))
    yield row(
        case.label,
        WARM,
        "s",
        _rounded(values["warm_s"][0]),
        target=_target(1.0 if limit_s else None),
    )


def _stages(
    case: cases.Case, values: Mapping[str, Sequence[float]], others: Mapping[str, Sequence[float]]
) -> Iterator[Row]:
    predicted, measured = values["predicted_ms"], values["measured_ms"]
    errors = _errors(predicted, measured)
    worst = max(errors, key=abs)
    yield row(
        case.label,
        STAGE,
        "%",
        _rounded(worst),
        spread=_spread(errors),
        target=_target(6.0),
        met=_met(worst, 6.0),
    )
    # No peer's prediction includes the loss.
    predicted_loss_ms, loss_ms = (
        values.get(name, [0.0])[0] for name in ("predicted_loss_ms", "loss_ms")
    )
    shown = {"Placer": sum(predicted) - predicted_loss_ms} | _of_peers(others, "pass_ms")
    yield row(case.label, PASS, "ms", _rounded(sum(measured) - loss_ms), peers=_all_rounded(shown))


def _step(
    case: cases.Case,
    values: Mapping[str, Sequence[float]],
    staged: Mapping[str, Sequence[float]],
    others: Mapping[str, Sequence[float]],
) -> Iterator[Row]:
    step_ms, predicted = median(values["step_ms"]), values["predicted_ms"][0]
    (error,) = _errors([predicted], [step_ms])
    yield row(case.label, STEP, "%", _rounded(error), target=_target(8.0), met=_met(error, 8.0))
    told = {"Placer": predicted}
    if staged.get("refined_step_ms"):
        (after,) = _errors(staged["refined_step_ms"], [step_ms])
        yield row(case.label, REFINED_STEP, "%", _rounded(after))
    spread = _spread(values["step_ms"])
    yield row(
        case.label, "step time", "ms", _rounded(step_ms), spread=spread, peers=_all_rounded(told)
    )
    yield row(case.label, "host issues a step", "ms", _rounded(median(values["host_ms"])))
    if values.get("step_reserved_bytes"):
        off = _errors(values["step_predicted_bytes"], values["step_reserved_bytes"])
        yield row(
            case.label,
            STEP_OVER,
            "%",
            _rounded(max(0.0, *off)),
            spread=_spread(off),
            target=_target(5.0),
        )
        yield row(
            case.label,
            STEP_UNDER,
            "%",
            _rounded(max(0.0, *(-error for error in off))),
            target=_target(2.0),
        )
    told = {"Placer": values["predicted_state_bytes"][0]} | _of_peers(others, "state_bytes")
    yield row(case.label, STATE, "MiB", _mib(values["state_bytes"][0]), peers=_all_mib(told))


def _memory(
    case: cases.Case, values: Mapping[str, Sequence[float]], others: Mapping[str, Sequence[float]]
) -> Iterator[Row]:
    errors = _errors(values["predicted_bytes"], values["measured_bytes"])
    yield row(case.label, OVER, "%", _rounded(max(0.0, *errors)), target=_target(5.0))
    yield row(
        case.label,
        UNDER,
        "%",
        _rounded(max(0.0, *(-error for error in errors))),
        target=_target(2.0),
    )
    # accelerate documents its estimate for training as the peak
    told = {"Placer": sum(values["predicted_bytes"])} | _of_peers(others, "state_bytes")
    used, reserved = sum(values["measured_bytes"]), sum(values["reserved_bytes"])
    yield row(case.label, PEAK, "MiB", _mib(used), peers=_all_mib(told))
    yield row(case.label, RESERVED, "%", _rounded(100 * (reserved / used - 1)))


def _too_large(sample: Sample) -> Iterator[Row]:
    if sample.failed:
        yield _failed(sample)
        return
    yield row(sample.case, COLD, "s", _rounded(sample.values["seconds"][0]), target=_target(180.0))
    held, largest = sample.values["held_bytes"][0], sample.values["largest_bytes"][0]
    if held:  # on GPUs, where memory is counted
        yield row(sample.case, HELD, "%", _rounded(100 * held / largest), target=_target(100.0))
        yield row(sample.case, "memory held at most", "MiB", _mib(held))


def _failed(sample: Sample) -> Row:
    return row(sample.case, f"no value of {sample.engine}: {sample.failed}", "", None)


def _of_peers(others: Mapping[str, Sequence[float]], measure: str) -> dict[str, float]:
    known = {
        name: others.get(f"{measure} {name}")
        for name in (peers.TORCHGPIPE, peers.ROOFLINE, peers.ACCELERATE)
    }
    return {name: values[0] for name, values in known.items() if values}


def _errors(predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    """Return the errors relative to the measured values in percent; negative is below."""
    return [
        100 * (said / was - 1) for said, was in zip(predicted, measured, strict=True) if was > 0
    ]


def _met(error: float, limit: float) -> bool | None:
    return None if cases.is_small() else abs(error) <= limit


def _target(value: float | None) -> float | None:
    return None if cases.is_small() else value


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _all_rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: _rounded(value) for name, value in values.items()}


def _mib(size_bytes: float) -> float:
    return _rounded(size_bytes / 2**20)


def _all_mib(sizes: Mapping[str, float]) -> dict[str, float]:
    return {name: _mib(size_bytes) for name, size_bytes in sizes.items()}


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return _rounded(min(values)), _rounded(max(values))
