"""The engine driven by hand, with plans that no flow makes yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from placer import capture_graph, devices
from placer.capture.layers import Layer, LayerFunction, LayerGraph
from placer.devices import Courier, Lane
from placer.executor.engine.engine import Engine
from placer.executor.engine.slot import Slot
from placer.executor.engine.stage import Stage
from placer.executor.segments import borders, segments
from placer.executor.training.feed import Feed
from placer.executor.training.input_gradients import InputGradients
from placer.executor.training.stages.training_slot import Head
from placer.executor.training.stages.training_stage import TrainingStage
from placer.executor.training.stages.weight_aliases import Weights
from placer.executor.training.training_engine import TrainingEngine
from placer.schedule import Pass
from placer.testing import logical_devices

HALF = 4
"""Samples that a replica has of each batch."""

STEPS, WIDTH, SEQUENCES = 5, 6, 2


def _loss(outputs: list[Any], targets: list[Any]) -> tuple[Tensor, dict[str, Any]]:
    return functional.mse_loss(outputs[0], targets[0]), {}


def test_two_replicas_of_a_stage_add_up_the_gradients_of_the_unsplit_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    data = [
        (torch.randn(2 * HALF, 5).double(), torch.randn(2 * HALF, 3).double()) for _ in range(2)
    ]
    expected = []
    for x, target in data:
        loss = functional.mse_loss(model(x), target)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        expected.append([loss.detach(), *gradients])
    with logical_devices(2) as places:
        x, target = data[0]
        graph = capture_graph(model, x[:HALF])
        weights, courier = Weights.from_graph(graph), Courier()
        parts = []
        for place in places:
            # the same layers on each device, over aliases of the weights there
            parts += segments(graph, [place] * len(graph.layers), weights.lookup(graph))
        weights.bind(parts, pieces=1)
        stages = []
        for part, place in zip(parts, places, strict=True):
            (reads,), (writes,) = borders([part], graph.outputs)
            total = torch.zeros((), device=place, dtype=torch.float64)
            head = Head(graph.outputs, _loss, total, torch.ones((), device=place))
            stage = TrainingStage(part, reads, writes, head, reach=weights.reach)
            stage.open_slots(1, {graph.inputs[0]: x[:HALF]}, [target[:HALF]], weight=0.5)
            stages.append(stage)
        lanes = {place: Lane(place) for place in places}
        engine = TrainingEngine(stages, lanes, courier)
        # micro-batch 0 goes through replica 0, micro-batch 1 through replica 1
        order = [Pass(one, "forward", one) for one in range(2)]
        order += [Pass(one, "backward", one) for one in range(2)]
        for (x, target), wanted in zip(data, expected, strict=True):
            given = {graph.inputs[0]: x, 0: target}
            dims, sizes = dict.fromkeys(given, 0), [HALF, HALF]
            owners = {*places, *weights.homes}
            begun = {place: Lane(place, caller=True).mark() for place in owners}
            for stage in stages:
                stage.head.total.zero_()
            weights.begin(lanes, begun, courier=courier)
            feed = Feed(given, sizes, courier, begun, dims)
            gradients = InputGradients(given, sizes, courier, dims)
            engine.run_batch(order, feed, gradients, exchange=weights.exchange)
            weights.finish({place: Lane(place, caller=True) for place in owners})
            loss = sum(stage.head.total.cpu() for stage in stages)
            found = [loss, *(parameter.grad for parameter in model.parameters())]
            torch.testing.assert_close(found, wanted)


def _attend(
    device: torch.device, state: Sequence[Tensor], reads: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """One head of causal attention for one token; its key and value are added to those before."""
    query, key, value = state
    token, position, keys, values = reads
    keys.index_copy_(1, position, token @ key)
    values.index_copy_(1, position, token @ value)
    scores = (token @ query) @ keys.transpose(1, 2) / WIDTH**0.5
    later = torch.arange(keys.shape[1], device=token.device) > position
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ values,)


def _project(
    device: torch.device, state: Sequence[Tensor], reads: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    return (reads[0] @ state[0],)


def _layer(name: str, state: str, reads: str, writes: str, function: LayerFunction) -> Layer:
    names = (tuple(text.split()) for text in (state, "", reads, writes))
    return Layer(name, (name,), "", *names, function=function, signature=name)


@torch.no_grad()
def test_a_slot_keeps_a_cache_that_its_passes_write_in_place() -> None:
    torch.manual_seed(0)
    state = {name: torch.randn(WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
    sequences = [torch.randn(1, STEPS, WIDTH) for _ in range(SEQUENCES)]
    layers = [
        _layer("attend", "query key value", "token position keys values", "attended", _attend),
        _layer("project", "out", "attended", "result", _project),
    ]
    inputs, outputs = ("token", "position", "keys", "values"), ("result",)
    graph = LayerGraph(layers, {}, inputs, outputs, (), state, False, 1, "fine")
    with logical_devices(2) as places:
        parts = segments(graph, places, lambda name, place: devices.move(state[name], place))
        reads, _ = borders(parts, ())
        writes = [{"attended": [1]}, {"result": []}]
        stages = [Stage[Slot](*border) for border in zip(parts, reads, writes, strict=True)]
        for _ in sequences:
            cache = {
                name: devices.move(torch.zeros(1, STEPS, WIDTH), places[0])
                for name in ("keys", "values")
            }
            stages[0].open(Slot(cache))
            stages[1].open(Slot())
        engine = Engine(stages, {place: Lane(place) for place in places}, Courier())
        made: list[list[Tensor]] = [[] for _ in sequences]
        for step in range(STEPS):
            for number, sequence in enumerate(sequences):
                token = {
                    "token": devices.move(sequence[:, step : step + 1], places[0]),
                    "position": devices.move(torch.tensor([step]), places[0]),
                }
                ready = Lane(places[0], caller=True).mark()
                first = Pass(0, "forward", number)
                engine.deliver(token, ready, None, first, stages[0].slot(number))
                engine.run([first, Pass(1, "forward", number)])
                made[number].append(stages[1].slot(number).outputs["result"].cpu().clone())
        caches = [slot.inputs["keys"].cpu() for slot in stages[0].slots]
    for sequence, found, cache in zip(sequences, made, caches, strict=True):
        query, key, value = (sequence @ state[name] for name in ("query", "key", "value"))
        uncached = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.testing.assert_close(torch.cat(found, dim=1), uncached @ state["out"])
        torch.testing.assert_close(cache, key)
