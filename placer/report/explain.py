"""Tables of placements, profiles and clusters: decisions, their basis and their proofs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import lcm

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from placer.errors import InputError, kind_of
from placer.report.cluster import cluster_table
from placer.report.estimate import estimate_table
from placer.report.rendering import Fitting, plain_text
from placer.report.shares import share_texts
from placer.schema import (
    Cluster,
    DeviceLoad,
    Estimate,
    Infeasibility,
    Placement,
    Profile,
    Step,
    StepChoice,
)
from placer.schema.base import Objective
from placer.utils.units import bytes_text, count_text, ms_text

MEASURES: dict[Objective, str] = {
    "throughput": "bottleneck per micro-batch",
    "step": "a whole batch",
    "latency": "critical path of one micro-batch",
    "generation": "time of a generation",
    "memory": "largest memory use",
    "devices": "devices that are used:",
}
"""The minimised quantity of each objective, in words."""
# limits of the lists in a report
MOST_OTHERS = 3
MOST_SEGMENTS = 3
MOST_LAYERS = 8
MOST_REQUIREMENTS = 8
MOST_HOLDERS = 4
NEAR = 1.001
"""Factor of a bound up to which a step counts as known."""
_STATUSES = {
    "optimal": "proven",
    "feasible": "the best found in time",
    "infeasible": "proven to be none",
    "unknown": "none found in time",
}


def explain(subject: Placement | Profile | Cluster | Estimate, width: int = 120) -> str:
    """Return the subject's table as plain text.

    Args:
        subject: what to explain.
        width: of a line, in characters (default 120).

    Raises:
        InputError: the subject is of another type.
    """
    return plain_text(table(subject), width)


def table(subject: Placement | Profile | Cluster | Estimate) -> RenderableType:
    """Return the subject as a rich table.

    Args:
        subject: a placement (for each device layers, compute, transfers and memory, with the
            bottleneck marked; then the proofs), a profile (for each layer times and memory; then
            the devices), a cluster (devices and links) or an estimate (the answer, then the memory
            of each device).

    Raises:
        InputError: the subject is of another type.
    """
    if isinstance(subject, Estimate):
        return estimate_table(subject)
    if isinstance(subject, Placement):
        return _placement(subject)
    if isinstance(subject, Profile):
        return _profile(subject)
    if isinstance(subject, Cluster):
        return cluster_table(subject)
    raise InputError(
        f"explain was given {kind_of(subject)}; give a Placement, a Profile, a Cluster or an "
        "Estimate. `placer show FILE` explains a file"
    )


def _placement(placement: Placement) -> RenderableType:
    if placement.infeasible is not None or not placement.layer_devices:
        return Text("\n".join(proven(placement)), style="bold red")
    return Group(
        device_table(placement.devices, _title(placement)),
        Text("\n".join([*segment_texts(placement), *proven(placement)])),
    )


def proven(placement: Placement) -> list[str]:
    """Return lines about objective, bound, gap, status, time and speed-up.

    If there is no placement, the lines explain why.
    """
    if placement.infeasible is not None or not placement.layer_devices:
        return [*_no_placement(placement)]
    return [*_found(placement)]


def _found(placement: Placement) -> Iterator[str]:
    yield f"objective   {_objective_text(placement)}"
    if placement.bound is not None:
        gap = "" if placement.gap is None else f", gap {placement.gap:.2%}"
        yield f"bound       {value_text(placement.objective, placement.bound)}{gap}"
    method = f" by {placement.method}" if placement.method else ""
    yield f"status      {placement.status}: {_STATUSES[placement.status]}"
    yield f"solve time  {placement.solve_time_s:.3f} s{method}"
    yield f"one device  {_single_text(placement)}"
    if placement.recompute:
        devices = ", ".join(placement.recompute)
        yield f"recompute   {devices} run forwards once more, and keep less meanwhile"
    yield from _resting(placement)
    if placement.step is not None:
        yield from _step(placement, placement.step)
    else:
        yield f"batch       {_choice_text(placement)}{_no_pipeline_text(placement)}"
        yield from _shares(placement)
    yield from _generation(placement)
    if (ties := placement.tie_breaks) is not None:
        least = "none as good has less" if ties.proven else "the least that was found"
        yield (
            f"ties        {ties.transfer_ms:.4g} ms of transfers, "
            f"{ties.imbalance_ms:.4g} ms apart: {least}"
        )
    if placement.limits is not None:
        kind = placement.limits.kind
        yield f"limited by  {kind}: {placement.limits.detail.removeprefix(f'{kind}: ')}"
        for help in placement.limits.improvements:
            value = value_text(placement.objective, help.objective_value)
            yield f"would help  {help.change}: {value}, {help.speedup:.2f}x"


def segment_texts(placement: Placement) -> list[str]:
    """Return a line for each device with the first and last layer of each of its segments.

    Devices that hold the same layers share a line.
    """
    return [
        f"{_holders_text(placement, device):10}  {_run_text(runs)}"
        for device, runs in _segments(placement.layer_devices).items()
    ]


def _holders_text(placement: Placement, device: str) -> str:
    """Return the devices that hold the layers of one."""
    names = [replica.device for replica in placement.replicas.get(device, ())] or [device]
    more = f" and {len(names) - MOST_HOLDERS} more" if len(names) > MOST_HOLDERS else ""
    return f"{', '.join(names[:MOST_HOLDERS])}{more}"


def _title(placement: Placement) -> str:
    mode = "training step" if placement.training else "inference"
    return (
        f"Placement of {placement.model or 'model'}: {mode}, micro-batch of {placement.batch_size}"
    )


def device_table(loads: Sequence[DeviceLoad], title: str) -> RenderableType:
    """Return the layers, times and memory of each device as a table."""
    return Fitting(_devices(loads, title), _devices(loads, title, shares=False))


def _devices(loads: Sequence[DeviceLoad], title: str, *, shares: bool = True) -> Table:
    grid = Table(
        title=title,
        title_justify="left",
        caption="▶ bottleneck: the busiest device",
        caption_justify="left",
    )
    grid.add_column("device")
    for heading in ("layers", "compute", "transfer", "busy", "memory / limit"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for load in loads:
        grid.add_row(
            load.device,
            str(load.layers),
            ms_text(load.compute_ms),
            ms_text(load.send_ms + load.receive_ms),
            f"▶ {ms_text(load.load_ms)}" if load.bottleneck else ms_text(load.load_ms),
            _memory_text(load, shares),
            style="bold" if load.bottleneck else "",
        )
    return grid


def _segments(layer_devices: Mapping[str, str]) -> dict[str, list[tuple[str, ...]]]:
    """Return for each device its maximal runs of layers in execution order."""
    runs: dict[str, list[tuple[str, ...]]] = {}
    for device, layers in groupby(layer_devices, key=lambda layer: layer_devices[layer]):
        runs.setdefault(device, []).append(tuple(layers))
    return runs


def _run_text(runs: list[tuple[str, ...]]) -> str:
    words = [run[0] if len(run) == 1 else f"{run[0]} … {run[-1]}" for run in runs[:MOST_SEGMENTS]]
    if len(runs) > MOST_SEGMENTS:
        words.append(f"and {len(runs) - MOST_SEGMENTS} more segments")
    return ", ".join(words)


def _memory_text(load: DeviceLoad, shares: bool) -> str:
    used, limit = bytes_text(load.memory.total_bytes), bytes_text(load.limit_bytes)
    share = (
        f" {load.memory.total_bytes / load.limit_bytes:.0%}" if shares and load.limit_bytes else ""
    )
    # "3.1 / 8.0 GiB": a common unit is written once
    number, unit = used.split()
    return f"{number if limit.endswith(f' {unit}') else used} / {limit}{share}"


def _resting(placement: Placement) -> Iterator[str]:
    """Yield a line about parameters or optimizer state on the host, if there are some."""
    if placement.optimizer_state == "host" and placement.layer_devices:
        yield "optimizer   its state rests on the host, and each step copies it there and back"
        return
    copies = ", ".join(
        f"{load.device} {bytes_text(load.resting_bytes)} in {ms_text(load.streaming_ms)}"
        + (f", {bytes_text(load.disk_bytes)} of them from the disk" if load.disk_bytes else "")
        for load in placement.devices
        if load.resting_bytes
    )
    if copies:
        layers = count_text(len(placement.resting), "layer")
        yield f"on the host parameters of {layers}, copied in each pass: {copies}"


def _step(placement: Placement, step: Step) -> Iterator[str]:
    """Yield lines about the whole batch, and the best alternatives."""
    rate = "" if step.samples_per_s is None else f", {step.samples_per_s:.4g} samples/s"
    yield (
        f"batch       {count_text(step.batch_size, 'sample')}: {_choice_text(placement)}{rate}, "
        f"devices idle {step.bubble:.0%}"
    )
    if step.isolated_ms is not None and step.steady_state_ms is not None:
        yield (
            f"a step      {ms_text(step.steady_state_ms)} steady-state, as in a training loop; "
            f"{ms_text(step.isolated_ms)} isolated"
        )
    if shapes := _shape_texts(step):
        yield f"shapes      {'; '.join(shapes)}"
    if placement.replicas:
        yield from _shares(placement)
        yield (
            f"exchange    gradient reduction takes {ms_text(step.reduction_ms)}, of which "
            f"{ms_text(step.reduction_hidden_ms)} are hidden"
        )
    yield from _sharded(placement)
    others = [
        (choice.objective_value, _choice_text(choice))
        for choice in step.choices
        # the best one is reported already
        if choice.objective_value not in (None, placement.objective_value)
    ]
    for value, text in sorted(others, key=lambda one: one[0] or 0.0)[:MOST_OTHERS]:
        yield f"instead     {text}: {ms_text(value or 0.0)}"


def _sharded(placement: Placement) -> Iterator[str]:
    """Yield lines about a sharded step, with its code, if there is one."""
    if (found := placement.sharded) is None:
        return
    value = placement.objective_value
    faster = f"predicted {value / found.step_ms:.2f}x faster: " if value and found.step_ms else ""
    yield f"FSDP2       {faster}{found.text}:"
    yield from (f"            {line}".rstrip() for line in found.code.splitlines())


def _generation(placement: Placement) -> Iterator[str]:
    """Yield lines about the tokens and the cache, under objective ``generation``."""
    if (found := placement.generation) is None:
        return
    later = "" if found.token_ms is None else f", each later one {ms_text(found.token_ms)}"
    before = "" if found.host_ms is None else f" and {ms_text(found.host_ms)} of the host before"
    speed = found.tokens_per_s
    rate = "" if speed is None else f", {speed:,.{0 if speed >= 1000 else 1}f} tokens/s"
    prompt = count_text(found.prompt_tokens, "token")
    cached = ", ".join(
        f"{load.device} {bytes_text(load.memory.cache_bytes)}"
        for load in placement.devices
        if load.memory.cache_bytes
    )
    first = ms_text(found.first_token_ms)
    yield f"tokens      the first after {first} for a prompt of {prompt}{before}{later}"
    yield (
        f"generation  {count_text(found.new_tokens, 'token')} in {ms_text(found.generation_ms)}, "
        f"{found.sequences_in_flight} in flight{rate}"
    )
    yield f"cache       {cached or 'none'}"
    if found.copies and found.copies_tokens_per_s is not None:
        ratio = found.copies_tokens_per_s / speed if speed else 1.0
        yield (
            f"copies      a whole model on each of {count_text(len(found.copies), 'device')} has "
            f"{found.copies_tokens_per_s:,.1f} tokens/s, {ratio:.2f}x"
        )


def _shares(placement: Placement) -> list[str]:
    """Return a line about the shares of replicas; nothing without replicas."""
    members = next(iter(placement.replicas.values()), ())
    if not members:
        return []
    if len(set(placement.replicas_by_stage)) > 1:
        counts = placement.replicas_by_stage
        parts = ", ".join(count_text(placement.batch_size // one, "sample") for one in counts)
        return [f"replicas    {_by_stage(counts)} by stage: each computes {parts} of a micro-batch"]
    samples = {replica.samples for replica in members}
    if len(samples) == 1:
        shares = f"each computes {count_text(samples.pop(), 'sample')} of a micro-batch"
    else:
        shares = ", ".join(f"{replica.device} {replica.samples}" for replica in members)
        shares += " samples of a micro-batch"
    if placement.step is not None and placement.step.measured_batch_sizes:
        sizes = ", ".join(map(str, placement.step.measured_batch_sizes))
        shares += f"; times are interpolated between the measured sizes {sizes}"
    return [f"replicas    {len(members)}: {shares}"]


def _shape_texts(step: Step) -> list[str]:
    """Return the shortest step of each number of replicas, as text; nothing without replicas.

    The search of a shape ends once its bound shows that another one is shorter.
    """
    texts = _by_stage_texts(step)
    groups: dict[int, list[StepChoice]] = {}
    for choice in step.choices:
        if not choice.replicas_by_stage:
            groups.setdefault(choice.replicas, []).append(choice)
    if groups.keys() <= {1} and not texts:
        return []
    for replicas, choices in groups.items():
        texts += _equal_replicas_texts(replicas, choices)
    return [text for _, text in sorted(texts)]


def _equal_replicas_texts(
    replicas: int, choices: Sequence[StepChoice]
) -> Iterator[tuple[float, str]]:
    """Yield the shortest known step in ms of a number of replicas, or a bound of it, as text."""
    known = [(one.objective_value, one) for one in choices if one.objective_value is not None]
    bound = min((one.bound for one in choices if one.bound is not None), default=None)
    value, best = min(known, key=lambda one: one[0], default=(None, None))
    if best is not None and value is not None:
        stages = best.stages or 1
        yield value, f"{_shape_text(stages, replicas)}: {ms_text(value)}"
        if (replicas, stages) != (1, 1) or bound is None or value <= bound * NEAR:
            return
    if bound is not None:
        shape = "stages" if replicas == 1 else f"{replicas} replicas"
        yield bound, f"{shape}: at least {ms_text(bound)}"


def _by_stage_texts(step: Step) -> list[tuple[float, str]]:
    """Return the shortest step in ms of each shape with replicas by stage, and its text."""
    shortest: dict[tuple[int, ...], float] = {}
    for choice in step.choices:
        if key := choice.replicas_by_stage:
            step_ms = choice.objective_value or 0.0
            shortest[key] = min(step_ms, shortest.get(key, step_ms))
    return [
        (step_ms, f"{_by_stage(counts)} replicas by stage: {ms_text(step_ms)}")
        for counts, step_ms in shortest.items()
    ]


def _by_stage(counts: Sequence[int]) -> str:
    """Return the numbers of replicas of stages, as PipeDream writes them."""
    return "-".join(map(str, counts))


def _shape_text(stages: int, replicas: int) -> str:
    """Return the name of a shape."""
    if replicas == 1:
        return "one device" if stages == 1 else f"{stages} stages"
    return f"{replicas} replicas" if stages == 1 else f"{stages} stages x {replicas} replicas"


def _choice_text(choice: Placement | StepChoice) -> str:
    segments = "" if choice.contiguous else ", several segments a device"
    chunks = count_text(choice.chunks, "micro-batch", "micro-batches")
    counts: tuple[int, ...] = choice.replicas_by_stage or (1,)
    if isinstance(choice, StepChoice) and not choice.replicas_by_stage:
        counts = (choice.replicas,)
    count = _by_stage(counts) if len(set(counts)) > 1 else counts[0]
    replicas = "" if count == 1 else f", {count} replicas"
    return f"{chunks} of {choice.batch_size}, {choice.schedule}{segments}{replicas}"


def _no_pipeline_text(placement: Placement) -> str:
    """Return a remark on a training step of one micro-batch, which fills no pipeline."""
    split = len(set(placement.layer_devices.values())) > 1
    if not (placement.training and placement.chunks == 1 and split):
        return ""
    return ": one device works at a time; give chunks, the micro-batches of a batch"


def _objective_text(placement: Placement) -> str:
    value = placement.objective_value
    shown = "none" if value is None else value_text(placement.objective, value)
    measure = MEASURES[placement.objective]
    if placement.generation is not None and placement.generation.sequences_in_flight > 1:
        measure = "time between the ends of two generations"
    if placement.objective == "throughput" and placement.replicas:
        samples = placement.batch_size // lcm(*placement.replicas_by_stage)
        measure = f"bottleneck per {count_text(samples, 'sample')}"
    return f"{placement.objective}: {measure} {shown}"


def value_text(objective: str, value: float) -> str:
    """Return a value of an objective with its unit.

    Args:
        objective: the objective.
        value: in ms, in bytes for ``memory``, or a number of devices for ``devices``.
    """
    if objective == "devices":
        return f"{value:g}"
    return bytes_text(value) if objective == "memory" else ms_text(value)


def _single_text(placement: Placement) -> str:
    single = placement.single_device
    if single is None:
        return "not compared"
    faster = f"speed-up {placement.speedup:.2f}x" if placement.speedup is not None else ""
    value = value_text(placement.objective, single.objective_value)
    if not single.fits:
        size = bytes_text(single.missing_bytes)
        missing = f"does not fit on one device: {size} are missing on {single.device}"
        if single.load_ms is not None:
            return (
                f"{missing}; with enough memory busy for {ms_text(single.load_ms)} "
                "for one micro-batch"
            )
        return f"{missing}; with enough memory {value}, {faster}" if faster else missing
    if single.load_ms is not None:
        return f"{single.device} alone is busy for {ms_text(single.load_ms)} for one micro-batch"
    alone = f"{single.device} alone: {value}"
    if len(set(placement.layer_devices.values())) == 1 and not placement.replicas:
        return f"{alone}; splitting would not be better"
    return f"{faster} over {alone}" if faster else alone


def _no_placement(placement: Placement) -> Iterator[str]:
    if placement.infeasible is not None:
        yield "no placement is possible"
        yield from _infeasible(placement.infeasible)
    else:
        yield (
            f"no placement was found within {placement.solve_time_s:.1f} s; allow more time or "
            "relax a constraint"
        )
        if placement.bound is not None:
            yield f"bound       {value_text(placement.objective, placement.bound)}"
    yield from _sharded(placement)


def _infeasible(why: Infeasibility) -> Iterator[str]:
    yield f"reason      {why.reason}"
    if why.layers:
        more = f" and {len(why.layers) - MOST_LAYERS} more" if len(why.layers) > MOST_LAYERS else ""
        yield f"layers      {', '.join(why.layers[:MOST_LAYERS])}{more}"
    if why.devices:
        yield f"devices     {', '.join(why.devices)}"
    if why.missing_bytes:
        yield f"short of    {bytes_text(why.missing_bytes)}"
    for number, words in enumerate(why.requirements[:MOST_REQUIREMENTS]):
        yield f"{'' if number else 'together':<11} {words}"
    if (more_words := len(why.requirements) - MOST_REQUIREMENTS) > 0:
        yield f"            and {more_words} more cannot hold together"


def _profile(profile: Profile) -> RenderableType:
    kinds = sorted({kind for layer in profile.layers for kind in layer.forward_ms})
    grid = Fitting(_layers(profile, kinds), _layers(profile, kinds, modules=False))
    parts: list[RenderableType] = [
        grid,
        Text("\n".join([_profile_sums(profile, kinds), *share_texts(profile)])),
    ]
    if not profile.captured:
        parts.append(
            Text(f"not captured, so it runs through hooks: {profile.not_captured_because}")
        )
    if profile.cluster is not None:
        parts.append(cluster_table(profile.cluster))
    return Group(*parts)


def _layers(profile: Profile, kinds: list[str], *, modules: bool = True) -> Table:
    title = f"Profile of {profile.model or 'model'}: {mode_text(profile)}"
    grid = Table(title=title, title_justify="left")
    grid.add_column("layer", overflow="fold")
    if modules:
        grid.add_column("module")
    for kind in kinds:
        for direction in ("forward", "backward")[: 2 if profile.training else 1]:
            grid.add_column(f"{direction}\n{kind}", justify="right", no_wrap=True)
    for heading in ("weights", "grads +\noptimizer", "saved"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for layer in profile.layers:
        times = []
        for kind in kinds:
            times.append(_time_of(layer.forward_ms, kind))
            if profile.training:
                times.append(_time_of(layer.backward_ms, kind))
        grid.add_row(
            layer.name,
            *([layer.module] if modules else []),
            *times,
            bytes_text(layer.param_bytes + layer.buffer_bytes),
            bytes_text(layer.grad_bytes + layer.optimizer_bytes),
            bytes_text(layer.saved_bytes),
        )
    return grid


def mode_text(profile: Profile) -> str:
    """Return what a profile measures: training or inference, and the micro-batch size."""
    mode = (
        f"training with {profile.optimizer or 'no optimizer'}" if profile.training else "inference"
    )
    loss = " and the loss" if profile.with_loss else ""
    return f"{mode}{loss}, micro-batch of {profile.batch_size}"


def _time_of(times_ms: Mapping[str, float], kind: str) -> str:
    return ms_text(times_ms[kind]) if kind in times_ms else "-"


def _profile_sums(profile: Profile, kinds: list[str]) -> str:
    layers = count_text(len(profile.layers), "layer")
    values = count_text(len(profile.edges), "value")
    words = [f"{layers} ({profile.granularity}), {values} between them"]
    for kind in kinds:
        total_ms = sum(layer.both_ms(kind) for layer in profile.layers)
        words.append(f"{kind}: {ms_text(total_ms)} in all")
    words.append(f"weights: {bytes_text(sum(layer.param_bytes for layer in profile.layers))}")
    if deferred := sum(layer.deferred_bytes for layer in profile.layers):
        words.append(
            f"left to weight passes under zero-bubble: {bytes_text(deferred)} a micro-batch"
        )
    return "\n".join(["; ".join(words), *filter(None, map(profile.unsteady, kinds))])
