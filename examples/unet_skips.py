"""A U-Net whose skip connections cross all devices, trained and compared with the unsplit model.

python examples/unet_skips.py [--devices 4]        on GPUs, or without them on CPU stand-ins
python examples/unet_skips.py --data FOLDER        images and masks from FOLDER, as in Carvana

FOLDER holds imgs/NAME.jpg and masks/NAME_mask.gif, as the Carvana data set does. Other image
formats, and masks without _mask in their names, are read too.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import Tensor, nn

import placer
from placer.zoo import unet

STEPS = 6
BATCH = 8

Batch = tuple[Tensor, Tensor]
"""Images of shape (N, 3, size, size), and masks of shape (N, size, size) that hold classes."""


def discs(count: int, size: int) -> Batch:
    """Draw noisy images of a bright disc, and their masks."""
    row, column = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centres = torch.randint(size // 4, 3 * size // 4, (count, 2, 1, 1))
    masks = (row - centres[:, 0]) ** 2 + (column - centres[:, 1]) ** 2 < (size / 5) ** 2
    images = masks.unsqueeze(1).float().expand(count, 3, size, size) + 0.3 * torch.randn(
        count, 3, size, size
    )
    return images, masks.long()


def from_folder(folder: Path, size: int) -> list[Batch]:
    """Read one batch for each step; a small folder is read again from its start."""
    pairs = [(path, mask_of(path, folder)) for path in sorted((folder / "imgs").glob("*.*"))]
    if not pairs:
        raise SystemExit(f"--data {folder}: there are no images in {folder / 'imgs'}")
    repeated = pairs * -(-STEPS * BATCH // len(pairs))
    parts = (repeated[start : start + BATCH] for start in range(0, STEPS * BATCH, BATCH))
    return [collate([read_pair(image, mask, size) for image, mask in part]) for part in parts]


def mask_of(image: Path, folder: Path) -> Path:
    """Find the mask of an image: NAME_mask or NAME, in any image format."""
    for name in (f"{image.stem}_mask", image.stem):
        for path in sorted((folder / "masks").glob(f"{name}.*")):
            return path
    raise SystemExit(f"--data {folder}: there is no mask of {image.name} in {folder / 'masks'}")


def read_pair(image: Path, mask: Path, size: int) -> Batch:
    """Read an image of shape (3, size, size), from 0 to 1, and its mask of shape (size, size)."""
    pixels = numpy.asarray(Image.open(image).convert("RGB").resize((size, size)))
    # Interpolation would invent classes between background and foreground.
    marked = numpy.asarray(
        Image.open(mask).convert("L").resize((size, size), Image.Resampling.NEAREST)
    )
    return torch.tensor(pixels).permute(2, 0, 1) / 255, torch.tensor(marked > 127).long()


def collate(pairs: list[Batch]) -> Batch:
    images, masks = zip(*pairs, strict=True)
    return torch.stack(images), torch.stack(masks)


def train(run: nn.Module, batches: Iterable[Batch], device: str | None = None) -> list[float]:
    """Take one step of gradient descent for each batch and return the losses before the steps."""
    optimizer = torch.optim.SGD(run.parameters(), lr=0.05)
    losses = []
    for images, masks in batches:
        optimizer.zero_grad()
        logits = run(images.to(device))
        loss = nn.functional.cross_entropy(logits, masks.to(logits.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="with imgs/ and masks/; else drawn discs"
    )
    parser.add_argument(
        "--size", type=int, default=32, help="pixels along an image's edge (%(default)s)"
    )
    options = parser.parse_args()
    count = options.devices
    torch.manual_seed(0)
    on_gpus = torch.cuda.device_count() >= count
    names = [f"{'cuda' if on_gpus else 'cpu'}:{index}" for index in range(count)]
    batches = (
        from_folder(options.data, options.size)
        if options.data
        else [discs(BATCH, options.size)] * STEPS
    )
    model = unet(width=8)
    whole = copy.deepcopy(model).to(names[0])
    unsplit = train(whole, batches, names[0])

    # On stand-ins, logical_devices raises where tensors of two devices meet, as GPUs would.
    with nullcontext() if on_gpus else placer.testing.logical_devices(count):
        flow = placer.DataFlow(model, device_ids=names)
        # One layer to each device in turn: inc and up4, which a skip connection joins, are on
        # different devices.
        flow.layer_gpus.update({name: index % count for index, name in enumerate(flow.layer_gpus)})
        flow.update_flow()
        split = train(flow, batches)

    for step, (a, b) in enumerate(zip(unsplit, split, strict=True)):
        print(f"step {step}: loss {b:.6f} split, {a:.6f} unsplit")
    difference = max(abs(a - b) for a, b in zip(unsplit, split, strict=True))
    print(f"largest difference of losses: {difference:.3g}")


if __name__ == "__main__":
    main()
