"""Inference of a U-Net over a stream of images on several devices, with the time of each part.

python examples/unet_stream.py [--devices 4] [--trace trace.json]        on GPUs or CPU stand-ins
python examples/unet_stream.py --data FOLDER                             images from FOLDER/imgs

Open the trace at https://ui.perfetto.dev: measured and predicted are two processes, with a thread
for each device.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import Tensor

import placer
from placer.zoo import unet

BATCHES, ROWS, SIZE = 12, 4, 64


def drawn() -> Iterator[Tensor]:
    """Yield random batches of shape (ROWS, 3, SIZE, SIZE)."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(BATCHES):
        yield torch.randn(ROWS, 3, SIZE, SIZE, generator=generator)


def from_folder(folder: Path) -> Iterator[Tensor]:
    """Yield as many batches of the folder's images; a small folder is read again from its start."""
    paths = sorted((folder / "imgs").glob("*.*"))
    if not paths:
        raise SystemExit(f"--data {folder}: there are no images in {folder / 'imgs'}")
    for first in range(0, BATCHES * ROWS, ROWS):
        batch = [
            Image.open(paths[(first + row) % len(paths)]).convert("RGB") for row in range(ROWS)
        ]
        pixels = numpy.stack([numpy.asarray(image.resize((SIZE, SIZE))) for image in batch])
        yield torch.tensor(pixels).permute(0, 3, 1, 2) / 255


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--trace", default="trace.json")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="with imgs/, as Carvana; else random images"
    )
    options = parser.parse_args()
    kind = "cuda" if torch.cuda.device_count() >= options.devices else "cpu"
    names = [f"{kind}:{index}" for index in range(options.devices)]
    torch.manual_seed(0)
    model = unet(width=8).eval()
    whole = copy.deepcopy(model)
    batches = list(from_folder(options.data) if options.data else drawn())

    profile = placer.profile(model, batches[0], names, training=False, progress=False)
    constraints = placer.Constraints(
        min_devices=options.devices
    )  # a model as small as this would stay on one
    placement = placer.solve(
        placer.PlacementRequest(profile=profile, constraints=constraints, transfers="overlapped")
    )
    flow = placer.DataFlow(model, device_ids=names, output_device="cpu")
    flow.update_flow(placement)

    difference = 0.0
    for batch, masks in zip(batches, flow.stream(batches), strict=True):  # no drain between batches
        difference = max(difference, (masks - whole(batch)).abs().max().item())
    print(f"streamed {BATCHES} batches; largest difference of outputs: {difference:.3g}")

    measurement = flow.measure(torch.cat(batches), chunks=BATCHES, profile=profile)
    print(measurement.table())
    measurement.save_trace(options.trace)


if __name__ == "__main__":
    main()
