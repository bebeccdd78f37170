"""Small random requests for the solver, and how hypothesis draws them."""

from __future__ import annotations

import itertools
import math
import os
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from placer.errors import InputError
from placer.schema import (
    Cluster,
    Constraints,
    Device,
    Edge,
    Layer,
    Link,
    PlacementRequest,
    Profile,
    TiedParameters,
)

MS = (0.0, 0.25, 1.0, 1.5, 2.0, 3.1, 7.3)
SIZES = (0, 1, 2, 3, 5, 8)
"""Few distinct times and sizes, so that ties and exact fits are common."""
STATE = ("param_bytes", "buffer_bytes")
TRAINED = (
    "grad_bytes",
    "optimizer_bytes",
    "saved_bytes",
    "backward_workspace_bytes",
    "recorded_workspace_bytes",
)


SHARE = float(os.environ.get("PLACER_EXAMPLES", "0.125"))
"""Of the drawn examples that a test names, so many are run; 1 or more for a change of the solver.
"""

THOROUGH = pytest.mark.skipif(
    SHARE < 1, reason="long, and like others that run: PLACER_EXAMPLES=1 runs it"
)


def examples(count):
    """As many drawn examples, the same in every run; a slow draw, or one that is filtered, is no
    fault."""
    return settings(
        max_examples=math.ceil(count * SHARE),
        deadline=None,
        derandomize=True,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
    )


@st.composite
def small_requests(draw, objectives=("throughput", "latency", "memory"), kind=None):
    """A request of 3 to 6 layers on 2 or 3 devices, with any features together.

    Hypothesis draws the numbers of devices and layers, and makes them small for a case that fails;
    the rest comes from a seed, which takes a tenth of the time."""
    devices = draw(st.integers(2, 3))
    layers = draw(st.integers(3, 6 if devices == 2 else 5))
    random = Random(draw(st.integers(0, 2**64 - 1)))
    drawn = (kind or DrawnRequest)(random, devices, layers, objectives)
    while True:
        try:
            return drawn.request()
        except InputError:
            # pins that contradict each other are bad input, see test_bad_input.py
            pass


class DrawnRequest:
    """A random request with so many devices and layers."""

    def __init__(self, random, devices, layers, objectives):
        self.random, self.objectives = random, objectives
        self.devices = [f"d{i}" for i in range(devices)]
        self.layers = [f"l{i}" for i in range(layers)]

    def request(self):
        choice = self.random.choice
        training, kinds = choice([False, True]), [choice("ab") for _ in self.devices]
        colocated = self.rarely(self.groups, ())
        profile = Profile(
            layers=[self.layer(name, training, sorted(set(kinds))) for name in self.layers],
            edges=self.edges(training),
            training=training,
            cluster=self.cluster(kinds, training),
            colocated=colocated,
            tied=[self.tie(group) for group in colocated if training and len(set(group)) > 1],
        )
        profile = self.splitting(profile) if self.random.random() < 0.3 else profile
        asked = PlacementRequest(
            profile=profile,
            objective=choice(self.objectives),
            constraints=self.constraints(),
            chunks=choice([1, 2, 3, 7]),
            schedule=choice(["1f1b", "fill-drain", "zero-bubble", "interleaved"]),
            transfers=choice(["added", "overlapped"]),
            workers=1,
            seed=self.random.randint(0, 3),
        )
        return self.leaving_weights(asked) if asked.schedule == "zero-bubble" else asked

    def leaving_weights(self, asked):
        """With what backward passes leave to weight passes."""
        fields = ("deferred_bytes", "input_grad_workspace_bytes", "weight_grad_workspace_bytes")
        layers = [
            layer.model_copy(
                update={
                    name: self.random.choice(SIZES) if asked.is_training else 0 for name in fields
                }
            )
            for layer in asked.profile.layers
        ]
        return asked.model_copy(
            update={
                "profile": asked.profile.model_copy(
                    update={
                        "layers": tuple(layers),
                        "optimizer_workspace_ratio": self.random.choice((0.0, 1.5)),
                    }
                )
            }
        )

    def rarely(self, make, default):
        return make() if self.random.random() < 0.25 else default

    def groups(self):
        return [
            self.random.sample(self.layers, self.random.randint(2, 3))
            for _ in range(self.random.randint(1, 2))
        ]

    def constraints(self):
        choice, number = self.random.choice, self.random.randint
        most = self.rarely(lambda: number(1, 3), None)
        return Constraints(
            contiguous=choice([True, True, False, None]),
            pinned=self.rarely(
                lambda: {choice(self.layers): choice(self.devices) for _ in range(number(1, 2))}, {}
            ),
            forbidden=self.rarely(self.bans, {}),
            colocated=self.rarely(self.groups, ()),
            max_devices=most,
            max_layers=self.rarely(lambda: number(2, len(self.layers)), None),
            min_devices=self.rarely(lambda: number(1, min(len(self.devices), most or 3)), None),
        )

    def tie(self, group):
        """Parameters that layers of a group share."""
        layers = self.random.sample(sorted(set(group)), self.random.randint(2, len(set(group))))
        return {"layers": layers, "gradient_bytes": self.random.choice(SIZES)}

    def splitting(self, profile):
        """With parameters that layers share and that may be on several devices."""
        first, *others = sorted(
            self.random.sample(range(len(self.layers)), min(len(self.layers), 3))
        )
        if not others:
            return profile
        size, gradient = self.random.choice(SIZES), self.random.choice(SIZES)
        layers = list(profile.layers)
        layers[first] = layers[first].model_copy(
            update={
                "param_bytes": layers[first].param_bytes + max(size, gradient),
                "grad_bytes": layers[first].grad_bytes + gradient,
            }
        )
        names = [self.layers[index] for index in (first, *others[: self.random.choice([1, 2])])]
        tie = TiedParameters(layers=names, param_bytes=size, gradient_bytes=gradient, split=True)
        return profile.model_copy(update={"layers": tuple(layers), "tied": (*profile.tied, tie)})

    def bans(self):
        named = [self.random.choice([*self.layers, "*"]) for _ in range(self.random.randint(1, 2))]
        return {
            name: self.random.sample(self.devices, self.random.choice([1, 1, 2])) for name in named
        }

    def layer(self, name, training, kinds):
        sizes = (*STATE, "forward_workspace_bytes", *(TRAINED if training else ()))
        return Layer(
            name=name,
            forward_ms={kind: self.random.choice(MS) for kind in kinds},
            backward_ms={kind: self.random.choice(MS) for kind in kinds} if training else {},
            **{field: self.random.choice(SIZES) for field in sizes},
        )

    def edges(self, training):
        """Values in a random graph; some have several readers, some layers make two values."""
        edges = []
        for index, name in enumerate(self.layers[:-1]):
            later = self.layers[index + 1 :]
            for _ in range(self.random.choice([0, 1, 1, 1, 2])):
                many = self.random.sample(later, self.random.randint(1, min(3, len(later))))
                targets = self.random.choice([later[:1], many])
                near = [name, *targets]
                rest = self.rest(targets) if training else {}
                edges.append(
                    Edge(
                        source=name,
                        targets=targets,
                        bytes=self.random.choice(SIZES),
                        gradient_bytes=self.random.choice(SIZES) if training else 0,
                        saved_by=[reader for reader in near if self.random.random() < 0.4]
                        if training
                        else [],
                        deferred=training and self.random.random() < 0.4,
                        **rest,
                    )
                )
        return edges

    def rest(self, targets):
        """Of some values that several layers read, what is held beside the gradient of the last."""
        if len(targets) < 2 or self.random.random() < 0.5:
            return {}
        *_, before, last = sorted(map(self.layers.index, targets))
        until = self.random.choice(["", *self.layers[before + 1 : last + 1]])
        return {"retained_bytes": self.random.choice(SIZES), "retained_until": until}

    def cluster(self, kinds, training):
        """Devices whose limits are ample or tight; links alike, unlike, or partly missing."""
        choice = self.random.choice
        limit = choice([30, 50, 80, 120, 10_000] if training else [15, 25, 40, 80, 10_000])
        devices = [
            Device(name=name, type=kind, memory_bytes=limit + choice([0, 0, 7]), reserve_bytes=2)
            for name, kind in zip(self.devices, kinds, strict=True)
        ]
        alike, missing = choice([False, True]), choice([False] * 5 + [True])
        speed = choice([1e3, 2.5e3, 1e4])
        links = []
        for source, target in itertools.permutations(self.devices, 2):
            if missing and choice([False, True]):
                continue
            if not alike:
                speed = choice([1e3, 2.5e3, 1e4])
            latency = 1e-4 if alike else choice([0.0, 1e-4, 1e-3])
            links.append(
                Link(source=source, target=target, bandwidth_bytes_per_s=speed, latency_s=latency)
            )
        return Cluster(devices=devices, links=links)
