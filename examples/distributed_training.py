r"""A GPT with tied embeddings, trained over several processes with a device each.

torchrun --nproc-per-node 4 examples/distributed_training.py

With a placement instead of the map by hand:

placer suggest examples.distributed_training:make --input 2x16:int64 --devices 4 --split-tied \
    --contiguous -o there.json
torchrun --nproc-per-node 4 examples/distributed_training.py --placement there.json

The processes may run on one host or on many. Each has a GPU if there are enough, or else a CPU
stand-in. The first process also trains the unsplit model, compares the losses, and reads the
checkpoint that all processes wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import placer
from placer.zoo import gpt

STEPS = 5
CHUNKS = 8


def make() -> nn.Module:
    torch.manual_seed(0)
    return gpt(layers=6, width=32, heads=4, context=16, vocabulary=64, tied=True)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def map_by_hand(model: nn.Module, devices: list[str]) -> dict[str, str]:
    """Map equal numbers of blocks to each device.

    The embeddings go with the first blocks. The head, which is tied to them, goes with the last.
    """
    blocks = [
        name
        for name, _ in model.named_modules()
        if name.startswith("blocks.") and name.count(".") == 1
    ]
    places = {
        name: devices[index * len(devices) // len(blocks)] for index, name in enumerate(blocks)
    }
    front = dict.fromkeys(("token_embedding", "position_embedding", "drop"), devices[0])
    return {**front, **places, "norm": devices[-1], "head": devices[-1]}


def train_unsplit(batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens, target in batches:
        optimizer.zero_grad()
        loss = loss_fn(model(tokens), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Make tokens of shape (16, 16) that count up, and the tokens that follow them."""
    first = torch.randint(64, (count, 16, 1), generator=torch.Generator().manual_seed(1))
    tokens = (first + torch.arange(17)) % 64
    return [(part[:, :-1], part[:, 1:]) for part in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--placement", type=Path, help="a placement of this model as JSON")
    parser.add_argument("--schedule", help="fill-drain, 1f1b or zero-bubble; else the placement's")
    options = parser.parse_args()
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpus = torch.cuda.device_count() >= here
    if on_gpus:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if on_gpus else "gloo")

    model = make()
    kind = "cuda" if on_gpus else "cpu"
    placement: dict[str, Any] = (
        json.loads(options.placement.read_text())
        if options.placement
        else map_by_hand(model, [f"{kind}:{index}" for index in range(dist.get_world_size())])
    )
    data = batches(STEPS)
    example = data[0][0][: 16 // CHUNKS]
    pipeline = placer.distributed.build(
        model, placement, example, loss_fn, chunks=CHUNKS, schedule=options.schedule
    )
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    losses = torch.zeros(STEPS, device=pipeline.device)
    for index, (tokens, target) in enumerate(data):
        optimizer.zero_grad()
        # the first stage reads the tokens, the last one the target
        loss = pipeline.step(tokens, target)
        optimizer.step()
        if loss is not None:
            losses[index] = loss
    # only last stages know the losses; replicas know the same ones
    dist.all_reduce(losses, dist.ReduceOp.MAX)

    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    # on several hosts: a folder that all of them see
    pipeline.save(str(path[0]), optimizer)
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        compare(losses.tolist(), data, str(path[0]))


def compare(losses: list[float], data: list[tuple[Tensor, Tensor]], path: str) -> None:
    unsplit = train_unsplit(data)
    for step, (a, b) in enumerate(zip(unsplit, losses, strict=True)):
        print(f"step {step}: loss {b:.6f} split, {a:.6f} unsplit")
    print(
        "largest difference of losses: "
        f"{max(abs(a - b) for a, b in zip(unsplit, losses, strict=True)):.3g}"
    )
    whole = make()
    state = {"model": whole.state_dict()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    tokens, target = data[0]
    print(
        "the checkpoint in the unsplit model: "
        f"loss {loss_fn(whole(tokens), target).item():.6f} on the first batch"
    )


if __name__ == "__main__":
    main()
