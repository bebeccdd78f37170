"""The timeline of a batch, predicted from a profile.

The times of layers are summed up by segment, and the schedule is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from placer import devices
from placer.errors import InputError
from placer.executor.segments import Segment
from placer.executor.training.training_pipeline import TrainingPipeline
from placer.report.timeline import Kind, Row, from_first_start
from placer.schedule import Pipeline, Plan, Timeline, Transfer, simulate
from placer.schema import Profile


def predicted(
    profile: Profile, parts: Sequence[Segment], plan: Plan, pipelines: int = 1
) -> tuple[Row, ...]:
    """Return the predicted timeline of a batch.

    Args:
        profile: of the model on these devices; its micro-batch counts as the one that runs.
        parts: the segments, in order, of one pipeline after another.
        plan: the order of passes.
        pipelines: how many pipelines take micro-batches in turn.

    Raises:
        InputError: the profile is of other layers, or of other devices.
    """
    timeline = simulate(_pipeline(profile, parts, plan, pipelines), plan)
    return _rows(timeline, [str(part.device) for part in parts])


def plan_of_stages(pipeline: TrainingPipeline) -> Plan:
    """Return the order of all passes, in which each stage of each pipeline is a stage.

    Parts of the batch are its micro-batches. Each goes through the stages of one pipeline.

    Args:
        pipeline: with slots.
    """
    places = list(pipeline.lanes)
    return Plan(
        places=tuple(places.index(stage.device) for stage in pipeline.stages),
        chunks=len(pipeline.sizes),
        issue=tuple(pipeline.passes()),
        # part m is in the slot of part m - in_flight, which went through the same pipeline
        in_flight=tuple(len(stage.slots) * pipeline.pipelines for stage in pipeline.stages),
        split=pipeline.plan.split,
    )


def _pipeline(profile: Profile, parts: Sequence[Segment], plan: Plan, pipelines: int) -> Pipeline:
    """Return the segments' times and the times of the transfers between them."""
    training, length = plan.training, len(parts) // pipelines
    known = {layer.name: layer for layer in profile.layers}
    forward, backward, weights = [], [], []
    for part in parts:
        kind = _type_of(profile, part.device)
        names = [step.layer.name for step in part.steps]
        missing = [
            name for name in names if name not in known or kind not in known[name].forward_ms
        ]
        if missing:
            raise InputError(
                f"the profile has no times of layer {missing[0]!r} on {kind!r}; "
                "give the profile that the placement was solved from"
            )
        layers = [known[name] for name in names]
        forward.append(sum(layer.forward_ms[kind] for layer in layers))
        backward.append(
            sum(layer.backward_ms.get(kind, 0.0) for layer in layers) if training else 0.0
        )
        weights.append(sum(layer.weight_half_ms(kind) for layer in layers) if training else 0.0)
    transfers = [
        one._replace(source=first + one.source, target=first + one.target)
        for first in range(0, len(parts), length)
        for one in _transfers(profile, parts[first : first + length], training)
    ]
    return Pipeline(plan.places, tuple(forward), tuple(backward), tuple(weights), tuple(transfers))


def _type_of(profile: Profile, device: torch.device) -> str:
    """Return the type under which the profile has a device's times."""
    found = profile.cluster.devices if profile.cluster is not None else ()
    return next(
        (item.type for item in found if item.name == str(device)), None
    ) or devices.type_name(device)


def _transfers(profile: Profile, parts: Sequence[Segment], training: bool) -> tuple[Transfer, ...]:
    """Return the transfers between segments on different devices, one for each pair of segments.

    A transfer over a link that was not measured takes no time.
    """
    stage_of = {step.layer.name: index for index, part in enumerate(parts) for step in part.steps}
    times: dict[tuple[int, int], tuple[float, float | None]] = {}
    for edge in profile.edges:
        source = stage_of.get(edge.source)
        # A value is sent to a segment once, however many of its layers read it.
        for target in dict.fromkeys(stage_of.get(name) for name in edge.targets):
            if source is None or target is None or parts[source].device == parts[target].device:
                continue
            forward_ms, gradient_ms = times.get((source, target), (0.0, None))
            there, back = str(parts[source].device), str(parts[target].device)
            forward_ms += _link_ms(profile, there, back, edge.bytes)
            if training and edge.gradient_bytes:
                gradient_ms = (gradient_ms or 0.0) + _link_ms(
                    profile, back, there, edge.gradient_bytes
                )
            times[source, target] = (forward_ms, gradient_ms)
    return tuple(
        Transfer(source, target, *both) for (source, target), both in sorted(times.items())
    )


def _link_ms(profile: Profile, source: str, target: str, size_bytes: int) -> float:
    link = profile.cluster.link(source, target) if profile.cluster is not None else None
    return 0.0 if link is None else link.transfer_ms(size_bytes)


def _rows(timeline: Timeline, lanes: Sequence[str]) -> tuple[Row, ...]:
    rows = [
        Row(lanes[stage], phase, stage, None, number, a, b)
        for stage, phase, number, a, b, _ in timeline.tasks
    ]
    for source, target, phase, number, start_ms, end_ms in timeline.transfers:
        kind: Kind = "gradients" if phase == "backward" else "values"
        rows.append(
            Row(
                f"{lanes[source]} → {lanes[target]}", kind, source, target, number, start_ms, end_ms
            )
        )
    return from_first_start(rows)
