"""One segment of a pipeline in training: passes forwards and backwards for micro-batches in flight.

    inputs (static)  ──▶ forward ──▶ outputs (static)      a slot for each micro-batch in flight;
    input gradients  ◀── backward ◀── output gradients     its activations live until the backward
                              │                            pass
                              ▼
                      weight gradients, at once or in a pass of their own

On a GPU every pass of every slot is one CUDA graph. If a layer cannot be recorded, the passes run
eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from placer import devices
from placer.capture import autocast
from placer.capture.loss_functions import require_gradient, require_real_number
from placer.capture.weight_grads.deferred import DeferredGradient
from placer.executor.engine.stage import Stage
from placer.executor.engine.weak_methods import weakly
from placer.executor.segments import MicroBatch, Segment
from placer.executor.stage_errors import Trail
from placer.executor.training.autograd_reach import parameters, reached
from placer.executor.training.input_gradients import detached, on_host
from placer.executor.training.optimizer.gradient_accumulation import Accumulation
from placer.executor.training.stages.training_slot import (
    AtOnce,
    Collected,
    Head,
    Key,
    NamedQueue,
    TrainingSlot,
)
from placer.schedule import Phase

LOSS = "(loss)"
"""Name of the loss where a layer is named."""


class _Entrance(torch.autograd.Function):
    """The identity, whose result a layer may write to in place.

    Autograd forbids that for a leaf, and for any view of one.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Entered(MicroBatch):
    """A micro-batch that enters a stage: a value becomes autograd's input when it is first read.

    Backward passes run the latest operation first. So the gradient of a value is ready as soon as
    its first reader has run, and no slice of a larger value stays until the pass is over, with all
    its memory.

    Args:
        inputs: by name.
        leaves: of some of them, the leaf that a gradient goes back to.
        trail: notes which layer runs.
    """

    def __init__(
        self, inputs: Mapping[str, Any], leaves: Mapping[str, Tensor], trail: Trail
    ) -> None:
        super().__init__(inputs.keys(), inputs.values(), trail)
        self._leaves = dict(leaves)

    def read(self, name: str, device: torch.device) -> Any:
        """Return the value on that device."""
        if name in self._leaves:
            self.write([name], [_Entrance.apply(self._leaves.pop(name))])  # type: ignore[no-untyped-call]
        return super().read(name, device)


class TrainingStage(Stage[TrainingSlot]):
    """A segment with forward and backward passes, for micro-batches in flight.

    Args:
        segment: its layers, over aliases of the parameters.
        reads: names of the values that come from other stages, or from the batch.
        writes: for each value that is read elsewhere: the stages that read it.
        head: the loss, in a stage whose result is the model's.
        split: whether weight gradients have a pass of their own.
        gather: returns a context for each forward pass: statistics over the whole batch.
        reach: is called with every weight whose gradients are left to a pass of their own.

    Attributes:
        slots: one for each micro-batch in flight.
        tail: the slot of the last micro-batch, by its number, where it is smaller than the others.
        unreached: of what it reads, the values that the loss does not depend on.
        awaited: by value that is read elsewhere: the stages that send a gradient of it.
        position: its number within its pipeline.
        pipelines: how many pipelines take micro-batches in turn.
        joined: of what it reads, the values that come without a copy, with the stage that makes
            them: an earlier piece of the same segment.
        spread: state that it uses, which layers of several devices change.
        memories: by slot, the number of the memory in which its recorded input-gradient pass works,
            where weight gradients have a pass of their own; see ``Plan.backward_memory``. Each slot
            has its own if empty.
        twin: a stage of another pipeline with the same layers, which is recorded before; it has
            measured the memory of the passes. None without one.
        is_shared: whether further pipelines have a stage with the same layers on this device, which
            works in the same memory.
        rooms: the pieces of memory in which each recorded pass works.
        reuses: whether a backward pass may leave its results where the forward pass works, so that
            they must be read before the slot's next forward pass runs.
    """

    def __init__(
        self,
        segment: Segment,
        reads: Sequence[str],
        writes: Mapping[str, Sequence[int]],
        head: Head | None = None,
        split: bool = False,
        gather: Callable[[], AbstractContextManager[Any]] = nullcontext,
        reach: Callable[[Tensor], None] = lambda weight: None,
    ) -> None:
        super().__init__(segment, reads, writes, Trail(backwards=True))
        self.head = head
        self.split = split
        self.gather = gather
        self.gathers = gather is not nullcontext
        self.reach = reach
        self.tail: dict[int, TrainingSlot] = {}
        self.reuses = False
        self.unreached: frozenset[Key] = frozenset()
        self.awaited: dict[str, set[int]] = {}
        self.position = 0
        self.pipelines = 1
        self.joined: dict[str, TrainingStage] = {}
        self.spread: Set[Hashable] = frozenset()
        self.memories: list[int] = []
        self.twin: TrainingStage | None = None
        self.is_shared = False
        self.rooms: Sequence[devices.Rooms] = ()
        self._made_of: dict[str, frozenset[Key]] = {}
        self._accumulation = Accumulation(tensor for step in segment.steps for tensor in step.state)
        self._shared_memory: Any = None

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The passes of a micro-batch, in order."""
        return ("forward", "backward", "weights") if self.split else ("forward", "backward")

    def eager_passes(self, slot: TrainingSlot) -> dict[Phase, Callable[[], None]]:
        """Return what runs each pass of a slot operation by operation."""
        return {
            "forward": weakly(self.forward, slot),
            "backward": weakly(self.backward, slot),
            "weights": weakly(self.add_weight_gradients, slot),
        }

    def slot(self, micro_batch: int) -> TrainingSlot:
        """Return the slot that a micro-batch goes through."""
        return self.tail.get(micro_batch) or super().slot(micro_batch // self.pipelines)

    def all_slots(self) -> list[TrainingSlot]:
        """Return the slots, and then the tail's."""
        return [*self.slots, *self.tail.values()]

    def open_slots(
        self, count: int, inputs: Mapping[str, Any], targets: Sequence[Any], weight: float
    ) -> dict[str, Any]:
        """Make the slots like this example, and run the first one forwards once.

        Args:
            count: micro-batches in flight.
            inputs: an example of every value that the stage reads; it requires a gradient if a
                gradient goes back to it.
            targets: an example of the loss's target, likewise.
            weight: of each micro-batch's loss in the batch's.

        Returns:
            An example of every value that other stages read, on the host.
        """
        self.slots, made = self._opened(count, inputs, targets, weight)
        return made

    def open_tail(
        self, micro_batch: int, inputs: Mapping[str, Any], targets: Sequence[Any], weight: float
    ) -> dict[str, Any]:
        """Make a slot for the last micro-batch, which is smaller than the others.

        Args:
            micro_batch: its number.
            inputs: as for ``open_slots``.
            targets: likewise.
            weight: likewise.

        Returns:
            As for ``open_slots``.
        """
        tail, made = self._opened(1, inputs, targets, weight)
        self.tail = {micro_batch: tail[0]}
        return made

    def close_slots(self) -> None:
        """Release the slots; the next batch makes new ones."""
        self.slots, self.tail, self._shared_memory = [], {}, None
        self.is_recorded, self.not_recorded_because = False, ""

    def _opened(
        self, count: int, inputs: Mapping[str, Any], targets: Sequence[Any], weight: float
    ) -> tuple[list[TrainingSlot], dict[str, Any]]:
        slots = []
        examples: dict[Key, Any] = dict(enumerate(targets))
        examples.update(inputs)
        # Slots stay. In cached pieces of memory they would leave gaps in which little else fits.
        devices.release_cache()
        for _ in range(count):
            static = {name: self._static(inputs[name]) for name in self.reads}
            slot = TrainingSlot(static, weight=weight)
            if self.head is not None:
                slot.targets = [self._static(target) for target in targets]
            slot.entering = tuple(
                key
                for key in (*self.reads, *range(len(slot.targets)))
                if _flows_back(examples[key])
            )
            queue = NamedQueue if self.split else AtOnce
            slot.deferred = queue(self.trail, self.reach, self._accumulation)
            slot.passes = self.eager_passes(slot)
            slots.append(slot)
        first = slots[0]
        self._compute(first, self.segment)
        if self.head is not None:
            self.head.parameters = parameters(first.roots[0])
            self.unreached = self._beyond_loss(first)
        made = {name: first.outputs[name] for name in self.writes}
        self._made_of = {name: reached(value, first.leaves) for name, value in made.items()}
        self.awaited = {
            name: {*readers} for name, readers in self.writes.items() if _flows_back(made[name])
        }
        # A graph of autograd remembers the stream that it was made on. If this one lived on, the
        # recording, on another stream, would wait for it.
        first.leaves, first.outputs, first.roots = {}, {}, []
        made = dict(zip(made, on_host(list(made.values())), strict=True))
        # As above: nothing of the pass is left, and the gradients stay.
        devices.release_cache()
        for slot in slots:
            slot.collected = slot.collected or (first.collected and Collected.like(first.collected))
            for name in self.awaited:
                slot.gradients[name] = torch.zeros_like(
                    made[name], device=self.device, requires_grad=False
                )
        return slots, made

    def _beyond_loss(self, slot: TrainingSlot) -> frozenset[Key]:
        """Return the values that entered and that the loss does not depend on."""
        if not slot.leaves:
            return frozenset()
        with autocast.disabled(self.device):
            found = torch.autograd.grad(slot.roots, list(slot.leaves.values()), allow_unused=True)
        slot.deferred.clear()
        return frozenset(
            name for name, gradient in zip(slot.leaves, found, strict=True) if gradient is None
        )

    def expect(self, stages: Sequence[TrainingStage]) -> None:
        """Stop waiting for gradients of values that the loss does not depend on.

        A value counts if the loss does not depend on it by way of any stage that reads it.

        Args:
            stages: all; those after this one have done the same.
        """
        for name, readers in list(self.awaited.items()):
            readers -= {reader for reader in readers if name in stages[reader].unreached}
            if not readers:
                del self.awaited[name]
                for slot in self.all_slots():
                    del slot.gradients[name]
        if self.head is None:
            awaited = frozenset[Key]().union(*(self._made_of[name] for name in self.awaited))
            self.unreached = frozenset(self.slots[0].entering) - awaited

    def join(self) -> None:
        """Let gradients of values that come without a copy go back without one, too.

        They are written where the stage that made the value expects them, if no other stage sends
        a gradient of it.
        """
        for name, maker in self.joined.items():
            if len(maker.awaited.get(name, ())) == 1 and name not in self.unreached:
                for slot, source in zip(self.all_slots(), maker.all_slots(), strict=True):
                    if name in slot.entering:
                        slot.handed[name] = slot.landing[name] = source.gradients[name]

    @torch.no_grad()
    def fix_inputs(self) -> None:
        """Give values that come without a copy their place, before passes are recorded.

        Recorded passes of the stage before make them in one place each. Where its passes are not
        recorded, the values are copied.
        """
        for name, maker in self.joined.items():
            for slot, source in zip(self.all_slots(), maker.all_slots(), strict=True):
                known = slot.inputs[name]
                if isinstance(known, Tensor):
                    place = source.outputs[name] if maker.is_recorded else torch.empty_like(known)
                    # Passes run before they are recorded, and an index has to be a valid one.
                    slot.inputs[name] = place.detach().copy_(known)

    def take(self, name: str, slot: TrainingSlot, made: Tensor) -> None:
        """Take a value from the stage before, on the stream in use.

        Args:
            name: of the value, among ``joined``.
            slot: that it is for.
            made: the value, which stays unchanged until the slot's last pass.
        """
        if not self.is_recorded:
            slot.inputs[name] = made
        elif slot.inputs[name].data_ptr() != made.data_ptr():
            with torch.no_grad():
                slot.inputs[name].copy_(made)

    def begin(self) -> None:
        """Prepare for a batch."""

    def release(self) -> None:
        """Release what passes left in the slots, after a failure.

        Recorded passes keep their memory, which they use again.
        """
        self._accumulation.drop()
        if self.is_recorded:
            return
        for slot in self.all_slots():
            slot.leaves, slot.outputs, slot.roots, slot.input_gradients = {}, {}, [], {}
            slot.deferred.clear()

    def recording_obstacle(self) -> str:
        """Return what is known to forbid a recording; an empty string if nothing is."""
        for step in self.segment.steps:
            if any(step.state[index].device.type == devices.CPU for index in step.foreign):
                return f"layer {step.layer.name!r} changes state that is on the host"
        return ""

    def record_slots(self) -> None:
        """Record the passes of every slot.

        Raises:
            devices.NotRecordable: a pass cannot be recorded.
        """
        twin = self.twin
        if twin is not None and twin.is_recorded and twin.device == self.device:
            self._shared_memory = twin._shared_memory
        else:
            self._shared_memory = devices.memory_pool(self.device)
        pools = self._backward_pools()
        every = list(zip(self.all_slots(), pools, strict=True))
        used = [*pools, self._shared_memory] if self.is_shared else pools
        shared = [slot for slot, pool in every if used.count(pool) > 1]
        for slot in shared:
            slot.landing = self._landing(slot)
        known = self._rooms_of_twin()
        self.rooms = self._rooms(self.slots[0], len(shared) > 0) if known is None else known
        for number, (slot, pool) in enumerate(every):
            # The passes of the first slots are warm: rooms are measured on them, or the first slot
            # has warmed up. The tail's, of another shape, are not.
            is_first = number < len(self.slots)
            is_warm = is_first and (known is None or number > 0)
            self._recorded(slot, pool, self.rooms if is_first else (), warm=is_warm)

    def _rooms_of_twin(self) -> Sequence[devices.Rooms] | None:
        """Return the pieces of memory of the stage's twin if both have the same passes."""
        if self.twin is None or not self.twin.is_recorded or self._work != self.twin._work:
            return None
        return self.twin.rooms

    @property
    def _work(self) -> tuple[Any, ...]:
        """What the memory of the passes depends on, besides the layers."""
        slot = self.slots[0]
        values = [
            (value.shape, value.dtype) if isinstance(value, Tensor) else value
            for value in (*slot.inputs.values(), *slot.targets)
        ]
        return devices.type_name(self.device), len(self.slots), len(self.tail), values

    def _backward_pools(self) -> list[Any]:
        """Return by slot, the tail's included, the memory in which its backward pass works.

        A whole backward pass leaves nothing, so that all slots share one memory. An input-gradient
        pass leaves something to its weight-gradient pass. There, slots share a memory if the plan
        runs that pass before the next input-gradient pass in it.
        """
        count = len(self.slots) + len(self.tail)
        if not self.split:
            return [self._shared_memory] * count
        numbers = self.memories or range(len(self.slots))
        memories = {number: devices.memory_pool(self.device) for number in numbers}
        return [memories[number] for number in numbers] + [
            devices.memory_pool(self.device) for _ in self.tail
        ]

    def _rooms(self, slot: TrainingSlot, shares_backward: bool) -> list[devices.Rooms]:
        """Return the pieces of memory in which each pass of a slot works best.

        The passes of all slots are warm then.
        """
        shared = [1] if not self.split else [1, 2] if shares_backward else [2]
        passes = [slot.passes[phase] for phase in self.phases]
        is_shared = len(self.slots) > 1 or self.is_shared
        return devices.fitting_rooms(passes, self.device, shared if is_shared else [])

    def _recorded(
        self, slot: TrainingSlot, backward_pool: Any, rooms: Sequence[devices.Rooms], warm: bool
    ) -> None:
        """Record the passes of a slot."""
        # What a pass leaves must not lie where another pass works before it is used:
        #   forward    leaves activations to the backward pass of its slot: memory of its own
        #   backward   the last pass leaves nothing, and all slots share one memory. If weight
        #              gradients are split, it leaves something to their pass: see _backward_pools
        #   weights    leaves nothing: shared
        # Gradients that are still on their way to other stages when another pass works there are
        # copied out of a shared memory first (_land).
        pools = {
            "forward": devices.memory_pool(self.device),
            "backward": backward_pool if self.split else self._shared_memory,
            "weights": self._shared_memory,
        }
        replays = devices.record(
            [slot.passes[phase] for phase in self.phases],
            self.device,
            pools=[pools[phase] for phase in self.phases],
            rooms=rooms,
            warm=warm,
        )
        slot.passes.update(zip(self.phases, replays, strict=True))

    def pass_ms(self) -> tuple[float, float, float]:
        """Return the milliseconds of a forward, an input-gradient and a weight-gradient pass.

        They are (1, 1, 1) unless the passes are recorded.
        """
        if not self.is_recorded:
            return 1.0, 1.0, 1.0
        times = devices.queued_ms(list(self.slots[0].passes.values()), self.device, 3)
        forward, backward, weights = (sorted(row)[1] for row in times)
        return forward, backward, weights

    def _static(self, example: Any) -> Any:
        if not isinstance(example, Tensor):
            return example
        static = torch.empty_like(example, device=self.device)
        with torch.no_grad():
            static.copy_(example.detach())
        return static

    def forward(self, slot: TrainingSlot) -> None:
        """Compute the segment in a slot, with what its backward pass needs, and the loss."""
        with self.segment.counting(), self.gather():
            self._compute(slot, self.segment)
        if self.head is not None:
            self.head.total.add_(slot.roots[0].detach())

    @torch.enable_grad()
    def _compute(self, slot: TrainingSlot, segment: Segment) -> None:
        """Run a segment over the inputs of a slot, with a graph for the backward pass."""
        slot.leaves = {key: slot.static(key).detach().requires_grad_() for key in slot.entering}
        leaves = {key: leaf for key, leaf in slot.leaves.items() if isinstance(key, str)}
        # A layer may write in place to an input without gradient, and so attach a graph to it. The
        # next pass must not find that graph.
        inputs = dict(zip(slot.inputs, detached(list(slot.inputs.values())), strict=True))
        batch = _Entered(inputs, leaves, self.trail)
        slot.deferred.clear()
        with autocast.uncached(self.device):
            with segment.deferring(slot.deferred):
                segment.run(batch)
            slot.outputs = {
                name: _apart(batch.read(name, self.device), slot.inputs.values())
                for name in self.writes
            }
            if self.head is not None:
                self._lose(self.head, slot, batch)

    def _lose(self, head: Head, slot: TrainingSlot, batch: MicroBatch) -> None:
        self.trail.enter(LOSS)
        targets = list(slot.targets)
        for key, leaf in slot.leaves.items():
            if isinstance(key, int):
                targets[key] = _Entrance.apply(leaf)  # type: ignore[no-untyped-call]
        outputs = [batch.read(name, self.device) for name in head.names]
        # "cuda" in a user's loss means this device. Stand-ins would refuse what the loss reads of
        # others.
        with devices.current(self.device) if self.device.type == "cuda" else nullcontext():
            loss, values = head.loss(outputs, targets)
        require_real_number(loss)
        require_gradient(loss)
        head.dtype = loss.dtype
        slot.roots = [loss * slot.weight]
        if values or head.collects:
            made = Collected(detached(outputs) if head.collects else None, values)
            slot.collected = slot.collected or Collected.like(made)
            slot.collected.take(made)

    def backward(self, slot: TrainingSlot) -> None:
        """Compute the input gradients of a slot, and the weight gradients unless they are split."""
        roots, gradients = list(slot.roots), [self._scale(root) for root in slot.roots]
        for name, gradient in slot.gradients.items():
            roots.append(slot.outputs[name])
            gradients.append(gradient)
        for leaf in slot.leaves.values():
            leaf.grad = None
        if not roots:
            slot.input_gradients = {
                name: torch.zeros_like(leaf) for name, leaf in slot.leaves.items()
            }
            slot.unreached = frozenset(slot.leaves)
            self._land(slot)
            return
        with autocast.disabled(self.device), self._accumulation:
            torch.autograd.backward(roots, gradients)
        slot.unreached = frozenset(key for key, leaf in slot.leaves.items() if leaf.grad is None)
        slot.input_gradients = {
            name: torch.zeros_like(leaf)
            if leaf.grad is None
            else _apart(leaf.grad, slot.gradients.values())
            for name, leaf in slot.leaves.items()
        }
        self._land(slot)

    def _landing(self, slot: TrainingSlot) -> dict[Key, Tensor]:
        return {
            key: slot.handed[key] if key in slot.handed else torch.zeros_like(slot.static(key))
            for key in slot.entering
        }

    @torch.no_grad()
    def _land(self, slot: TrainingSlot) -> None:
        """Copy input gradients out of the memory that other backward passes work in."""
        if slot.landing:
            for name, static in slot.landing.items():
                static.copy_(slot.input_gradients[name])
                slot.leaves[name].grad = None
            slot.input_gradients = {**slot.input_gradients, **slot.landing}

    def _scale(self, root: Tensor) -> Tensor:
        assert self.head is not None
        return self.head.scale.to(root.dtype).expand_as(root)

    def add_weight_gradients(self, slot: TrainingSlot) -> None:
        """Add the weight gradients that the backward pass of a slot has left."""
        with autocast.disabled(self.device):
            devices.side_by_side(
                [partial(self._add, slot, part) for part in slot.deferred.branches()], self.device
            )
        slot.deferred.clear()

    def _add(self, slot: TrainingSlot, some: Iterable[DeferredGradient]) -> None:
        for addition in some:
            self.trail.layer = addition.layer
            addition.run(slot.deferred)
        self._accumulation.flush()


def drop_unreached(stages: Sequence[TrainingStage]) -> None:
    """Let no gradient flow to values that the loss does not depend on.

    Zeros would let weight decay change the weights, which it leaves alone in the unsplit model.
    """
    for stage in reversed(stages):
        stage.expect(stages)


def _apart(result: Any, received: Iterable[Any]) -> Any:
    """Return a result, copied if it lies in memory that the stage receives values in.

    The next micro-batch's values come there while this result may still be on its way.
    """
    if not isinstance(result, Tensor):
        return result
    there = {place for item in received if isinstance(item, Tensor) for place in _places(item)}
    return result if there.isdisjoint(_places(result)) else result.clone()


def _places(tensor: Tensor) -> list[int]:
    return [part.untyped_storage().data_ptr() for part in devices.parts(tensor)]


def _flows_back(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
