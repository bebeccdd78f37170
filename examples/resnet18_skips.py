"""ResNet-18 split inside its skip connections, trained and compared with the unsplit model.

python examples/resnet18_skips.py        on two GPUs, or without them on two CPU stand-ins
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
from torch import Tensor, nn

import placer
from placer.zoo import resnet18

STEPS = 6


def stripes(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Draw noisy images of shape (count, 3, size, size).

    Their stripes run across (class 0) or down (class 1).
    """
    labels = torch.arange(count) % 2
    wave = torch.sin(torch.arange(size) * 1.2)
    across = wave.view(1, 1, size, 1).expand(1, 3, size, size)
    images = torch.where(labels.view(-1, 1, 1, 1).bool(), across.transpose(2, 3), across)
    return images + 0.3 * torch.randn(count, 3, size, size), labels


def train(run: nn.Module, images: Tensor, labels: Tensor) -> list[float]:
    """Take a few steps of gradient descent and return the losses before the steps."""
    optimizer = torch.optim.SGD(run.parameters(), lr=0.02)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = run(images)
        loss = nn.functional.cross_entropy(logits, labels.to(logits.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.manual_seed(0)
    on_gpus = torch.cuda.device_count() > 1
    names = ["cuda:0", "cuda:1"] if on_gpus else ["cpu:0", "cpu:1"]
    images, labels = stripes(count=16, size=32)
    # GPUs add up in another order each time; batch normalisation over few values makes much of it
    # in float32.
    images, model = images.double(), resnet18(num_classes=2).double()
    whole = copy.deepcopy(model).to(names[0])
    unsplit = train(whole, images.to(names[0]), labels.to(names[0]))

    # On stand-ins, logical_devices raises where tensors of two devices meet, as GPUs would.
    with nullcontext() if on_gpus else placer.testing.logical_devices(2):
        flow = placer.DataFlow(model, device_ids=names, fine_grained=True)
        # Every other leaf on the other device: each skip connection crosses.
        flow.layer_gpus.update({name: index % 2 for index, name in enumerate(flow.layer_gpus)})
        flow.update_flow()
        split = train(flow, images, labels)

    for step, (a, b) in enumerate(zip(unsplit, split, strict=True)):
        print(f"step {step}: loss {b:.6f} split, {a:.6f} unsplit")
    print(
        "largest difference of losses: "
        f"{max(abs(a - b) for a, b in zip(unsplit, split, strict=True)):.3g}"
    )


if __name__ == "__main__":
    main()
