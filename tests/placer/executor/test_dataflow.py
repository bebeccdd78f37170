"""What DataFlow promises about maps, state, optimizers and errors."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from small_flows import CPU, Model, X, placed
from splitting import assert_same, scatter_layers, step, twins
from torch import nn

from placer import DataFlow, devices
from placer.capture import capture_graph
from placer.errors import InputError, PlacementError
from placer.schema import Infeasibility, Placement
from placer.testing import logical_devices


def _places(model: nn.Module) -> dict[str, torch.device]:
    return {name: parameter.device for name, parameter in model.named_parameters()}


def test_layer_gpus_names_the_children_in_order_all_on_the_first_device() -> None:
    assert list(DataFlow(Model()).layer_gpus.items()) == [("stem", 0), ("body", 0), ("head", 0)]


def test_layer_gpus_names_the_leaves_when_fine_grained() -> None:
    flow = DataFlow(Model(), fine_grained=True)
    assert list(flow.layer_gpus) == ["stem.0", "stem.1", "body.0", "body.1", "body.2", "head"]


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("place", [2, "2", "cpu:2", torch.device("cpu", 2)])
def test_a_device_is_given_as_an_index_a_string_or_a_torch_device(
    place: int | str | torch.device,
) -> None:
    model = Model().double()
    with logical_devices(3):
        placed(model, head=place)(X)
        assert model.head.weight.device == CPU[2]


def test_parameters_are_on_the_devices_that_the_map_says() -> None:
    model = Model().double()
    with logical_devices(4):
        placed(model, stem=3, body=1, head=2)
        places = {name.partition(".")[0]: place for name, place in _places(model).items()}
        assert places == {"stem": CPU[3], "body": CPU[1], "head": CPU[2]}
        assert model.body[1].running_mean.device == CPU[1]


def test_before_update_flow_the_model_runs_as_it_is() -> None:
    model, reference = twins(Model)
    flow = DataFlow(model)
    assert_same(step(flow, model, (X,), {}), step(reference, reference, (X,), {}))


def test_update_flow_twice_with_other_maps_gives_the_same_results() -> None:
    model, reference = twins(Model, training=False)
    whole = step(reference, reference, (X,), {})
    with logical_devices(4):
        flow = DataFlow(model)
        for seed in range(4):
            scatter_layers(flow, 4, seed)
            assert_same(step(flow, model, (X,), {}), whole)


def test_parameters_and_buffers_keep_their_identity() -> None:
    model = Model().double()
    before = [*model.parameters(), *model.buffers()]
    with logical_devices(3):
        flow = placed(model, stem=1, body=2)
        flow(X).sum().backward()
        flow.undo()
    assert all(
        ours is theirs
        for ours, theirs in zip(before, [*model.parameters(), *model.buffers()], strict=True)
    )


def test_undo_brings_state_gradients_flags_and_the_map_back() -> None:
    model, _ = twins(Model)
    with logical_devices(3):
        flow = DataFlow(model, inference_only=True)
        scatter_layers(flow, 3)
        flow(X)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        flow.undo()
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert {place.type for place in _places(model).values()} == {"cpu"}
        assert {place.index for place in _places(model).values()} == {None}
        assert set(flow.layer_gpus.values()) == {0}
        flow.layer_gpus["head"] = 1
        flow.update_flow()
        flow(X).sum().backward()
        flow.undo()
        assert {parameter.grad.device.index for parameter in model.parameters()} == {None}


def test_undo_restores_what_was_frozen_and_what_was_not() -> None:
    model = Model()
    model.stem.requires_grad_(False)
    DataFlow(model, inference_only=True).undo()
    assert [parameter.requires_grad for parameter in model.parameters()] == [False] * 2 + [True] * 6


def test_inference_only_keeps_no_graph() -> None:
    with logical_devices(2):
        flow = DataFlow(Model().double(), inference_only=True)
        flow.layer_gpus["head"] = 1
        flow.update_flow()
        assert not flow(X).requires_grad


def test_train_and_eval_switch_dropout_and_batch_norm() -> None:
    model, reference = twins(Model)
    with logical_devices(3):
        flow = placed(model, stem=1, head=2)
        for training in (True, False, True, False):
            flow.train(training)
            reference.train(training)
            assert_same(step(flow, model, (X,), {}), step(reference, reference, (X,), {}))


def test_switching_a_part_of_the_model_to_eval_is_seen() -> None:
    model, reference = twins(Model)
    with logical_devices(3):
        flow = placed(model, stem=1, head=2)
        flow(X)
        model.body.eval()
        reference(X)
        reference.body.eval()
        torch.testing.assert_close(
            flow(X).detach().cpu(), reference(X).detach(), atol=1e-6, rtol=1e-6
        )


@pytest.mark.parametrize(
    "sizes", [(6, 1, 3, 6), (1, 4), pytest.param((2, 5), marks=pytest.mark.exhaustive)]
)
def test_batches_of_another_size_run(sizes: tuple[int, ...]) -> None:
    model, reference = twins(Model, training=False)
    with logical_devices(3):
        flow = placed(model, stem=1, head=2)
        for size in sizes:
            assert_same(
                step(flow, model, (X[:size],), {}), step(reference, reference, (X[:size],), {})
            )


def test_batches_of_a_data_loader_run() -> None:
    model, reference = twins(Model, training=False)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(X, torch.arange(6)), batch_size=4
    )
    with logical_devices(3):
        flow = placed(model, stem=1, head=2)
        results = [flow(x).detach().cpu() for x, _ in loader]
    torch.testing.assert_close(torch.cat(results), reference(X).detach(), atol=1e-10, rtol=1e-10)


def test_freezing_after_a_run_is_respected() -> None:
    model, _ = twins(Model)
    with logical_devices(2):
        flow = placed(model, head=1)
        flow(X).sum().backward()
        flow.zero_grad()
        model.stem.requires_grad_(False)
        flow(X).sum().backward()
    assert model.stem[0].weight.grad is None
    assert model.head.weight.grad is not None


def test_a_placement_sets_the_map_the_granularity_and_the_chunks() -> None:
    model, reference = twins(Model, training=False)
    layers = [layer.name for layer in capture_graph(model, X, granularity="auto").layers]
    places = {name: f"cpu:{index % 3}" for index, name in enumerate(layers)}
    placement = Placement(status="optimal", objective="throughput", layer_devices=places, chunks=3)
    with logical_devices(3):
        flow = DataFlow(model)
        flow.update_flow(placement)
        assert list(flow.layer_gpus.items()) == [
            (name, index % 3) for index, name in enumerate(layers)
        ]
        assert flow.chunks == 3
        assert_same(step(flow, model, (X,), {}), step(reference, reference, (X,), {}), atol=1e-10)
        flow.update_flow(placement.model_dump())
        flow.undo()
        assert flow.chunks == 1
        assert list(flow.layer_gpus) == ["stem", "body", "head"]


def _unharmed(flow: DataFlow, reference: nn.Module) -> None:
    torch.testing.assert_close(
        flow(X).detach().cpu(), reference(X).detach(), atol=1e-10, rtol=1e-10
    )


def test_an_unknown_layer_is_named_and_nothing_moves() -> None:
    model, reference = twins(Model, training=False)
    with logical_devices(2):
        flow = placed(model, head=1)
        flow.layer_gpus["haed"] = 0
        with pytest.raises(PlacementError, match=r"'haed'.*stem"):
            flow.update_flow()
        assert model.head.weight.device == CPU[1]
        del flow.layer_gpus["haed"]
        _unharmed(flow, reference)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("place", [7, "cpu:7", -1, "gpu", 1.5, "meta"])
def test_an_unknown_device_is_named_and_nothing_moves(place: int | str) -> None:
    model, reference = twins(Model, training=False)
    with logical_devices(2):
        flow = placed(model, head=1)
        flow.layer_gpus["stem"] = place
        with pytest.raises(PlacementError, match=str(place)):
            flow.update_flow()
        flow.layer_gpus["stem"] = 0
        _unharmed(flow, reference)


def test_an_infeasible_placement_is_refused_with_its_reason() -> None:
    model, reference = twins(Model, training=False)
    why = Infeasibility(reason="layer 'body' needs 9 bytes more than cpu:1 has")
    placement = Placement(status="infeasible", objective="throughput", infeasible=why)
    with logical_devices(2):
        flow = placed(model, head=1)
        with pytest.raises(PlacementError, match="9 bytes more"):
            flow.update_flow(placement)
        _unharmed(flow, reference)


def test_a_placement_of_another_model_is_refused_and_leaves_the_map() -> None:
    model, reference = twins(Model, training=False)
    placement = Placement(
        status="optimal", objective="throughput", layer_devices={"features.0": "cpu:0"}
    )
    with logical_devices(2):
        flow = placed(model, head=1)
        with pytest.raises(PlacementError, match=r"features\.0"):
            flow.update_flow(placement)
        assert list(flow.layer_gpus) == ["stem", "body", "head"]
        _unharmed(flow, reference)


@pytest.mark.parametrize("chunks", [0, -1, 1.5, "two"])
def test_chunks_must_be_a_whole_number_of_one_or_more(chunks: int) -> None:
    with logical_devices(2):
        flow = placed(Model().double(), head=1)
        with pytest.raises(InputError, match="chunks"):
            flow(X, chunks=chunks)


def test_a_model_on_meta_is_refused_with_the_way_out() -> None:
    with torch.device("meta"):
        model = Model()
    flow = DataFlow(model)
    with logical_devices(2), pytest.raises(PlacementError, match=r"meta.*placer\.load"):
        flow.update_flow()


def test_lazy_modules_are_refused_until_they_have_run_once() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)).double()
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus["0"] = 1
        with pytest.raises(PlacementError, match="lazy"):
            flow.update_flow()
        flow(X)
        flow.update_flow()
        assert flow(X).shape == (6, 2)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(InputError, match="function"):
        DataFlow(lambda x: x)  # type: ignore[arg-type]


def test_an_error_of_the_model_leaves_the_flow_usable() -> None:
    model, reference = twins(Model, training=False)
    with logical_devices(2):
        flow = placed(model, head=1)
        with pytest.raises(Exception, match=r"shape|size|dim"):
            flow(X[:, :3])
        _unharmed(flow, reference)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_model_that_somebody_else_moved_is_where_it_belongs_in_the_next_call(chunks: int) -> None:
    model, reference = twins(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), training=False
    )
    x = torch.randn(6, 4, dtype=torch.float64)
    with logical_devices(3), torch.no_grad():
        one, other = DataFlow(model), DataFlow(model)
        one.layer_gpus.update({"0": 0, "1": 1, "2": 1})
        other.layer_gpus.update({"0": 2, "1": 2, "2": 2})
        for flow in (one, other, one):
            flow.update_flow()
        for flow in (one, one, other, other, one):
            torch.testing.assert_close(flow(x, chunks=chunks).cpu(), reference(x))
        model.to("cpu:2")
        torch.testing.assert_close(one(x, chunks=chunks).cpu(), reference(x))


class _TakesTokens(nn.Module):
    """Makes something of the dtype that its weights have; its inputs say nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.last(x + torch.arange(4, dtype=x.dtype, device=x.device))


def test_a_model_of_another_dtype_is_captured_anew() -> None:
    model, reference = twins(_TakesTokens, training=False, dtype=torch.float32)
    tokens = torch.arange(6).reshape(2, 3)
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model)
        flow.layer_gpus.update(embedding=0, last=1)
        flow.update_flow()
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            flow.to(dtype)
            torch.testing.assert_close(flow(tokens).cpu(), reference.to(dtype)(tokens))


class _HasConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.root = (
            nn.Linear(4, 5),
            nn.Linear(5, 3),
            nn.Parameter(torch.ones(5)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype, device=x.device)
        return self.last(self.first(x) * self.root) * scale


def test_inference_mode_around_moves_and_the_first_call_is_no_obstacle_to_training() -> None:
    model, reference = twins(_HasConstants, training=False)
    x = torch.randn(6, 4, dtype=torch.float64)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus["last"] = 1
        with torch.inference_mode():
            flow.update_flow()
            assert flow(x).is_inference()
        flow(x).sum().backward()
        reference(x).sum().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
        with torch.inference_mode():
            flow.undo()
    model(x).sum().backward()


def test_inputs_made_in_inference_mode_are_captured_and_written_to_as_others() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 2)).eval()
    with logical_devices(2), torch.inference_mode():
        flow = DataFlow(model)
        flow.layer_gpus["2"] = 1
        flow.update_flow()
        x = torch.linspace(-1, 1, 24).view(6, 4)
        written = x.clone()
        results = [flow(written), flow(x.clone(), chunks=2)]
        assert flow.not_captured_because == "" and torch.equal(written, x.relu())
    for result in results:
        torch.testing.assert_close(result, model(x.clone()))


def test_what_a_map_does_not_name_goes_where_its_empty_name_says() -> None:
    model = nn.Sequential(
        OrderedDict(
            a=nn.Linear(4, 4), b=nn.Sequential(nn.Linear(4, 4), nn.ReLU()), c=nn.Linear(4, 2)
        )
    )
    expected = model(torch.ones(3, 4))
    with logical_devices(3):
        flow = DataFlow(model)
        flow.layer_gpus.clear()
        flow.layer_gpus.update({"": 2, "b": 1})
        flow.update_flow()
        places = {name: str(devices.location(tensor)) for name, tensor in model.named_parameters()}
        assert places == {
            "a.weight": "cpu:2",
            "a.bias": "cpu:2",
            "b.0.weight": "cpu:1",
            "b.0.bias": "cpu:1",
            "c.weight": "cpu:2",
            "c.bias": "cpu:2",
        }
        torch.testing.assert_close(flow(torch.ones(3, 4)).cpu(), expected)


@pytest.mark.parametrize("around", [{}, {"body": 1}])
def test_modules_below_a_child_stay_where_a_map_puts_them(around: dict[str, int]) -> None:
    body = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model = nn.Sequential(OrderedDict(body=body, head=nn.Linear(4, 2)))
    expected = model(torch.ones(3, 4))
    wanted = {"body.0": 0, "body.1": 0, "head": 1, **(around or {"body.2": 1, "body.3": 1})}
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.clear()
        flow.layer_gpus.update(wanted)
        flow.update_flow()
        torch.testing.assert_close(flow(torch.ones(3, 4)).cpu(), expected)
        places = [str(devices.location(layer.weight)) for layer in (*body, model.head)]
        assert (
            places == ["cpu:0", "cpu:0", "cpu:1", "cpu:1", "cpu:1"]
            and not flow.not_captured_because
        )
        flow.layer_gpus.clear()
        flow.layer_gpus.update(body=1, head=0)
        flow.update_flow()
        torch.testing.assert_close(flow(torch.ones(3, 4)).cpu(), expected)
        assert {str(devices.location(layer.weight)) for layer in body} == {"cpu:1"}
