"""Trains a U-Net whose skip connections run over all devices, and holds every step against the
unsplit model.

python examples/unet_skips.py [--devices 4]        on GPUs, or without them on CPU stand-ins
"""

from __future__ import annotations

import argparse
import copy
from contextlib import nullcontext

import torch
from torch import Tensor, nn

import placer
from placer.zoo import unet

STEPS = 6


def discs(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Noisy images of shape (count, 3, size, size) of a bright disc, and masks of shape (count,
    size, size).
    """
    row, column = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centres = torch.randint(size // 4, 3 * size // 4, (count, 2, 1, 1))
    masks = (row - centres[:, 0]) ** 2 + (column - centres[:, 1]) ** 2 < (size / 5) ** 2
    images = masks.unsqueeze(1).float().expand(count, 3, size, size) + 0.3 * torch.randn(
        count, 3, size, size
    )
    return images, masks.long()


def train(run: nn.Module, images: Tensor, masks: Tensor) -> list[float]:
    """A few steps of gradient descent; the loss before each."""
    optimizer = torch.optim.SGD(run.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = run(images)
        loss = nn.functional.cross_entropy(logits, masks.to(logits.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4)
    count = parser.parse_args().devices
    torch.manual_seed(0)
    on_gpus = torch.cuda.device_count() >= count
    names = [f"{'cuda' if on_gpus else 'cpu'}:{index}" for index in range(count)]
    images, masks = discs(count=8, size=32)
    model = unet(width=8)
    whole = copy.deepcopy(model).to(names[0])
    unsplit = train(whole, images.to(names[0]), masks.to(names[0]))

    # On stand-ins, logical_devices raises where tensors of two devices meet, as GPUs would.
    with nullcontext() if on_gpus else placer.testing.logical_devices(count):
        flow = placer.DataFlow(model, device_ids=names)
        # Down the devices and round again: inc and up4, which a skip connection joins, are devices
        # apart.
        flow.layer_gpus.update({name: index % count for index, name in enumerate(flow.layer_gpus)})
        flow.update_flow()
        split = train(flow, images, masks)

    for step, (a, b) in enumerate(zip(unsplit, split, strict=True)):
        print(f"step {step}: loss {b:.6f} split, {a:.6f} unsplit")
    print(
        f"largest difference of losses: {max(abs(a - b) for a, b in zip(unsplit, split, strict=True)):.3g}"
    )


if __name__ == "__main__":
    main()
