"""What users give by mistake: the error names it and the way out, and the flow can be used as
before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import placer
from placer import BatchOptions, DataFlow
from placer.capture import capture_graph
from placer.errors import BatchError, CaptureError, InputError, PlacementError, StageError
from placer.schema import Placement
from placer.zoo import ToyModel

DEVICES = ["cpu:0", "cpu:1"]
X = torch.randn(4, 10)


def _placement(around: str = "") -> Placement:
    """One of a ToyModel on two devices, which lies at a path in what is around it."""
    places = {f"{around}net1": "cpu:0", f"{around}relu": "cpu:1", f"{around}net2": "cpu:1"}
    return Placement(status="optimal", objective="throughput", layer_devices=places)


@pytest.mark.parametrize(
    "take", [DataFlow, lambda model: capture_graph(model, X)], ids=["DataFlow", "capture"]
)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        (ToyModel, r"model is the class ToyModel; give an instance, such as ToyModel\(\)"),
        (None, "model is None; give an nn.Module"),
    ],
)
def test_what_is_no_model_is_named(take: Callable[[Any], Any], given: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        take(given)


@pytest.mark.parametrize(
    "name", ["inference_only", "fine_grained", "enable_clone", "clear_cache", "deferred_batch_norm"]
)
def test_a_word_for_a_flag_of_a_flow_is_refused_as_it_would_count_as_true(name: str) -> None:
    flags: dict[str, Any] = {name: "no"}
    with pytest.raises(InputError, match=f"{name} is 'no'; give True or False"):
        DataFlow(ToyModel(), **flags)


@pytest.mark.parametrize("devices", ["cpu:0", torch.device("cpu"), 0.5])
def test_one_device_without_a_list_is_named_with_the_list_to_write(devices: Any) -> None:
    with pytest.raises(
        InputError,
        match=r"device_ids is .*; give a list, such as \['cuda:0', 'cuda:1'\], or their number",
    ):
        DataFlow(ToyModel(), device_ids=devices)


def test_a_device_beside_those_of_the_flow_is_one_of_them_once_a_map_or_a_placement_names_it() -> (
    None
):
    by_hand, placed = (DataFlow(ToyModel(), DEVICES[:1]) for _ in range(2))
    by_hand.layer_gpus["net2"] = 1
    by_hand.update_flow()
    placed.update_flow(_placement())
    assert by_hand.device_ids == placed.device_ids == [0, 1]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"net1": "cpu:1"}, r"put a map of layers into flow.layer_gpus.update\(...\)"),
        (
            '{"layer_devices": {"net1": "cpu:1"}}',
            "a str; give a Placement, which Placement.model_validate_json",
        ),
        ({"layer_devices": {"net1": "cpu:1"}}, "this is not a placement: .*status"),
    ],
)
def test_what_is_no_placement_is_told_apart(given: Any, told: str) -> None:
    flow = DataFlow(ToyModel(), DEVICES)
    with pytest.raises(PlacementError, match=rf"(?s){told}"):
        flow.update_flow(given)
    assert set(flow.layer_gpus.values()) == {0}


def _blocks(depth: int, run: int | None = None) -> nn.Module:
    """Blocks in a list, of which the model runs the first ones, or all of them."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(10, 8)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks[:run]:
                x = block(x).relu()
            return x

    torch.manual_seed(0)
    return Blocks()


MISSING = r"no device for 'blocks\.4', 'blocks\.5' of Blocks, .*: suggest another"


def test_a_placement_of_a_model_with_fewer_blocks_gives_a_warning() -> None:
    # the last blocks were run on any device, without a word.
    shallow = placer.suggest(_blocks(4), X, devices=DEVICES)
    flow = DataFlow(_blocks(6), DEVICES)
    with pytest.warns(UserWarning, match=MISSING):
        flow.update_flow(shallow)
    by_hand = {"first": "cpu:0", "blocks.1": "cpu:0", "blocks.2": "cpu:1"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flow.update_flow(Placement(status="feasible", objective="latency", layer_devices=by_hand))


def test_blocks_that_do_not_run_need_no_device() -> None:
    model = _blocks(6, run=4)
    expected = model(X)
    flow = DataFlow(model, DEVICES)
    with pytest.warns(UserWarning, match=MISSING):
        flow.update_flow(placer.suggest(model, X, devices=DEVICES))
    assert torch.equal(flow(X), expected)


@pytest.mark.parametrize(
    ("wrap", "path"),
    [(nn.DataParallel, "module"), (torch.compile, "_orig_mod")],
    ids=["DataParallel", "compile"],
)
def test_a_wrapped_model_takes_its_own_placement_alone(
    wrap: Callable[[nn.Module], nn.Module], path: str
) -> None:
    model = ToyModel()
    expected = model(X)
    flow, plain = DataFlow(wrap(model), DEVICES), DataFlow(model, DEVICES)
    with pytest.raises(
        PlacementError, match=rf"there is {path}.net1: give the model that is wrapped, model.{path}"
    ):
        flow.update_flow(_placement())
    with pytest.raises(PlacementError, match=rf"of a wrapped model: suggest one for model.{path}"):
        plain.update_flow(_placement(f"{path}."))
    flow.update_flow(_placement(f"{path}."))
    assert torch.equal(flow(X), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_model_is_refused_with_the_way_out() -> None:
    scripted = torch.jit.script(ToyModel())
    # What torch.export makes of it, a TypeError of its forward, was told first.
    with pytest.raises(
        CaptureError,
        match=r"^the model was compiled by torch.jit, .*: give the module that it was made",
    ):
        placer.suggest(scripted, X, devices=DEVICES)
    flow = DataFlow(scripted, DEVICES)
    flow.update_flow()
    with pytest.raises(
        CaptureError,
        match=r"^the model was compiled by torch\.jit, .*: give the module that it was made from$",
    ):
        flow(X)


def _stepping() -> Any:
    flow = DataFlow(ToyModel(), DEVICES)
    flow.update_flow(_placement())
    return flow, flow.train_step(functional.mse_loss)


@pytest.mark.parametrize("inputs", [(X, X), {"xx": X}])
@pytest.mark.filterwarnings("error")
def test_inputs_that_the_model_refuses_are_no_matter_of_its_capture(inputs: Any) -> None:
    # It was warned before that the model is not captured, because torch.export had met the same
    # TypeError, and that micro-batches were not compared, for the same reason.
    flow, step = _stepping()
    with pytest.raises(
        StageError, match=r"TypeError: ToyModel\.forward\(\) (takes|got an unexpected)"
    ):
        step(inputs, torch.randn(4, 5), chunks=2)
    step(X, torch.randn(4, 5), chunks=2)
    assert not flow.not_captured_because


@pytest.mark.parametrize("update", ["no", None, 2])
def test_a_step_that_is_told_neither_to_update_nor_not_to_is_refused(update: Any) -> None:
    _, step = _stepping()
    with pytest.raises(InputError, match=rf"update is {update!r}; give True or False"):
        step(X, torch.randn(4, 5), update=update)


@pytest.mark.parametrize("in_flight", ["x", 3, [0]])
def test_what_is_no_number_of_micro_batches_in_flight_is_refused_under_every_schedule(
    in_flight: Any,
) -> None:
    flow, step = _stepping()
    flow.in_flight = in_flight
    with pytest.raises(
        InputError, match=r"flow\.in_flight is .*: give a number of micro-batches, 1 or more"
    ):
        step(X, torch.randn(4, 5))


def test_an_optimizer_of_another_model_is_named_before_a_step() -> None:
    model = ToyModel()
    flow = DataFlow(model, DEVICES)
    flow.update_flow()
    with pytest.raises(
        InputError, match=r"no parameter of this ToyModel.*; make it from flow.parameters\(\)"
    ):
        flow.train_step(functional.mse_loss, torch.optim.SGD(ToyModel().parameters(), lr=0.1))
    flow.train_step(functional.mse_loss, torch.optim.SGD(model.net2.parameters(), lr=0.1))(
        X, torch.randn(4, 5)
    )


def test_what_is_no_optimizer_is_named_and_nothing_moves() -> None:
    flow = DataFlow(ToyModel(), DEVICES)
    with pytest.raises(InputError, match=r"optimizer is 'adam'; give the torch\.optim\.Optimizer"):
        flow.update_flow(_placement(), optimizer="adam")  # type: ignore[arg-type]
    assert set(flow.layer_gpus.values()) == {0}


def test_a_map_that_is_none_is_named() -> None:
    flow = DataFlow(ToyModel(), DEVICES)
    flow.layer_gpus = [0, 1, 1]  # type: ignore[assignment]
    with pytest.raises(PlacementError, match=r"layer_gpus is \[0, 1, 1\]; give a map"):
        flow.update_flow()


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (0, r"the key 0; give names of layers, such as '0'"),
        ((0,), "such as '0'"),
        (None, "such as '0'"),
    ],
)
def test_a_layer_that_is_not_named_by_its_name_is_told_which_that_is(key: Any, told: str) -> None:
    flow = DataFlow(nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 2)), DEVICES)
    flow.layer_gpus[key] = 1
    with pytest.raises(PlacementError, match=told):
        flow.update_flow()


def test_a_model_without_modules_is_named_as_its_only_layer() -> None:
    # The message listed nothing, followed by dots.
    with pytest.raises(
        PlacementError, match=r"'net1' is not a module .*; its layers are \(model\)$"
    ):
        DataFlow(nn.Linear(10, 4), DEVICES).update_flow(_placement())


def test_a_module_as_a_layers_name_is_told_its_own() -> None:
    model = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 2))
    flow = DataFlow(model, DEVICES)
    flow.layer_gpus[model[1]] = 1  # type: ignore[index]
    with pytest.raises(PlacementError, match="such as '1'"):
        flow.update_flow()


def test_a_map_that_nothing_follows_yet_is_told_once() -> None:
    flow = DataFlow(ToyModel(), DEVICES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flow(X)
        flow.layer_gpus["net2"] = 1
        with pytest.warns(UserWarning, match=r"call flow\.update_flow\(\)"):
            flow(X)
        flow(X)
        with flow.applied() as model:
            model(X)
        flow.update_flow()
        flow(X)


def test_an_empty_batch_runs_but_cannot_be_measured() -> None:
    with pytest.raises(InputError, match="a batch of 0"):
        placer.suggest(ToyModel(), X[:0], devices=DEVICES)
    flow = DataFlow(ToyModel(), DEVICES)
    flow.update_flow(_placement())
    assert flow(X[:0]).shape == (0, 5)


def test_a_model_whose_parameters_are_all_frozen_runs_and_says_that_there_is_nothing_to_train() -> (
    None
):
    model = ToyModel().requires_grad_(False)
    flow = DataFlow(model, DEVICES)
    flow.update_flow(_placement())
    assert torch.equal(flow(X), model(X)) and not flow(X).requires_grad
    step = flow.train_step(functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InputError, match="there is nothing to train"):
        step(X, torch.randn(4, 5))


def test_a_model_in_half_precision_is_placed_on_stand_ins() -> None:
    model = ToyModel().half()
    expected = model(X.half())
    flow = DataFlow(model, DEVICES)
    flow.update_flow(placer.suggest(model, X.half(), devices=DEVICES, progress=False))
    assert torch.equal(flow(X.half()), expected)


@pytest.fixture
def flow() -> DataFlow:
    flow = DataFlow(ToyModel(), DEVICES)
    flow.update_flow(_placement())
    return flow


def test_what_steps_no_parameters_is_told_apart_from_an_optimizer(flow: DataFlow) -> None:
    optimizer = torch.optim.SGD(flow.parameters(), lr=0.1)
    with pytest.raises(
        InputError, match=r"the class SGD; give an instance, such as SGD\(flow.parameters"
    ):
        flow.train_step(functional.mse_loss, torch.optim.SGD)  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(InputError, match="a StepLR, which steps no parameters; give the optimizer"):
        flow.train_step(functional.mse_loss, scheduler)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"scaler is True; give a torch.amp.GradScaler"):
        flow.train_step(functional.mse_loss, optimizer, scaler=True)


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        (X[:0], "the batch has no samples"),
        (
            X.numpy(),
            r"inputs, a ndarray, contain no tensor; convert arrays by torch.as_tensor\(x\)",
        ),
        ((), "inputs, a tuple, contain no tensor"),
    ],
    ids=["empty", "numpy", "nothing"],
)
def test_what_is_no_batch_to_train_on_is_named_and_nothing_is_stepped(
    flow: DataFlow, inputs: Any, told: str
) -> None:
    before = [parameter.detach().clone() for parameter in flow.parameters()]
    step = flow.train_step(functional.mse_loss, torch.optim.SGD(flow.parameters(), lr=0.1))
    with pytest.raises(InputError, match=told):
        step(inputs, torch.randn(4, 5))
    assert all(torch.equal(a, b) for a, b in zip(before, flow.parameters(), strict=True))
    step(X, torch.randn(4, 5))


@pytest.mark.parametrize("loss_fn", [functional.cross_entropy, functional.mse_loss])
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_target_that_is_a_numpy_array_is_told_what_to_give(
    flow: DataFlow, chunks: int, loss_fn: Any
) -> None:
    # mse_loss raised "'int' object is not callable", as size is a number in arrays.
    step = flow.train_step(loss_fn)
    with pytest.raises(
        InputError,
        match=r"a numpy array of shape \(4,\); convert it by torch.as_tensor\(x\)$",
    ):
        step(X, torch.arange(4).numpy(), chunks=chunks)


@pytest.mark.parametrize("chunks", [0, -1, 1.5, True, "2"])
def test_what_is_no_number_of_micro_batches_is_named_wherever_it_is_given(
    flow: DataFlow, chunks: Any
) -> None:
    step = flow.train_step(functional.mse_loss, torch.optim.SGD(flow.parameters(), lr=0.1))
    for run in (
        lambda: flow(X, chunks=chunks),
        lambda: step(X, torch.randn(4, 5), chunks=chunks),
        lambda: flow.measure(X, chunks=chunks),
    ):
        with pytest.raises(
            InputError, match=f"chunks={chunks!r}: give a whole number of micro-batches, 1 or more"
        ):
            run()


def test_what_a_measurement_cannot_take_is_named(flow: DataFlow) -> None:
    other = DataFlow(ToyModel(), DEVICES)
    other.update_flow(_placement())
    with pytest.raises(InputError, match="step is one of another flow"):
        flow.measure(X, torch.randn(4, 5), step=other.train_step(functional.mse_loss))
    with pytest.raises(InputError, match="profile is a str; give the Profile"):
        flow.measure(X, profile="profile.json")  # type: ignore[arg-type]


def test_a_training_step_in_inference_mode_is_refused_with_the_way_out(flow: DataFlow) -> None:
    step = flow.train_step(functional.mse_loss)
    with torch.inference_mode(), pytest.raises(InputError, match=r"leave torch.inference_mode\(\)"):
        step(X, torch.randn(4, 5))


class _Counts(nn.Module):
    """Takes a number for each sample, as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(10, 10), nn.Linear(10, 5)

    def forward(
        self, x: torch.Tensor, counts: list[int], size: tuple[int, ...] = (4, 4, 4, 4)
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.net1(x)
        return self.net2(hidden * torch.tensor(counts, device=x.device)[:, None])  # type: ignore[no-any-return]


def test_a_list_with_an_entry_for_each_sample_is_refused_with_the_declaration_that_cuts_it() -> (
    None
):
    flow = DataFlow(_Counts(), device_ids=DEVICES)
    flow.layer_gpus.update(net1=0, net2=1)
    flow.update_flow()
    counts, options = [1, 2, 3, 4], BatchOptions(inputs={"counts": "items"})
    whole = flow(X, counts)
    step = flow.train_step(functional.mse_loss)
    for run in (
        lambda: flow(X, counts, chunks=2),
        lambda: step((X, counts), torch.zeros(4, 5), chunks=2),
    ):
        with pytest.raises(
            BatchError, match=r"inputs=\{'counts': 'items'\}\) gives the batch's results"
        ):
            run()
    torch.testing.assert_close(flow(X, counts, chunks=2, batch_options=options), whole)
    with pytest.raises(
        InputError, match=r"'x' has shape .*4 along dimension 0.* the batch has 3 samples"
    ):
        flow(X, [1, 2, 3], chunks=2, batch_options=BatchOptions(inputs={"counts": "items", "x": 0}))


def test_targets_of_other_lengths_are_taken_where_nothing_is_cut() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 5))
    flow = DataFlow(model, device_ids=DEVICES)
    flow.layer_gpus.update({"0": 0, "1": 1})
    flow.update_flow()
    step = flow.train_step(lambda output, target: (output.mean() - target["boxes"].mean()).pow(2))
    with pytest.raises(InputError, match=r"must be the batch.*or give chunks=1"):
        step(X, {"boxes": torch.ones(7)}, chunks=2)
    for count in (7, 9):
        loss = (model(X).mean() - torch.ones(count).mean()).pow(2)
        torch.testing.assert_close(step(X, {"boxes": torch.ones(count)}, chunks=1), loss.detach())


def test_a_flow_is_not_compiled_as_a_whole() -> None:
    with pytest.raises(InputError, match=r"give compile=True to flow.train_step and flow.stream"):
        DataFlow(ToyModel(), device_ids=DEVICES).compile()


def test_a_list_of_arguments_is_told_to_be_a_tuple_in_a_step_too() -> None:
    flow = DataFlow(ToyModel(), device_ids=DEVICES)
    flow.update_flow()
    with pytest.raises(StageError, match="give a tuple, not a list, of positional arguments"):
        flow.train_step(functional.mse_loss)([X], torch.zeros(4, 5))
