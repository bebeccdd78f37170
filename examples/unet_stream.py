"""Streams images through a U-Net on several devices, and measures where the time of a batch goes.

python examples/unet_stream.py [--devices 4] [--trace trace.json]        on GPUs, or without them on CPU stand-ins

Open the trace at https://ui.perfetto.dev: measured and predicted are two processes, with a thread
for each device.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator

import torch
from torch import Tensor

import placer
from placer.zoo import unet

BATCHES, ROWS, SIZE = 12, 4, 64


def images() -> Iterator[Tensor]:
    """What a loader would bring."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(BATCHES):
        yield torch.randn(ROWS, 3, SIZE, SIZE, generator=generator)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--trace", default="trace.json")
    options = parser.parse_args()
    kind = "cuda" if torch.cuda.device_count() >= options.devices else "cpu"
    names = [f"{kind}:{index}" for index in range(options.devices)]
    torch.manual_seed(0)
    model = unet(width=8).eval()
    whole = copy.deepcopy(model)

    profile = placer.profile(model, next(images()), names, training=False, progress=False)
    # a model as small as this would stay on one
    constraints = placer.Constraints(min_devices=options.devices)
    placement = placer.solve(
        placer.PlacementRequest(profile=profile, constraints=constraints, transfers="overlapped")
    )
    flow = placer.DataFlow(model, device_ids=names, output_device="cpu")
    flow.update_flow(placement)

    difference = 0.0
    # no drain between batches
    for batch, masks in zip(images(), flow.stream(images()), strict=True):
        difference = max(difference, (masks - whole(batch)).abs().max().item())
    print(f"streamed {BATCHES} batches; largest difference of outputs: {difference:.3g}")

    measurement = flow.measure(torch.cat(list(images())), chunks=BATCHES, profile=profile)
    print(measurement.table())
    measurement.save_trace(options.trace)


if __name__ == "__main__":
    main()
