"""A model that is too large for one device: weights, gradients and Adam's state exceed it.

On GPUs it is a GPT of 10 billion float32 parameters: 16 bytes per parameter are 159 GB. Stand-ins
get a limit that a tiny model exceeds. The peer is FSDP2, which shards every weight. Two engines do
not fit together, so each frees the memory of its weights between turns and continues with new
values; times do not depend on values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from placer import (
    Cluster,
    Constraints,
    DataFlow,
    Placement,
    PlacementRequest,
    Profile,
    profile,
    solve,
    zoo,
)

from . import cases, contest, in_ranks, memory, ours, replicas, timing
from .contest import Contender
from .in_ranks import Runner
from .ranks import Here, Ranks
from .sample import Sample, reason, release

CASE = "large"
STEPS = 3
SAMPLES = 16
"""Of a batch, on every number of devices."""
ENGINES = (ours.ENGINE, replicas.FSDP2)


def measure(count: int, engines: Sequence[str]) -> Iterator[Sample]:
    """Yield the samples of a contest, then of eager PyTorch, which must run out of memory.

    Args:
        count: the number of devices.
        engines: the engines that take part, from ``ENGINES``.
    """
    cases.prepare()
    makers: dict[str, Callable[[], Contender]] = {
        ours.ENGINE: partial(_ours, count),
        replicas.FSDP2: partial(_sharded, count, pools := list[Ranks]()),
    }
    contenders = []
    try:
        for engine in engines:
            try:
                contenders.append(makers[engine]())
            except Exception as error:
                yield Sample(CASE, engine, count, 0, failed=reason(error))
            release()
        yield from contest.alternate(CASE, contenders)
    finally:
        for pool in pools:
            pool.close()
    contenders.clear()
    release()
    if not cases.is_small():
        yield from contest.alternate(
            CASE, [contest.here("eager", cases.places(1), 1, contest.kept(_eager))], rounds=1
        )


def label() -> str:
    """Return the model's name for tables."""
    return (
        "tiny GPT"
        if cases.is_small()
        else "GPT of 9.96 billion parameters, Adam, 16 x 1024 tokens, TF32"
    )


def _model(place: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with place:
        return zoo.gpt(2, 32, 2, 16, 64) if cases.is_small() else zoo.gpt(30, 5120, 40, 1024, 50304)


def _batch(place: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    with place:
        tokens = (
            torch.randint(64, (SAMPLES, 16))
            if cases.is_small()
            else torch.randint(50304, (SAMPLES, 1024))
        )
    return tokens, tokens.roll(-1, dims=1)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Adam:
    """Return the optimizer.

    It is fused on GPUs, where it makes no copies of the weights; a wide model learns in small
    steps.
    """
    return torch.optim.Adam(parameters, lr=cases.sized(1e-4, 1e-5), fused=cases.on_gpus())


def _eager() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a step over a quarter of the batch on one device."""
    model = _model(cases.home())
    inputs, target = (tensor[: SAMPLES // 4] for tensor in _batch(cases.home()))
    optimizer = adam(model.parameters())
    return replicas.step_of(
        model, optimizer, (inputs, target), cases.token_loss
    ), optimizer.zero_grad


def _sharded(count: int, pools: list[Ranks]) -> Contender:
    """Return FSDP2 with a process per device."""
    pools.append(Ranks(count))
    pools[0].run(_build_sharded)
    return Contender(replicas.FSDP2, count, 1, partial(pools[0].run, in_ranks.row, CASE))


def _build_sharded(here: Here) -> None:
    """Make the step in a process without ever holding the whole model on a device."""
    model = replicas.sharded(_model(torch.device("meta")), here)
    model.to_empty(device=here.home)
    optimizer = adam(model.parameters())
    _restart(model, optimizer)
    step = replicas.step_of(
        model, optimizer, replicas.part_of(here, _batch(here.home)), cases.token_loss
    )
    parked = Parked(model, optimizer)
    parked.park()
    here.kept[CASE] = Runner(step, parked.park, parked.wake)


def _ours(count: int) -> Contender:
    """Return Placer's engine; its profiles assume the optimizer that it steps."""
    inputs, target = _batch(cases.home())
    places = cases.places(count)
    sizes = [SAMPLES // chunks for chunks in (2 * count, 4 * count)]
    found = profile(
        _model(torch.device("meta")),
        inputs[: max(sizes)].cpu(),
        [str(place) for place in places],
        training=True,
        optimizer=adam,
        progress=False,
        batch_sizes=sizes,
        loss_fn=cases.token_loss,
        target=target[: max(sizes)].cpu(),
    )
    placement = _placed(found, count)
    used = memory.Meter(places)
    model = _model(torch.device("meta")).to_empty(device="cpu")
    flow = DataFlow(model, places)
    flow.update_flow(placement)
    optimizer = adam(model.parameters())
    _restart(model, optimizer)
    step = flow.train_step(cases.token_loss, optimizer)
    losses = [step(inputs, target).item() for _ in range(STEPS)]
    used.forget_peak()
    alone = timing.steps(partial(step, inputs, target), places)
    counted = used.against(placement)
    del step
    parked = Parked(model, optimizer)
    parked.park()

    @contextmanager
    def ready() -> Iterator[Callable[[], Any]]:
        parked.wake()
        yield partial(flow.train_step(cases.token_loss, optimizer), inputs, target)
        parked.park()

    made = contest.here(ours.ENGINE, places, placement.chunks, ready)
    made.values = counted | {
        "parameters": [float(sum(parameter.numel() for parameter in model.parameters()))],
        "loss": losses,
        "alone_ms": alone["step_ms"],
        "host_ms": alone["host_ms"],
        "predicted_ms": [] if placement.objective_value is None else [placement.objective_value],
    }
    return made


class Parked:
    """A model and its optimizer, whose memory is freed between turns.

    Args:
        model: the model, with its weights on their devices.
        optimizer: its optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._sizes: list[int] = []

    def park(self) -> None:
        """Free the memory of weights, gradients and the optimizer's state."""
        self._optimizer.zero_grad(set_to_none=True)
        storages = self._storages()
        self._sizes = [storage.size() for storage in storages]
        for storage in storages:
            storage.resize_(0)
        release()

    def wake(self) -> None:
        """Allocate the memory again, with other values."""
        if not self._sizes:
            return
        for storage, size in zip(self._storages(), self._sizes, strict=True):
            storage.resize_(size)
        self._sizes = []
        _restart(self._model, self._optimizer)

    def _storages(self) -> list[torch.UntypedStorage]:
        tensors = [*self._model.parameters(), *_states(self._optimizer)]
        return [_local(tensor).untyped_storage() for tensor in tensors]


@torch.no_grad()
def _restart(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set values as at the start of training.

    Weights are random, norms are one, and the optimizer's state is zero.
    """
    for name, parameter in model.named_parameters():
        value = _local(parameter)
        if value.dim() > 1:
            value.normal_(std=0.02)
        else:
            value.fill_(float(name.endswith("weight")))
    for value in _states(optimizer):
        _local(value).zero_()


def _states(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _placed(profiles: Sequence[Profile], count: int) -> Placement:
    """Return the placement with the shortest steady-state step.

    At tiny sizes, devices get a little less memory than the model needs on one of them.
    """
    asked = ours.question(profiles, count, SAMPLES)
    if cases.is_small():
        one = {"objective": "memory", "constraints": Constraints(max_devices=1)}
        # all loads but one are empty
        alone = min(
            max(load.memory.total_bytes for load in solve(request).devices)
            for request in (PlacementRequest(profile=found, **one) for found in profiles)
        )
        assert asked.cluster is not None
        limited = [
            device.model_copy(update={"memory_bytes": alone - 1, "reserve_bytes": 0})
            for device in asked.cluster.devices
        ]
        asked = asked.model_copy(
            update={"cluster": Cluster(devices=tuple(limited), links=asked.cluster.links)}
        )
    placement = solve(asked)
    if not placement.layer_devices:
        raise RuntimeError(f"no placement: {placement.status}")
    if placement.single_device is None or placement.single_device.fits:
        raise RuntimeError("the model fits on one device")
    return placement
