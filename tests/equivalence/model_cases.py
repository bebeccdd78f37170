"""Training, calls and streams of small models over two stand-ins.

Every schedule must give the losses and gradients of the unsplit model over the same micro-batches.
The frozen numbers are the unsplit model's, so they hold for every schedule.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from public_api import (
    Service,
    move,
    placed_flow,
    profile_of,
    recompute,
    stream,
    structure,
    suggest,
    train_step,
)
from small_networks import NETWORKS, Network, with_known_weights
from torch import Tensor, nn

CHUNKS = 4
STEPS = 3
RUNS = (
    ("fill-drain", False),
    ("1f1b", False),
    ("1f1b", True),
    ("zero-bubble", False),
    ("interleaved", False),
)
"""Schedules, and whether the first device computes its forward passes again."""
TOLERANCE = 1e-12
"""Relative to the norm of each tensor. On one thread they agree to about 1e-15."""


def summary(tensor: Tensor) -> list[float]:
    """Return two numbers that change with any element: the norm, and the norm with a projection.

    The projection is on fixed cosines, scaled to the norm at most. Added to twice the norm it is
    never small, so that a relative tolerance suits it.
    """
    flat = tensor.detach().cpu().double().flatten()
    norm = float(flat.norm())
    directions = torch.cos(torch.arange(len(flat), dtype=torch.float64) ** 2)
    projection = float(flat @ directions) / max(1.0, float(directions.norm()))
    return [norm, 2 * norm + projection]


def leaves(nest: Any) -> list[Tensor]:
    """Return the tensors of a result; a dictionary's in the order of their names."""
    if isinstance(nest, Tensor):
        return [nest]
    parts = [nest[name] for name in sorted(nest)] if isinstance(nest, Mapping) else nest
    return [leaf for part in parts for leaf in leaves(part)]


def partition(devices: Iterable[str]) -> list[int]:
    """Return a map with its devices numbered as they first occur, since both are alike."""
    used: dict[str, int] = {}
    return [used.setdefault(device, len(used)) for device in devices]


def cut(nest: Any, count: int) -> list[Any]:
    """Return a batch, or a dictionary of inputs, in equal parts."""
    if isinstance(nest, Tensor):
        return list(nest.chunk(count))
    parts = {name: value.chunk(count) for name, value in nest.items()}
    return [{name: part[number] for name, part in parts.items()} for number in range(count)]


def called(model: Any, inputs: Any, **options: Any) -> Any:
    """Call a model, or a flow, with a tensor or with keyword arguments."""
    return model(**inputs, **options) if isinstance(inputs, dict) else model(inputs, **options)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all cases; its momentum shows an update that was lost."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trained_alone(model: nn.Module, network: Network) -> list[float]:
    """Train the unsplit model over the same micro-batches, and return the losses."""
    optimizer, losses = optimizer_of(model), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = 0.0
        parts = zip(cut(network.inputs, CHUNKS), network.target.chunk(CHUNKS), strict=True)
        for inputs, target in parts:
            part = network.loss_fn(called(model, inputs), target) / CHUNKS
            part.backward()
            loss += float(part.detach())
        optimizer.step()
        losses.append(loss)
    return losses


def refuse_unlike(what: str, one: Iterable[Tensor], other: Iterable[Tensor]) -> None:
    """Raise an AssertionError if tensors are further apart than the tolerance."""
    for number, (here, there) in enumerate(zip(one, other, strict=True)):
        here, there = here.detach().cpu().double(), there.detach().cpu().double()
        distance, norm = float((here - there).norm()), float(there.norm())
        assert distance <= TOLERANCE * norm + 1e-14, f"{what}, tensor {number}: {distance} apart"


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return gradients, parameters and buffers after training."""
    found = {f"gradient of {name}": leaf.grad for name, leaf in model.named_parameters()}
    return found | {f"value of {name}": value for name, value in model.state_dict().items()}


def run(name: str, service: Service) -> dict[str, Any]:
    """Profile, place and run a network; return what is compared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(NETWORKS[name])
    finally:
        torch.set_num_threads(threads)


def _run(network: Network) -> dict[str, Any]:
    model = with_known_weights(network.make())
    start = copy.deepcopy(model.state_dict())
    alone = copy.deepcopy(model)
    profile = profile_of(model, cut(network.inputs, CHUNKS)[0], optimizer_of(model))
    placement = suggest(profile)
    losses = trained_alone(alone, network)
    expected = state_of(alone)
    found: dict[str, Any] = {
        "profile": structure(profile),
        "objective": placement.objective_value,
        "map": partition(placement.layer_devices.values()),
        "losses": losses,
        "gradients": {
            key.removeprefix("gradient of "): summary(value)
            for key, value in expected.items()
            if key.startswith("gradient of ")
        },
    }
    with placed_flow(model, placement) as flow:
        for schedule, recomputes in RUNS:
            recompute(flow, [0] if recomputes else [])
            if schedule == "interleaved":  # each device has two stages
                count = len(flow.layer_gpus)
                move(flow, [index * 4 // count % 2 for index in range(count)])
            model.load_state_dict(start)
            step = train_step(flow, network.loss_fn, optimizer_of(model), schedule)
            mine = [step(network.inputs, network.target, chunks=CHUNKS) for _ in range(STEPS)]
            refuse_unlike(f"{schedule}: loss", mine, torch.tensor(losses, dtype=torch.float64))
            state = state_of(model)
            assert state.keys() == expected.keys()
            for key, value in expected.items():
                refuse_unlike(f"{schedule}: {key}", [state[key]], [value])
        assert bool(flow.not_captured_because) != network.captured
        found |= _calls(network, flow, model, alone)
    return found


def _calls(network: Network, flow: Any, model: nn.Module, alone: nn.Module) -> dict[str, Any]:
    """Call the trained flow with and without gradients, and stream batches; compare each."""
    parts = cut(network.inputs, 2)
    model.eval()
    alone.eval()
    with torch.no_grad():
        expected = called(alone, network.inputs)
        streamed_alone = [leaves(called(alone, part)) for part in parts]
        for chunks in (1, 2):
            result = called(flow, network.inputs, chunks=chunks)
            refuse_unlike(f"call of {chunks}", leaves(result), leaves(expected))
    streamed = [leaves(result) for result in stream(flow, parts)]
    for one, other in zip(streamed, streamed_alone, strict=True):
        refuse_unlike("stream", one, other)
    for one in (model, alone):
        one.zero_grad()
    sums = []
    for one in (flow, alone):
        total = sum(leaf.square().sum().cpu() for leaf in leaves(called(one, network.inputs)))
        total.backward()
        sums.append(total.detach())
    refuse_unlike("sum of squares", [sums[0]], [sums[1]])
    for (name, mine), (_, theirs) in zip(
        model.named_parameters(), alone.named_parameters(), strict=True
    ):
        refuse_unlike(f"backward of a call: {name}", [mine.grad], [theirs.grad])
    return {
        "outputs": [summary(leaf) for leaf in leaves(expected)],
        "stream": [[summary(leaf) for leaf in result] for result in streamed],
        "sum of squares": float(sums[0]),
    }
