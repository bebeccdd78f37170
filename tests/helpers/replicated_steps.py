"""Small questions that allow replicas, and every answer that there could be: numbers of replicas,
assignments, and shares."""

import itertools
import math
from collections import defaultdict
from dataclasses import replace
from random import Random

from every_step import Steps

from placer.schedule import steady_state_ms, step_ms
from placer.schedule.gradient_pieces import ADD_BYTES_PER_S, CROSSING_RATIO, PIECES
from placer.schema import (
    Cluster,
    Constraints,
    Device,
    Edge,
    Layer,
    Link,
    PlacementRequest,
    Profile,
    Rate,
)

MB = 10**6
MS = (0.5, 1.0, 1.5, 2.0, 3.25)
GRADIENTS = (0, 30 * MB, 50 * MB, 90 * MB)
BYTES_PER_S = 50e9


def drawn_request(seed, devices=(2, 3, 4), unlike=False, **asked):
    """A request of a few layers on so many devices, with tight or ample memory."""
    return _Drawn(Random(seed)).request(devices, unlike, asked)


class _Drawn:
    def __init__(self, random):
        self.choice, self.random = random.choice, random

    def request(self, devices, unlike, asked):
        count = self.choice(devices)
        layers = self.choice((1, 2, 3) if count < 4 else (1, 2))
        names = [f"l{i}" for i in range(layers)]
        kinds = [self.choice("ab") if unlike else "a" for _ in range(count)]
        sizes = self.choice([(1,), (2,), (1, 2), (1, 4), (2, 4)])
        states = [self.state() for _ in names]
        edges = self.edges(names)
        self.temporary = self.choice([0.0, 0.5])
        profiles = [self.profile(names, states, edges, size) for size in sizes]
        self.random.shuffle(profiles)
        limit = self.choice([10**12, 10**12, 800 * MB, 400 * MB])
        members = [
            Device(name=f"d{i}", type=kind, memory_bytes=limit) for i, kind in enumerate(kinds)
        ]
        return PlacementRequest(
            profile=profiles[0],
            profiles=profiles[1:],
            cluster=Cluster(devices=members, links=self.links(members)),
            schedule=asked.pop("schedule", None)
            or self.choice(["auto", "1f1b", "zero-bubble", "fill-drain", "interleaved"]),
            objective="step",
            step_kind=self.choice(["isolated", "steady-state"]),
            batch_size=self.choice([4, 8]),
            constraints=asked.pop("constraints", None)
            or Constraints(
                max_devices=self.choice([None, None, None, 3]),
                min_devices=self.choice([None, None, None, min(2, layers)]),
                recompute=self.choice(["never", "never", "auto", "always"]),
            ),
            replicas="auto",
            workers=1,
            **asked,
        )

    def state(self):
        """What a layer has whatever the size of a micro-batch."""
        gradients = self.choice(GRADIENTS)
        return {
            "grad_bytes": gradients,
            "param_bytes": gradients + self.choice([0, 10 * MB]),
            "optimizer_bytes": 2 * gradients + self.choice([0, 1]),
            "optimizer_ms": {kind: self.choice(MS) for kind in "ab"} if gradients else {},
        }

    def profile(self, names, states, edges, size):
        scale = self.choice([0.8, 1.0]) * size
        layers = [
            Layer(
                name=name,
                forward_ms={kind: scale * self.choice(MS) for kind in "ab"},
                backward_ms={kind: scale * self.choice(MS) for kind in "ab"},
                saved_bytes=size * self.choice([0, 10 * MB + 1]),
                backward_workspace_bytes=size * self.choice([0, 5 * MB]),
                **state,
            )
            for name, state in zip(names, states, strict=True)
        ]
        edges = [
            Edge(source=a, targets=b, bytes=size * MB, gradient_bytes=size * MB) for a, b in edges
        ]
        return Profile(
            layers=layers,
            edges=edges,
            training=True,
            batch_size=size,
            optimizer_workspace_ratio=self.temporary,
        )

    def edges(self, names):
        """A row, or a graph with a branch."""
        row = list(itertools.pairwise(names))
        if len(names) == 3 and self.random.random() < 0.3:
            return [(names[0], names[1:]), (names[1], names[2:])]
        return [(a, [b]) for a, b in row]

    def links(self, members):
        speed, latency = self.choice([0.5, 1.0, 4.0]) * BYTES_PER_S, self.choice([0.0, 1e-4])
        loaded = self.choice([None, Rate(bandwidth_bytes_per_s=speed / 2, latency_s=latency)])
        return [
            Link(
                source=a.name,
                target=b.name,
                bandwidth_bytes_per_s=speed,
                latency_s=latency,
                bidirectional=loaded,
            )
            for a, b in itertools.permutations(members, 2)
        ]


class EveryShape:
    """Every answer that there could be."""

    def __init__(self, request):
        self.request = request
        self.every_size = {one.batch_size: one for one in (request.profile, *request.profiles)}

    def best(self):
        """The shortest step of all shapes; None without any."""
        values = [*self.alone(), *self.equal_pipelines(), *self.unlike_devices()]
        return min(values, default=None)

    def alone(self):
        """Steps without replicas."""
        yield from Steps(self.request).all()

    def equal_pipelines(self):
        """Steps of alike pipelines, each on as many devices."""
        devices, whole = self.request.devices, self.request.batch_size
        if len({(device.type, device.usable_bytes) for device in devices}) > 1:
            return
        for count in range(2, len(devices) + 1):
            rules = self.request.constraints
            if len(devices) % count or whole % count:
                continue
            sizes = [one for size, one in self.every_size.items() if whole // count % size == 0]
            least, most = -(-(rules.min_devices or 1) // count), (rules.max_devices or 99) // count
            if not sizes or not most:
                continue
            group = devices[: len(devices) // count]
            profile, *profiles = (part_of_optimizer(one, count) for one in sizes)
            asked = self.request.model_copy(
                update={
                    "profile": profile,
                    "profiles": tuple(profiles),
                    "batch_size": whole // count,
                    "cluster": self.request.cluster.model_copy(update={"devices": group}),
                    "constraints": rules.model_copy(
                        update={"min_devices": least, "max_devices": most}
                    ),
                }
            )
            yield from ReplicatedSteps(asked, count).all()

    def unlike_devices(self):
        """Steps of devices of which each has the whole model and its share of each micro-batch."""
        request, devices = self.request, self.request.devices
        kinds = {(device.type, device.usable_bytes) for device in devices}
        rules, schedule = request.constraints, request.schedule
        if len(kinds) < 2:
            return
        asked = request.model_copy(update={"schedule": "1f1b" if schedule == "auto" else schedule})
        least, most = min(self.every_size), max(self.every_size)
        for number in range(2, len(devices) + 1):
            if not (rules.min_devices or 1) <= number <= (rules.max_devices or 99):
                continue
            for members in itertools.combinations(devices, number):
                for chunks in range(1, request.batch_size + 1):
                    samples, rest = divmod(request.batch_size, chunks)
                    for shares in itertools.product(range(least, most + 1), repeat=number):
                        if not rest and sum(shares) == samples:
                            yield from self.shared(asked, members, chunks, shares)

    def shared(self, asked, members, chunks, shares):
        """The step of some devices with these shares; nothing if one lacks memory."""
        ends, optimizers = [], []
        for device, samples in zip(members, shares, strict=True):
            rule = asked.constraints.recompute_on(device.name)
            own = asked.model_copy(
                update={
                    "profile": part_of_optimizer(self.between(samples), len(members)),
                    "profiles": (),
                    "batch_size": chunks * samples,
                    "cluster": asked.cluster.model_copy(update={"devices": (device,)}),
                    "constraints": Constraints(
                        contiguous=True, recompute=rule if rule == "always" else "never"
                    ),
                }
            )
            steps = ReplicatedSteps(own, len(members))
            found = list(steps.parts())
            if not found:
                return
            ((end, optimizer),) = found
            ends.append(end)
            optimizers.append(optimizer)
        yield max(ends) + max(optimizers)

    def between(self, samples):
        """The profile of a size, by the rule of three."""
        if samples in self.every_size:
            return self.every_size[samples]
        low = max(size for size in self.every_size if size < samples)
        high = min(size for size in self.every_size if size > samples)
        share = (samples - low) / (high - low)

        def mix(one, other):
            return one + share * (other - one)

        def layer(one, other):
            times = {
                name: {
                    kind: mix(getattr(one, name)[kind], getattr(other, name)[kind]) for kind in "ab"
                }
                for name in ("forward_ms", "backward_ms")
            }
            sizes = {
                name: -int(-mix(getattr(one, name), getattr(other, name)) // 1)
                for name in ("saved_bytes", "backward_workspace_bytes")
            }
            return one.model_copy(update=times | sizes)

        small, large = self.every_size[low], self.every_size[high]
        return small.model_copy(
            update={
                "batch_size": samples,
                "layers": tuple(map(layer, small.layers, large.layers)),
                "edges": tuple(
                    edge.model_copy(update={"bytes": samples * MB, "gradient_bytes": samples * MB})
                    for edge in small.edges
                ),
            }
        )


def part_of_optimizer(profile, count):
    """The profile of one of several replicas."""
    layers = [
        layer.model_copy(
            update={
                "optimizer_ms": {kind: ms / count for kind, ms in layer.optimizer_ms.items()},
                "optimizer_bytes": (layer.optimizer_bytes + count - 1) // count,
            }
        )
        for layer in profile.layers
    ]
    share = profile.optimizer_workspace_ratio / count
    return profile.model_copy(update={"layers": tuple(layers), "optimizer_workspace_ratio": share})


def cut_evenly(profile, layers):
    """The layers in a few runs with gradients, each cut where it is nearest to an equal part.

    It is not cut where many bytes cross, or more than one layer's gradients too early.
    """
    total = sum(one.grad_bytes for one in layers)
    if not total:
        return []
    largest = max(one.grad_bytes for one in layers)
    names = [one.name for one in profile.layers]
    cuts = []
    for number in range(1, PIECES):
        found = []
        for place in range(1, len(layers)):
            known = sorted({0, place, len(layers), *cuts})
            runs = [layers[a:b] for a, b in itertools.pairwise(known)]
            made = set(names[: names.index(layers[place].name)])
            crossing = sum(
                edge.bytes
                for edge in profile.edges
                if edge.source in made and not made.issuperset(edge.targets)
            )
            before = sum(one.grad_bytes for one in layers[:place])
            part = total / PIECES
            if (
                place not in cuts
                and all(any(one.grad_bytes for one in run) for run in runs)
                and crossing <= CROSSING_RATIO * part
                and before + largest >= number * part
            ):
                apart = abs(before - number * part)
                found.append((max(part / 4, apart), crossing, apart, place))
        if found:
            cuts.append(min(found)[-1])
    ends = [0, *sorted(cuts), len(layers)]
    return [layers[a:b] for a, b in itertools.pairwise(ends)]


class ReplicatedSteps(Steps):
    """Steps of a pipeline that exchanges gradients with so many others; all links are alike."""

    def __init__(self, request, count):
        super().__init__(request)
        self.count = count
        self.link = request.cluster.links[0]

    def exchange_ms(self, size, adding):
        """The time in which a replica sends a part of some bytes to each other one."""
        rate = self.link.bidirectional or self.link
        part = size / self.count
        one = rate.latency_s + part / rate.bandwidth_bytes_per_s
        add = 3 * part * (self.count - 1) / self.count / ADD_BYTES_PER_S
        return 1e3 * ((self.count - 1) * one + adding * add * self.count) if size else 0.0

    def maps(self):
        """Each assignment, where rooms leave memory for each device's buffers."""
        for every, where in super().maps():
            every.replicas = self.count
            limits = {
                device.name: device.usable_bytes - buffers(every, where, where, device.name)
                for device in every.devices
            }
            every.limit = limits.get
            yield every, where

    def steps(self, every, where):
        for parts in self.steps_in_parts(every, where):
            yield self.step_with(*parts)

    def parts(self):
        """The time between two optimizers, and the optimizer, of one device alone."""
        for every, where in self.maps():
            for pipeline, stage_of, found in self.steps_in_parts(every, where):
                (slots,) = self.slots(pipeline, stage_of, found).values()
                exposed, optimizer, wait = slots
                passes = step_ms(replace(pipeline, optimizer_ms=()), found)
                yield wait + passes + exposed, optimizer

    def steps_in_parts(self, every, where):
        """The order of passes that is shortest without the exchange, of those that fit."""
        self.every, self.where = every, where
        for again in self.recomputed(every, where):
            self.again = again
            by_order = defaultdict(list)
            for pipeline, stage_of, found in self.plans(every, where, again):
                by_order[pipeline.places].append((pipeline, stage_of, found))
            row = self.request.step_kind == "steady-state"
            for alike in by_order.values():
                alike.sort(key=lambda one: (steady_state_ms if row else step_ms)(one[0], one[2]))
                for pipeline, stage_of, found in alike:
                    asked = every, where, stage_of, found, again
                    if self.fits(*asked) and self.needed(*asked):
                        yield pipeline, stage_of, found
                        break

    def step_with(self, pipeline, stage_of, found):
        slots = self.slots(pipeline, stage_of, found)
        once = [sum(slots[place]) for place in dict.fromkeys(pipeline.places)]
        spread = [0.0] * len(pipeline.places)
        for place, slot in zip(dict.fromkeys(pipeline.places), once, strict=True):
            spread[pipeline.places.index(place)] = slot
        if self.request.step_kind == "steady-state":
            return steady_state_ms(replace(pipeline, optimizer_ms=tuple(spread)), found)
        return step_ms(replace(pipeline, optimizer_ms=()), found) + max(once)

    def slots(self, pipeline, stage_of, found):
        """By device, what comes after its last pass: exposed reduction, optimizer, gathering."""
        kind = {device.name: device.type for device in self.every.devices}
        slots = {}
        for place in set(pipeline.places):
            clock, complete, optimizer = 0.0, [], 0.0
            final = {stage: None for stage, own in enumerate(pipeline.places) if own == place}
            for stage, phase, _ in found.issue:
                if stage in final:
                    weights = pipeline.weight_grad_ms[stage]
                    backward = pipeline.backward_ms[stage] - (weights if found.split else 0.0)
                    clock += {
                        "forward": pipeline.forward_ms[stage],
                        "backward": backward,
                        "weights": weights,
                    }[phase]
                    final[stage] = clock  # the last pass of a stage is one that makes gradients
            for stage, end in final.items():
                mine = [one for one in self.every.layers if stage_of[one.name] == stage]
                here = kind[self.where[mine[0].name]]
                optimizer += sum(one.optimizer_ms.get(here, 0.0) for one in mine)
                time = end
                # backwards through the pass, from its end to its begin
                ready = {}
                for layer in mine:
                    ready[layer.name] = time
                    back = layer.backward_ms[here]
                    half = min(
                        back, layer.weight_grad_ms.get(here, back / 2 if layer.grad_bytes else 0)
                    )
                    time -= half if found.split else back
                for piece in cut_evenly(self.request.profile, mine):
                    complete.append((ready[piece[0].name], sum(one.grad_bytes for one in piece)))
            lane = 0.0
            for ready_ms, size in sorted(complete):
                lane = max(lane, ready_ms) + self.exchange_ms(size, adding=True)
            slots[place] = max(0.0, lane - clock), optimizer, self.wait(stage_of, sorted(final))
        return slots

    def wait(self, stage_of, stages):
        """How long the first forward passes of a device wait for parameters, piece by piece."""
        kind = {device.name: device.type for device in self.every.devices}
        lane = clock = 0.0
        waited = 0.0
        for stage in stages:
            mine = [one for one in self.every.layers if stage_of[one.name] == stage]
            for piece in cut_evenly(self.request.profile, mine) or [mine]:
                lane += self.exchange_ms(sum(one.grad_bytes for one in piece), adding=False)
                waited += max(0.0, lane - clock)
                clock = max(lane, clock)
                clock += sum(one.forward_ms[kind[self.where[one.name]]] for one in piece)
        return waited

    @staticmethod
    def uses(every, where, stage_of, found, again=frozenset()):
        uses = Steps.uses(every, where, stage_of, found, again)
        return {name: size + buffers(every, where, stage_of, name) for name, size in uses.items()}


def buffers(every, where, stage_of, device):
    """Bytes for the packed parameters of an owner, and for two pieces from each other replica."""
    stages = {stage_of[name] for name, place in where.items() if place == device}
    held = [[one for one in every.layers if stage_of[one.name] == stage] for stage in stages]
    pieces = [piece for stage in held for piece in cut_evenly(every.request.profile, stage)]
    largest = max((sum(one.grad_bytes for one in piece) for piece in pieces), default=0)
    total = sum(one.grad_bytes for stage in held for one in stage)
    parts = every.replicas
    return math.ceil(total / parts) + math.ceil(2 * (parts - 1) * largest / parts)
