"""Learns scikit-learn's images of digits on a placement that Placer suggests.

python examples/seqnet_digits.py [--epochs 20] [--devices 2]
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import placer
from placer.report import explain
from placer.zoo import SeqNet

BATCH = 128


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images of shape (N, 1, 8, 8) and labels of shape (N,), to learn from and to test with."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    learn, test = order[:-360], order[-360:]
    return images[learn], labels[learn], images[test], labels[test]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args()
    on_gpus = torch.cuda.device_count() >= options.devices
    names = [f"{'cuda' if on_gpus else 'cpu'}:{index}" for index in range(options.devices)]

    torch.manual_seed(0)
    model = SeqNet()
    images, labels, test_images, test_labels = digits()
    placement = placer.suggest(model, images[:BATCH], devices=names, optimizer="adam")
    print(explain(placement))

    # On stand-ins, logical_devices raises where tensors of two devices meet, as GPUs would.
    with nullcontext() if on_gpus else placer.testing.logical_devices(options.devices):
        flow = placer.DataFlow(model, device_ids=names)
        flow.update_flow(placement)
        optimizer = torch.optim.Adam(flow.parameters(), lr=3e-3)
        for epoch in range(options.epochs):
            loss_sum = 0.0
            order = torch.randperm(len(labels))
            for batch in order.split(BATCH):
                optimizer.zero_grad()
                logits = flow(images[batch])
                loss = nn.functional.cross_entropy(logits, labels[batch].to(logits.device))
                loss.backward()
                optimizer.step()
                loss_sum += loss.item() * len(batch)
            print(f"epoch {epoch + 1}: loss {loss_sum / len(labels):.4f}")
        flow.eval()
        with torch.no_grad():
            found = flow(test_images).cpu().argmax(dim=1)
    print(
        f"accuracy on {len(test_labels)} images not learned from: {(found == test_labels).float().mean():.3f}"
    )


if __name__ == "__main__":
    main()
