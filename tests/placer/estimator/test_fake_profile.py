"""Estimates against closed forms, and against what real runs on the CPU record."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import placer
from placer.capture import capture_graph
from placer.capture.serialization import to_wire
from placer.devices import CPU, type_name
from placer.estimator import fake_layers
from placer.estimator.fake_profile import estimated_graph_profile, estimated_profile
from placer.profiler.memory import LayerMemory, measure_memory
from placer.profiler.trial import Trial
from placer.schema import Cluster, Device, Link, ProfileOptions

WIDTH, BATCH, LENGTH, HEADS = 32, 4, 8, 2
TIMES = {"forward_ms", "backward_ms", "weight_grad_ms", "optimizer_ms", "host_ms", "spread"}


def _cluster(kind: str | None = None, count: int = 1) -> Cluster:
    kind = kind or type_name(torch.device(CPU))
    names = [f"cuda:{index}" for index in range(count)]
    return Cluster(
        devices=tuple(
            Device(name=name, type=kind, memory_bytes=24 * 2**30, host="gpus") for name in names
        ),
        links=tuple(
            Link(source=a, target=b, bandwidth_bytes_per_s=1e10)
            for a in names
            for b in names
            if a != b
        ),
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        query, key, value = self.qkv(self.norm(x)).view(shape).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return x + self.dropout(mixed)


class Tied(nn.Module):
    """A language model whose head has the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(50, WIDTH), Attention()
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(self.embedding(tokens)))
        return logits


class Recomputed(nn.Module):
    """Two equal parts, the first of which runs again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _mlp(), _mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.first, x, use_reentrant=False)
        return self.second(y)  # type: ignore[no-any-return]


class Skipped(nn.Module):
    """A concatenation whose gradients are slices, and an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu_()
        y: Tensor = self.last(torch.cat([x, self.second(x)], 1))
        return y


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def _convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(5)
    )


def _images() -> Tensor:
    return torch.randn(BATCH, 3, 10, 10)


def _features() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH)


def _tokens() -> Tensor:
    return torch.zeros(BATCH, LENGTH, dtype=torch.long)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "attention and dropout": (Attention, _features),
    "tied weights": (Tied, _tokens),
    "recompute": (Recomputed, _features),
    "slices and in-place operations": (Skipped, _images),
}


def _memory(profile: placer.Profile) -> dict[str, Any]:
    """Return everything in a profile that does not depend on times or devices."""
    layers = [layer.model_dump(exclude=TIMES) for layer in profile.layers]
    return profile.model_dump(exclude={"layers", "cluster"}) | {"layers": layers}


def _measured(model: nn.Module, inputs: Any, **options: Any) -> placer.Profile:
    return placer.profile(model, inputs, 1, cache=False, progress=False, repeats=1, **options)


@pytest.mark.parametrize(
    ("name", "training"),
    [
        *((name, True) for name in MODELS),
        ("attention and dropout", False),
        *(
            pytest.param(name, False, marks=pytest.mark.exhaustive)
            for name in MODELS
            if name != "attention and dropout"
        ),
    ],
)
def test_an_estimate_equals_what_a_real_run_on_the_cpu_records(name: str, training: bool) -> None:
    make, inputs = MODELS[name]
    model = make()
    estimated = estimated_profile(model, inputs(), _cluster(), training=training)
    assert _memory(estimated) == _memory(_measured(model, inputs(), training=training))


def test_a_convolution_with_batch_normalisation_equals_its_real_run() -> None:
    model = _convolutions()
    model(_images())  # gives the lazy layer its size
    estimated = estimated_profile(model, _images(), _cluster(), ProfileOptions(granularity="fine"))
    assert _memory(estimated) == _memory(_measured(model, _images(), granularity="fine"))


def test_the_loss_counts_as_in_a_real_run() -> None:
    model, target = nn.Linear(WIDTH, 5), torch.zeros(BATCH, dtype=torch.long)
    inputs = torch.randn(BATCH, WIDTH)
    options = ProfileOptions(loss_fn=functional.cross_entropy, target=target)
    estimated = estimated_profile(model, inputs, _cluster(), options)
    measured = _measured(model, inputs, loss_fn=functional.cross_entropy, target=target)
    assert _memory(estimated) == _memory(measured)


def test_state_equals_closed_forms() -> None:
    profile = estimated_profile(_mlp(), _features(), _cluster())
    parameters = 2 * 4 * WIDTH * WIDTH + 5 * WIDTH
    assert sum(layer.param_bytes for layer in profile.layers) == 4 * parameters
    assert sum(layer.grad_bytes for layer in profile.layers) == 4 * parameters
    # Adam: two moments of each parameter, and a count of steps for each of the four tensors
    assert sum(layer.optimizer_bytes for layer in profile.layers) == 8 * parameters + 4 * 4


def test_inference_has_neither_gradients_nor_saved_bytes() -> None:
    profile = estimated_profile(_mlp(), _features(), _cluster(), training=False)
    kept = [
        (layer.grad_bytes, layer.optimizer_bytes, layer.saved_bytes) for layer in profile.layers
    ]
    assert set(kept) == {(0, 0, 0)}
    assert not any(edge.saved_by for edge in profile.edges)


@cache
def _expected() -> dict[str, Any]:
    return _memory(estimated_profile(_mlp(), _features(), _cluster()))


@pytest.mark.covering
@pytest.mark.parametrize("place", ["cpu", "meta", "fake"])
@pytest.mark.parametrize("weights", ["cpu", "meta"])
def test_inputs_and_weights_need_no_data(place: str, weights: str) -> None:
    with torch.device(weights):
        model = _mlp()
    if place == "fake":
        with FakeTensorMode():
            inputs = torch.empty(BATCH, LENGTH, WIDTH)
    else:
        inputs = torch.empty(BATCH, LENGTH, WIDTH, device=place)
    assert _memory(estimated_profile(model, inputs, _cluster())) == _expected()


def test_a_model_larger_than_the_memory_of_this_machine_is_estimated() -> None:
    width = 2**20  # 4 TiB of weights in each layer
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    profile = estimated_profile(model, torch.empty(1, width, device="meta"), _cluster())
    assert [layer.param_bytes for layer in profile.layers] == [4 * (width**2 + width)] * 2


def test_the_model_is_left_as_it_was() -> None:
    model = _convolutions()
    model(_images())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.eval()
    estimated_profile(model, _images(), _cluster("GPU"))
    assert not model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_equal_layers_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    graph = capture_graph(model, (_features(),))
    ran = []

    def counted(trial: Trial, training: bool) -> LayerMemory:
        ran.append(trial)
        return measure_memory(trial, training)

    monkeypatch.setattr(fake_layers, "measure_memory", counted)
    estimated_profile(model, _features(), _cluster())
    assert len(ran) == len({layer.signature for layer in graph.layers}) < len(graph.layers)


def test_an_estimate_on_gpus_counts_the_pieces_of_the_allocator() -> None:
    on_cpu = estimated_profile(_mlp(), _features(), _cluster())
    on_gpu = estimated_profile(_mlp(), _features(), _cluster("GPU"))
    extra = [
        gpu.backward_workspace_bytes - cpu.backward_workspace_bytes
        for gpu, cpu in zip(on_gpu.layers, on_cpu.layers, strict=True)
    ]
    assert extra == [8 * 2**20] * len(extra)


def test_the_solver_places_an_estimate_by_memory() -> None:
    profile = estimated_profile(
        nn.Sequential(*(_mlp() for _ in range(4))), _features(), _cluster("GPU", 2)
    )
    request = placer.PlacementRequest(profile=profile, objective="memory")
    assert placer.solve(request).status == "optimal"


def test_a_received_graph_has_the_estimate_of_its_model() -> None:
    model, inputs = _mlp(), _features()
    graph = to_wire(capture_graph(model, (inputs,)))
    received = estimated_graph_profile(graph, _cluster("GPU"))
    expected = estimated_profile(model, inputs, _cluster("GPU"))
    assert _memory(received) == _memory(expected)


class _Branch(nn.Linear):
    """A layer that decides by values, so that torch.export refuses it and its module is a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


def test_a_layer_that_reads_values_is_named() -> None:
    model = nn.Sequential(_mlp(), _Branch(WIDTH, WIDTH))
    with pytest.raises(placer.ProfilingError, match=r"layer '1' cannot run on fake tensors"):
        estimated_profile(model, _features(), _cluster())
