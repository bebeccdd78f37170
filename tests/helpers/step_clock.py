"""A second reading of steps: a clock goes from event to event, devices and lanes take what is next
when they can."""

from collections import defaultdict


class StepClock:
    """One step, or several in a row, without any formula for starts or ends.

    Args:
        pipeline: the stages.
        plan: the order of passes.
        steps: how many; their micro-batches are numbered on.
    """

    def __init__(self, pipeline, plan, steps=1):
        self.pipeline, self.plan, self.steps = pipeline, plan, steps
        self.last = "weights" if plan.split else "backward"
        self.finished, self.arrived = set(), set()
        self.queue = {
            device: self.in_a_row(device, order) for device, order in plan.by_device().items()
        }
        self.lanes = self.lane_queues()
        self.running = {}
        self.ends = [0] * steps

    def in_a_row(self, device, order):
        """What a device does, in order: in each step its passes, then its optimizer."""
        queue = []
        for step in range(self.steps):
            queue += [
                (stage, phase, batch + step * self.plan.chunks) for stage, phase, batch in order
            ]
            queue.append((device, "optimizer", step))
        return queue

    def lane_queues(self):
        """By lane, what goes through it, in order."""
        lanes = defaultdict(list)
        for device, order in self.queue.items():
            for stage, phase, batch in order:
                for t in sorted(self.pipeline.transfers):
                    other = self.pipeline.places[t.source]
                    if t.target == stage and phase == "forward":
                        lanes[other, device, "values"].append(("values", t, batch))
                    if t.target == stage and phase == "backward" and t.gradient_ms is not None:
                        lanes[device, other, "gradients"].append(("gradients", t, batch))
        return lanes

    def may_start(self, item):
        stage, phase, batch = item
        if phase == "optimizer":
            return True
        mine = [t for t in self.pipeline.transfers if t.target == stage]
        if phase == "forward":
            return all(("values", t, batch) in self.arrived for t in mine)
        if phase == "weights":
            return (stage, "backward", batch) in self.finished
        back = [
            t for t in self.pipeline.transfers if t.source == stage and t.gradient_ms is not None
        ]
        if not back:
            return (len(self.pipeline.places) - 1, "forward", batch) in self.finished
        return all(("gradients", t, batch) in self.arrived for t in back)

    def may_leave(self, item):
        kind, t, batch = item
        if kind == "gradients":
            return (t.target, "backward", batch) in self.finished
        before = self.had_its_buffer(batch, self.plan.in_flight[t.target])
        room = (
            before is None
            or not self.plan.training
            or (t.target, self.last, before) in self.finished
        )
        return room and (t.source, "forward", batch) in self.finished

    def had_its_buffer(self, batch, buffers):
        """Each step deals its micro-batches out to the buffers anew, in turn."""
        chunks = self.plan.chunks
        older = range(batch - 1, -1, -1)
        return next(
            (other for other in older if other % chunks % buffers == batch % chunks % buffers), None
        )

    def duration(self, item):
        if item[0] == "values":
            return item[1].forward_ms
        if item[0] == "gradients":
            return item[1].gradient_ms
        stage, phase, _ = item
        p = self.pipeline
        if phase == "optimizer":
            return sum(
                time
                for place, time in zip(p.places, p.optimizer_ms, strict=False)
                if place == stage
            )
        if phase == "backward" and self.plan.split:
            return p.backward_ms[stage] - p.weight_grad_ms[stage]
        return {"forward": p.forward_ms, "backward": p.backward_ms, "weights": p.weight_grad_ms}[
            phase
        ][stage]

    def play(self):
        """When the last pass or optimizer ends."""
        now = 0
        while True:
            while self.change(now):
                pass
            if not any(self.queue.values()) and not any(
                isinstance(key, int) for key in self.running
            ):
                return now
            assert self.running, "all wait for ever"
            now = min(end for _, end in self.running.values())

    def change(self, now):
        """End what ends now and start what may; whether anything did."""
        for key, (item, end) in list(self.running.items()):
            if end == now:
                del self.running[key]
                if item[1] == "optimizer":
                    self.ends[item[2]] = now
                else:
                    (self.arrived if item[0] in ("values", "gradients") else self.finished).add(
                        tuple(item)
                    )
                return True
        for key, waiting in [*self.queue.items(), *self.lanes.items()]:
            ready = self.may_start if isinstance(key, int) else self.may_leave
            if waiting and key not in self.running and ready(waiting[0]):
                self.running[key] = (waiting[0], now + self.duration(waiting[0]))
                waiting.pop(0)
                return True
        return False
