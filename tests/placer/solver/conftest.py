"""Small random requests, and the best answer to each by trying every assignment.

The enumeration is a third reading of the cost model, apart from costs.py and check.py: by events and sets.
"""

import functools
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import reject
from hypothesis import strategies as st
from pydantic import ValidationError

from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver.problem import Problem

MS = st.sampled_from([0.0, 0.25, 1.0, 1.5, 2.0, 3.1, 7.3])
SIZE = st.sampled_from([0, 1, 2, 3, 5, 8])


@st.composite
def small_requests(draw, objectives=("throughput", "latency", "memory")):
    """A request of 3 to 6 layers on 2 or 3 devices, with any features together."""
    device_count = draw(st.integers(2, 3))
    count = draw(st.integers(3, 6 if device_count == 2 else 5))
    names = [f"l{i}" for i in range(count)]
    training = draw(st.booleans())
    kinds = draw(st.lists(st.sampled_from("ab"), min_size=device_count, max_size=device_count))
    layers = [draw(small_layers(name, training, sorted(set(kinds)))) for name in names]
    edges = draw(small_edges(names, training))
    cluster = draw(small_clusters(kinds))
    devices = [device.name for device in cluster.devices]
    groups = st.lists(st.sampled_from(names), min_size=2, max_size=3).map(tuple)
    banned = st.dictionaries(
        st.sampled_from([*names, "*"]), st.lists(st.sampled_from(devices), max_size=2).map(tuple), max_size=2
    )

    def rarely(strategy, default):
        return draw(strategy) if draw(st.integers(0, 3)) == 0 else default

    numbers = {"max_devices": rarely(st.integers(1, 3), None), "max_layers": rarely(st.integers(2, count), None)}
    numbers["min_devices"] = rarely(st.integers(1, min(device_count, numbers["max_devices"] or device_count)), None)
    asked = {
        "profile": Profile(
            layers=layers, edges=edges, training=training, cluster=cluster, colocated=rarely(st.tuples(groups), ())
        ),
        "objective": draw(st.sampled_from(objectives)),
        "constraints": Constraints(
            contiguous=draw(st.sampled_from([True, True, False, None])),
            pinned=rarely(st.dictionaries(st.sampled_from(names), st.sampled_from(devices), max_size=2), {}),
            forbidden=rarely(banned, {}),
            colocated=rarely(st.tuples(groups), ()),
            **numbers,
        ),
        "chunks": draw(st.sampled_from([1, 2, 3, 7])),
        "schedule": draw(st.sampled_from(["1f1b", "fill-drain", "zero-bubble", "interleaved"])),
        "transfers": draw(st.sampled_from(["added", "overlapped"])),
        "workers": 1,
        "seed": draw(st.integers(0, 3)),
    }
    try:
        return PlacementRequest(**asked)
    except ValidationError:  # pins that contradict each other are bad input, see test_bad_input.py
        reject()


@st.composite
def small_layers(draw, name, training, kinds):
    """A layer with few distinct sizes, so that ties and exact fits are common."""
    sizes = {
        field: draw(SIZE)
        for field in ("param_bytes", "buffer_bytes", "grad_bytes", "optimizer_bytes", "saved_bytes")
        if training or field in ("param_bytes", "buffer_bytes")
    }
    return Layer(
        name=name,
        forward_ms={kind: draw(MS) for kind in kinds},
        backward_ms={kind: draw(MS) for kind in kinds} if training else {},
        forward_workspace_bytes=draw(SIZE),
        backward_workspace_bytes=draw(SIZE) if training else 0,
        **sizes,
    )


@st.composite
def small_edges(draw, names, training):
    """Values in a random graph; some are read by several layers, some layers make two values."""
    edges = []
    for index, name in enumerate(names[:-1]):
        for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2]))):
            far = st.lists(st.sampled_from(names[index + 1 :]), min_size=1, max_size=3, unique=True)
            targets = draw(st.one_of(st.just([names[index + 1]]), far))
            saved_by = draw(st.lists(st.sampled_from([name, *targets]), unique=True)) if training else []
            edges.append(
                Edge(
                    source=name,
                    targets=targets,
                    bytes=draw(SIZE),
                    gradient_bytes=draw(SIZE) if training else 0,
                    saved_by=saved_by,
                )
            )
    return edges


@st.composite
def small_clusters(draw, kinds):
    """Devices whose limits are ample or tight; links alike, unlike, or partly missing."""
    limit = draw(st.sampled_from([15, 25, 40, 80, 10_000]))
    devices = [
        Device(name=f"d{i}", type=kind, memory_bytes=draw(st.sampled_from([limit, limit, limit + 7])), reserve_bytes=2)
        for i, kind in enumerate(kinds)
    ]
    same_links = draw(st.booleans())
    missing = draw(st.integers(0, 5)) == 0
    speed = draw(st.sampled_from([1e3, 2.5e3, 1e4]))
    links = []
    for source, target in itertools.permutations(devices, 2):
        if missing and draw(st.booleans()):
            continue
        if not same_links:
            speed = draw(st.sampled_from([1e3, 2.5e3, 1e4]))
        latency = 1e-4 if same_links else draw(st.sampled_from([0.0, 1e-4, 1e-3]))
        links.append(Link(source=source.name, target=target.name, bandwidth_bytes_per_s=speed, latency_s=latency))
    return Cluster(devices=devices, links=links)


class Enumeration:
    """Every assignment of a small request, and what each costs."""

    def __init__(self, request, contiguous):
        self.request, self.contiguous = request, contiguous
        self.layers = request.profile.layers
        self.devices = request.devices
        self.training = request.is_training
        self.link = {(link.source, link.target): link for link in request.placed_on.links}

    def best(self):
        """The smallest objective over all placements that meet every requirement; None if none does."""
        names = [layer.name for layer in self.layers]
        values = [
            self.value(dict(zip(names, choice, strict=True)))
            for choice in itertools.product([device.name for device in self.devices], repeat=len(names))
        ]
        return min((value for value in values if value is not None), default=None)

    def value(self, where):
        """The objective of one assignment; None if it breaks a requirement."""
        if not self.obeys_rules(where) or not self.can_pass(where):
            return None
        uses = [use for use in self.uses(where) if self.fits(use)]
        if not uses:
            return None
        if self.request.objective == "memory":
            return min(max(use.values()) for use in uses)
        return self.latency(where) if self.request.objective == "latency" else self.bottleneck(where)

    def fits(self, use):
        return all(use[device.name] <= device.memory_bytes - device.reserve_bytes for device in self.devices)

    def obeys_rules(self, where):
        rules = self.request.constraints
        banned = {
            (layer, device)
            for key, devices in rules.forbidden.items()
            for device in devices
            for layer in (where if key == "*" else [key])
        }
        return (
            rules.pinned.items() <= where.items()
            and not banned & set(where.items())
            and all(len({where[x] for x in g}) == 1 for g in (*rules.colocated, *self.request.profile.colocated))
            and (rules.min_devices or 0) <= len(set(where.values())) <= (rules.max_devices or float("inf"))
            and max(list(where.values()).count(d) for d in where.values()) <= (rules.max_layers or float("inf"))
        )

    def sends(self, where):
        """(edge, from, to) for every sending of a value."""
        return {
            (number, where[edge.source], where[target])
            for number, edge in enumerate(self.request.profile.edges)
            for target in edge.targets
            if where[edge.source] != where[target]
        }

    def can_pass(self, where):
        edges = self.request.profile.edges
        return all(
            (a, b) in self.link and ((b, a) in self.link or not self.training or edges[n].gradient_bytes == 0)
            for n, a, b in self.sends(where)
        )

    def bottleneck(self, where):
        edges = self.request.profile.edges
        busy = {d.name: [0.0, 0.0, 0.0] for d in self.devices}
        kind = {d.name: d.type for d in self.devices}
        for layer in self.layers:
            busy[where[layer.name]][0] += layer.forward_ms[kind[where[layer.name]]]
            if self.training:
                busy[where[layer.name]][0] += layer.backward_ms[kind[where[layer.name]]]
        for number, a, b in self.sends(where):
            hops = [(a, b, edges[number].bytes)]
            if self.training and edges[number].gradient_bytes:
                hops.append((b, a, edges[number].gradient_bytes))
            for start, end, size in hops:
                link = self.link[start, end]
                time = 1000 * link.latency_s + 1000 * size / link.bandwidth_bytes_per_s
                busy[start][1] += time
                busy[end][2] += time
        return max(sum(parts) if self.request.transfers == "added" else max(parts) for parts in busy.values())

    def latency(self, where):
        """Play the layers one after another."""
        edges = self.request.profile.edges
        kind = {d.name: d.type for d in self.devices}

        def play(names, time, arrivals):
            ends, clock = {}, dict.fromkeys(kind, 0.0)
            for name in names:
                here = where[name]
                ready = max([clock[here], *(ends[x] + delay for x, delay in arrivals(name))])
                ends[name] = clock[here] = ready + time(name, kind[here])
            return max(ends.values())

        def hop(a, b, size):
            return 0.0 if a == b else 1000 * (self.link[a, b].latency_s + size / self.link[a, b].bandwidth_bytes_per_s)

        by_name = {layer.name: layer for layer in self.layers}
        names = list(by_name)
        total = play(
            names,
            lambda name, k: by_name[name].forward_ms[k],
            lambda name: [(e.source, hop(where[e.source], where[name], e.bytes)) for e in edges if name in e.targets],
        )
        if self.training:
            total += play(
                names[::-1],
                lambda name, k: by_name[name].backward_ms[k],
                lambda name: [
                    (t, hop(where[t], where[name], e.gradient_bytes))
                    for e in edges
                    if e.source == name and e.gradient_bytes
                    for t in e.targets
                ],
            )
        return total

    def uses(self, where):
        """Bytes by device, once for every order of stages in which values run forwards."""
        used = sorted(set(where.values()))
        if not self.contiguous:
            yield {d.name: self.use(where, d.name, self.request.chunks) for d in self.devices}
            return
        for order in itertools.permutations(used):
            place = {device: p for p, device in enumerate(order)}
            if all(place[a] < place[b] for _, a, b in self.sends(where)):
                use = {d.name: 0 for d in self.devices}
                for device, p in place.items():
                    flight = self.request.chunks
                    if self.request.schedule in ("1f1b", "interleaved"):
                        flight = min(flight, len(order) - p)
                    if self.request.schedule == "zero-bubble":
                        flight = min(flight, 2 * len(order) - 1)
                    use[device] = self.use(where, device, flight)
                yield use

    def use(self, where, device, flight):
        mine = [layer for layer in self.layers if where[layer.name] == device]
        if self.training:
            need, kept = self.need(frozenset(layer.name for layer in mine))
            return need + (flight - 1) * kept
        held = sum(layer.param_bytes + layer.buffer_bytes for layer in mine)
        worst = 0
        for step, layer in enumerate(self.layers):
            later = {x.name for x in self.layers[step:] if where[x.name] == device}
            earlier = {x.name for x in self.layers[: step + 1]}
            now = sum(
                e.bytes
                for e in self.request.profile.edges
                if e.source in earlier and (later & set(e.targets) or (e.source == layer.name and layer.name in later))
            )
            worst = max(worst, now + (layer.forward_workspace_bytes if layer.name in later else 0))
        return held + worst

    @functools.cache  # noqa: B019 - an enumeration does not outlive its test
    def need(self, names):
        """What a device of these layers needs in training with one micro-batch, and what each further one adds."""
        mine = [layer for layer in self.layers if layer.name in names]
        state = sum(x.param_bytes + x.buffer_bytes + x.grad_bytes + x.optimizer_bytes for x in mine)
        kept = sum(layer.saved_bytes for layer in mine)
        kept += sum(e.bytes for e in self.request.profile.edges if names & set(e.saved_by))
        steps = [self.step(names, layer, back) for layer in mine for back in (False, True)]
        return state + max(steps, default=0), kept

    def step(self, mine, layer, back):
        """What one micro-batch takes of the device of these layers while one of them runs, in training."""
        order = [x.name for x in self.layers]
        now = order.index(layer.name)
        done, to_come = set(order[: now + 1]), set(order[now + 1 :])
        total = layer.backward_workspace_bytes if back else layer.forward_workspace_bytes
        total += sum(x.saved_bytes for x in self.layers if x.name in mine & done)
        for e in self.request.profile.edges:
            readers = set(e.targets)
            kept = set(e.saved_by) & mine & done
            total += e.bytes if kept else 0
            if e.source in done - {layer.name}:
                if not back:
                    total += e.bytes if readers & mine & to_come and not kept else 0
                elif e.source in mine:
                    total += e.gradient_bytes if readers & to_come else 0
                else:
                    total += e.gradient_bytes if readers & mine & to_come and readers & mine & done else 0
        return total


@pytest.fixture(scope="session")
def brute_force():
    """``brute_force(request, contiguous)``: the smallest objective of all assignments, or None."""
    return lambda request, contiguous: Enumeration(request, contiguous).best()


@pytest.fixture(scope="session")
def enumeration():
    """The class of all assignments of a request."""
    return Enumeration


@pytest.fixture(scope="session")
def strategies():
    """Hypothesis strategies for small requests."""
    return SimpleNamespace(requests=small_requests)


@pytest.fixture(scope="session")
def training_problem():
    """``training_problem(random)``: a problem whose values are read by several layers, some of which keep them."""
    return make_training_problem


def make_training_problem(random, objective="memory"):
    """4 to 7 layers on 2 or 3 alike devices, drawn in a fraction of a millisecond."""
    sizes = (0, 0, 1, 2, 3, 5, 8)
    names = [f"l{i}" for i in range(random.randint(4, 7))]
    layers = [
        Layer(
            name=name,
            forward_ms={"t": 1},
            backward_ms={"t": 1},
            param_bytes=random.choice(sizes),
            saved_bytes=random.choice(sizes),
            forward_workspace_bytes=random.choice(sizes),
            backward_workspace_bytes=random.choice(sizes),
        )
        for name in names
    ]
    edges = []
    for index, source in enumerate(names[:-1]):
        later = names[index + 1 :]
        targets = random.sample(later, random.randint(1, min(3, len(later))))
        saved_by = [name for name in (source, *targets) if random.random() < 0.3]
        size, gradient = random.choice(sizes), random.choice(sizes)
        edges.append(Edge(source=source, targets=targets, bytes=size, gradient_bytes=gradient, saved_by=saved_by))
    devices = [Device(name=f"d{i}", type="t", memory_bytes=10_000) for i in range(random.randint(2, 3))]
    links = [
        Link(source=a.name, target=b.name, bandwidth_bytes_per_s=1e3) for a, b in itertools.permutations(devices, 2)
    ]
    profile = Profile(layers=layers, edges=edges, training=True, cluster=Cluster(devices=devices, links=links))
    return Problem.from_request(
        PlacementRequest(
            profile=profile,
            objective=objective,
            chunks=random.choice((1, 3)),
            schedule="fill-drain",
            constraints=Constraints(contiguous=objective == "throughput"),
        )
    )


@pytest.fixture
def chain():
    """``chain(times, devices=2, ...)``: a request for layers in a row, one value between each two."""
    return make_chain


def make_chain(times_ms, devices=2, memory_bytes=1_000, param_bytes=0, value_bytes=0, **asked):
    """Layers l0, l1, ... on alike devices d0, d1, ... with links of 1 byte per ms."""
    count = len(times_ms)
    params = param_bytes if isinstance(param_bytes, (list, tuple)) else [param_bytes] * count
    layers = [
        Layer(name=f"l{i}", forward_ms={"t": time}, param_bytes=size)
        for i, (time, size) in enumerate(zip(times_ms, params, strict=True))
    ]
    edges = [Edge(source=f"l{i}", targets=[f"l{i + 1}"], bytes=value_bytes) for i in range(count - 1)]
    names = [f"d{i}" for i in range(devices)]
    cluster = Cluster(
        devices=[Device(name=name, type="t", memory_bytes=memory_bytes) for name in names],
        links=[Link(source=a, target=b, bandwidth_bytes_per_s=1e3) for a, b in itertools.permutations(names, 2)],
    )
    return PlacementRequest(profile=Profile(layers=layers, edges=edges, cluster=cluster), **asked)
