"""Every answer of a small question whose stages may have numbers of replicas of their own."""

import itertools
import math
from dataclasses import replace
from random import Random

from enumeration import Enumeration, memories
from replicated_steps import (
    MB,
    EveryShape,
    ReplicatedSteps,
    buffers,
    drawn_request,
    part_of_optimizer,
)

from placer.schedule import plan, steady_state_ms, step_ms
from placer.schedule.gradient_pieces import ADD_BYTES_PER_S
from placer.schema import Constraints, Edge


class EveryStageShape(EveryShape):
    """Every answer, over all cuts of the layers and numbers of replicas of the stages."""

    def best(self):
        """The shortest step of all shapes; None without any."""
        values = [super().best(), *self.by_stage()]
        return min((value for value in values if value is not None), default=None)

    def by_stage(self):
        """Steps of stages of which not all have equally many replicas."""
        asked, rules = self.request.schedule, self.request.constraints
        schedules = ["1f1b", "zero-bubble", "fill-drain"] if asked == "auto" else [asked]
        for counts, cuts in unlike_counts(self.request):
            if (rules.min_devices or 1) <= sum(counts) <= (rules.max_devices or 99):
                for size, order in itertools.product(self.every_size.values(), schedules):
                    if order != "interleaved":
                        yield from GroupedSteps(self.request, size, order, counts, cuts).all()


def unlike_counts(request):
    """All numbers of replicas by stage that are not all equal, with the ends of the stages."""
    most, layers = len(request.devices), len(request.profile.layers)
    for stages in range(2, min(most, layers) + 1):
        for counts in itertools.product(range(1, most + 1), repeat=stages):
            if len(set(counts)) > 1 and sum(counts) <= most:
                for cuts in itertools.combinations(range(1, layers), stages - 1):
                    yield counts, cuts


class GroupedSteps:
    """The step of one plan, if it fits."""

    def __init__(self, request, profile, order, counts, cuts):
        units = math.lcm(*counts)
        self.counts, self.shares = counts, [units // count for count in counts]
        self.chunks, self.rest = divmod(request.batch_size, units * profile.batch_size)
        self.request = request.model_copy(
            update={"profile": profile, "profiles": (), "chunks": self.chunks, "schedule": order}
        )
        ends = [0, *cuts, len(profile.layers)]
        self.stage_of = {
            layer.name: stage
            for stage, (start, stop) in enumerate(itertools.pairwise(ends))
            for layer in profile.layers[start:stop]
        }
        self.names = [device.name for device in request.devices][: len(counts)]
        self.where = {name: self.names[stage] for name, stage in self.stage_of.items()}

    def all(self):
        """Nothing if the batch has no such micro-batches, or memory is short."""
        if (
            self.rest
            or not self.chunks
            or not Enumeration(self.request, True).obeys_rules(self.where)
        ):
            return
        again = {name for stage, name in enumerate(self.names) if self.recomputes(stage)}
        pipeline = self.pipeline(again)
        rooms = [self.room(stage, name in again) for stage, name in enumerate(self.names)]
        if None in rooms:
            return
        found = plan(
            self.request.schedule,
            pipeline.places,
            self.chunks,
            forward_ms=pipeline.forward_ms,
            backward_ms=pipeline.backward_ms,
            weight_grad_ms=pipeline.weight_grad_ms,
            transfers=pipeline.transfers,
            room=rooms if self.apart else None,
        )
        slots = [self.slot(stage, pipeline, found) for stage in range(len(self.counts))]
        if self.request.step_kind == "steady-state":
            yield steady_state_ms(replace(pipeline, optimizer_ms=tuple(slots)), found)
        else:
            yield step_ms(replace(pipeline, optimizer_ms=()), found) + max(slots)

    @property
    def apart(self):
        return self.request.schedule == "zero-bubble"

    def every(self, stage):
        """The enumeration whose devices have the stage's part of the optimizer."""
        profile = part_of_optimizer(self.request.profile, self.counts[stage])
        every = Enumeration(self.request.model_copy(update={"profile": profile}), True)
        every.replicas = self.counts[stage]
        return every

    def steps(self, stage):
        steps = ReplicatedSteps(self.request, self.counts[stage])
        steps.every, steps.where = self.every(stage), self.where
        return steps

    def pipeline(self, again):
        """The passes of a unit, as often as a device runs them; a border has a busier end."""
        one = self.steps(0).pipeline(
            self.steps(0).every, self.where, self.names, self.stage_of, again
        )

        def scaled(times):
            return tuple(share * time for share, time in zip(self.shares, times, strict=True))

        transfers = []
        for transfer in one.transfers:
            busier = max(self.shares[transfer.source], self.shares[transfer.target])
            back = transfer.gradient_ms
            transfers.append(
                transfer._replace(
                    forward_ms=busier * transfer.forward_ms,
                    gradient_ms=None if back is None else busier * back,
                )
            )
        return replace(
            one,
            forward_ms=scaled(one.forward_ms),
            backward_ms=scaled(one.backward_ms),
            weight_grad_ms=scaled(one.weight_grad_ms),
            transfers=tuple(transfers),
        )

    def slot(self, stage, pipeline, found):
        """What a stage does between two steps: exposed reduction, optimizer, gathering."""
        exposed, optimizer, wait = self.steps(stage).slots(pipeline, self.stage_of, found)[stage]
        return exposed + optimizer + wait

    # Memory

    def fewest(self, stage):
        stages = len(self.counts)
        return (
            self.chunks
            if self.request.schedule == "fill-drain"
            else min(self.chunks, stages - stage)
        )

    def use(self, stage, room, again):
        """The bytes of a device with so many micro-batches in flight, each of several units."""
        every, name, share = self.every(stage), self.names[stage], self.shares[stage]
        extra = buffers(every, self.where, self.stage_of, name) if every.replicas > 1 else 0
        if again:
            return every.recomputed_use(self.where, name, room * share) + extra
        backwards = None
        if self.apart:
            backwards = share * memories(room, 1 + room - self.fewest(stage))
        return every.use(self.where, name, room * share, backwards) + extra

    def recomputes(self, stage):
        """Whether a device recomputes: it must, or it may, lacks memory and then needs less."""
        rule = self.request.constraints.recompute
        if rule != "auto":
            return rule == "always"
        kept = self.use(stage, self.fewest(stage), False)
        return kept > self.limit and self.use(stage, self.fewest(stage), True) < kept

    @property
    def limit(self):
        return self.request.devices[0].usable_bytes

    def room(self, stage, again):
        """The most micro-batches in flight for which there is memory; None if for none."""
        room = self.fewest(stage)
        if self.use(stage, room, again) > self.limit:
            return None
        while self.apart and room < min(self.chunks, 2 * len(self.counts)):
            if self.use(stage, room + 1, again) > self.limit:
                break
            room += 1
        return room


def smallest_bottleneck(request):
    """The smallest bottleneck of stages of which not all have equally many replicas, or None.

    All devices are alike, and so are all links.
    """
    rules, found = request.constraints, []
    for counts, cuts in unlike_counts(request):
        if (rules.min_devices or 1) <= sum(counts) <= (rules.max_devices or 99):
            found += bottleneck(request, counts, cuts)
    return min(found, default=None)


def bottleneck(request, counts, cuts):
    """The bottleneck of one plan, for a unit; nothing if it does not fit."""
    whole = request.model_copy(update={"batch_size": request.chunks * request.profile.batch_size})
    plan = GroupedSteps(whole, request.profile, request.schedule, counts, cuts)
    if plan.rest or not Enumeration(plan.request, True).obeys_rules(plan.where):
        return []
    again = {stage for stage in range(len(counts)) if plan.recomputes(stage)}
    if any(plan.room(stage, stage in again) is None for stage in range(len(counts))):
        return []
    link, kind = request.cluster.links[0], request.devices[0].type
    worst = 0.0
    for stage, count in enumerate(counts):
        mine = [one for one in request.profile.layers if plan.stage_of[one.name] == stage]
        compute = sum(one.forward_ms[kind] + one.backward_ms[kind] for one in mine)
        compute += sum(one.forward_ms[kind] for one in mine) if stage in again else 0.0
        sent = received = 0.0
        for edge in request.profile.edges:
            source = plan.stage_of[edge.source]
            for reader in {plan.stage_of[name] for name in edge.targets} - {source}:
                there, back = link.transfer_ms(edge.bytes), link.transfer_ms(edge.gradient_bytes)
                sent += there * (stage == source) + back * (stage == reader)
                received += there * (stage == reader) + back * (stage == source)
        size = sum(one.grad_bytes for one in mine)
        busy = link.bidirectional or link
        byte_ms = 1e3 * (count - 1) / count * (2 / busy.bandwidth_bytes_per_s + 3 / ADD_BYTES_PER_S)
        compute = compute / count + size * byte_ms / request.chunks
        parts = compute, sent / count, received / count
        load = sum(parts) if request.transfers == "added" else max(parts)
        worst = max(worst, load)
    return [worst]


def branching_request(seed, **asked):
    """A question with ample memory, whose layers read some layers before them, or none."""
    random, order = Random(seed), ("1f1b", "zero-bubble", "fill-drain")[seed % 3]
    request = drawn_request(seed, devices=(3, 4), schedule=order, constraints=Constraints())
    names = [f"l{index}" for index in range(random.choice([3, 4]))]
    readers = {
        name: tuple(other for other in names[number + 1 :] if random.random() < 0.45)
        for number, name in enumerate(names)
    }

    def with_branches(profile):
        known, size = profile.layers, profile.batch_size * MB
        layers = [
            known[number % len(known)].model_copy(update={"name": name})
            for number, name in enumerate(names)
        ]
        edges = [
            Edge(source=name, targets=targets, bytes=size, gradient_bytes=size)
            for name, targets in readers.items()
            if targets
        ]
        return profile.model_copy(update={"layers": tuple(layers), "edges": tuple(edges)})

    devices = [one.model_copy(update={"memory_bytes": 10**13}) for one in request.devices]
    changed = {
        "replicas": "by-stage",
        "batch_size": (8, 12)[seed % 2],
        "profile": with_branches(request.profile),
        "profiles": tuple(map(with_branches, request.profiles)),
        "cluster": request.cluster.model_copy(update={"devices": tuple(devices)}),
        "constraints": Constraints(contiguous=True),
    }
    return request.model_copy(update=changed | asked)


def two_to_one(body):
    """The body of a request to the service, changed so that its best shape is 2-1.

    Only the last layer has gradients, and they take long to exchange.
    """
    names = ["cuda:0", "cuda:1", "cuda:2"]
    device, link = body["cluster"]["devices"][0], body["cluster"]["links"][0]
    links = [link | {"source": a, "target": b} for a, b in itertools.permutations(names, 2)]
    cluster = {"devices": [device | {"name": name} for name in names], "links": links}
    *light, last = body["profile"]["layers"]
    layers = [*(layer | {"grad_bytes": 0} for layer in light), last | {"grad_bytes": 2**33}]
    asked = {"objective": "step", "chunks": 12, "replicas": "by-stage", "schedule": "1f1b"}
    return {
        **body,
        **asked,
        "profile": body["profile"] | {"layers": layers},
        "cluster": body["cluster"] | cluster,
    }


def in_every_order(request):
    """The question once for each order of its layers in which values run forwards."""
    layers = request.profile.layers
    for order in itertools.permutations(range(len(layers))):
        place = {layers[index].name: number for number, index in enumerate(order)}
        edges = request.profile.edges
        if all(place[edge.source] < place[name] for edge in edges for name in edge.targets):
            profile, *profiles = (
                one.model_copy(update={"layers": tuple(one.layers[index] for index in order)})
                for one in (request.profile, *request.profiles)
            )
            yield request.model_copy(update={"profile": profile, "profiles": tuple(profiles)})
