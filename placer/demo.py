"""The demo: profile, place through the service, split, and compare with the unsplit model.

model ─▶ profile ─▶ POST /v1/placements ─▶ update_flow ─▶ training step ─┐
  └─▶ deepcopy ─────────────────────────────────────────▶ training step ─┴─▶ largest differences
"""

from __future__ import annotations

import copy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import IO

import httpx
from rich.console import Console

from placer.errors import PlacerError, UnreachableError
from placer.report.explain import table
from placer.schema import Cluster, Constraints, Placement, PlacementRequest, Profile
from placer.utils.extras import extra
from placer.utils.units import bytes_text
from placer_client.client import Client

with extra("torch"):
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    from placer import testing
    from placer.executor.dataflow import DataFlow
    from placer.profiler.profile import profile
    from placer.zoo import resnet18, resnet50, unet

STAND_INS = 4
TOLERANCE = 1e-4
"""Largest difference that counts as equal, as a share of the largest compared value.

It allows for float32 sums in another order."""

START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Job:
    """A model and a batch to train it with.

    Attributes:
        title: for people.
        make: the model.
        images: shape of the batch, ``(N, 3, H, W)``.
        labels: shape of the classes that are the target: ``(N,)``, or ``(N, H, W)`` for
            segmentation.
        classes: how many there are.
    """

    title: str
    make: Callable[[], nn.Module]
    images: tuple[int, ...]
    labels: tuple[int, ...]
    classes: int

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return images and labels, the same at every call."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(self.images, generator=generator)
        return images, torch.randint(self.classes, self.labels, generator=generator)


@dataclass(frozen=True)
class Step:
    """What one training step gave, on the CPU.

    Attributes:
        output: of the model.
        gradients: by parameter.
    """

    output: Tensor
    gradients: dict[str, Tensor]


def jobs(quick: bool, cuda: bool) -> list[Job]:
    """Return the models to show.

    Args:
        quick: smaller models, for a test.
        cuda: whether there are GPUs, so that images can have their usual size.
    """
    batch, size = (16, 224) if cuda else (8, 64)
    if quick:
        return [
            Job("ResNet-18", resnet18, (4, 3, 32, 32), (4,), 1000),
            Job("U-Net of width 8", lambda: unet(width=8), (2, 3, 32, 32), (2, 32, 32), 2),
        ]
    return [
        Job("ResNet-50", resnet50, (batch, 3, size, size), (batch,), 1000),
        Job("U-Net", unet, (batch // 4, 3, size, size), (batch // 4, size, size), 2),
    ]


def run(quick: bool = False) -> bool:
    """Run the demo, and return whether every split model agreed with its unsplit copy.

    Args:
        quick: smaller models and images.
    """
    console = Console()
    cuda = torch.cuda.is_available()
    count = torch.cuda.device_count() if cuda else STAND_INS
    names = [f"{'cuda' if cuda else 'cpu'}:{index}" for index in range(count)]
    kind = "GPUs" if cuda else "CPU stand-ins, each with a memory limit that forces a split"
    console.print(f"[bold]Placer demo[/] on {count} {kind}")
    with _service(console) as url, Client(url) as client:
        console.print(f"service: {url}\n")
        agreed = [_show(job, names, client, console) for job in jobs(quick, cuda)]
    console.print(
        "every split model agrees with its unsplit copy"
        if all(agreed)
        else "[bold red]a model disagrees"
    )
    return all(agreed)


def _show(job: Job, names: list[str], client: Client, console: Console) -> bool:
    torch.manual_seed(0)
    model = job.make()
    images, _ = job.batch()
    console.print(f"[bold]{job.title}[/], training on batches of shape {tuple(images.shape)}")
    measured = profile(model, images, devices=names, training=True, progress=sys.stderr.isatty())
    with console.status("asking the service"):
        placement = _place(measured, names, client, console)
    console.print(table(placement))
    # TF32 and atomic sums differ even between two runs of the same model.
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
    with exact, console.status("one training step, unsplit and split"):
        whole = _unsplit_step(copy.deepcopy(model), job, names[0])
        split = _split_step(model, job, placement, names)
    return _compare(whole, split, console)


def _place(measured: Profile, names: list[str], client: Client, console: Console) -> Placement:
    cluster = measured.cluster
    assert cluster is not None  # profile() measures the devices
    if names[0].startswith("cpu"):
        cluster = _halved(measured, cluster, client, console)
    return client.place(PlacementRequest(profile=measured, cluster=cluster))


def _halved(measured: Profile, cluster: Cluster, client: Client, console: Console) -> Cluster:
    """Return the cluster with half of the memory that the model needs on one device."""
    alone = Constraints(max_devices=1)
    whole = client.place(PlacementRequest(profile=measured, cluster=cluster, constraints=alone))
    if not whole.devices:
        raise PlacerError(
            f"the demo's model does not fit into this machine's memory: {whole.infeasible}"
        )
    needed = max(load.memory.total_bytes for load in whole.devices)
    console.print(
        f"on one device it needs {bytes_text(needed)}; each stand-in may use half of that"
    )
    limit = {"memory_bytes": needed // 2, "reserve_bytes": 0}
    return cluster.model_copy(
        update={"devices": tuple(d.model_copy(update=limit) for d in cluster.devices)}
    )


def _unsplit_step(model: nn.Module, job: Job, device: str) -> Step:
    images, labels = job.batch()
    where = torch.device(device)
    return _step(model.to(where), model, images.to(where), labels.to(where))


def _split_step(model: nn.Module, job: Job, placement: Placement, names: list[str]) -> Step:
    """Return the same step under the placement.

    On stand-ins, an operation across two devices raises an error, as on GPUs.
    """
    on_cpu = names[0].startswith("cpu")
    logical: AbstractContextManager[object] = (
        testing.logical_devices(len(names)) if on_cpu else nullcontext()
    )
    with logical:
        flow = DataFlow(model, device_ids=list(names))
        flow.update_flow(placement)
        images, labels = job.batch()
        return _step(flow, model, images, labels)


def _step(run: nn.Module, model: nn.Module, images: Tensor, labels: Tensor) -> Step:
    torch.manual_seed(1)  # for dropout, the same in both
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    output: Tensor = run(images)
    loss: Tensor = functional.cross_entropy(output, labels.to(output.device))
    torch.autograd.backward(loss)
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    kept = {name: gradient.detach().cpu().clone() for name, gradient in gradients.items()}
    optimizer.step()
    return Step(output.detach().cpu(), kept)


def _compare(whole: Step, split: Step, console: Console) -> bool:
    console.print("one training step, split against unsplit:")
    agreed = split.gradients.keys() == whole.gradients.keys()
    pairs = {
        "outputs": [(whole.output, split.output)],
        "gradients": [
            (whole.gradients[name], split.gradients[name]) for name in whole.gradients if agreed
        ],
    }
    for what, compared in pairs.items():
        difference = max((float((a - b).abs().max()) for a, b in compared), default=float("nan"))
        scale = max((float(a.abs().max()) for a, _ in compared), default=0.0)
        equal = difference <= TOLERANCE * scale  # False for NaN
        agreed = agreed and equal
        verdict = "[green]agree" if equal else "[bold red]DISAGREE"
        console.print(
            f"  largest difference of {what:9} {difference:.3g}, of values up to {scale:.3g}:"
            f" {verdict}"
        )
    console.print()
    return agreed


@contextmanager
def _service(console: Console) -> Iterator[str]:
    """Run the service in a process of its own, on a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "placer", "serve", "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--database", ":memory:"], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            with console.status("starting the service"):
                _wait_until_ready(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: IO[str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/readyz", trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    log.seek(0)
    raise UnreachableError(f"the service did not start: {log.read()[-1000:] or 'no output'}")
