"""On real GPUs: plain tensors that several devices read, and ties that are split, against the
unsplit model."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from model_list import CASES
from plain_tables import INPUTS, USES, Net, fresh
from torch import Tensor, nn
from torch.nn import functional

import placer
from placer import BatchOptions, Constraints, DataFlow
from placer.zoo import gpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("exact"),
    pytest.mark.filterwarnings(
        "ignore:.*without CUDA graphs", "ignore:.*micro-batches run one after another"
    ),
]


def _flow(net: Net) -> DataFlow:
    flow = DataFlow(net)
    # else micro-batches see what others wrote
    flow.batch_options = BatchOptions(verify="write" not in net.use)
    flow.layer_gpus.update(a=0, b=torch.cuda.device_count() - 1, c=0)
    flow.update_flow()
    return flow


def _at(net: Net, home: str) -> Net:
    net.own = net.own.to(home)
    return net


def _equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=1e-9, atol=1e-9)


HOMES = pytest.mark.parametrize("home", ["cpu", "cuda:0"])


@HOMES
@pytest.mark.parametrize("use", USES)
def test_calls_and_streams_follow_what_is_written_to_a_plain_tensor(use: str, home: str) -> None:
    net, expected = fresh("attribute", use), []
    with torch.no_grad():
        for turn in range(3):
            expected += [torch.cat([net(part) for part in x.chunk(2)]) for x in INPUTS]
            expected += [net(x) for x in INPUTS]
            expected.append(net.own.clone())
            net.own.add_(float(turn))
    net, found = _at(fresh("attribute", use), home), []
    with torch.no_grad():
        flow = _flow(net)
        for turn in range(3):
            found += [flow(x, chunks=2).cpu() for x in INPUTS]
            found += [y.cpu() for y in flow.stream(INPUTS)]
            found.append(net.own.cpu().clone())
            net.own.add_(float(turn))
    assert net.own.device == torch.device(home) and not flow.not_captured_because
    _equal(found, expected)


@HOMES
@pytest.mark.parametrize("use", USES)
def test_training_steps_follow_what_is_written_to_a_plain_tensor(use: str, home: str) -> None:
    net, expected = fresh("attribute", use, training=True), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number, x in enumerate(INPUTS):
        net.own.add_(float(number))
        optimizer.zero_grad()
        for part in x.chunk(2):
            (functional.mse_loss(net(part), torch.zeros_like(part)) / 2).backward()
        optimizer.step()
        expected += [tensor.detach().clone() for tensor in (*net.parameters(), net.own)]
    net, found = _at(fresh("attribute", use, training=True), home), []
    flow = _flow(net)
    step = flow.train_step(functional.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1))
    for number, x in enumerate(INPUTS):
        net.own.add_(float(number))
        step(x, torch.zeros_like(x), chunks=2)
        found += [tensor.detach().cpu().clone() for tensor in (*net.parameters(), net.own)]
    _equal(found, expected)


@pytest.mark.parametrize("how", ["call", "chunks", "stream", "applied"])
def test_a_split_tie_gives_what_the_unsplit_model_gives_and_follows_its_original(how: str) -> None:
    torch.manual_seed(0)
    model = gpt(layers=4, width=16, heads=2, context=8, vocabulary=11, tied=True).double().eval()
    reference, tokens = copy.deepcopy(model), [torch.randint(11, (4, 8)) for _ in range(4)]
    last = torch.cuda.device_count() - 1
    asked: dict[str, Any] = {
        "training": False,
        "split_tied": True,
        "progress": False,
        "cache": False,
    }
    if last:
        asked["constraints"] = Constraints(min_devices=2, contiguous=True)
    with torch.no_grad():
        placement = placer.suggest(model, tokens[0], granularity="blocks", **asked)
        flow = DataFlow(model)
        flow.update_flow(placement)
        for _ in range(3):
            expected = [reference(batch) for batch in tokens]
            if how == "stream":
                found = [y.cpu() for y in flow.stream(tokens)]
            elif how == "applied":
                with flow.applied():
                    found = [model(batch).cpu() for batch in tokens]
            else:
                found = [flow(batch, chunks=2 if how == "chunks" else 1).cpu() for batch in tokens]
            _equal(found, expected)
            for net in (model, reference):
                net.token_embedding.weight.mul_(1.5)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"]
)
def test_accelerate_runs_the_device_map_of_whole_blocks(name: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model: nn.Module = CASES[name].make().eval()
    args, kwargs = CASES[name].inputs(False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = model(*args, **kwargs)[0]
        placement = placer.suggest(
            model,
            kwargs or args,
            training=False,
            granularity="blocks",
            progress=False,
            cache=False,
            devices=2,
            constraints=Constraints(min_devices=2),
        )
        found = placement.device_map(model)
        assert set(found.values()) == {0, 1}
        moved = accelerate.dispatch_model(copy.deepcopy(model), found)
        torch.testing.assert_close(moved(*args, **kwargs)[0].cpu(), expected, rtol=1e-4, atol=1e-4)
