"""What the loss does not depend on has no gradient, as in the unsplit model, so that no optimizer
changes it."""

from __future__ import annotations

from typing import Any

import pytest
import ranked_oddities as models
import ranked_training as training
import torch
from rank_pool import RankPool
from ranked import joined

from placer.capture.capture import layer_graph
from placer.capture.export.export import export
from placer.distributed.output_reach import Flows

EXACT = 1e-10
ON_THREE = {"front": "cpu:0", "aside": "cpu:0", "middle": "cpu:1", "back": "cpu:2"}
LATE = {"front": "cpu:0", "aside": "cpu:0", "middle": "cpu:1", "join": "cpu:2", "back": "cpu:2"}
TIED = {"front": "cpu:0", "aside": "cpu:1", "middle": "cpu:2", "back": "cpu:3"}


def check(
    ranks: RankPool,
    make: Any,
    places: dict[str, str],
    kind: str = "adamw",
    schedule: str = "1f1b",
    recompute: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Three steps are the unsplit model's; its gradients after the first."""
    parts = ranks.run(training.split_steps, make, places, 2, kind, 3, schedule, recompute)
    expected = training.unsplit_steps(make, 2, kind, 3)
    (losses,) = [part["losses"] for part in parts if part and part["losses"]]
    assert losses == pytest.approx(expected["losses"], rel=EXACT)
    found = joined(parts, "gradients")
    assert {name for name, gradient in found.items() if gradient is None} == {
        name for name, gradient in expected["gradients"].items() if gradient is None
    }
    for what in ("gradients", "parameters"):
        for name, tensor in expected[what].items():
            if tensor is not None:
                torch.testing.assert_close(
                    joined(parts, what)[name], tensor, atol=EXACT, rtol=EXACT, msg=name
                )
    return found


@pytest.mark.covering
@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("recompute", [(), ("cpu:0", "cpu:1")])
def test_a_result_without_a_loss_gives_nothing_back_by_way_of_later_stages(
    ranks: RankPool, schedule: str, recompute: tuple[str, ...]
) -> None:
    found = check(ranks, models.passed_by, ON_THREE, "sgd", schedule, recompute)
    assert found["aside.weight"] is None and found["front.weight"] is not None


@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused", "foreach"])
def test_decay_leaves_alone_what_has_no_gradient(ranks: RankPool, kind: str) -> None:
    check(ranks, models.passed_by, ON_THREE, kind)


def test_a_loss_may_depend_on_another_result_from_time_to_time(ranks: RankPool) -> None:
    check(ranks, models.now_and_then, ON_THREE)


def test_a_value_that_a_later_layer_detaches_gives_nothing_back(ranks: RankPool) -> None:
    assert check(ranks, models.detached_late, LATE)["aside.weight"] is None


def test_an_infinite_slope_of_what_has_no_loss_is_not_multiplied_by_zero(ranks: RankPool) -> None:
    check(
        ranks,
        models.steep,
        {"front": "cpu:0", "aside": "cpu:0", "middle": "cpu:1", "back": "cpu:1"},
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_tied_weight_without_a_loss_has_no_gradient(ranks: RankPool, schedule: str) -> None:
    assert check(ranks, models.tied_aside, TIED, "sgd", schedule)["aside.weight"] is None


def test_gradients_come_back_through_what_is_written_in_place(ranks: RankPool) -> None:
    places = {name: "cpu:0" if name in ("front", "aside") else "cpu:1" for name in TIED}
    assert check(ranks, models.written_in, places)["aside.weight"] is not None


def test_what_is_written_in_place_and_detached_later_gives_nothing_back(ranks: RankPool) -> None:
    assert check(ranks, models.written_and_detached, LATE)["aside.weight"] is None


def flows_of(make: Any) -> tuple[Any, Flows]:
    torch.manual_seed(0)
    model, inputs, *_ = make()
    exported = export(model, (inputs,), {})
    graph = layer_graph(exported, model, tuple(name for name, _ in model.named_children()))
    return graph, Flows.from_graph(graph, exported.module.graph)


def test_one_result_needs_no_marks() -> None:
    graph, flows = flows_of(models.detached_late)
    crossing = [name for name in graph.values if graph.values[name].source == "aside"]
    assert not any(flows.through(name) for name in crossing) and not flows.depend(
        list(graph.values)
    )
    assert all(flows.through(name) for name in graph.outputs)


def test_two_results_need_marks_where_a_value_leads_to_one_alone() -> None:
    graph, flows = flows_of(models.passed_by)
    made = {graph.values[name].source: name for name in graph.values}
    assert flows.depend([made["front"], made["aside"]])
    assert flows.results[made["front"]] == {graph.outputs[0]} and flows.results[made["aside"]] == {
        graph.outputs[1]
    }
