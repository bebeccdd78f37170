"""Bounds from parts of the model: the layers of the busiest stages, as if they were alone.

    stages    a │ b   C   d │ e      C is the busiest: the layers of b, C and d are placed
                                     optimally on all devices, as if a and e were not there

A placement without some of its layers is a placement of the rest, and no device of it takes longer.
So the optimum of a part is a lower bound of the whole. Values from a layer that is left out are
left out too, and so are readers. Few stages are busy, for instance, in a network whose first values
are large over slow links. The other layers, which fit in many ways, then make only the whole hard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from placer.solver import costs
from placer.solver.problem import Problem, Value

GROWTH = 1.5
"""Factor of a part's layers over the part before: few parts, none much too large."""

MOST_LAYERS = 400
"""The most layers of a part: larger ones are as hard as the whole."""


def parts(problem: Problem, devices: list[int]) -> Iterator[list[int]]:
    """Yield ever more layers around the busiest stage, ascending; never all of them.

    Args:
        problem: the placement problem.
        devices: by layer, the device in a placement.
    """
    result = costs.costs_of(problem, devices)  # it was found, so it can be
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
    """Return the problem of some layers alone.

    Args:
        problem: the placement problem.
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
        if not number.keys() >= {value.retained_from, value.retained_until, value.readers[-1]}:
            return replace(part, retained_bytes=0)  # less may be held
        return replace(
            part,
            retained_from=number[value.retained_from],
            retained_until=number[value.retained_until],
        )

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
