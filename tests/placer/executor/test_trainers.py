"""Inside ``flow.applied()`` training loops of other libraries leave a model where it is placed, and
as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_list import transformers
from torch import Tensor, nn

from placer import DataFlow, devices
from placer.executor.device_map import device_map
from placer.executor.state.assignment import Assignment
from placer.testing import logical_devices

pytest.importorskip("accelerate")

HALVES = {"": 0, "model.layers.1": 1, "model.norm": 1, "lm_head": 1}


def _llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    found = transformers()
    model: nn.Module = found.LlamaForCausalLM(
        found.LlamaConfig(vocab_size=40, num_hidden_layers=2, **sizes)
    )
    return model


def _placed(model: nn.Module, places: dict[str, int], **options: Any) -> DataFlow:
    flow = DataFlow(model, device_ids=["cpu:0", "cpu:1"], **options)
    flow.layer_gpus.clear()
    flow.layer_gpus.update(places)
    flow.update_flow()
    return flow


def _places(model: nn.Module) -> dict[str, str]:
    return {name: str(devices.location(one)) for name, one in model.named_parameters()}


def _trainer(model: nn.Module, folder: Path, gpus: int, **options: Any) -> Any:
    """A trainer that sees a number of GPUs, of which cpu:0 is the first."""
    found = transformers()

    class Arguments(found.TrainingArguments):  # type: ignore[misc, name-defined]
        @property
        def device(self) -> torch.device:
            super().device  # noqa: B018  it sets up what else there is
            return torch.device("cpu:0")

        @property
        def n_gpu(self) -> int:
            return min(gpus, int(vars(self).get("_seen", gpus)))

        def __setattr__(
            self, name: str, value: Any
        ) -> None:  # the trainer's way to say that it uses but one
            super().__setattr__(
                "_seen" if name == "_n_gpu" and "_ready" in vars(self) else name, value
            )

    arguments = Arguments(
        str(folder),
        per_device_train_batch_size=2,
        max_steps=3,
        learning_rate=0.05,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    _ = arguments.device
    vars(arguments)["_ready"] = True
    generator = torch.Generator().manual_seed(1)
    data = [
        {"input_ids": (ids := torch.randint(40, (6,), generator=generator)), "labels": ids}
        for _ in range(8)
    ]
    return found.Trainer(model, arguments, train_dataset=data, eval_dataset=data)


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[nn.Module]]:
    """The models that were wrapped in DataParallel, which has no GPUs here."""
    found: list[nn.Module] = []

    class Noted(nn.Module):
        def __init__(self, module: nn.Module, *_: Any, **__: Any) -> None:
            super().__init__()
            found.append(module)
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    monkeypatch.setattr(nn, "DataParallel", Noted)
    yield found


def test_a_trainer_that_sees_two_gpus_would_wrap_a_model_elsewhere(
    tmp_path: Path, wrapped: list[nn.Module]
) -> None:
    _trainer(_llama(), tmp_path, gpus=2).train()
    assert len(wrapped) == 1  # else the tests below could not fail


@pytest.mark.covering
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}])
@pytest.mark.parametrize(
    "places",
    [HALVES, {"": 0}, {"": 1}],
    ids=["two devices", "the trainer's device", "another device"],
)
def test_transformers_trainer_neither_moves_nor_wraps_it(
    tmp_path: Path, wrapped: list[nn.Module], places: dict[str, int], options: dict[str, Any]
) -> None:
    model = _llama()
    whole = copy.deepcopy(model)
    unsplit = _trainer(whole, tmp_path, gpus=1, **options)
    unsplit.train()
    with logical_devices(2):
        flow = _placed(model, places)
        before = _places(model)
        with flow.applied() as placed:
            trainer = _trainer(placed, tmp_path, gpus=2, **options)
            trainer.train()
            assert trainer.model_wrapped is model
            loss = trainer.evaluate()["eval_loss"]
        assert _places(model) == before
        assert {devices.location(one).index for one in model.parameters()} == set(places.values())
    assert not wrapped
    assert loss == pytest.approx(unsplit.evaluate()["eval_loss"], rel=1e-4)
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("places", [{"0": 0, "1": 1}, {"0": 1, "1": 1}, {"0": 0, "1": 0}])
def test_an_accelerator_neither_moves_nor_wraps_it(places: dict[str, int]) -> None:
    from accelerate import Accelerator

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    whole = copy.deepcopy(model)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    theirs = torch.optim.SGD(whole.parameters(), lr=0.1)
    with logical_devices(2):
        flow = _placed(model, places)
        before = _places(model)
        with flow.applied() as placed:
            accelerator = Accelerator(cpu=True)
            prepared, optimizer = accelerator.prepare(
                placed, torch.optim.SGD(model.parameters(), lr=0.1)
            )
            assert prepared is model
            for _ in range(2):
                optimizer.zero_grad()
                accelerator.backward(prepared(x).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            assert _places(model) == before
    for _ in range(2):
        theirs.zero_grad()
        whole(x).square().mean().backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        theirs.step()
    for ours, its in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), its.detach(), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 2), lambda: nn.Linear(4, 2, bias=False)])
def test_an_accelerator_does_not_move_a_model_of_one_module(make: Any) -> None:
    from accelerate import Accelerator

    model: nn.Module = make()
    with logical_devices(2):
        with _placed(model, {"": 1}).applied() as placed:
            Accelerator(cpu=True).prepare(placed)
            assert set(_places(model).values()) == {"cpu:1"}


@pytest.mark.parametrize("before", [None, {"": "cuda:0"}])
def test_the_map_is_taken_away_afterwards(before: dict[str, str] | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if before is not None:
        model.hf_device_map = before  # type: ignore[assignment]
    own = dict(vars(model))
    with logical_devices(2):
        flow = _placed(model, {"0": 0, "1": 1})
        with flow.applied():
            with flow.applied():
                inner = vars(model)["hf_device_map"]
            assert vars(model)["hf_device_map"] is not before
            assert list(map(str, inner.values())) == ["cpu:0", "cpu:0", "cpu:1"]
        assert vars(model) == own
        with pytest.raises(KeyError), flow.applied():
            raise KeyError
        assert vars(model) == own


def test_generate_of_an_encoder_and_decoder_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    found = transformers()
    monkeypatch.setattr(
        "transformers.generation.utils.add_hook_to_module", lambda *_, **__: pytest.fail("a hook")
    )
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    model = found.T5ForConditionalGeneration(
        found.T5Config(vocab_size=40, decoder_start_token_id=0, **sizes)
    ).eval()
    whole = copy.deepcopy(model)
    ids: Tensor = torch.randint(2, 40, (2, 5))
    with logical_devices(2):
        flow = _placed(model, {"": 0, "decoder": 1, "lm_head": 1})
        encoder = dict(vars(model.encoder))
        with flow.applied():
            ours = model.generate(ids, max_new_tokens=4, do_sample=False)
        assert vars(model.encoder) == encoder
    assert ours.tolist() == whole.generate(ids, max_new_tokens=4, do_sample=False).tolist()


def test_a_map_of_gpus_has_their_numbers_and_always_two_values() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    )
    first, second, host = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu", 0)
    assert device_map(model, Assignment({"0": first, "2": second}, first)) == {
        "": first,
        "0": 0,
        "2.0": 1,
        "2.1": 1,
    }
    alone = device_map(model, Assignment({"": second}, first))
    assert alone == {"": second, "0": 1, "2.0": 1, "2.1": 1}
    # of one value the trainer would think that the model may be replicated
    assert len(set(alone.values())) == 2
    mixed = device_map(model, Assignment({"0": host, "2": second}, second))
    assert mixed == {"": second, "0": "cpu:0", "2.0": 1, "2.1": 1}
    # which would mean that weights are offloaded
    assert not {"cpu", "disk"}.intersection(map(str, mixed.values()))
