"""Image classification with SeqNet on a placement that Placer suggests.

python examples/seqnet_digits.py [--epochs 20] [--devices 2]     scikit-learn's images of digits
python examples/seqnet_digits.py --data FOLDER                   FashionMNIST or MNIST from FOLDER
python examples/seqnet_digits.py --mlflow                        log the run to MLflow

FOLDER is the root folder that torchvision's FashionMNIST downloads to, or a folder with the four
files themselves: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
t10k-labels-idx1-ubyte, each also compressed as .gz. MLflow reads MLFLOW_TRACKING_URI.
"""

from __future__ import annotations

import argparse
import gzip
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import placer
from placer.report import explain
from placer.zoo import SeqNet

BATCH = 128
RAW_FOLDERS = (".", "FashionMNIST/raw", "MNIST/raw", "raw")
"""Where torchvision keeps the files, below the folder that its data sets are given."""

Data = tuple[Tensor, Tensor, Tensor, Tensor]
"""Images of shape (N, 1, size, size) and labels of shape (N,) for training, then for testing."""


def digits() -> Data:
    """Load scikit-learn's digits, 8 pixels wide and high."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:-360], order[-360:]
    return images[train], labels[train], images[test], labels[test]


def from_folder(folder: Path) -> Data:
    """Load the four files of FashionMNIST, 28 pixels wide and high."""
    names = [
        f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
    ]
    images, labels, test_images, test_labels = (read_idx(folder, f"{name}-ubyte") for name in names)
    return scaled(images), labels.long(), scaled(test_images), test_labels.long()


def scaled(images: Tensor) -> Tensor:
    """Turn bytes of shape (N, H, W) into numbers from 0 to 1 of shape (N, 1, H, W)."""
    return images.float().unsqueeze(1) / 255


def read_idx(folder: Path, name: str) -> Tensor:
    """Read an idx file: a four-byte head, four bytes for each dimension, then unsigned bytes."""
    for path in (folder / raw / f"{name}{ending}" for raw in RAW_FOLDERS for ending in ("", ".gz")):
        if path.exists():
            content = (
                gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            )
            dimensions = content[3]
            shape = numpy.frombuffer(content, ">i4", count=dimensions, offset=4)
            values = numpy.frombuffer(content, "u1", offset=4 + 4 * dimensions)
            return torch.tensor(values).view(*shape.tolist())
    looked = ", ".join(str(folder / raw) for raw in RAW_FOLDERS)
    raise SystemExit(f"--data {folder}: there is no {name} or {name}.gz in {looked}")


def mlflow_if_asked(asked: bool) -> Any:
    """Import MLflow only where it is asked for; return None elsewhere."""
    if not asked:
        return None
    try:
        import mlflow
    except ModuleNotFoundError:
        raise SystemExit("--mlflow needs the package mlflow: pip install mlflow") from None
    return mlflow


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="FashionMNIST's files; else digits"
    )
    parser.add_argument("--mlflow", action="store_true", help="log parameters, losses and accuracy")
    options = parser.parse_args()
    mlflow = mlflow_if_asked(options.mlflow)
    on_gpus = torch.cuda.device_count() >= options.devices
    names = [f"{'cuda' if on_gpus else 'cpu'}:{index}" for index in range(options.devices)]

    torch.manual_seed(0)
    images, labels, test_images, test_labels = (
        from_folder(options.data) if options.data else digits()
    )
    model = SeqNet(size=images.shape[-1])
    placement = placer.suggest(model, images[:BATCH], devices=names, optimizer="adam")
    print(explain(placement))

    with mlflow.start_run() if mlflow else nullcontext():
        if mlflow:
            asked = {"devices": options.devices, "epochs": options.epochs, "batch": BATCH}
            found = {"status": placement.status, "bottleneck_ms": placement.objective_value}
            mlflow.log_params(asked | found)
            mlflow.log_dict(dict(placement.layer_devices), "layer_devices.json")
        # On stand-ins, logical_devices raises where tensors of two devices meet, as GPUs would.
        with nullcontext() if on_gpus else placer.testing.logical_devices(options.devices):
            flow = placer.DataFlow(model, device_ids=names)
            flow.update_flow(placement)
            optimizer = torch.optim.Adam(flow.parameters(), lr=3e-3)
            for epoch in range(options.epochs):
                loss = train(flow, optimizer, images, labels)
                print(f"epoch {epoch + 1}: loss {loss:.4f}")
                if mlflow:
                    mlflow.log_metric("loss", loss, step=epoch + 1)
            accuracy = test(flow, test_images, test_labels)
        if mlflow:
            mlflow.log_metric("accuracy", accuracy)
    print(f"accuracy on {len(test_labels)} images not learned from: {accuracy:.3f}")


def train(
    flow: placer.DataFlow, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> float:
    """Train for one epoch and return the mean loss of a sample."""
    flow.train()
    loss_sum = 0.0
    for batch in torch.randperm(len(labels)).split(BATCH):
        optimizer.zero_grad()
        logits = flow(images[batch])
        loss = nn.functional.cross_entropy(logits, labels[batch].to(logits.device))
        loss.backward()
        optimizer.step()
        loss_sum += loss.item() * len(batch)
    return loss_sum / len(labels)


@torch.no_grad()
def test(flow: placer.DataFlow, images: Tensor, labels: Tensor) -> float:
    """Return the share of images whose class the model finds."""
    flow.eval()
    found = torch.cat([flow(part).cpu().argmax(dim=1) for part in images.split(1000)])
    return (found == labels).float().mean().item()


if __name__ == "__main__":
    main()
