"""Weights that are more than one block of numbers: placed models are right, and all of a weight
moves with a layer."""

from __future__ import annotations

import copy
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from placed_weights import (
    CLOSE,
    adapted,
    assert_adapters_train_as_unsplit,
    assert_moves_and_comes_back,
    assert_on,
    assert_runs_as_unsplit,
    placed,
    unsplit,
)
from torch import Tensor, nn
from weight_kinds import KINDS, Around, Linear, Sparse, State, batch_of, model_of

from placer import DataFlow, devices
from placer.capture.capture import capture_graph
from placer.capture.serialization import to_wire
from placer.errors import CaptureError, InputError, PlacementError
from placer.executor.state.state_moves import move_state
from placer.profiler.profile import profile
from placer.testing import logical_devices

NO_COPY = "wrapper with a linear layer"
"""Its class implements no ``copy_``, which torch's ``load_state_dict`` needs."""


@pytest.mark.covering(every=5)
@pytest.mark.parametrize("kind", KINDS)
def test_all_that_a_layer_stores_moves_with_it_and_comes_back(kind: str) -> None:
    assert_moves_and_comes_back(KINDS[kind])


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_placed_model_gives_what_the_unsplit_model_gives(kind: str) -> None:
    assert_runs_as_unsplit(KINDS[kind])


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.captured])
def test_clones_give_what_the_unsplit_model_gives_and_follow_its_changes(kind: str) -> None:
    x = batch_of(KINDS[kind])
    with placed(KINDS[kind], enable_clone=True) as (flow, model), torch.no_grad():
        other = flow.construct_module({"0": 1, "1": 0, "2": 0})
        for result in (flow(x), flow(x, chunks=2), other(x)):
            torch.testing.assert_close(result.cpu(), unsplit(KINDS[kind]), **CLOSE)
        if kind.startswith("state in"):
            return  # constants of a graph, which no clone is told the changes of
        for layer in (model[0], model[2]):
            for tensor in KINDS[kind].stored(layer):
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.mul_(1.5)
        assert not torch.allclose(model(x), unsplit(KINDS[kind]))
        torch.testing.assert_close(flow(x).cpu(), model(x).cpu(), **CLOSE)


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.captured])
def test_clones_of_a_model_that_is_not_captured_are_refused(kind: str) -> None:
    with placed(KINDS[kind], enable_clone=True) as (flow, _), torch.no_grad():
        with pytest.raises(InputError, match="make the flow without enable_clone"):
            flow(batch_of(KINDS[kind]))


@pytest.mark.covering(every=5, first=1)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != NO_COPY])
def test_the_state_of_a_placed_model_is_loaded_into_it(kind: str) -> None:
    state = {name: value.clone() for name, value in model_of(KINDS[kind]).state_dict().items()}
    with placed(KINDS[kind]) as (flow, model), torch.no_grad():
        x = batch_of(KINDS[kind])
        flow(x)
        assert model.state_dict().keys() == state.keys()
        flow.load_state_dict(state)
        torch.testing.assert_close(flow(x).cpu(), unsplit(KINDS[kind]), **CLOSE)


@pytest.mark.covering(every=5)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_over_a_frozen_layer_train_as_in_the_unsplit_model(
    kind: str, schedule: str
) -> None:
    why = assert_adapters_train_as_unsplit(KINDS[kind], schedule)
    assert (why == "") == KINDS[kind].captured, why


def test_an_optimizers_step_after_a_move_changes_what_the_unsplit_models_would() -> None:
    kind = KINDS["wrapper"]
    model, reference = adapted(kind), adapted(kind)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, reference)]
    x = batch_of(kind)
    with logical_devices(2):
        flow = DataFlow(model)
        train = None
        for first in (0, 1):
            flow.layer_gpus.update({"0": first, "1": first, "2": 1 - first})
            flow.update_flow(optimizer=optimizers[0])
            train = train or flow.train_step(nn.functional.mse_loss, optimizer=optimizers[0])
            train(x, x, chunks=2)
        flow.undo()
    for _ in range(2):
        optimizers[1].zero_grad()
        nn.functional.mse_loss(reference(x), x).backward()
        optimizers[1].step()
    for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
        if its.requires_grad:
            torch.testing.assert_close(mine, its, **CLOSE)


def trained(layer: Any) -> nn.Sequential:
    """A layer with a weight of its own kind that requires a gradient, and a plain one."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(OrderedDict(first=layer(), act=nn.Tanh(), second=nn.Linear(16, 16)))
    (weight,) = (parameter for name, parameter in model.first.named_parameters() if name != "bias")
    weight.requires_grad_()
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "layer", [lambda: Linear(Around), lambda: Sparse("coo", False)], ids=["wrapper", "sparse"]
)
def test_such_a_weight_that_is_trained_has_the_gradient_of_the_unsplit_model(layer: Any) -> None:
    model, reference, x = trained(layer), trained(layer), batch_of(KINDS["wrapper"])
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update(first=1, act=0, second=0)
        flow.update_flow()
        train = flow.train_step(nn.functional.mse_loss)
        with pytest.warns(
            UserWarning, match=r"'first\.(weight|matrix)' is trained and not a plain tensor"
        ):
            train(x, x, chunks=2)
        mine = {name: parameter.grad.to("cpu") for name, parameter in model.named_parameters()}
    nn.functional.mse_loss(reference(x), x).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(
            mine[name].to_dense(), parameter.grad.to_dense(), **CLOSE, msg=name
        )
    found = profile(trained(layer), x, ["cpu:0"], cache=False, progress=False, repeats=1)
    assert found.layers[0].grad_bytes > 0


def test_layers_that_share_an_attached_tensor_have_a_copy_each_where_they_are() -> None:
    """Moving the shared tensor itself would take it from the other layer."""
    model: Any = model_of(KINDS["attached object"])
    code = torch.full((16, 1), 2.0)
    scales = [model[index].weight.state.scale.clone() for index in (0, 2)]
    for index, scale in zip((0, 2), scales, strict=True):
        model[index].weight.state = State(code, State(scale))
        model[index].scale_of = lambda weight: weight.state.value()
    with torch.no_grad():
        expected = model(batch_of(KINDS["attached object"]))
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model)
        flow.layer_gpus.update({"0": 0, "1": 0, "2": 1})
        flow.update_flow()
        assert_on([model[0].weight.state.scale], torch.device("cpu", 0))
        assert_on([model[2].weight.state.scale], torch.device("cpu", 1))
        assert devices.location(code) == torch.device("cpu")
        torch.testing.assert_close(
            flow(batch_of(KINDS["attached object"])).cpu(), expected, **CLOSE
        )


def test_another_name_for_the_memory_of_a_weight_remains_one_after_a_move() -> None:
    with placed(KINDS["state in an object"]) as (flow, model):
        for layer in (model[0], model[2]):
            assert layer.state.numbers.data_ptr() == layer.weight.data_ptr()
        flow.undo()
        for layer in (model[0], model[2]):
            assert layer.state.numbers.data_ptr() == layer.weight.data_ptr()


def test_an_object_that_layers_on_two_devices_share_stays_where_it_is() -> None:
    shared = SimpleNamespace(scale=torch.full((16, 1), 0.1))
    model: Any = model_of(KINDS["state in an object"])
    for index in (0, 2):
        shared.numbers = model[index].state.numbers
        model[index].state = shared
    x = batch_of(KINDS["state in an object"])
    with torch.no_grad():
        expected = model(x)
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model)
        flow.layer_gpus.update({"0": 0, "1": 0, "2": 1})
        flow.update_flow()
        assert model[0].state is model[2].state is shared
        assert devices.location(shared.scale) == torch.device("cpu")
        torch.testing.assert_close(flow(x).cpu(), expected, **CLOSE)


def test_state_that_was_replaced_after_a_call_is_used_by_the_next() -> None:
    kind = KINDS["attached object"]
    x, reference = batch_of(kind), model_of(kind)
    with placed(kind) as (flow, model), torch.no_grad():
        flow(x)
        for one in (model, reference):
            layer: Any = one[2]
            layer.weight.state = State(layer.weight.state.scale * 2)
        found = flow(x).cpu()
    with torch.no_grad():
        torch.testing.assert_close(found, reference(x), **CLOSE)


@pytest.mark.parametrize("kind", ["attached object", "wrapper", "csr parameter"])
def test_a_move_that_fails_puts_all_of_a_weight_back(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(KINDS[kind])
    copied = devices.copy

    def failing(tensor: Tensor, device: torch.device, *rest: Any) -> Tensor:
        if device.index == 1 and tensor is last:
            raise torch.OutOfMemoryError("no memory")
        return copied(tensor, device, *rest)

    with logical_devices(3):
        move_state(model, lambda name: torch.device("cpu", 0))
        last = [*model.state_dict(keep_vars=True).values()][-1]
        monkeypatch.setattr(devices, "copy", failing)
        with pytest.raises(PlacementError, match=r"no room on cpu:1 .* the model was put back"):
            move_state(model, lambda name: torch.device("cpu", 1))
        for layer in (model[0], model[2]):
            assert_on(KINDS[kind].stored(layer), torch.device("cpu", 0))


@pytest.mark.parametrize(
    "kind", ["wrapper", "wrapper with a linear layer", "csr buffer", "coo parameter"]
)
def test_a_graph_with_such_a_weight_is_not_sent_as_if_it_were_dense(kind: str) -> None:
    graph = capture_graph(model_of(KINDS[kind]), batch_of(KINDS[kind]))
    with pytest.raises(
        CaptureError, match=r"profile the model on the machine with the devices|profile it where"
    ):
        to_wire(graph)


@pytest.mark.parametrize("kind", ["wrapper", "wrapper with a linear layer"])
def test_a_weight_that_is_elsewhere_is_captured_as_what_it_is(kind: str) -> None:
    """A dense twin in its place would make a graph of other operations."""
    model, x = model_of(KINDS[kind]), batch_of(KINDS[kind])
    expected = capture_graph(model, x).hash
    weight: Any = model[0].weight
    elsewhere = devices.copy(weight, torch.device("meta"))
    model[0].weight = nn.Parameter(elsewhere, requires_grad=False)
    assert capture_graph(model, x).hash == expected


@pytest.mark.parametrize("kind", ["attached tensor", "attached object", "state that is taken away"])
def test_a_weight_whose_attributes_torch_export_does_not_see_runs_through_hooks(kind: str) -> None:
    with pytest.raises(CaptureError, match=r"'0.weight' has tensors in its attributes"):
        capture_graph(model_of(KINDS[kind]), batch_of(KINDS[kind]), hooks=False)


class Doubled(nn.Parameter):
    """A parameter whose class changes what a function does with it, and no attribute tells."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is nn.functional.linear else result


def test_a_parameter_of_a_class_with_functions_of_its_own_gives_what_the_unsplit_model_gives() -> (
    None
):
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).eval()
    model[1].weight = Doubled(model[1].weight.detach(), requires_grad=False)
    x = batch_of(KINDS["wrapper"])
    with torch.no_grad():
        expected = model(x)
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model)
        flow.layer_gpus.update({"0": 1, "1": 0})
        flow.update_flow()
        torch.testing.assert_close(flow(x).cpu(), expected, **CLOSE)
        assert "Doubled" in flow.not_captured_because


class Stopping(torch.Tensor):
    """A weight whose class turns gradients off, where torch.export does not see it."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Stopping:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> Stopping:
        return cls(inner["inner"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, bias = args
            with torch.no_grad():
                scale = x.abs().amax(1, keepdim=True)
            return nn.functional.linear(x / scale, weight.inner, bias) * scale
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(func(args[0].inner, *args[1:], **(kwargs or {})))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_gradient_that_the_class_of_a_weight_stops_is_stopped_in_a_placed_model(
    training: bool,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Linear(Stopping)).train(training)
    reference = copy.deepcopy(model)
    x = batch_of(KINDS["wrapper"])
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update({"0": 1, "1": 0})
        flow.update_flow()
        flow(x).square().mean().backward()
        mine = model[0].weight.grad.to("cpu")
        with torch.no_grad():
            torch.testing.assert_close(flow(x).cpu(), reference(x), **CLOSE)
    reference(x).square().mean().backward()
    torch.testing.assert_close(mine, reference[0].weight.grad, **CLOSE)
