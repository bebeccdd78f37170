"""Models whose state, calls or operations make splitting hard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Skips, TiedTokens
from splitting import assert_same, assert_split_equals_unsplit, scatter_layers, step, twins
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from placer import DataFlow
from placer.testing import logical_devices

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)
MODES = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.between, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.shared(self.between(self.relu(self.shared(x)))))


class NormCalledTwice(nn.Module):
    """Running statistics that two calls change one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(self.norm(x)))


class TiedLinears(nn.Module):
    """One weight in three modules, transposed in one of them, and a tied bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.second.bias = self.first.bias
        self.third.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return functional.linear(y, self.first.weight.t())


class OnTheRoot(nn.Module):
    """Parameters and buffers of the root itself, used before, between and after its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.table = nn.Parameter(torch.randn(6, 4))
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]), persistent=False)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.table) * self.scale
        x = self.first(x) * self.mask + self.shift
        return self.second(x) * self.scale + self.table[0]


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).requires_grad_(False)
        self.head = nn.Linear(4, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class Counter(nn.Module):
    """A buffer that the model changes in place, one that it replaces' data of, and one that only reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.first(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.detach().mean(dim=0), alpha=0.1)
        return self.second(y - self.average) * self.calls


class SharedBuffer(nn.Module):
    """A buffer that several layers read and one changes."""

    class Reader(nn.Module):
        def __init__(self, table: Tensor) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("table", table)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + self.table

    def __init__(self) -> None:
        super().__init__()
        table = torch.ones(4, dtype=torch.float64)
        self.readers = nn.ModuleList(self.Reader(table) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for reader in self.readers:
            x = reader(x)
        return x


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.narrow, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow.bfloat16()(self.first(x).bfloat16())
        return self.last(y.double())


class AutocastInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.second(y)
            with torch.autocast("cpu", enabled=False):
                y = torch.tanh(y.float())
            z = y @ y.t()
        return self.third(y) + z.float().mean()


class NoGradInside(nn.Module):
    """A no_grad region over several layers, with a grad region inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            target = self.second(y)
            with torch.enable_grad():
                kept = self.third(target)
            target = torch.tanh(self.last(target))
        return self.last(y) * target + kept


class DetachInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.third(self.second(y.detach()) + y)


class InPlace(nn.Module):
    """Values overwritten after others have read them, and read after they were overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * 1.0
        before = y + 0.0
        self.relu(y)
        z = self.second(y)
        z = z * 1.0
        z += before
        z[:, 0] = y[:, 1]
        return self.third(z) + y


class WrittenThroughViews(nn.Module):
    """One layer writes, through views, to what another layer made; a third one reads the whole."""

    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, table: Tensor, row: int, x: Tensor) -> None:
            table[row].copy_(self.linear(x))
            table.narrow(1, 0, 2).mul_(0.5)

    def __init__(self) -> None:
        super().__init__()
        self.make, self.writer, self.other, self.last = nn.Linear(4, 4), self.Writer(), self.Writer(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        table = self.make(x) * 1.0
        self.writer(table, 1, x[0])
        middle = table.clone()
        self.other(table, 2, x[1])
        return self.last(table) + middle


class Swaps(nn.Module):
    """Outputs chunked, swapped and stacked over modules (ShuffleNet's pattern), with an in-place list of results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        results = []
        for layer in self.layers:
            left, right = right, layer(left)
            results.insert(0, right)
        return torch.stack(results, dim=1).flatten(1)


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.first(x), 0.5, self.training)
        x = x + torch.rand_like(x)
        return functional.dropout(self.second(x), 0.5, self.training)


class NoModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class UnusedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def _normed(norm: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh(), norm(nn.Linear(4, 2)))


AWKWARD: dict[str, Callable[[], nn.Module]] = {
    "called_twice": CalledTwice,
    "norm_called_twice": NormCalledTwice,
    "tied_linears": TiedLinears,
    "on_the_root": OnTheRoot,
    "frozen": Frozen,
    "counter": Counter,
    "shared_buffer": SharedBuffer,
    "no_grad_inside": NoGradInside,
    "detach_inside": DetachInside,
    "in_place": InPlace,
    "written_through_views": WrittenThroughViews,
    "swaps": Swaps,
    "functional_dropout": FunctionalDropout,
    "unused_layer": UnusedLayer,
    "old_weight_norm": _normed(nn.utils.weight_norm),
    "old_spectral_norm": _normed(nn.utils.spectral_norm),
    "weight_norm": _normed(nn.utils.parametrizations.weight_norm),
    "spectral_norm": _normed(nn.utils.parametrizations.spectral_norm),
    "instance_norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, affine=True, track_running_stats=True), nn.Flatten()
    ),
}


@MODES
@pytest.mark.parametrize("name", AWKWARD)
def test_split_equals_unsplit(name: str, training: bool) -> None:
    assert_split_equals_unsplit(AWKWARD[name], (X,), training=training)


@MODES
def test_tied_embeddings_equal_unsplit(training: bool) -> None:
    assert_split_equals_unsplit(TiedTokens, (torch.tensor([[1, 2], [0, 6]]),), training=training)


def test_a_model_without_modules_runs_on_the_output_device() -> None:
    model, reference = twins(NoModules)
    with logical_devices(2):
        flow = DataFlow(model, output_device=1)
        flow.update_flow()
        split = step(flow, model, (X,), {})
        assert model.weight.device == torch.device("cpu:1")
    assert_same(split, step(reference, reference, (X,), {}))


@pytest.mark.parametrize("seed", range(8))
def test_complex_skips_over_many_devices(seed: int) -> None:
    model, reference = twins(lambda: Skips(layers=7, features=4))
    with logical_devices(6):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 6, seed)
        split = step(flow, model, (X,), {})
    assert_same(split, step(reference, reference, (X,), {}))


def test_tied_parameters_stay_one_object_and_one_gradient_when_their_layers_are_apart() -> None:
    model, reference = twins(TiedTokens)
    tokens = torch.tensor([[1, 2], [0, 6]])
    with logical_devices(3):
        flow = DataFlow(model)
        flow.layer_gpus.update(embedding=0, mix=1, head=2)
        flow.update_flow()
        split = step(flow, model, (tokens,), {})
        assert model.head.weight is model.embedding.weight
    assert_same(split, step(reference, reference, (tokens,), {}))


@pytest.mark.parametrize("make", [MixedDtypes, AutocastInside])
def test_mixed_dtypes_equal_unsplit(make: type[nn.Module]) -> None:
    dtype = torch.float64 if make is MixedDtypes else torch.float32
    model, reference = twins(make, dtype=dtype)
    whole = step(reference, reference, (X.to(dtype),), {})
    with logical_devices(3):
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        split = step(flow, model, (X.to(dtype),), {})
    assert [tensor.dtype for tensor in split.tensors] == [tensor.dtype for tensor in whole.tensors]
    assert_same(split, whole)


def test_autocast_around_the_flow_acts_as_around_the_model() -> None:
    model, reference = twins(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)), dtype=torch.float32
    )
    x = X.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = step(reference, reference, (x,), {})
    with logical_devices(3):
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            split = step(flow, model, (x,), {})
        outside = flow(x)
    assert split.tensors[0].dtype == torch.bfloat16
    assert outside.dtype == torch.float32
    assert_same(split, whole)


def test_no_grad_and_inference_mode_around_the_flow_keep_no_graph() -> None:
    model, reference = twins(Skips)
    x = X[:, :4].repeat(1, 2)[:, :5]
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3)
        with torch.no_grad():
            quiet = flow(x)
        assert not quiet.requires_grad
        assert flow(x).requires_grad
        with torch.inference_mode():
            inference = flow(x)
        assert inference.is_inference()
    with torch.no_grad():
        torch.testing.assert_close(quiet, reference(x), atol=1e-10, rtol=1e-10)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 4)) for _ in range(3)
        )
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def test_gradient_checkpointing_inside_the_model_gives_the_same_gradients() -> None:
    assert_split_equals_unsplit(lambda: Checkpointed(use_reentrant=False), (X,))


def test_a_reentrant_checkpoint_is_not_captured_since_a_graph_would_train_nothing_after_it() -> None:
    # Captured, everything behind the checkpoint stood in a no_grad region that never ended.
    model, reference = twins(lambda: Checkpointed(use_reentrant=True))
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus["stem"] = 1
        flow.update_flow()
        torch.manual_seed(1)
        y = flow(X)
        assert "reentrant checkpoint" in flow.not_captured_because or "CheckpointFunction" in flow.not_captured_because
    torch.manual_seed(1)
    torch.testing.assert_close(y.detach(), reference(X).detach(), atol=1e-10, rtol=1e-10)


def test_a_reentrant_checkpoint_over_two_devices_runs_again_on_both_in_the_backward_pass() -> None:
    # The hooks were gone when the backward pass ran the blocks again, and their inputs stayed where they were.
    model, reference = twins(lambda: Checkpointed(use_reentrant=True))
    x = X.clone().requires_grad_()
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus["stem"] = 1
        flow.update_flow()
        split = step(flow, model, (x,), {})
        flow.undo()
    assert_same(split, step(reference, reference, (x,), {}))
    assert not any(child._forward_pre_hooks for child in model.modules())


def test_forward_hooks_of_the_user_run_on_every_call() -> None:
    model, reference = twins(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    seen: list[Any] = []
    handle = model[0].register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape)))
    model[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    reference[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    with logical_devices(3):
        flow = DataFlow(model)
        flow.layer_gpus.update({"0": 0, "1": 1, "2": 2})
        flow.update_flow()
        split = step(flow, model, (X,), {})
        flow(X)
        assert seen == [(6, 4), (6, 4)]
        assert "hooks" in flow.not_captured_because
        handle.remove()
        flow(X)
        assert len(seen) == 2
    assert_same(split, step(reference, reference, (X,), {}))


def test_backward_hooks_of_the_user_run() -> None:
    model, _ = twins(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    seen = []
    model[0].register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(grad_output[0].shape))
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update({"0": 0, "1": 1, "2": 0})
        flow.update_flow()
        flow(X).sum().backward()
    assert seen == [torch.Size([6, 4])]


def test_parameter_hooks_run_on_the_parameter_itself() -> None:
    model, reference = twins(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    for module in (model, reference):
        module[0].weight.register_hook(lambda gradient: gradient * 3)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update({"0": 1, "1": 0})
        flow.update_flow()
        split = step(flow, model, (X,), {})
    assert_same(split, step(reference, reference, (X,), {}))
