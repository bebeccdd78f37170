"""A measured timeline has every pass and copy once, in an order that can be; the prediction is the
simulated one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import lcm
from typing import Any

import pytest
import torch
from small_models import Skips
from splitting import CapturedOnce
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow
from placer.capture.capture import capture_graph
from placer.errors import InputError
from placer.executor.training.training_pipeline import Order
from placer.report.timeline import Measurement
from placer.schema import Cluster, Device, Edge, Layer, Link, Placement, Profile, Replica
from placer.testing import logical_devices

ROWS, FEATURES, CHUNKS, DEVICES = 8, 5, 4, 3


def _profile(model: nn.Module, inputs: Tensor) -> Profile:
    """Made-up times of the model's own layers: layer i takes i + 1 ms forwards, twice that
    backwards."""
    graph = capture_graph(model, inputs)
    maker = {name: layer.name for layer in graph.layers for name in layer.writes}
    readers = graph.readers()
    return Profile(
        training=True,
        batch_size=ROWS // CHUNKS,
        layers=tuple(
            Layer(
                name=layer.name,
                forward_ms={"toy": index + 1.0},
                backward_ms={"toy": 2.0 * (index + 1)},
            )
            for index, layer in enumerate(graph.layers)
        ),
        edges=tuple(
            Edge(source=maker[name], targets=tuple(readers[name]), bytes=1000, gradient_bytes=1000)
            for name in maker
            if readers[name]
        ),
        cluster=Cluster(
            devices=tuple(
                Device(name=f"cpu:{index}", type="toy", memory_bytes=2**30)
                for index in range(DEVICES)
            ),
            links=tuple(
                Link(source=f"cpu:{a}", target=f"cpu:{b}", bandwidth_bytes_per_s=1e6)
                for a in range(DEVICES)
                for b in range(DEVICES)
                if a != b
            ),
        ),
    )


@cache
def _both(training: bool) -> CapturedOnce:
    return CapturedOnce(Skips, training)


@cache
def _own_profile(training: bool) -> Profile:
    return _profile(_both(training).model, _rows()[:2])


def _rows() -> Tensor:
    return torch.randn(ROWS, FEATURES, dtype=torch.float64)


@contextmanager
def _placed(
    training: bool, counts: tuple[int, ...] = (1,) * DEVICES, chunks: int = CHUNKS
) -> Iterator[tuple[DataFlow, Tensor, Tensor, Profile]]:
    """A flow of a model that all tests share, placed on stand-ins; a batch, its target, a profile.

    Args:
        training: the mode of the model.
        counts: the number of replicas of each stage.
        chunks: micro-batches.
    """
    profile = _own_profile(training)
    names, units = [layer.name for layer in profile.layers], lcm(*counts)
    first = [f"cpu:{sum(counts[:stage])}" for stage in range(len(counts))]
    spare = iter(range(DEVICES))
    held = {
        place: tuple(
            Replica(device=f"cpu:{next(spare)}", samples=units // count) for _ in range(count)
        )
        for place, count in zip(first, counts, strict=True)
    }
    placement = Placement(
        status="feasible",
        objective="throughput",
        layer_devices={
            name: first[index * len(counts) // len(names)] for index, name in enumerate(names)
        },
        replicas={place: some for place, some in held.items() if len(some) > 1},
        batch_size=units,
        chunks=chunks,
    )
    with logical_devices(DEVICES), _both(training).flow() as flow:
        flow.update_flow(placement)
        yield flow, _rows(), _rows(), profile


def _in_an_order_that_can_be(measurement: Measurement) -> None:
    """Every transfer starts after the pass that made what it carries, and ends before the pass that
    reads it."""
    passes = {
        (row.stage, row.kind, row.micro_batch): row
        for row in measurement.measured
        if row.target is None
    }
    for row in measurement.measured:
        phase = "backward" if row.kind == "gradients" else "forward"
        if row.kind in ("values", "gradients", "inputs"):
            assert row.end_ms <= passes[row.target, phase, row.micro_batch].start_ms
        if row.kind in ("values", "gradients", "results"):
            assert row.start_ms >= passes[row.stage, phase, row.micro_batch].end_ms
    assert min(row.start_ms for row in measurement.measured) == 0


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b", "zero-bubble"])
def test_a_training_step_has_every_pass_of_every_micro_batch_once(schedule: Order) -> None:
    with _placed(training=True) as (flow, inputs, target, profile):
        step = flow.train_step(functional.mse_loss, schedule=schedule)
        measurement = flow.measure(inputs, target, step=step, profile=profile)
    kinds = (
        ("forward", "backward", "weights") if schedule == "zero-bubble" else ("forward", "backward")
    )
    expected = {
        (stage, kind, number)
        for stage in range(DEVICES)
        for kind in kinds
        for number in range(CHUNKS)
    }
    found = [(row.stage, row.kind, row.micro_batch) for row in measurement.rows]
    assert len(found) == len(expected) and set(found) == expected
    assert {row.device for row in measurement.rows} == {f"cpu:{index}" for index in range(DEVICES)}
    assert all(row.end_ms >= row.start_ms for row in measurement.measured)
    _in_an_order_that_can_be(measurement)


def test_inference_has_every_pass_once_and_its_results() -> None:
    with _placed(training=False) as (flow, inputs, _, profile):
        measurement = flow.measure(inputs, profile=profile)
    passes = [(row.stage, row.kind, row.micro_batch) for row in measurement.rows]
    assert sorted(passes) == [(s, "forward", m) for s in range(DEVICES) for m in range(CHUNKS)]
    assert sum(row.kind == "results" for row in measurement.measured) == CHUNKS
    assert sum(row.kind == "inputs" for row in measurement.measured) >= CHUNKS
    _in_an_order_that_can_be(measurement)


def test_the_predicted_busy_time_is_the_sum_of_the_layers_times() -> None:
    with _placed(training=True) as (flow, inputs, target, profile):
        step = flow.train_step(functional.mse_loss, schedule="1f1b")
        trained = flow.measure(inputs, target, step=step, profile=profile)
        inferred = flow.eval().measure(inputs, profile=profile)
        flow.train()
        places = {name: str(flow.settings.device(place)) for name, place in flow.layer_gpus.items()}
    for device in trained.devices:
        forward_ms = sum(
            layer.forward_ms["toy"] for layer in profile.layers if places[layer.name] == device
        )
        assert inferred.busy_ms(device, predicted=True) == pytest.approx(CHUNKS * forward_ms)
        assert trained.busy_ms(device, predicted=True) == pytest.approx(3 * CHUNKS * forward_ms)


def test_predicted_transfers_take_what_the_profile_says_of_their_link() -> None:
    with _placed(training=False) as (flow, inputs, _, profile):
        measurement = flow.measure(inputs, profile=profile)
    places = {
        layer.name: index * DEVICES // len(profile.layers)
        for index, layer in enumerate(profile.layers)
    }
    crossing: dict[tuple[int, int], int] = {}
    for edge in profile.edges:
        for there in {places[name] for name in edge.targets} - {places[edge.source]}:
            crossing[places[edge.source], there] = crossing.get((places[edge.source], there), 0) + 1
    found = {
        (row.stage, row.target): row.end_ms - row.start_ms
        for row in measurement.predicted
        if row.target
    }
    assert set(found) == set(crossing)
    for way, count in crossing.items():
        # 1000 bytes at a megabyte a second each
        assert found[way] == pytest.approx(count * 1.0)


@pytest.mark.parametrize("counts", [(2,), (3,), (2, 1), (1, 2)])
def test_the_predicted_step_of_replicas_runs_the_units_of_a_device_in_turn(
    counts: tuple[int, ...],
) -> None:
    units = lcm(*counts)
    with _placed(training=True, counts=counts, chunks=1) as (flow, inputs, target, profile):
        assert profile.cluster is not None
        links = [
            link.model_copy(update={"bandwidth_bytes_per_s": 1e15})
            for link in profile.cluster.links
        ]
        cluster = profile.cluster.model_copy(update={"links": tuple(links)})
        profile = profile.model_copy(update={"cluster": cluster})
        step = flow.train_step(functional.mse_loss, schedule="1f1b")
        found = flow.measure(inputs, target, step=step, profile=profile)
    layers = len(profile.layers)
    end = layers if len(counts) == 1 else -(-layers // 2)
    # one unit takes a and 2 a in the first stage, and b and 2 b in the second one
    a, b = (sum(index + 1.0 for index in some) for some in (range(end), range(end, layers)))
    expected = {
        # every replica runs a unit of its own
        (2,): 3 * a,
        (3,): 3 * a,
        # the second stage runs both units forwards, then backwards
        (2, 1): a + 2 * b + 4 * b + 2 * a,
        # the first one goes backwards through unit 0, and then, if it has come, through unit 1
        (1, 2): max(max(2 * a, a + 3 * b) + 2 * a, 2 * a + 3 * b) + 2 * a,
    }
    assert found.predicted_ms == pytest.approx(expected[counts])
    assert all(row.predicted_end_ms is not None for row in found.rows)
    assert {row.micro_batch for row in found.rows} == set(range(units))
    works = zip((a, b)[: len(counts)], counts, strict=True)
    busy = [3 * work * units / count for work, count in works for _ in range(count)]
    for index, time_ms in enumerate(busy):
        assert found.busy_ms(f"cpu:{index}", predicted=True) == pytest.approx(time_ms)
    assert f"one micro-batch in {units} parts" in found.title


def test_what_is_measured_leaves_weights_buffers_and_random_numbers_as_they_were() -> None:
    with _placed(training=True) as (flow, inputs, target, _):
        optimizer = torch.optim.SGD(flow.parameters(), lr=0.1)
        step = flow.train_step(functional.mse_loss, optimizer)
        before = {name: value.cpu().clone() for name, value in flow.state_dict().items()}
        torch.manual_seed(3)
        flow.measure(inputs, target, step=step)
        drawn = torch.rand(1)
        after = {name: value.cpu().clone() for name, value in flow.state_dict().items()}
    for name, value in after.items():
        assert torch.equal(value, before[name]), name
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))


def test_a_model_in_training_mode_is_what_it_was_after_its_inference_was_measured() -> None:
    model = nn.Sequential(
        nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES), nn.Dropout(0.5)
    ).train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    flow.update_flow()
    torch.manual_seed(0)
    flow.measure(torch.randn(ROWS, FEATURES), chunks=2)
    after = torch.rand(())
    torch.manual_seed(0)
    torch.randn(ROWS, FEATURES)
    torch.testing.assert_close(after, torch.rand(()))
    torch.testing.assert_close(dict(model.named_buffers()), before)


def test_steps_and_streams_after_a_measurement_are_not_traced() -> None:
    with _placed(training=True) as (flow, inputs, target, _):
        step = flow.train_step(functional.mse_loss)
        first = flow.measure(inputs, target, step=step)
        count = len(first.measured)
        step(inputs, target)
        assert len(first.measured) == count
        pipeline, _, _ = step.pipeline(inputs, target)
        assert (
            pipeline is not None
            and pipeline.engine.trace is None
            and pipeline.courier.trace is None
        )


def test_without_a_profile_nothing_is_predicted() -> None:
    with _placed(training=False) as (flow, inputs, _, _):
        measurement = flow.measure(inputs)
    assert measurement.predicted == () and measurement.predicted_ms is None


def test_a_profile_of_other_micro_batches_is_named() -> None:
    with _placed(training=False) as (flow, inputs, _, profile):
        other = profile.model_copy(update={"batch_size": 32})
        measurement = flow.measure(inputs, profile=other)
    assert any("micro-batches of 32, these are of 2" in note for note in measurement.notes)


def test_a_profile_of_other_layers_is_refused() -> None:
    other = Profile(layers=(Layer(name="elsewhere", forward_ms={"toy": 1.0}),))
    with (
        _placed(training=False) as (flow, inputs, _, _),
        pytest.raises(InputError, match="the profile has no times of layer"),
    ):
        flow.measure(inputs, profile=other)


def test_a_target_without_a_step_is_refused() -> None:
    with (
        _placed(training=False) as (flow, inputs, target, _),
        pytest.raises(InputError, match="give its target and step="),
    ):
        flow.measure(inputs, target)


def test_what_is_no_step_is_told_what_to_give() -> None:
    step: Any = functional.mse_loss  # an AttributeError of its missing flow came
    with (
        _placed(training=True) as (flow, inputs, target, _),
        pytest.raises(InputError, match=r"step is a function; give what .* train_step"),
    ):
        flow.measure(inputs, target, step=step)


def test_a_step_whose_loss_needs_no_target_is_measured_without_one() -> None:
    # it was refused, though step(inputs) runs
    with _placed(training=True) as (flow, inputs, _, _):
        step = flow.train_step(lambda output, _: output.square().mean())
        measurement = flow.measure(inputs, step=step)
    assert sum(row.kind == "backward" for row in measurement.measured) == DEVICES * CHUNKS


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_more_micro_batches_than_samples_are_refused(training: bool) -> None:
    # as many as there were samples were measured
    with _placed(training) as (flow, inputs, target, _):
        step = flow.train_step(functional.mse_loss) if training else None
        with pytest.raises(
            InputError, match="chunks=9 is more than the samples of the inputs, 8; give"
        ):
            flow.measure(inputs, target if training else None, step=step, chunks=ROWS + 1)


def test_a_flow_that_is_not_placed_is_refused() -> None:
    with pytest.raises(InputError, match="call update_flow"):
        DataFlow(nn.Linear(2, 2)).measure(torch.zeros(2, 2))


class _Branching(nn.Module):
    """A branch on a tensor's value: it cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return x if x.sum() > 0 else -x


def test_a_model_that_cannot_be_captured_is_refused_with_the_reason() -> None:
    flow = DataFlow(_Branching())
    flow.update_flow()
    with pytest.raises(InputError, match="runs through hooks, so it has no segments to measure"):
        flow.measure(torch.randn(2, 4))


def test_inputs_that_a_layer_cannot_take_are_told_as_the_layer_tells_them() -> None:
    with (
        _placed(training=False) as (flow, inputs, _, _),
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
    ):
        flow.measure(inputs[:, :-1], chunks=2)
