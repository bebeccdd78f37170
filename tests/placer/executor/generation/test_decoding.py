"""``generate`` inside ``flow.applied()``: recorded passes, and the unsplit model's results."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import torch
from generating_models import MAKERS, pair, split
from model_list import transformers
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow, devices
from placer.executor import model_captures
from placer.executor.generation.static_cache import StaticCopy
from placer.executor.generation.tracing.operation_trace import OperationTrace
from placer.executor.generation.tracing.trace_replay import TraceReplay
from placer.testing import logical_devices

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 3},
}
# Passes of one token: the prompt's pass gives the first token of a text.
PASSES = 6
OPTIONS = {
    "max_new_tokens": PASSES + 1,
    "min_new_tokens": PASSES + 1,
    "do_sample": False,
    "pad_token_id": 0,
}

# Beams, which have more rows than prompts as other ways do, and an encoder.
# Caches with windows decode in `test_logits_are_the_unsplit_models_for_given_tokens`.
RUN = {("llama", "greedy"), ("llama", "beams"), ("t5", "beams")}
# Others have the same layers: a Qwen2 has a Llama's, and a BART has a T5's.
DECODED = {"llama", "mistral", "mixtral", "gemma3", "gpt2", "t5"}


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # how long hooks take says when a model is captured: never here, however busy the machine is
    monkeypatch.setattr(model_captures, "_CAPTURE_S", math.inf)
    with logical_devices(2):
        yield


def _ids(rows: int = 2, columns: int = 7, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 55, (rows, columns), generator=generator)


def _both(flow: DataFlow, reference: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
    """Generate with the placed and the unsplit model, from the same random state."""
    results = []
    torch.manual_seed(3)
    expected = reference.generate(*args, **{**OPTIONS, **options})
    torch.manual_seed(3)
    with flow.applied() as model:
        results.append(model.generate(*args, **{**OPTIONS, **options}))
    return results[0], expected


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(
            name,
            way,
            marks=() if (name, way) in RUN else pytest.mark.exhaustive,
        )
        for name in MAKERS
        for way in WAYS
    ],
)
def test_texts_are_the_unsplit_models_and_come_from_recorded_passes(name: str, way: str) -> None:
    model, reference = pair(name)
    flow = split(model)
    for seed in (1, 2):
        found, expected = _both(flow, reference, _ids(seed=seed), **WAYS[way])
        assert found.tolist() == expected.tolist()
    report = flow.generation_report
    assert report.not_recorded_because == ""
    assert (report.recorded, report.hooked) == (2 * PASSES - 2, 2)
    assert {"cpu:0", "cpu:1"} == {*report.stages}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in DECODED else pytest.mark.exhaustive)
        for name in MAKERS
    ],
)
def test_logits_are_the_unsplit_models_for_given_tokens(name: str) -> None:
    model, reference = pair(name)
    flow = split(model)
    tokens, encoded = _ids(2, 11), _ids(2, 5)
    is_pair = bool(getattr(model.config, "is_encoder_decoder", False))

    def logits(run: Any) -> Iterator[Tensor]:
        cache, more = None, {}
        for start, end in ((0, 4), *((place, place + 1) for place in range(4, 11))):
            given = {"input_ids": tokens[:, start:end]}
            if is_pair:
                given = {"decoder_input_ids": tokens[:, start:end]}
                given |= {"input_ids": encoded} if cache is None else {"encoder_outputs": more}
            result = run(**given, past_key_values=cache, use_cache=True)
            cache, more = result.past_key_values, (result.get("encoder_last_hidden_state"),)
            yield result.logits[:, -1].cpu()

    with torch.no_grad(), flow.applied():
        for found, expected in zip(logits(model), logits(reference), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    # The prompt's cache is made inside, and comes back on the output device; the first token shows
    # where its layers are.
    assert flow.generation_report.recorded == 4


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("llama", "gpt2")), "mistral"],
)
def test_left_padded_prompts(name: str) -> None:
    model, reference = pair(name)
    flow = split(model)
    ids, mask = _ids(3, 9), torch.ones(3, 9, dtype=torch.int64)
    mask[0, :4] = mask[2, :1] = 0
    found, expected = _both(flow, reference, ids * mask, attention_mask=mask)
    assert found.tolist() == expected.tolist()
    assert flow.generation_report.recorded == PASSES - 2


def test_a_prompt_of_embeddings() -> None:
    model, reference = pair("llama")
    flow = split(model)
    embeddings = reference.model.embed_tokens(_ids()).detach()
    found, expected = _both(flow, reference, inputs_embeds=embeddings)
    assert found.tolist() == expected.tolist()
    assert flow.generation_report.recorded == PASSES - 2


def test_a_streamer_gets_every_token() -> None:
    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    model, reference = pair("llama")
    flow = split(model)
    streamer = Streamer()
    with flow.applied():
        model.generate(_ids(1), streamer=streamer, **OPTIONS)
    expected = reference.generate(_ids(1), **OPTIONS)
    assert streamer.tokens == [*expected[0].tolist(), -1]
    assert flow.generation_report.recorded == PASSES - 2


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.exhaustive), "mistral"])
def test_a_second_turn_goes_on_with_the_returned_cache_which_is_the_unsplit_models(
    name: str,
) -> None:
    model, reference = pair(name)
    flow = split(model)
    first, expected = _both(flow, reference, _ids(), return_dict_in_generate=True)
    # another text meanwhile, in the same static memory
    _both(flow, reference, _ids(seed=5))
    _assert_same_on_the_layers_devices(first.past_key_values, expected.past_key_values)
    second = torch.cat([expected.sequences, _ids(seed=2)], 1)
    options = {**OPTIONS, "max_new_tokens": 5, "min_new_tokens": 5}
    wanted = reference.generate(second, past_key_values=expected.past_key_values, **options)
    with flow.applied():
        found = model.generate(second, past_key_values=first.past_key_values, **options)
    assert found.tolist() == wanted.tolist()
    assert flow.generation_report.recorded > 2 * PASSES - 2


def _assert_same_on_the_layers_devices(cache: Any, expected: Any) -> None:
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        assert layer.get_seq_length() == other.get_seq_length()
        torch.testing.assert_close(layer.keys.cpu(), other.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer.values.cpu(), other.values, atol=1e-5, rtol=1e-5)
    places = [devices.location(layer.keys).index for layer in cache.layers]
    assert places == [index * 2 // len(places) for index in range(len(places))]


@pytest.mark.parametrize(
    "ways",
    [
        {"prompt_lookup_num_tokens": 3},
        pytest.param({"assistant_model": True}, marks=pytest.mark.exhaustive),
    ],
)
def test_assisted_decoding(ways: dict[str, Any]) -> None:
    model, reference = pair("llama")
    flow = split(model)
    if "assistant_model" in ways:
        ways = {"assistant_model": copy.deepcopy(reference)}
    ids = _ids(1, 4).repeat(1, 3)
    found, expected = _both(flow, reference, ids, **ways)
    assert found.tolist() == expected.tolist()


def test_a_static_cache_of_the_user() -> None:
    model, reference = pair("llama")
    flow = split(model)
    for seed in (1, 2):
        found, expected = _both(
            flow, reference, _ids(seed=seed), cache_implementation="static", disable_compile=True
        )
        assert found.tolist() == expected.tolist()
    assert flow.generation_report.recorded == 2 * PASSES - 2


def test_without_recording_the_flow_runs_as_before() -> None:
    model, reference = pair("llama")
    flow = split(model)
    with flow.applied(record=False):
        found = model.generate(_ids(), **OPTIONS)
    assert found.tolist() == reference.generate(_ids(), **OPTIONS).tolist()
    report = flow.generation_report
    assert (report.recorded, report.hooked) == (0, 0)


def test_a_text_longer_than_its_cache_is_recorded_again() -> None:
    model, reference = pair("llama")
    flow = split(model)
    expected = _rest_of(reference, _ids(1, 60), 10)
    with torch.no_grad(), flow.applied():
        found = _rest_of(model, _ids(1, 60), 10)
    assert found == expected
    report = flow.generation_report
    # four tokens go into the first cache and five into the second; the prompt's cache was made
    # inside, so its layers' devices were seen with the first token only
    assert (report.recorded, report.hooked, report.capacity) == (4, 5, 128)


def _rest_of(model: Any, ids: Tensor, count: int) -> list[int]:
    """Generate by hand, without telling how many tokens will come."""
    tokens: list[int] = []
    cache = None
    for _ in range(count):
        result = model(input_ids=ids, past_key_values=cache, use_cache=True)
        ids, cache = result.logits[:, -1:].argmax(-1).cpu(), result.past_key_values
        tokens += ids.flatten().tolist()
    return tokens


def test_changed_weights_count_and_replaced_weights_are_recorded_again() -> None:
    model, reference = pair("llama")
    flow = split(model)
    _both(flow, reference, _ids())
    with torch.no_grad():
        for one in (model, reference):
            one.model.layers[0].mlp.down_proj.weight.mul_(-3)
    found, expected = _both(flow, reference, _ids())
    assert found.tolist() == expected.tolist()
    assert flow.generation_report.hooked == 2
    for one in (model, reference):
        layer = one.model.layers[0].mlp
        layer.up_proj.weight = nn.Parameter(layer.up_proj.weight * -2)
    found, expected = _both(flow, reference, _ids())
    assert found.tolist() == expected.tolist()
    # the prompt notices the new parameter, so both tokens before a recording come after it
    assert flow.generation_report.hooked == 4


def test_moved_layers_are_recorded_again() -> None:
    model, reference = pair("llama")
    flow = split(model)
    _both(flow, reference, _ids())
    flow.layer_gpus.update({name: 1 - int(place) for name, place in flow.layer_gpus.items()})
    flow.update_flow()
    found, expected = _both(flow, reference, _ids())
    assert found.tolist() == expected.tolist()
    assert flow.generation_report.stages == ("cpu:1", "cpu:0")


def test_an_attribute_that_changes_in_the_middle_of_a_text_counts() -> None:
    class Scaled(nn.Module):
        factor = 1.0

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.factor = inner, 1.0

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x) * self.factor
            return result

    class Switch:
        """A streamer that changes the model after four tokens."""

        def __init__(self, layer: Scaled) -> None:
            self.layer, self.count = layer, 0

        def put(self, value: Tensor) -> None:
            self.count += 1
            self.layer.factor = -4.0 if self.count > 5 else 1.0

        def end(self) -> None:
            pass

    texts = []
    for one in pair("llama"):
        one.model.layers[1].mlp = Scaled(one.model.layers[1].mlp).eval()
        switch = Switch(one.model.layers[1].mlp)
        if not texts:
            flow = split(one)
            with flow.applied():
                texts.append(one.generate(_ids(1), streamer=switch, **OPTIONS).tolist())
        else:
            texts.append(one.generate(_ids(1), streamer=switch, **OPTIONS).tolist())
    assert texts[0] == texts[1]
    assert flow.generation_report.recorded == 2


class _Asks(nn.Module):
    """Reads a result on the host, which no recording can."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x if x.sum() > 0 else -x)
        return result


class _Counts(_Asks):
    """Scales by a number of its own that grows from call to call."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        result: Tensor = self.inner(x) * self.count
        return result


class _Draws(_Asks):
    """Draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x + torch.rand_like(x))
        return result


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (_Asks, "reads values of a tensor on the host"),
        (_Counts, "change in every pass"),
        (_Draws, "draws random numbers"),
    ],
)
def test_a_pass_that_depends_on_more_than_its_inputs_runs_through_hooks(
    kind: type[_Asks], why: str
) -> None:
    model, reference = pair("llama")
    for one in (model, reference):
        one.model.layers[1].mlp = kind(one.model.layers[1].mlp).eval()
    flow = split(model)
    found, expected = _both(flow, reference, _ids())
    # another order of draws gives other numbers
    assert kind is _Draws or found.tolist() == expected.tolist()
    report = flow.generation_report
    assert report.recorded == 0 and why in report.not_recorded_because


def test_hooks_of_the_user_run() -> None:
    model, reference = pair("llama")
    flow = split(model)
    calls: list[int] = []
    model.model.layers[1].register_forward_hook(lambda *given: calls.append(1))
    found, expected = _both(flow, reference, _ids())
    assert found.tolist() == expected.tolist()
    assert len(calls) == PASSES + 1
    assert "hooks" in flow.generation_report.not_recorded_because


def test_training_and_gradients_are_not_recorded() -> None:
    model, _ = pair("llama")
    flow = split(model)
    with flow.applied():
        cache = model(input_ids=_ids(), use_cache=True).past_key_values
        model(input_ids=_ids(2, 1), past_key_values=cache).logits.sum().backward()
        assert "torch.no_grad()" in flow.generation_report.not_recorded_because
        model.train()
        model.generate(_ids(), **OPTIONS)
    assert "model.eval()" in flow.generation_report.not_recorded_because


def test_attentions_and_hidden_states_are_returned() -> None:
    model, reference = pair("llama")
    for one in (model, reference):
        one.set_attn_implementation("eager")
    flow = split(model)
    options = {
        "return_dict_in_generate": True,
        "output_attentions": True,
        "output_hidden_states": True,
    }
    found, expected = _both(flow, reference, _ids(), **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, atol=1e-5, rtol=1e-5)


def test_a_copy_made_inside_generates_by_itself() -> None:
    model, reference = pair("llama")
    flow = split(model)
    with flow.applied():
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
    expected = reference.generate(_ids(), **OPTIONS).tolist()
    for one in (twin, again):
        assert one.generate.__self__ is one
        assert one.to("cpu").generate(_ids(), **OPTIONS).tolist() == expected
    assert "generate" not in vars(model)


def test_a_text_that_is_broken_off_leaves_no_trace_in_the_next_one() -> None:
    class Stop:
        count = 0

        def put(self, value: Tensor) -> None:
            self.count += 1
            if self.count == 5:
                raise KeyboardInterrupt

        def end(self) -> None:
            pass

    model, reference = pair("llama")
    flow = split(model)
    for seed in (1, 2):
        with pytest.raises(KeyboardInterrupt), flow.applied():
            model.generate(_ids(1, seed=seed), streamer=Stop(), **OPTIONS)
        found, expected = _both(flow, reference, _ids(1, seed=seed))
        assert found.tolist() == expected.tolist()
    assert flow.generation_report.hooked == 2


def test_a_pass_that_is_broken_off_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = pair("llama")
    flow = split(model)
    cache = transformers().DynamicCache()
    tokens, expected = _ids(1, 12), reference(_ids(1, 12)).logits
    run = TraceReplay.run

    def broken(replay: TraceReplay) -> None:
        run(replay)
        raise KeyboardInterrupt

    with torch.no_grad(), flow.applied():
        model(input_ids=tokens[:, :5], past_key_values=cache)
        for place in range(5, 12):
            given = {"input_ids": tokens[:, place : place + 1], "past_key_values": cache}
            if place == 9:
                monkeypatch.setattr(TraceReplay, "run", broken)
                with pytest.raises(KeyboardInterrupt):
                    model(**given)
                monkeypatch.undo()
            found = model(**given).logits[:, -1].cpu()
            torch.testing.assert_close(found, expected[:, place], atol=1e-5, rtol=1e-5)


def test_without_memory_for_a_static_cache_the_text_goes_through_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*given: Any) -> None:
        raise torch.OutOfMemoryError("so many bytes")

    model, reference = pair("llama")
    flow = split(model)
    monkeypatch.setattr(StaticCopy, "adopt", no_memory)
    found, expected = _both(flow, reference, _ids())
    assert found.tolist() == expected.tolist()
    report = flow.generation_report
    assert report.recorded == 0 and "no memory to record it" in report.not_recorded_because


def test_calls_that_never_come_again_are_traced_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair("llama")
    flow = split(model)
    traces = []
    trace = OperationTrace.__init__
    monkeypatch.setattr(
        OperationTrace, "__init__", lambda self, *args: (traces.append(1), trace(self, *args))[1]
    )
    cache = transformers().DynamicCache()
    with torch.no_grad(), flow.applied():
        model(input_ids=_ids(1), past_key_values=cache)
        for turn in range(30):
            model(input_ids=_ids(1, 1), past_key_values=cache, unknown=turn)
    assert len(traces) < 12
    assert "from token to token" in flow.generation_report.not_recorded_because


def test_a_batch_of_another_size_is_recorded_apart() -> None:
    model, reference = pair("llama")
    flow = split(model)
    for rows in (1, 3, 1, 3):
        found, expected = _both(flow, reference, _ids(rows))
        assert found.tolist() == expected.tolist()
    report = flow.generation_report
    assert report.recorded + report.hooked == 4 * PASSES and report.hooked <= 4


def test_autocast_is_not_recorded_because_it_keeps_casts_of_weights() -> None:
    model, _ = pair("llama")
    flow = split(model)
    with torch.autocast("cpu", dtype=torch.bfloat16), flow.applied():
        model.generate(_ids(), **OPTIONS)
    report = flow.generation_report
    assert report.recorded == 0 and "autocast" in report.not_recorded_because


def test_a_model_without_generate_decodes_too() -> None:
    library = transformers()
    model, reference = pair("llama")
    flow = split(inner := model.model)
    cache, other = library.DynamicCache(), library.DynamicCache()
    with torch.inference_mode(), flow.applied():
        for place in range(8):
            ids = _ids(1, 5, seed=place) if place == 0 else _ids(1, 1, seed=place)
            found = inner(input_ids=ids, past_key_values=cache).last_hidden_state
            wanted = reference.model(input_ids=ids, past_key_values=other).last_hidden_state
            torch.testing.assert_close(found.cpu(), wanted, atol=1e-5, rtol=1e-5)
    assert flow.generation_report.recorded == 5


class _InterruptedOnce(nn.Module):
    """An activation in one call of which the user interrupts."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.calls, self.interrupted = count(1), number

    def forward(self, x: Tensor) -> Tensor:
        if next(self.calls) == self.interrupted:
            raise KeyboardInterrupt
        return functional.silu(x)


@pytest.mark.parametrize("number", range(2, 6))
def test_a_text_after_an_interrupted_pass(number: int) -> None:
    """A pass that is interrupted while it is traced leaves nothing that a later text relies on."""
    model, reference = pair("llama")
    model.model.layers[1].mlp.act_fn = _InterruptedOnce(number).eval()
    flow = split(model)
    with torch.no_grad(), flow.applied() as placed:
        expected = reference.generate(_ids(), **OPTIONS)
        for _ in range(3):
            with suppress(KeyboardInterrupt):
                placed.generate(_ids(), **OPTIONS)
        assert placed.generate(_ids(), **OPTIONS).tolist() == expected.tolist()
