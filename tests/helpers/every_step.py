"""Small questions for objective ``step``, and every answer that there could be, each played by a
clock."""

import itertools
from collections import Counter
from dataclasses import replace

from enumeration import Enumeration, memories
from hypothesis import strategies as st
from step_clock import StepClock

from placer.schedule import Pipeline, Transfer, plan, roomy_plans, steady_state_ms
from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile

MS = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.25])
SIZE = st.sampled_from([0, 1, 2, 3, 5])


@st.composite
def profiles(draw, training, row, kinds, count, size):
    """A few layers measured at one micro-batch size; in a row each reads from the one before, and
    gradients return."""
    names = [f"l{i}" for i in range(count)]
    times = st.fixed_dictionaries({kind: MS for kind in kinds})
    layers = [
        Layer(
            name=name,
            forward_ms=draw(times),
            backward_ms=draw(times) if training else {},
            weight_grad_ms=draw(times) if training and draw(st.booleans()) else {},
            optimizer_ms=draw(times) if training and draw(st.booleans()) else {},
            param_bytes=draw(SIZE),
            grad_bytes=draw(SIZE) if training else 0,
            saved_bytes=draw(SIZE) if training else 0,
            backward_workspace_bytes=draw(SIZE) if training else 0,
            recorded_workspace_bytes=draw(SIZE) if training else 0,
            deferred_bytes=draw(SIZE) if training else 0,
            input_grad_workspace_bytes=draw(SIZE) if training else 0,
            weight_grad_workspace_bytes=draw(SIZE) if training else 0,
        )
        for name in names
    ]
    edges = []
    for source, name in enumerate(names[:-1]):
        targets = draw(st.sets(st.sampled_from(names[source + 1 :]))) | (
            {names[source + 1]} if row else set()
        )
        size_of_gradient = draw(SIZE) + row if training else 0
        kept = [name] if training and draw(st.booleans()) else []
        if targets:
            edges.append(
                Edge(
                    source=name,
                    targets=sorted(targets),
                    bytes=draw(SIZE),
                    gradient_bytes=size_of_gradient,
                    saved_by=kept,
                )
            )
    return Profile(
        layers=layers,
        edges=edges,
        training=training,
        batch_size=size,
        optimizer_workspace_ratio=draw(st.sampled_from([0, 1, 2.5])),
    )


@st.composite
def requests(draw, row=False, contiguous=None):
    """2 to 4 layers on 2 or 3 devices, a batch of up to 4 samples in micro-batches of 1 and 2."""
    training = draw(st.booleans()) or draw(st.booleans())
    kinds = draw(st.lists(st.sampled_from("ab"), min_size=2, max_size=3))
    count = draw(st.integers(2, 4 if len(kinds) == 2 else 3))
    sizes = draw(st.sampled_from([(1,), (2,), (2, 1), (1, 2)]))
    made = [draw(profiles(training, row, sorted(set(kinds)), count, size)) for size in sizes]
    limit = draw(st.sampled_from([12, 25, 10_000]))
    devices = [Device(name=f"d{i}", type=kind, memory_bytes=limit) for i, kind in enumerate(kinds)]
    links = [
        Link(source=a.name, target=b.name, bandwidth_bytes_per_s=draw(st.sampled_from([1e3, 4e3])))
        for a, b in itertools.permutations(devices, 2)
    ]
    return PlacementRequest(
        profile=made[0],
        profiles=made[1:],
        cluster=Cluster(devices=devices, links=links),
        objective="step",
        schedule=draw(
            st.sampled_from(["auto", "auto", "1f1b", "zero-bubble", "fill-drain", "interleaved"])
        ),
        step_kind=draw(st.sampled_from(["isolated", "steady-state"])),
        batch_size=draw(st.sampled_from([2, 4])),
        constraints=Constraints(contiguous=contiguous),
        workers=1,
    )


class Steps:
    """Every answer that there could be."""

    def __init__(self, request):
        self.request = request

    def all(self):
        """The step of each assignment, for each way to run it, that meets every requirement."""
        for every, where in self.maps():
            if every.obeys_rules(where) and every.can_pass(where):
                yield from self.steps(every, where)

    def maps(self):
        """Each way to run it, as an enumeration, with each assignment."""
        for asked, contiguous in self.ways():
            every = Enumeration(asked, contiguous)
            yield from ((every, where) for where in every.maps())

    def ways(self):
        asked, training = self.request.schedule, self.request.is_training
        every = ["1f1b", "zero-bubble", "fill-drain"] if training else ["fill-drain"]
        kinds = [(order, True) for order in (every if asked == "auto" else [asked])]
        if (
            training
            and asked in ("auto", "interleaved")
            and self.request.constraints.contiguous is not True
        ):
            if all(self.rule(device.name) != "always" for device in self.request.devices):
                kinds.append(("interleaved", False))
        for profile in (self.request.profile, *self.request.profiles):
            chunks, rest = divmod(self.request.batch_size, profile.batch_size)
            for order, contiguous in kinds if not rest else []:
                chosen = {
                    "profile": profile,
                    "chunks": chunks,
                    "schedule": order,
                    "cluster": self.request.placed_on,
                }
                yield self.request.model_copy(update=chosen), contiguous

    def steps(self, every, where):
        """The step for each order of the stages in which memory suffices."""
        for again in self.recomputed(every, where):
            for pipeline, stage_of, found in self.plans(every, where, again):
                asked = every, where, stage_of, found, again
                if self.fits(*asked) and self.needed(*asked):
                    yield self.step(pipeline, found)

    def step(self, pipeline, found):
        """What it takes, alone with the longest optimizer at its end, or in a row."""
        if self.request.step_kind == "steady-state":
            return steady_state_ms(pipeline, found)
        optimizer = Counter()
        for place, time in zip(pipeline.places, pipeline.optimizer_ms, strict=True):
            optimizer[place] += time
        return StepClock(replace(pipeline, optimizer_ms=()), found).play() + max(optimizer.values())

    def rule(self, device):
        """Whether a device recomputes: never, always, or as it likes."""
        asked = self.request.constraints.recompute
        return asked if isinstance(asked, str) else asked.get(device) or asked.get("*") or "never"

    def recomputed(self, every, where):
        """Every set of devices that may recompute together; none where micro-batches are counted by
        segment."""
        used = sorted(set(where.values()))
        free = [
            device
            for device in used
            if self.rule(device) == "auto" and every.training and every.contiguous
        ]
        fixed = [device for device in used if self.rule(device) == "always" and every.training]
        for size in range(len(free) + 1):
            for chosen in itertools.combinations(free, size):
                yield {*fixed, *chosen}

    def needed(self, every, where, stage_of, found, again):
        """Whether those that recompute and need not are over their limits otherwise, and it helps
        them."""
        # as few micro-batches in flight as there may be
        if every.apart and every.training:
            stages = len(found.places)
            found = replace(
                found, in_flight=tuple(min(every.request.chunks, stages - p) for p in range(stages))
            )
        uses = [self.uses(every, where, stage_of, found, some) for some in ((), again)]
        limits = {
            device.name: device.memory_bytes - device.reserve_bytes for device in every.devices
        }
        free = [device for device in again if self.rule(device) == "auto"]
        return all(uses[0][device] > max(limits[device], uses[1][device]) for device in free)

    def plans(self, every, where, again=frozenset()):
        """By order of the stages, one if they are a row, or segments, each order of passes."""
        used = sorted(set(where.values()))
        orders = itertools.permutations(used) if every.contiguous else [None]
        for order in orders:
            place = {device: stage for stage, device in enumerate(order or ())}
            if order and not all(place[a] < place[b] for _, a, b in every.sends(where)):
                continue
            if order:
                stages, stage_of = (
                    list(order),
                    {layer: place[device] for layer, device in where.items()},
                )
            else:
                runs = [
                    (device, list(names))
                    for device, names in itertools.groupby(where, key=where.get)
                ]
                stages = [device for device, _ in runs]
                stage_of = {name: stage for stage, (_, names) in enumerate(runs) for name in names}
            pipeline = self.pipeline(every, where, stages, stage_of, again)
            times = {
                name: getattr(pipeline, name)
                for name in ("forward_ms", "backward_ms", "weight_grad_ms")
            }
            times["transfers"] = pipeline.transfers
            asked, chunks = every.request.schedule, every.request.chunks
            if asked == "interleaved" and len(set(pipeline.places)) < len(pipeline.places):
                plans = roomy_plans(pipeline, chunks)
            else:
                held = (
                    [*every.rooms(where, order, again)]
                    if asked == "zero-bubble" and every.training
                    else None
                )
                plans = [
                    plan(
                        asked, pipeline.places, chunks, training=every.training, room=held, **times
                    )
                ]
            yield from ((pipeline, stage_of, found) for found in plans)

    def pipeline(self, every, where, stages, stage_of, again):
        kind = {device.name: device.type for device in every.devices}
        totals = {
            name: [0.0] * len(stages) for name in ("forward", "backward", "weights", "optimizer")
        }
        for layer in every.layers:
            here, back = (
                kind[where[layer.name]],
                layer.backward_ms.get(kind[where[layer.name]], 0.0),
            )
            totals["forward"][stage_of[layer.name]] += layer.forward_ms[here]
            totals["backward"][stage_of[layer.name]] += back
            totals["backward"][stage_of[layer.name]] += (
                layer.forward_ms[here] if where[layer.name] in again else 0.0
            )
            totals["weights"][stage_of[layer.name]] += min(
                back, layer.weight_grad_ms.get(here, back / 2 if layer.grad_bytes else 0)
            )
            totals["optimizer"][stage_of[layer.name]] += (
                layer.optimizer_ms.get(here, 0.0) if every.training else 0.0
            )
        there, back = Counter(), Counter()
        for number, a, b in every.sends(where):
            edge = every.request.profile.edges[number]
            first = min(stage_of[name] for name in edge.targets if where[name] == b)
            there[stage_of[edge.source], first] += every.hop(a, b, edge.bytes)
            if every.training and edge.gradient_bytes:
                back[stage_of[edge.source], first] += every.hop(b, a, edge.gradient_bytes)
        transfers = tuple(
            Transfer(*pair, time, back.get(pair)) for pair, time in sorted(there.items())
        )
        places = tuple([device.name for device in every.devices].index(name) for name in stages)
        forward, backward, weights, optimizer = (tuple(total) for total in totals.values())
        return Pipeline(places, forward, backward, weights, transfers, optimizer)

    @classmethod
    def fits(cls, every, where, stage_of, found, again=frozenset()):
        uses = cls.uses(every, where, stage_of, found, again)
        return all(
            uses[device.name] <= device.memory_bytes - device.reserve_bytes
            for device in every.devices
        )

    @staticmethod
    def recorded_use(every, mine, stage_of, found):
        """Bytes of a device whose segments each have recorded passes."""
        use = every.state(mine) + every.optimizer_step(mine)
        for stage in {stage_of[layer.name] for layer in mine}:
            names = frozenset(layer.name for layer in mine if stage_of[layer.name] == stage)
            flight = found.in_flight[stage]
            use += flight * (every.alone(names) + (every.landing(names) if flight > 1 else 0))
            use += every.backward_pass(names)
        return use

    @staticmethod
    def uses(every, where, stage_of, found, again=frozenset()):
        """Bytes by device, with as many micro-batches in flight as the plan has."""
        uses = {}
        for device in every.devices:
            mine = [layer for layer in every.layers if where[layer.name] == device.name]
            if device.name in again:
                flight = found.in_flight[stage_of[mine[0].name]]
                uses[device.name] = every.recomputed_use(where, device.name, flight)
                continue
            recorded = every.training and (every.apart or every.contiguous)
            stage = stage_of[mine[0].name] if mine and recorded else None
            flight = 1 if stage is None else found.in_flight[stage]
            backwards = None
            if stage is not None and every.apart:
                fewest = min(every.request.chunks, len(found.places) - stage)
                backwards = memories(flight, 1 + flight - fewest)
            use = every.use(where, device.name, flight, backwards)
            adds_up = every.training and not recorded
            for layer in mine if adds_up else ():
                use += (found.in_flight[stage_of[layer.name]] - 1) * layer.saved_bytes
            for edge in every.request.profile.edges if adds_up else ():
                held = [
                    found.in_flight[stage_of[name]]
                    for name in edge.saved_by
                    if where[name] == device.name
                ]
                use += (max(held) - 1) * edge.bytes if held else 0
            if adds_up and mine:
                use = max(use, Steps.recorded_use(every, mine, stage_of, found))
            uses[device.name] = use
        return uses
