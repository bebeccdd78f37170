"""The best answer to a small request, by trying every assignment.

A third reading of the cost model, apart from costs.py and check.py: by events and sets.
"""

from __future__ import annotations

import functools
import itertools


def brute_force(request, contiguous):
    """The smallest objective of all assignments, or None."""
    return Enumeration(request, contiguous).best()


@functools.cache
def memories(room, apart):
    """How few memories do for so many micro-batches in turn, round and round.

    Of two that have the same memory one comes so many after the other, or more.
    """

    def follows(dealt):
        return all(
            dealt[i] != dealt[(i + step) % room]
            for i in range(room)
            for step in range(1, min(apart, room))
        )

    for count in range(1, room + 1):
        if any(map(follows, itertools.product(range(count), repeat=room))):
            return count
    return room


class Enumeration:
    """Every assignment of a small request, and what each costs."""

    def __init__(self, request, contiguous):
        self.request, self.contiguous = request, contiguous
        self.layers = request.profile.layers
        self.devices = request.devices
        self.training = request.is_training
        self.link = {(link.source, link.target): link for link in request.placed_on.links}

    def best(self):
        """The smallest objective over all placements that meet every requirement; None if none
        does."""
        values = [self.value(where) for where in self.maps()]
        return min((value for value in values if value is not None), default=None)

    def maps(self):
        """Every assignment, as device names by layer name."""
        names = [layer.name for layer in self.layers]
        for choice in itertools.product(
            [device.name for device in self.devices], repeat=len(names)
        ):
            yield dict(zip(names, choice, strict=True))

    def value(self, where):
        """The objective of one assignment; None if it breaks a requirement."""
        if not self.obeys_rules(where) or not self.can_pass(where):
            return None
        uses = [use for use in self.uses(where) if self.fits(use)]
        if not uses:
            return None
        if self.request.objective == "memory":
            return min(max(use.values()) for use in uses)
        return (
            self.latency(where) if self.request.objective == "latency" else self.bottleneck(where)
        )

    def fits(self, use):
        return all(
            use[device.name] <= device.memory_bytes - device.reserve_bytes
            for device in self.devices
        )

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
            and all(
                len({where[x] for x in g}) == 1
                for g in (*rules.colocated, *self.request.profile.colocated)
            )
            and (rules.min_devices or 0)
            <= len(set(where.values()))
            <= (rules.max_devices or float("inf"))
            and max(list(where.values()).count(d) for d in where.values())
            <= (rules.max_layers or float("inf"))
        )

    def meets(self, asked, where, use):
        """Whether an assignment, which uses so many bytes by device, meets one of the solver's
        requirements."""
        rules, device = self.request.constraints, self.devices[asked.device]
        on = [where[self.layers[layer].name] for layer in asked.layers]
        counts = [list(where.values()).count(name) for name in set(where.values())]
        return {
            "pin": lambda: on == [device.name],
            "ban": lambda: device.name not in on,
            "group": lambda: len(set(on)) == 1,
            "contiguous": lambda: self.contiguous,
            "most": lambda: len(counts) <= rules.max_devices,
            "least": lambda: len(counts) >= rules.min_devices,
            "layers": lambda: max(counts) <= rules.max_layers,
            "links": lambda: self.can_pass(where),
            "limit": lambda: use[device.name] <= device.memory_bytes - device.reserve_bytes,
        }[asked.kind]()

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
            (a, b) in self.link
            and ((b, a) in self.link or not self.training or edges[n].gradient_bytes == 0)
            for n, a, b in self.sends(where)
        )

    def hop(self, a, b, size):
        """How long so many bytes are on their way, in milliseconds."""
        return (
            0.0
            if a == b
            else 1000 * (self.link[a, b].latency_s + size / self.link[a, b].bandwidth_bytes_per_s)
        )

    def compute(self, where):
        """How long each used device computes for a micro-batch, in milliseconds."""
        kind = {device.name: device.type for device in self.devices}
        busy = dict.fromkeys(where.values(), 0.0)
        for layer in self.layers:
            device = where[layer.name]
            busy[device] += layer.forward_ms[kind[device]]
            busy[device] += layer.backward_ms[kind[device]] if self.training else 0.0
        return busy

    def rank(self, where):
        """What breaks ties: the time of all transfers at both ends, then the difference of compute
        times."""
        transfer = 0.0
        for number, a, b in self.sends(where):
            edge = self.request.profile.edges[number]
            transfer += 2 * self.hop(a, b, edge.bytes)
            if self.training and edge.gradient_bytes:
                transfer += 2 * self.hop(b, a, edge.gradient_bytes)
        busy = self.compute(where).values()
        return transfer, max(busy) - min(busy)

    def bottleneck(self, where):
        edges = self.request.profile.edges
        busy = {device: [time, 0.0, 0.0] for device, time in self.compute(where).items()}
        for number, a, b in self.sends(where):
            hops = [(a, b, edges[number].bytes)]
            if self.training and edges[number].gradient_bytes:
                hops.append((b, a, edges[number].gradient_bytes))
            for start, end, size in hops:
                time = self.hop(start, end, size)
                busy[start][1] += time
                busy[end][2] += time
        return max(
            sum(parts) if self.request.transfers == "added" else max(parts)
            for parts in busy.values()
        )

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

        by_name = {layer.name: layer for layer in self.layers}
        names = list(by_name)
        total = play(
            names,
            lambda name, k: by_name[name].forward_ms[k],
            lambda name: [
                (e.source, self.hop(where[e.source], where[name], e.bytes))
                for e in edges
                if name in e.targets
            ],
        )
        if self.training:
            total += play(
                names[::-1],
                lambda name, k: by_name[name].backward_ms[k],
                lambda name: [
                    (t, self.hop(where[t], where[name], e.gradient_bytes))
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
                    if self.request.schedule != "fill-drain":
                        flight = min(flight, len(order) - p)
                    use[device] = self.use(where, device, flight)
                yield use

    def rooms(self, where, order, again=()):
        """By stage, the most micro-batches in flight for which its device has memory; the fewest
        where none are.

        Those of ``again`` recompute.
        """
        for p, device in enumerate(order):
            fewest = min(self.request.chunks, len(order) - p)
            most = min(self.request.chunks, 2 * len(order)) if len(order) > 1 else 1

            def use(room, device=device, fewest=fewest):
                if device in again:
                    return self.recomputed_use(where, device, room)
                return self.use(where, device, room, memories(room, 1 + room - fewest))

            fitting = [room for room in range(fewest, most + 1) if use(room) <= self.limit(device)]
            yield max(fitting, default=fewest)

    def recomputed_use(self, where, device, flight):
        """What a device takes that keeps of further micro-batches only what comes in."""
        entering = {number for number, _, target in self.sends(where) if target == device}
        size = sum(self.request.profile.edges[number].bytes for number in entering)
        alone, _ = self.need(frozenset(name for name, place in where.items() if place == device))
        return alone + (flight - 1) * size

    def limit(self, device):
        """What a device may use, by its name."""
        found = next(one for one in self.devices if one.name == device)
        return found.memory_bytes - found.reserve_bytes

    def use(self, where, device, flight, backwards=None):
        if backwards is None:
            backwards = flight if self.apart and not self.contiguous else 1
        mine = [layer for layer in self.layers if where[layer.name] == device]
        if self.training:
            names = frozenset(layer.name for layer in mine)
            if self.apart or self.contiguous:
                alone, beside = self.alone(names), self.landing(names) if flight > backwards else 0
                back, shared = backwards * self.backward_pass(names), self.shared(mine)
                return self.state(mine) + flight * (alone + beside) + back + shared
            need, kept = self.need(names)
            return need + (flight - 1) * kept
        held = sum(layer.param_bytes + layer.buffer_bytes for layer in mine)
        held += sum(tie.param_bytes or tie.gradient_bytes for tie in self.copied(mine))
        worst = 0
        for step, layer in enumerate(self.layers):
            to_come = {x.name for x in self.layers[step:]}
            later = {name for name in to_come if where[name] == device}
            earlier = {x.name for x in self.layers[: step + 1]}
            now = sum(
                e.bytes
                for e in self.request.profile.edges
                if e.source in earlier
                and set(e.targets) & (to_come if where[e.source] == device else later)
            )
            worst = max(worst, now + (layer.forward_workspace_bytes if layer.name in later else 0))
        return held + worst

    def state(self, mine):
        """What is there all the time in training."""
        own = sum(x.param_bytes + x.buffer_bytes + x.grad_bytes + x.optimizer_bytes for x in mine)
        return own + sum(
            (tie.param_bytes or tie.gradient_bytes) + tie.gradient_bytes
            for tie in self.copied(mine)
        )

    def copied(self, mine):
        """The parameters of which a device of these layers has a copy."""
        names = {layer.name for layer in mine}
        ties = [tie for tie in self.request.profile.tied if tie.split]
        return [
            tie
            for tie in ties
            if names & set(tie.layers) and min(tie.layers, key=self.order.index) not in names
        ]

    def shared(self, mine):
        """What weight passes work in where they run apart, one after another, and then the
        optimizer."""
        apart = max((x.weight_grad_workspace_bytes for x in mine), default=0) if self.apart else 0
        return apart + self.optimizer_step(mine)

    def optimizer_step(self, mine):
        """What the optimizer makes and frees again."""
        return sum(int(self.request.profile.optimizer_workspace_ratio * x.grad_bytes) for x in mine)

    @functools.cache  # noqa: B019 - an enumeration does not outlive its test
    def alone(self, names):
        """What one micro-batch has on a device of these layers for its forward pass, and for what
        crosses."""
        mine = [layer for layer in self.layers if layer.name in names]
        edges = self.request.profile.edges
        own = [e for e in edges if e.source in names]
        gone = [e for e in own if set(e.targets) - names]
        sent = [e for e in gone if not names & set(e.saved_by)]
        ahead = sum(x.saved_bytes for x in mine)  # when the pass is over
        ahead += sum(e.bytes for e in own if e in sent or names & set(e.saved_by))
        for layer in mine:
            now = self.order.index(layer.name)
            done, to_come = set(self.order[:now]), set(self.order[now + 1 :])
            stays = sum(
                e.bytes for e in sent if e.source in done and not set(e.targets) & names & to_come
            )
            ahead = max(ahead, self.step(names, layer, False, own) + stays)
        come = sum(e.bytes for e in edges if e not in own and names & set(e.targets))
        return ahead + come + sum(e.gradient_bytes for e in gone if e not in self.waiting(names))

    def waiting(self, names):
        """What a device of these layers sends whose gradient waits for a weight half where it
        comes."""
        gone = [
            e for e in self.request.profile.edges if e.source in names and set(e.targets) - names
        ]
        return [e for e in gone if self.apart and e.deferred and len(set(e.targets)) == 1]

    def landing(self, names):
        """Gradients that a device of these layers sends for one micro-batch, and those that wait
        where they come."""
        sent = [
            e
            for e in self.request.profile.edges
            if e.source not in names and names & set(e.targets)
        ]
        return sum(e.gradient_bytes for e in (*sent, *self.waiting(names)))

    @functools.cache  # noqa: B019 - an enumeration does not outlive its test
    def backward_pass(self, names):
        """What a backward pass works in on a device of these layers, or its input half, where
        weights are apart."""
        mine = [layer for layer in self.layers if layer.name in names]
        back = sum(layer.deferred_bytes for layer in mine) if self.apart else 0
        for place, layer in enumerate(mine):
            now = self.order.index(layer.name)
            held = sum(later.deferred_bytes for later in mine[place + 1 :]) if self.apart else 0
            for e in self.request.profile.edges:
                there = [self.order.index(name) for name in e.targets if name in names]
                if there and self.order.index(e.source) < now < max(there):
                    held += e.gradient_bytes
            works_in = layer.backward_workspace_bytes
            told_apart = (
                layer.input_grad_workspace_bytes if self.apart else layer.recorded_workspace_bytes
            )
            if told_apart:
                works_in = told_apart
            back = max(back, held + works_in)
        return back

    def rest(self, e, mine, now):
        """What is held at a step backwards of the storage that the gradient of the last reader is a
        slice of."""
        *_, before, last = sorted(e.targets, key=self.order.index)
        until = e.retained_until or last
        waits = self.order.index(before) <= now < self.order.index(until)
        return (
            e.retained_bytes
            if waits and last in mine and ({*e.targets, e.source} - {last}) & mine
            else 0
        )

    @functools.cached_property
    def order(self):
        """The layers' names as they run."""
        return [layer.name for layer in self.layers]

    @property
    def apart(self):
        """Whether weight passes run apart."""
        return self.request.schedule == "zero-bubble"

    @functools.cache  # noqa: B019 - an enumeration does not outlive its test
    def need(self, names):
        """What a device of these layers needs in training with one micro-batch, and what each
        further one adds."""
        mine = [layer for layer in self.layers if layer.name in names]
        kept = sum(layer.saved_bytes for layer in mine)
        kept += sum(e.bytes for e in self.request.profile.edges if names & set(e.saved_by))
        steps = [self.step(names, layer, back) for layer in mine for back in (False, True)]
        return self.state(mine) + max([*steps, self.optimizer_step(mine)], default=0), kept

    def step(self, mine, layer, back, edges=None):
        """What one micro-batch takes of the device of these layers while one of them runs, in
        training."""
        order = [x.name for x in self.layers]
        now = order.index(layer.name)
        done, to_come = set(order[: now + 1]), set(order[now + 1 :])
        total = layer.backward_workspace_bytes if back else layer.forward_workspace_bytes
        total += sum(x.saved_bytes for x in self.layers if x.name in mine & done)
        for e in self.request.profile.edges if edges is None else edges:
            readers = set(e.targets)
            kept = set(e.saved_by) & mine & done
            total += e.bytes if kept else 0
            if e.source in done - {layer.name}:
                if not back:
                    total += e.bytes if readers & mine & to_come and not kept else 0
                elif e.source in mine:
                    total += e.gradient_bytes if readers & to_come else 0
                else:
                    total += (
                        e.gradient_bytes
                        if readers & mine & to_come and readers & mine & done
                        else 0
                    )
                if back and e.retained_bytes:
                    total += self.rest(e, mine, now)
        for tie in [tie for tie in self.request.profile.tied if not tie.split] if back else ():
            first, *_, last = sorted(map(order.index, tie.layers))
            total += tie.gradient_bytes if first <= now < last and set(tie.layers) <= mine else 0
        return total
