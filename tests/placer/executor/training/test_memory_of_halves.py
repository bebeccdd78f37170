"""What the passes of a zero-bubble step make and keep, storage by storage, is what its placement
predicts of them."""

from __future__ import annotations

import gc
import weakref
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placer import BatchOptions, Constraints, DataFlow, PlacementRequest, profile, solve
from placer.capture.weight_grads.deferred import DeferredGradient
from placer.executor.training.optimizer import gradient_accumulation
from placer.executor.training.stages.training_slot import TrainingSlot
from placer.executor.training.stages.training_stage import TrainingStage
from placer.profiler import profile_writer
from placer.testing import logical_devices
from placer.zoo import gpt, resnet18, unet

CHUNKS = 4
"""Of two stages and of three all of them are in flight."""


class Pool(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The storages that are made while it is entered, until they are freed, entered or not.

    Attributes:
        most: the most bytes that they were.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.made: dict[int, int] = {}
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and id_of(tensor) not in self.made:
                self.known.add(id_of(tensor))  # made elsewhere
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() != -1:
            # without a mode such as this, autograd adds up in place what nobody else holds
            self.free(args[0])
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, Tensor)
                and id_of(tensor) not in self.made
                and id_of(tensor) not in self.known
            ):
                self.add(tensor)
        self.known.clear()
        return result

    def add(self, tensor: Tensor) -> None:
        key, storage = id_of(tensor), tensor.untyped_storage()
        self.made[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.gone, key)

    def free(self, tensor: Tensor) -> None:
        waits = any(isinstance(holder, DeferredGradient) for holder in gc.get_referrers(tensor))
        if not waits and tensor.nbytes == tensor.untyped_storage().nbytes():
            self.gone(id_of(tensor))

    def gone(self, key: int) -> None:
        self.now -= self.made.pop(key, 0)


def id_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    logits = output.flatten(0, 1) if output.dim() == 3 else output
    return functional.cross_entropy(logits, target.flatten() if output.dim() == 3 else target)


class _Branches(nn.Module):
    """Convolutions side by side whose results are concatenated, so that their gradients are slices
    of one."""

    def __init__(self, width: int, *kernels: int) -> None:
        super().__init__()
        self.sides = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width // len(kernels), size, padding=size // 2), nn.ReLU()
            )
            for size in kernels
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([side(x) for side in self.sides], 1)


def _branching() -> nn.Module:
    kernels = [(1, 3, 5, 1), (3, 1, 1, 3), (5, 1, 3, 1), (1, 1, 3, 3)]
    blocks = [_Branches(32, *each) for each in kernels]
    between = [nn.Conv2d(32, 32, 3, padding=1) for _ in blocks]
    pairs = [part for pair in zip(blocks, between, strict=True) for part in pair]
    return nn.Sequential(nn.Conv2d(3, 32, 3), *pairs, nn.Flatten(), nn.Linear(32 * 900, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "resnet18": (
        resnet18,
        lambda size: (torch.randn(size, 3, 64, 64), torch.randint(1000, (size,))),
    ),
    "unet": (
        lambda: unet(width=8),
        lambda size: (torch.randn(size, 3, 64, 64), torch.randint(2, (size, 64, 64))),
    ),
    "branching": (
        _branching,
        lambda size: (torch.randn(size, 3, 32, 32), torch.randint(10, (size,))),
    ),
    "gpt": (
        lambda: gpt(layers=3, width=32, heads=2, context=64, vocabulary=64),
        lambda size: (torch.randint(64, (size, 64)), torch.randint(64, (size, 64))),
    ),
}


CUTS = {
    "halves": lambda names: [len(names) // 2],
    # What the first stage hands to the next it hands to the last one too, which concatenates it.
    "two read a value": lambda names: [names.index("down1.0"), names.index("up1.up")],
}


@pytest.mark.covering(every=5, first=3)
@pytest.mark.parametrize(
    ("name", "cuts"), [*((name, "halves") for name in MODELS), ("unet", "two read a value")]
)
def test_the_passes_of_a_micro_batch_take_what_is_predicted(
    name: str, cuts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, data = MODELS[name]
    model, (part, target) = make(), data(4)
    # here 1 MiB is much
    monkeypatch.setattr(profile_writer, "_material", lambda size: size)
    monkeypatch.setattr(gradient_accumulation, "_MOST_BYTES", 0)  # and so are 32
    given: Any = {"optimizer": None, "loss_fn": _loss, "target": target}
    with logical_devices(3):
        measured = profile(model, part, 3, progress=False, repeats=1, cache=False, **given)
        names = [layer.name for layer in measured.layers]
        begins = CUTS[cuts](names)
        pinned = {name: f"cpu:{bisect(begins, place)}" for place, name in enumerate(names)}
        rules = Constraints(contiguous=True, pinned=pinned)
        placement = solve(
            PlacementRequest(
                profile=measured, schedule="zero-bubble", chunks=CHUNKS, constraints=rules
            )
        )
        taken: dict[str, dict[str, int]] = defaultdict(dict)
        for which in ("forward", "backward"):
            monkeypatch.setattr(
                TrainingStage, which, _watched(getattr(TrainingStage, which), which, taken)
            )
        flow = DataFlow(model)
        # a comparison collects results, too
        flow.batch_options = BatchOptions(verify=False)
        flow.update_flow(placement)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batch, goals = data(4 * CHUNKS)
        step = flow.train_step(_loss, optimizer, "zero-bubble")
        step(batch, goals, chunks=CHUNKS)
        stage_on = {
            str(stage.device): stage for pipeline in step.pipelines for stage in pipeline.stages
        }
    assert placement.in_flight == tuple(len(stage_on[device].slots) for device in placement.stages)
    for load in placement.devices:
        if not load.layers:
            continue
        stage, passes = stage_on[load.device], taken[load.device]
        count, memories = len(stage.slots), len(set(stage.memories))
        used = count * (passes["forward"] + _places(stage)) + memories * passes["backward"]
        used += count * _landing(stage) if memories < count else 0
        assert 0.999 <= load.memory.activation_bytes / used <= 1.09, (load, passes)


def _landing(stage: TrainingStage) -> int:
    """The bytes of the gradients that it sends for a micro-batch: recorded, they are copied out of
    a shared memory."""
    slot = stage.slots[0]
    return sum(int(slot.static(key).nbytes) for key in slot.entering)


def _places(stage: TrainingStage) -> int:
    """The bytes of what arrives from other stages for a micro-batch: values that need gradients,
    and gradients."""
    slot = stage.slots[0]
    arriving = [*(slot.static(key) for key in slot.entering), *slot.gradients.values()]
    return sum(int(tensor.nbytes) for tensor in arriving)


def _watched(
    run: Callable[[TrainingStage, TrainingSlot], None], which: str, taken: dict[str, dict[str, int]]
) -> Any:
    def watched(stage: TrainingStage, slot: TrainingSlot) -> None:
        pool = Pool()
        with pool:
            run(stage, slot)
        most = taken[str(stage.device)]
        most[which] = max(most.get(which, 0), pool.most)

    return watched
