"""On real GPUs: models generate, and train on methods of their own, split as they do unsplit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_cases import without_dropout
from model_list import CASES, transformers
from splitting import scatter_layers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from placer import DataFlow

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]


@pytest.mark.parametrize(
    "ways", [{}, {"num_beams": 3}, {"cache_implementation": "static", "disable_compile": True}]
)
@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"]
)
def test_generate_gives_what_it_gives_unsplit(name: str, ways: dict[str, Any]) -> None:
    if name.startswith("T5") and "cache_implementation" in ways:
        pytest.skip("transformers itself makes no such cache for it")
    torch.manual_seed(0)
    model = without_dropout(CASES[name].make().double().eval()).cuda(0)
    whole = copy.deepcopy(model)
    flow = DataFlow(model, fine_grained=True)
    scatter_layers(flow, torch.cuda.device_count())
    for length in (5, 8, 5):
        ids = torch.randint(
            2, 50, (2, length), generator=torch.Generator().manual_seed(length)
        ).cuda(0)
        options = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False, **ways}
        expected = whole.generate(ids, **options)
        with flow.applied():
            found = model.generate(ids, **options)
        assert found.tolist() == expected.tolist()
    assert flow.not_captured_because == ""


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("is_inside", [True, False])
def test_what_checkpoints_run_again_in_the_threads_of_autograd_runs_where_it_ran(
    is_inside: bool, reentrant: bool
) -> None:
    """Each GPU has a thread of its own, and the one that holds the flow waits for them."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = checkpoint(lambda x: model[2](model[1](model[0](x)) + x), x, use_reentrant=reentrant)
        return (checkpoint(model, y, use_reentrant=reentrant) + y).pow(2).sum()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).double().cuda(0)
    whole = copy.deepcopy(model)
    x = torch.randn(4, 8, dtype=torch.float64, device="cuda:0", requires_grad=True)
    loss(whole, x).backward()
    flow = DataFlow(model, fine_grained=True)
    scatter_layers(flow, torch.cuda.device_count())
    for _ in range(2):
        model.zero_grad()
        with flow.applied():
            result = loss(model, x)
            if is_inside:
                result.backward()
        if not is_inside:
            result.backward()
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad.cpu(), atol=1e-10, rtol=1e-10)


def _places(model: nn.Module) -> list[torch.device]:
    return [parameter.device for parameter in model.parameters()]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("alone", [False, True], ids=["all GPUs", "the first GPU"])
def test_transformers_trainer_neither_moves_nor_wraps_a_placed_model(
    tmp_path: Path, alone: bool
) -> None:
    pytest.importorskip("accelerate")
    found = transformers()
    torch.manual_seed(0)
    model = without_dropout(CASES["LlamaForCausalLM"].make()).cuda(0)
    flow = DataFlow(model, fine_grained=True)
    scatter_layers(flow, 1 if alone else torch.cuda.device_count())
    data = [{"input_ids": (ids := torch.randint(2, 40, (6,))), "labels": ids} for _ in range(8)]
    options = {"max_steps": 3, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    before, weights = (
        _places(model),
        [parameter.detach().clone() for parameter in model.parameters()],
    )
    with flow.applied() as placed:
        trainer = found.Trainer(
            placed, found.TrainingArguments(str(tmp_path), **options), train_dataset=data
        )
        trainer.train()
        assert trainer.model_wrapped is model
    assert _places(model) == before
    assert not all(map(torch.equal, model.parameters(), weights))
    assert not hasattr(model, "hf_device_map")


@pytest.mark.parametrize("last", [0, -1])
def test_an_accelerator_neither_moves_nor_wraps_a_placed_model(last: int) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    flow = DataFlow(model)
    flow.layer_gpus.update({"0": 0, "1": last % torch.cuda.device_count()})
    flow.update_flow()
    before = _places(model)
    with flow.applied() as placed:
        accelerator = accelerate.Accelerator()
        prepared, optimizer = accelerator.prepare(
            placed, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        assert prepared is model
        accelerator.backward(prepared(torch.randn(4, 8, device="cuda:0")).square().mean())
        optimizer.step()
        assert _places(model) == before
