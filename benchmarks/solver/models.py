"""Profiles of real models, made by this project's profiler, and a cluster of unlike devices.

``python -m benchmarks.solver.models [NAME ...]`` measures them again and writes
``benchmarks/workloads/models``. The profiles keep the models' depths, channels and branches. Widths
of the transformers and sizes of images are smaller, so that a CPU can run one training step of each
layer. Each model is split into its leaves and measured with one thread and with two. Two threads
speed up some layers more than others, so the measurements stand for two types of devices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placer.schema import (
    Cluster,
    Constraints,
    Device,
    Layer,
    Link,
    PlacementRequest,
    Profile,
    TiedParameters,
)
from placer.solver.solve import solve

if TYPE_CHECKING:
    from torch import Tensor, nn

WORKLOADS = Path(__file__).parent.parent / "workloads" / "models"
FAST, SLOW = "two threads", "one thread"
PER_HOST = 4
INSIDE_BYTES_PER_S, INSIDE_LATENCY_S = 8e9, 10e-6
BETWEEN_BYTES_PER_S, BETWEEN_LATENCY_S = 1e9, 50e-6
CHUNKS = 8
PLENTY_BYTES = 2**50
_DIGITS = 4
_TIMES = ("forward_ms", "backward_ms", "optimizer_ms")


@dataclass(frozen=True)
class Model:
    """A model to profile.

    Attributes:
        label: its name with its sizes.
        make: makes the model on the current default device.
        inputs: makes the inputs of one micro-batch.
    """

    label: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]


def _models() -> dict[str, Model]:
    """Return the models by name.

    Only measuring calls this function, because everything else here needs no torch.
    """
    import torch

    from placer import zoo

    from ..profiler.models import inception

    def images(count: int, size: int) -> Callable[[], Tensor]:
        return lambda: torch.randn(count, 3, size, size)

    def tokens(count: int, length: int, vocabulary: int) -> Callable[[], Tensor]:
        return lambda: torch.randint(vocabulary, (count, length))

    return {
        "resnet50": Model("ResNet-50, 4 images of 128 pixels", zoo.resnet50, images(4, 128)),
        "unet": Model("U-Net, 1 image of 128 pixels", zoo.unet, images(1, 128)),
        "inception": Model("Inception-v3, 4 images of 139 pixels", inception, images(4, 139)),
        "gpt2": Model(
            "GPT-2 of 12 blocks, 2 sequences of 128",
            lambda: zoo.gpt(context=128, tied=True),
            tokens(2, 128, 50257),
        ),
        "llama": Model(
            "Llama of 80 blocks, width 1024, 2 sequences of 128",
            lambda: zoo.llama(layers=80, width=1024, heads=8, key_heads=1, hidden=3584),
            tokens(2, 128, 32000),
        ),
        "mixtral": Model(
            "Mixtral of 32 blocks, width 256, 1 sequence of 64", _mixtral, tokens(1, 64, 32000)
        ),
    }


def _mixtral() -> nn.Module:
    """Return Mixtral 8x7B's depth, experts and heads at a sixteenth of its width.

    Its experts are one captured operation.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=256,
        intermediate_size=896,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    make: Callable[..., nn.Module] = MixtralForCausalLM._from_config
    return make(config, experts_implementation="batched_mm")


def names() -> list[str]:
    """Return the names of the models with a profile."""
    return sorted(path.stem for path in WORKLOADS.glob("*.json"))


def profile(name: str) -> Profile:
    """Return the profile of a model, as measured."""
    return Profile.model_validate_json((WORKLOADS / f"{name}.json").read_text())


def request(name: str, **asked: object) -> PlacementRequest:
    """Return a training request for a model on ``cluster``.

    Args:
        name: the name of the model.
        asked: further fields of the request.
    """
    measured = profile(name)
    content = {
        "profile": measured,
        "cluster": cluster(measured),
        "chunks": CHUNKS,
        "schedule": "1f1b",
        **asked,
    }
    return PlacementRequest.model_validate(content)


def alike(name: str, **asked: object) -> PlacementRequest:
    """Return the same on eight slow devices of one host, where memory never binds.

    Args:
        name: the name of the model.
        asked: further fields of the request.
    """
    names = [f"device:{index}" for index in range(2 * PER_HOST)]
    devices = tuple(Device(name=one, type=SLOW, memory_bytes=PLENTY_BYTES) for one in names)
    links = tuple(_link(a, b, inside=True) for a, b in permutations(names, 2))
    return request(name, **{**asked, "cluster": Cluster(devices=devices, links=links)})


def split(name: str, **asked: object) -> PlacementRequest:
    """Return the same where tied embeddings may be on two devices, each with a copy.

    Args:
        name: the name of a model with tied embeddings.
        asked: further fields of the request.
    """
    together = alike(name, **asked)
    (group,) = together.profile.colocated
    (shared,) = (
        layer.grad_bytes
        for layer in together.profile.layers
        if layer.name in group and layer.grad_bytes
    )
    tied = TiedParameters(layers=group, gradient_bytes=shared)
    return together.model_copy(
        update={"profile": together.profile.model_copy(update={"tied": (tied,)}).untied()}
    )


def roomy(name: str, **asked: object) -> PlacementRequest:
    """Return the same where memory never binds.

    Args:
        name: the name of the model.
        asked: further fields of the request.
    """
    limited = request(name, **asked)
    devices = [
        device.model_copy(update={"memory_bytes": PLENTY_BYTES})
        for device in limited.placed_on.devices
    ]
    return request(
        name,
        **{**asked, "cluster": limited.placed_on.model_copy(update={"devices": tuple(devices)})},
    )


def tight(name: str, share: float, recompute: str, **asked: object) -> PlacementRequest:
    """Return the same on devices that hold only a share of the largest stage's memory.

    Args:
        name: the name of the model.
        share: the available part of the largest stage's memory.
        recompute: whether devices may recompute, as ``Constraints`` takes it.
        asked: further fields of the request.
    """
    plenty = request(name, **asked)
    largest = max(load.memory.total_bytes for load in solve(plenty).devices)
    limited = [
        device.model_copy(update={"memory_bytes": int(share * largest)})
        for device in plenty.placed_on.devices
    ]
    of_share = plenty.placed_on.model_copy(update={"devices": tuple(limited)})
    return request(
        name, **{**asked, "cluster": of_share, "constraints": Constraints(recompute=recompute)}
    )


def cluster(measured: Profile) -> Cluster:
    """Return eight unlike devices on two hosts, four on each host.

    The devices of the first host have the fast type, the devices of the second the slow type and
    1.5 times the memory. Links inside a host have 8 GB/s and 10 us, links between hosts 1 GB/s and
    50 us. A fast device holds an eighth of the model's memory with all micro-batches in flight
    everywhere, plus the largest group of layers that must be together. Under 1F1B memory binds,
    mostly at the first stages.
    """
    needs = _needs(measured)
    room = sum(needs.values()) // (2 * PER_HOST) + _largest(measured, needs)
    kinds = {f"host{host}/device:{index}": host for host in (0, 1) for index in range(PER_HOST)}
    return Cluster(
        devices=tuple(
            Device(
                name=name,
                type=SLOW if host else FAST,
                memory_bytes=room * 3 // 2 if host else room,
                host=f"host{host}",
            )
            for name, host in kinds.items()
        ),
        links=tuple(_link(a, b, kinds[a] == kinds[b]) for a, b in permutations(kinds, 2)),
    )


def _needs(measured: Profile) -> dict[str, int]:
    """Return, by layer, its state and the activations of all micro-batches, in bytes."""
    needs = {
        layer.name: layer.param_bytes
        + layer.grad_bytes
        + layer.optimizer_bytes
        + layer.buffer_bytes
        + CHUNKS * layer.saved_bytes
        + layer.backward_workspace_bytes
        for layer in measured.layers
    }
    for edge in measured.edges:
        for keeper in edge.saved_by[:1]:
            needs[keeper] += CHUNKS * edge.bytes
    return needs


def _largest(measured: Profile, needs: dict[str, int]) -> int:
    together = [sum(needs[name] for name in group) for group in measured.colocated]
    return max([*needs.values(), *together])


def _link(source: str, target: str, inside: bool) -> Link:
    return Link(
        source=source,
        target=target,
        bandwidth_bytes_per_s=INSIDE_BYTES_PER_S if inside else BETWEEN_BYTES_PER_S,
        latency_s=INSIDE_LATENCY_S if inside else BETWEEN_LATENCY_S,
    )


def measure(name: str) -> Profile:
    """Measure a model again, with one thread and with two."""
    import torch

    from placer import profile as profiled

    model = _models()[name]
    with torch.device("meta"):
        made = model.make()
    found = []
    for kind, threads in ((FAST, 2), (SLOW, 1)):
        torch.set_num_threads(threads)
        of_kind = profiled(
            made,
            model.inputs(),
            1,
            granularity="fine",
            optimizer="adam",
            repeats=5,
            cache=False,
            progress=False,
        )
        found.append(_small(of_kind, kind))
    return _merged(found, model.label)


def _small(measured: Profile, kind: str) -> Profile:
    """Return the parts of a profile that a placement needs, with its device type renamed."""

    def layer(old: Layer) -> dict[str, Any]:
        times = {
            field: dict.fromkeys([kind], _short(ms))
            for field in _TIMES
            for ms in getattr(old, field).values()
        }
        return {
            "module": old.module.rpartition(".")[2],
            "host_ms": {},
            "spread": {},
            "weight_grad_ms": {},
        } | times

    layers = tuple(old.model_copy(update=layer(old)) for old in measured.layers)
    return measured.model_copy(update={"layers": layers, "cluster": None})


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _merged(found: list[Profile], label: str) -> Profile:
    from placer.profiler.merge import merge_profiles

    return merge_profiles(*found).model_copy(update={"model": label})


def main() -> None:
    """Measure and write the named models, or all."""
    WORKLOADS.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or _models():
        text = measure(name).to_json()
        (WORKLOADS / f"{name}.json").write_text(text + "\n")
        print(f"{name}: {len(text)} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
