"""Operations that hold graphs of their own, and those inside torch.func: each is in one layer, and
runs split."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from covering import named
from splitting import CapturedOnce, assert_same, assert_split_equals, scatter_layers, step, twins
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.autograd import forward_ad

from placer import DataFlow, PlacementRequest, capture_graph, profile, solve
from placer.capture.export import nested_ops
from placer.capture.export.export import export
from placer.executor.training.training_pipeline import Order
from placer.testing import logical_devices

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)


class ChoosesOperations(_Base):
    """The branches make tensors on the device that they run on, and give two results."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)

        def one(y: Tensor) -> tuple[Tensor, Tensor]:
            return y.sin(), y * torch.arange(4, dtype=y.dtype, device=y.device)

        def other(y: Tensor) -> tuple[Tensor, Tensor]:
            return y.cos(), y * torch.full((4,), 3.0, dtype=y.dtype, device=y.device)

        left, right = torch.cond(y.sum() > 0, one, other, (y,))
        return self.third(left) + self.second(right)


class ChoosesModules(_Base):
    """The branches call modules, one of which has a place of its own in the model, and read an
    attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = torch.cond(
            y.sum() > 0,
            lambda y: self.second(y) * self.scale,
            lambda y: torch.tanh(self.third(y)),
            (y,),
        )
        return self.third(y)


class LoopsWithoutGradients(_Base):
    """A loop inside a region of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            count = torch.zeros((), dtype=torch.int64, device=y.device)
            _, z = while_loop(
                lambda i, z: i < 3, lambda i, z: (i + 1, torch.tanh(z) * 1.5), (count, y.detach())
            )
        return self.third(self.second(y) + z)


class Maps(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.third(map_rows(lambda row: torch.tanh(self.second(row)), self.first(x)))


class Scans(_Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)

        def recur(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(0.5 * state + row)
            return state, state * 2

        last, rows = scan(recur, torch.zeros_like(y[:, 0]), y.t(), dim=0)
        return self.third(self.second(rows.t())) + last[:, None]


class Vectorised(_Base):
    """A module in torch.vmap, and operations that read its weight."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.vmap(self.second)(self.first(x))
        return self.third(
            torch.vmap(torch.vmap(torch.sin))(y)
            + torch.vmap(lambda row: row @ self.second.weight)(y)
        )


class ForwardDerivative(_Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        value, slope = torch.func.jvp(torch.tanh, (y,), (torch.ones_like(y),))
        return self.third(self.second(value) * slope)


@torch.library.custom_op("placer_tests::scaled", mutates_args=())
def scaled(x: Tensor, scale: float) -> Tensor:
    """An operator of the user's own."""
    return x * scale


@scaled.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def _keep_scale(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, float], output: Tensor
) -> None:
    ctx.scale = inputs[1]  # type: ignore[attr-defined]


scaled.register_autograd(
    lambda ctx, gradient: (gradient * ctx.scale * 2, None), setup_context=_keep_scale
)


class OwnOperator(_Base):
    """Its backward pass is twice what its forward pass says."""

    def forward(self, x: Tensor) -> Tensor:
        return self.third(scaled(self.second(self.first(x)), 1.5))


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    """The unsplit models have torch compile their branches, and it does so a few times in a process
    and no more."""
    torch._dynamo.reset()


NESTED: list[type[nn.Module]] = [
    ChoosesOperations,
    ChoosesModules,
    LoopsWithoutGradients,
    Maps,
    Scans,
    Vectorised,
    ForwardDerivative,
    OwnOperator,
]


class _Both(CapturedOnce):
    """Both models, and what the unsplit one gives: torch compiles its branches for that, each time
    anew."""

    def __init__(self, make: type[nn.Module], training: bool) -> None:
        super().__init__(make, training)
        self.whole = cache(lambda sign: step(self.reference, self.reference, (sign * (X + 1),), {}))


@pytest.fixture(scope="module")
def both() -> Callable[[type[nn.Module], bool], _Both]:
    return cache(_Both)


@pytest.fixture(scope="module")
def gradients() -> Callable[[type[nn.Module]], list[list[Tensor]]]:
    """Of an unsplit model, for each batch of ``TRAINED``."""

    def gradients(make: type[nn.Module]) -> list[list[Tensor]]:
        _, reference = twins(make)
        found = []
        for x in TRAINED:
            reference.zero_grad()
            for part, goal in zip(x.chunk(3), X.chunk(3), strict=True):
                ((reference(part) - goal).pow(2).mean() / 3).backward()
            found.append([parameter.grad for parameter in reference.parameters()])
        return found

    return cache(gradients)


@pytest.mark.covering
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("make", named({make.__name__: make for make in NESTED}, ["Scans"]))
def test_split_equals_unsplit(
    make: type[nn.Module], training: bool, sign: int, both: Callable[[type[nn.Module], bool], _Both]
) -> None:
    kept = both(make, training)
    assert_split_equals(kept.whole(sign), kept, (sign * (X + 1),), kinds=["fine", "placement"])


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("make", NESTED)
def test_one_capture_serves_both_ways_through_the_model(
    make: type[nn.Module], both: Callable[[type[nn.Module], bool], _Both]
) -> None:
    kept = both(make, True)
    batches = (X + 1, -X - 1)
    with logical_devices(3), kept.flow() as flow:
        scatter_layers(flow, 3)
        split = [step(flow, kept.model, (x,), {}) for x in batches]
        assert len({flow.placed.captured(flow.placed.laid_out(((x,), {}))) for x in batches}) == 1
    for outcome, sign in zip(split, (1, -1), strict=True):
        assert_same(outcome, kept.whole(sign))


TRAINED = (X, -X - 1)


@pytest.mark.covering(every=5)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("make", NESTED)
def test_a_training_step_gives_the_gradients_of_the_unsplit_model(
    make: type[nn.Module],
    schedule: Order,
    both: Callable[[type[nn.Module], bool], _Both],
    gradients: Callable[[type[nn.Module]], list[list[Tensor]]],
) -> None:
    kept = both(make, True)
    with logical_devices(3), kept.flow() as flow:
        scatter_layers(flow, 3)
        train = flow.train_step(
            lambda output, target: (output - target).pow(2).mean(), schedule=schedule
        )
        found = []
        for x in TRAINED:
            train(x, X.to("cpu:0"), chunks=3)
            found.append([parameter.grad.cpu().clone() for parameter in kept.model.parameters()])
        assert flow.not_captured_because == ""
    for mine, its in zip(found, gradients(make), strict=True):
        for (path, _), ours, theirs in zip(kept.model.named_parameters(), mine, its, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10, msg=path)


@pytest.mark.covering(every=4, first=1)
@pytest.mark.parametrize("make", NESTED)
def test_a_stream_gives_what_the_unsplit_model_gives(
    make: type[nn.Module], both: Callable[[type[nn.Module], bool], _Both]
) -> None:
    kept = both(make, False)
    batches = [X + 1, -X - 1, X]
    with logical_devices(3), kept.flow() as flow:
        scatter_layers(flow, 3)
        results = [result.cpu() for result in flow.stream(batches)]
    with torch.no_grad():
        for result, batch in zip(results, batches, strict=True):
            torch.testing.assert_close(result, kept.reference(batch), atol=1e-12, rtol=1e-12)


@pytest.mark.covering(every=8)
@pytest.mark.parametrize("make", NESTED)
def test_a_profile_places_it(make: type[nn.Module]) -> None:
    model, _ = twins(make)
    measured = profile(model, X, ["cpu:0", "cpu:1"], repeats=1, cache=False, progress=False)
    assert solve(PlacementRequest(profile=measured)).layer_devices


def test_an_attribute_that_a_branch_reads_is_read_anew() -> None:
    model, reference = twins(ChoosesModules)
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        step(flow, model, (X + 1,), {})
        model.scale = reference.scale = 5.0
        split = step(flow, model, (X + 1,), {})
    assert_same(split, step(reference, reference, (X + 1,), {}))


def test_a_model_that_is_not_captured_chooses_too() -> None:
    class Converts(ChoosesOperations):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.from_numpy(x.detach().cpu().numpy()).to(x.device))

    model, reference = twins(Converts)
    # torch compiles branches under no mode like that of logical devices
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    flow.layer_gpus.update(first=1, second=1, third=0)
    flow.update_flow()
    split = step(flow, model, (X + 1,), {})
    assert flow.not_captured_because
    assert_same(split, step(reference, reference, (X + 1,), {}))
    flow.undo()
    options = {"repeats": 1, "cache": False, "progress": False}
    assert [layer.name for layer in profile(model, X, ["cpu:0"], **options).layers] == [
        "first",
        "third",
        "second",
    ]


def test_modules_inside_a_branch_are_no_layers_of_a_model_that_is_not_captured() -> None:
    class Converts(ChoosesModules):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.from_numpy(x.detach().cpu().numpy()).to(x.device))

    graph = capture_graph(Converts().double(), X)
    assert not graph.captured
    assert [layer.name for layer in graph.layers] == ["first", "third"]


def test_a_graph_of_its_own_makes_tensors_where_its_layer_runs() -> None:
    # stands for another device, which a machine without GPUs has not
    device = torch.device("meta")
    exported = export(ChoosesOperations(), (X.float(),), {})
    bodies = [
        found
        for node in exported.module.graph.nodes
        if (found := nested_ops.nested_graph(exported.module, node))
    ]
    assert len(bodies) == 2
    for body in bodies:
        there = nested_ops.graph_on_device(body, "cpu", device)
        assert all(tensor.device == device for tensor in there(torch.ones(6, 4, device=device)))
        assert there is nested_ops.graph_on_device(body, "cpu", device)
        assert body is nested_ops.graph_on_device(body, "cpu", torch.device("cpu:3"))


def test_graphs_are_told_apart_by_what_the_operations_inside_do() -> None:
    class Other(ChoosesModules):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            y = torch.cond(
                y.sum() > 0, lambda y: self.second(y) * 3, lambda y: torch.tanh(self.third(y)), (y,)
            )
            return self.third(y)

    one, again, other = (
        capture_graph(make(), X.float()).hash for make in (ChoosesModules, ChoosesModules, Other)
    )
    assert one == again != other


@pytest.mark.covering
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_tangents_pass_from_device_to_device(training: bool, chunks: int, gradients: bool) -> None:
    model, reference = twins(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), training
    )
    x = torch.randn(4, 3, dtype=torch.float64)
    tangent = torch.randn_like(x)
    expected = torch.func.jvp(reference, (x,), (tangent,))
    with logical_devices(3), torch.set_grad_enabled(gradients):
        flow = DataFlow(model)
        flow.layer_gpus.update({"0": 1, "1": 1, "2": 2})
        flow.update_flow()
        for _ in range(2):
            with forward_ad.dual_level():
                found = forward_ad.unpack_dual(
                    flow(forward_ad.make_dual(x, tangent), chunks=chunks)
                )
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(one.detach().cpu(), other.detach())
        if chunks == 1:
            for one, other in zip(torch.func.jvp(flow, (x,), (tangent,)), expected, strict=True):
                torch.testing.assert_close(one.detach().cpu(), other.detach())


@pytest.mark.parametrize(
    "transform", [torch.func.jacfwd, torch.func.jacrev, torch.func.hessian, torch.vmap]
)
def test_the_first_call_of_a_flow_may_be_in_a_transform(transform: Callable[..., Any]) -> None:
    model, reference = twins(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    flow = DataFlow(model, device_ids=["cpu:0", "cpu:1"])
    flow.layer_gpus["2"] = "cpu:1"
    flow.update_flow()
    x = torch.randn(2, 3, dtype=torch.float64)
    torch.testing.assert_close(transform(flow)(x), transform(reference)(x))


def test_vmap_of_a_flow_sees_that_two_inputs_share_memory() -> None:
    class Writes(_Base):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            return self.third(self.first(x) + y)

    model, reference = twins(Writes, training=False)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(3, 2, 4)
    other_x = x.clone()
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model)
        flow.layer_gpus.update(first=0, third=1)
        flow.update_flow()
        torch.testing.assert_close(
            torch.vmap(flow)(x, x).cpu(), torch.vmap(reference)(other_x, other_x)
        )
        torch.testing.assert_close(x, other_x)


def test_after_a_failure_inside_torch_func_other_work_goes_on() -> None:
    # The level that vmap had begun stayed, and every later vmap stood inside it.
    class Fails(_Base):
        def forward(self, x: Tensor) -> Tensor:
            rows = torch.vmap(lambda row, index: row.gather(0, index))(self.first(x), x.long())
            return self.third(rows)

    model, reference = twins(Fails, training=False)
    good = torch.ones(6, 4, dtype=torch.float64)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update(first=0, third=1)
        flow.update_flow()
        flow(good)
        with pytest.raises(Exception, match="layer"):
            flow(good * 100)
        assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
        torch.testing.assert_close(flow(good).detach().cpu(), reference(good).detach())


def test_a_result_of_a_layer_is_written_to_through_views_in_a_step_with_halves() -> None:
    # Of inputs of three dimensions a linear layer gives a view of a product, and as one of a
    # function of Placer's own.
    class Divides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).view(*x.shape[:2], 2, 2).permute(0, 2, 1, 3)
            y /= 2.0
            z = self.second(y.permute(0, 2, 1, 3).flatten(2))
            z[:, 0] *= 3.0
            return z

    model, _ = twins(Divides)
    reference = copy.deepcopy(model)
    x = X.reshape(3, 2, 4)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update(first=0, second=1)
        flow.update_flow()
        train = flow.train_step(
            lambda output, target: (output - target).pow(2).mean(), schedule="zero-bubble"
        )
        train(x, x.to("cpu:0"), chunks=3)
    (reference(x) - x).pow(2).mean().backward()
    for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), its.grad, atol=1e-12, rtol=1e-12)
