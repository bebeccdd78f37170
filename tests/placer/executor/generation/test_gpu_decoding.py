"""On real GPUs: ``generate`` inside ``flow.applied()`` replays CUDA graphs, as one GPU computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generating_models import pair, split
from torch import Tensor, nn

from placer import DataFlow
from placer.executor.generation.tracing import compiled_pieces

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]

OPTIONS = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
COUNT = min(2, torch.cuda.device_count())
WAYS: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"do_sample": True}]


def _placed(name: str) -> tuple[Any, Any, DataFlow]:
    """Return a model that is split over GPUs, an equal one on the first, and the flow."""
    model, reference = pair(name, torch.float64)
    model, reference = model.cuda(0), reference.cuda(0)
    return model, reference, split(model, COUNT)


def _ids(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 55, (2, 7), generator=generator).cuda(0)


@pytest.mark.parametrize("ways", WAYS, ids=["greedy", "beams", "sampling"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "t5", "bart"])
def test_texts_are_those_of_one_gpu_and_come_from_recordings(
    name: str, ways: dict[str, Any]
) -> None:
    model, reference, flow = _placed(name)
    for seed in range(4):
        torch.manual_seed(3)
        expected = reference.generate(_ids(seed), **{**OPTIONS, **ways})
        torch.manual_seed(3)
        with flow.applied():
            found = model.generate(_ids(seed), **{**OPTIONS, **ways})
        assert found.tolist() == expected.tolist()
    report = flow.generation_report
    assert report.not_recorded_because == ""
    assert (report.recorded, report.hooked) == (42, 2)
    # the prompt of an encoder-decoder is a part of its first pass
    assert report.recorded_prompts == int(name not in ("t5", "bart"))
    assert {*report.stages} == {f"cuda:{place}" for place in range(COUNT)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_one_gpu_up_to_rounding(dtype: torch.dtype) -> None:
    model, reference = (one.cuda(0) for one in pair("llama", dtype))
    flow = split(model, COUNT)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    options = {**OPTIONS, "return_dict_in_generate": True, "output_logits": True}
    expected = reference.generate(_ids(), **options)
    with flow.applied():
        for seed in (2, 1):
            found = model.generate(_ids(seed), **options)
    assert flow.generation_report.recorded == 20
    # the first token comes from the prompt; later ones may differ after a tie
    same = (found.sequences == expected.sequences).all(0).long().cumprod(0).sum() - 7
    for one, other in list(zip(found.logits, expected.logits, strict=True))[: int(same)]:
        assert (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_passes_give_the_tokens_of_one_gpu(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_pieces, "gains", lambda *times: True)
    model, reference, flow = _placed("llama")
    # plain passes before and after the compiled ones
    for seed, compile in ((1, False), (1, backend), (2, backend), (2, False)):
        with flow.applied(compile=compile):
            found = model.generate(_ids(seed), **OPTIONS)
        assert found.tolist() == reference.generate(_ids(seed), **OPTIONS).tolist()
        report = flow.generation_report
        assert report.not_recorded_because == "" and report.not_compiled_because == ()
        assert (len(report.compiled) >= COUNT) == (compile is not False or seed == 2)
    assert (report.recorded, report.hooked) == (40, 4)


def test_a_text_is_recorded_again_when_it_outgrows_its_cache() -> None:
    model, reference, flow = _placed("llama")
    ids = torch.cat([_ids(seed) for seed in range(9)], 1)[:, :60]

    def text(run: Any) -> list[int]:
        tokens, given, cache = [], ids, None
        for _ in range(10):
            result = run(input_ids=given, past_key_values=cache, use_cache=True)
            given, cache = result.logits[:, -1:].argmax(-1), result.past_key_values
            tokens += given.flatten().tolist()
        return tokens

    with torch.no_grad():
        expected = text(reference)
        with flow.applied():
            assert text(model) == expected
    assert flow.generation_report.recorded >= 4


class _Asks(nn.Module):
    """Reads a value on the host, which no recording can."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x if x.sum() > 0 else -x)
        return result


def test_what_cannot_be_recorded_runs_through_hooks() -> None:
    model, reference, _ = _placed("llama")
    for one in (model, reference):
        one.model.layers[1].mlp = _Asks(one.model.layers[1].mlp).eval()
    flow = split(model, COUNT)
    expected = reference.generate(_ids(), **OPTIONS)
    with flow.applied():
        found = model.generate(_ids(), **OPTIONS)
    assert found.tolist() == expected.tolist()
    report = flow.generation_report
    assert report.recorded == 0 and "on the host" in report.not_recorded_because


def test_recordings_of_an_earlier_placement_give_their_memory_back() -> None:
    model, _, flow = _placed("llama")

    def held() -> int:
        torch.cuda.synchronize(0)
        return int(torch.cuda.memory_allocated(0))

    sizes = []
    for _ in range(3):
        flow.update_flow()
        with flow.applied():
            model.generate(_ids(), **OPTIONS)
        sizes.append(held())
    assert sizes[2] <= sizes[1] + 4096
