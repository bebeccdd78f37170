"""Some layers alone: what those of the busiest stages take, if nothing else is there, no placement
is below.

    stages    a │ b   C   d │ e      C is the busiest: the layers of b, C and d are placed at best on all devices
                                     that there are, as if a and e were not

A placement, with all layers but those left out, still is one of these, and no device of it takes
longer. Values that come from a layer which is left out are too, and readers. Where few stages are
busy, as in a network whose first values are large over slow links, the rest is what makes the whole
hard: it fits beside in many ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from placer.solver import costs
from placer.solver.problem import Problem, Value

GROWTH = 1.5
"""Each part has so many times the layers of the one before."""

MOST_LAYERS = 400
"""A part of more layers is as hard as all is."""


def parts(problem: Problem, devices: list[int]) -> Iterator[list[int]]:
    """Ever more layers around the busiest stage, ascending; never all of them.

    Args:
        problem: what is asked.
        devices: by layer, the device in a placement.
    """
    result = costs.evaluate(problem, devices)
    assert result is not None  # it was found, so it can be
    stage_of = {device: stage for stage, device in enumerate(result.stages)}
    busiest = stage_of[max(stage_of, key=lambda device: result.load_ms[device])]

    def distance(layer: int) -> tuple[int, int]:
        stage = stage_of[devices[layer]]
        return abs(stage - busiest), layer if stage >= busiest else -layer

    nearest = sorted(range(len(devices)), key=distance)
    size = float(1 + sum(stage_of[device] == busiest for device in devices))
    while size < min(len(devices), MOST_LAYERS + 1):
        yield sorted(nearest[: int(size)])
        size *= GROWTH


def part_of(problem: Problem, layers: Sequence[int]) -> Problem:
    """The problem of some layers alone.

    Args:
        problem: what is asked.
        layers: ascending.
    """
    number = {layer: index for index, layer in enumerate(layers)}

    def some(of: Sequence[int]) -> tuple[int, ...]:
        return tuple(number[layer] for layer in of if layer in number)

    def within(value: Value) -> Value:
        part = replace(
            value,
            source=number[value.source],
            readers=some(value.readers),
            keepers=some(value.keepers),
            unbound=frozenset(some(sorted(value.unbound))),
        )
        if not number.keys() >= {value.rest_from, value.rest_until, value.readers[-1]}:
            return replace(part, rest_bytes=0)  # less may be held
        return replace(part, rest_from=number[value.rest_from], rest_until=number[value.rest_until])

    return replace(
        problem,
        layers=tuple(problem.layers[layer] for layer in layers),
        values=tuple(
            within(value)
            for value in problem.values
            if value.source in number and some(value.readers)
        ),
        forward_ms=tuple(problem.forward_ms[layer] for layer in layers),
        backward_ms=tuple(problem.backward_ms[layer] for layer in layers),
        allowed=tuple(problem.allowed[layer] for layer in layers),
        groups=tuple(some(group) for group in problem.groups if len(some(group)) > 1),
        loose=frozenset(some(sorted(problem.loose))),
        most_devices=min(problem.most_devices, len(layers)),
        least_devices=1,
        shared=(),  # less is held without copies
    )
