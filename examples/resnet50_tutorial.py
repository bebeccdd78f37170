"""ResNet-50 split over two devices, timed and drawn as in PyTorch's model-parallel tutorial.

python examples/resnet50_tutorial.py --out plots                on two GPUs: the tutorial's sizes
python examples/resnet50_tutorial.py --out plots --quick        anywhere: few, small images
python examples/resnet50_tutorial.py --out plots --no-quick     the tutorial's sizes anywhere: slow

Without two GPUs, the default is --quick. The first picture compares one device with the split
model, plain and with micro-batches. The second shows time against the split size. On CPU stand-ins
both halves share the same cores, so the split cannot be faster there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn

import placer
from placer.zoo import resnet50

matplotlib.use("Agg")
from matplotlib import pyplot

Run = Callable[[Tensor], Tensor]


def halves(model: nn.Module) -> dict[str, int]:
    """Return the tutorial's map: up to layer2 on the first device, the rest on the second."""
    names = [name for name, _ in model.named_children()]
    border = names.index("layer3")
    return {name: int(index >= border) for index, name in enumerate(names)}


def split_model(names: list[str], classes: int) -> placer.DataFlow:
    model = resnet50(classes)
    flow = placer.DataFlow(model, device_ids=names)
    flow.layer_gpus.update(halves(model))
    flow.update_flow()
    return flow


def train(run: Run, parameters: list[nn.Parameter], batches: list[tuple[Tensor, Tensor]]) -> None:
    """Take a step for each batch.

    The loss is the mean squared error to the label as a one-hot row, as in the tutorial.
    """
    optimizer = torch.optim.SGD(parameters, lr=0.001)
    for images, labels in batches:
        optimizer.zero_grad()
        outputs = run(images)
        nn.functional.mse_loss(outputs, labels.to(outputs.device)).backward()
        optimizer.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def times_s(
    run: Run, parameters: list[nn.Parameter], batches: list[tuple[Tensor, Tensor]], repeats: int
) -> list[float]:
    """Return the time of each repetition, in seconds, after a warm-up."""
    train(run, parameters, batches[:1])
    measured = []
    for _ in range(repeats):
        begin = time.perf_counter()
        train(run, parameters, batches)
        measured.append(time.perf_counter() - begin)
    return measured


def bars(measured: dict[str, list[float]], path: Path) -> None:
    means = [statistics.mean(times) for times in measured.values()]
    spreads = [statistics.stdev(times) if len(times) > 1 else 0.0 for times in measured.values()]
    figure, axes = pyplot.subplots(figsize=(5, 4))
    axes.bar(list(measured), means, yerr=spreads, capsize=8, color="tab:blue", alpha=0.7)
    axes.set_ylabel("ResNet-50 execution time (s)")
    axes.yaxis.grid(True, alpha=0.4)
    figure.savefig(path, bbox_inches="tight", dpi=120)
    pyplot.close(figure)


def curve(measured: dict[int, list[float]], path: Path) -> None:
    means = [statistics.mean(times) for times in measured.values()]
    spreads = [statistics.stdev(times) if len(times) > 1 else 0.0 for times in measured.values()]
    figure, axes = pyplot.subplots(figsize=(5, 4))
    axes.errorbar(list(measured), means, yerr=spreads, marker="o", capsize=4)
    axes.set_xlabel("pipeline split size (images)")
    axes.set_ylabel("ResNet-50 execution time (s)")
    axes.yaxis.grid(True, alpha=0.4)
    figure.savefig(path, bbox_inches="tight", dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the two pictures")
    on_gpus = torch.cuda.device_count() > 1
    quick = argparse.BooleanOptionalAction
    parser.add_argument("--quick", action=quick, default=not on_gpus, help="few, small images")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    size, batch, count, repeats, classes = (
        (32, 4, 1, 1, 10) if options.quick else (128, 120, 3, 10, 1000)
    )
    split_sizes = [2, 4] if options.quick else [1, 3, 5, 8, 10, 12, 20, 40, 60]

    torch.manual_seed(0)
    rows = torch.nn.functional.one_hot(torch.randint(classes, (count, batch)), classes).float()
    batches = [(torch.randn(batch, 3, size, size), labels) for labels in rows]
    names = ["cuda:0", "cuda:1"] if on_gpus else ["cpu:0", "cpu:1"]
    whole = resnet50(classes).to(names[0])
    single = times_s(
        lambda images: whole(images.to(names[0])), list(whole.parameters()), batches, repeats
    )

    # On stand-ins, logical_devices raises where tensors of two devices meet, as GPUs would; its
    # checks take time too.
    with nullcontext() if on_gpus else placer.testing.logical_devices(2):
        flow = split_model(names, classes)
        parameters = list(flow.parameters())
        split = times_s(flow, parameters, batches, repeats)
        by_size = {
            images: times_s(
                lambda x, n=batch // images: flow(x, chunks=n), parameters, batches, repeats
            )
            for images in split_sizes
        }
    best = min(by_size, key=lambda images: statistics.mean(by_size[images]))
    bars(
        {"one device": single, "split": split, f"split, {best} a time": by_size[best]},
        options.out / "one_or_split.png",
    )
    curve(by_size, options.out / "split_size.png")
    print(f"one device: {statistics.mean(single):.3f} s; split: {statistics.mean(split):.3f} s")
    print(f"micro-batches of {best} images: {statistics.mean(by_size[best]):.3f} s")
    print(f"wrote {options.out / 'one_or_split.png'} and {options.out / 'split_size.png'}")


if __name__ == "__main__":
    main()
