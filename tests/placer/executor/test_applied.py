"""``flow.applied()``: methods of a model other than forward, and its parts, run where its layers
are."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from counted_captures import count_captures
from model_list import CASES
from splitting import TOLERANCE, scatter_layers, twins
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from placer import DataFlow, devices
from placer.errors import CaptureError, InputError
from placer.executor.model_captures import Waiting
from placer.testing import logical_devices

X = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8)


@pytest.fixture(autouse=True, params=["hooks", "graphs"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls of the model go through hooks, and many through captured graphs, as all do here in
    the second half."""
    if request.param == "graphs":
        monkeypatch.setattr(Waiting, "waits", lambda *given: False)


class Autoencoder(nn.Module):
    """Its parts are used by methods of their own, and by operations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Linear(8, 6), nn.Tanh())
        self.mean, self.spread = nn.Linear(6, 3), nn.Linear(6, 3)
        self.up = nn.Linear(3, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.down(x)
        return self.mean(h), self.spread(h)

    def decode(self, z: Tensor) -> Tensor:
        result: Tensor = self.up(z) * self.scale
        return result

    def loss(self, x: Tensor) -> Tensor:
        mean, spread = self.encode(x)
        return functional.mse_loss(self.decode(mean + spread.exp()), x) + (mean * spread).mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x)[0])


class Asks(Autoencoder):
    """Cannot be captured."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class RunsAgain(Autoencoder):
    """Under a checkpoint whose backward pass runs modules once more."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = checkpoint(self.down, x, use_reentrant=True)
        return self.mean(h), self.spread(h)


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.cpu().clone()
        for name, parameter in model.named_parameters()
    }


def _assert_close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("make", [Autoencoder, Asks, RunsAgain])
@pytest.mark.parametrize("seed", range(4))
def test_methods_and_their_gradients_equal_those_of_the_unsplit_model(
    make: type[Autoencoder], seed: int
) -> None:
    model, reference = twins(make)
    x = X.clone().requires_grad_()
    expected = reference.loss(x)
    expected.backward()
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3, seed)
        with flow.applied() as applied:
            assert applied is model
            y = X.clone().requires_grad_()
            result = applied.loss(y)
            result.backward()
        _assert_close(result.detach().cpu(), expected.detach())
        _assert_close(_gradients(model), _gradients(reference))
        _assert_close(y.grad, x.grad)


@pytest.mark.parametrize("make", [Autoencoder, Asks, RunsAgain])
def test_a_backward_pass_may_come_after_it(make: type[Autoencoder]) -> None:
    model, reference = twins(make)
    x = X.clone().requires_grad_()
    reference.loss(x).backward()
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3)
        with flow.applied():
            result = model.loss(X.clone().requires_grad_())
        result.backward()
        _assert_close(_gradients(model), _gradients(reference))


@pytest.mark.parametrize("make", [Autoencoder, Asks])
def test_a_call_of_the_model_is_one_of_the_flow(
    make: type[Autoencoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = twins(make)
    made = count_captures(monkeypatch)
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3)
        expected = reference(X)
        with flow.applied():
            _assert_close(model(X).cpu(), expected)
            _assert_close(flow(X).cpu(), expected)
            _assert_close(model(X).cpu(), expected)
        _assert_close(flow(X).cpu(), expected)
        assert (flow.not_captured_because == "") == (make is Autoencoder)
    assert len(made) == 1


def test_steps_and_streams_run_inside_as_they_do_outside() -> None:
    model, reference = twins(Autoencoder)
    expected = functional.mse_loss(reference(X), X)
    expected.backward()
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3)
        with flow.applied(), flow.applied():  # twice is once
            loss = flow.train_step(functional.mse_loss)(X, X, chunks=2)
            streamed = list(flow.stream([X, X, X]))
        _assert_close(loss.cpu(), expected.detach())
        _assert_close(_gradients(model), _gradients(reference))
        _assert_close([one.cpu() for one in streamed], [reference(X).detach()] * 3)


def test_afterwards_nothing_is_left_also_if_it_fails() -> None:
    model, _ = twins(Asks)
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3)
        with pytest.raises(KeyError), flow.applied():
            model.encode(X)
            raise KeyError
        assert not any(
            child._forward_hooks or child._forward_pre_hooks for child in model.modules()
        )
        assert "_compiled_call_impl" not in vars(model)
        flow.undo()
        _assert_close(model(X), copy.deepcopy(model)(X))


def test_a_copy_that_is_made_inside_runs_by_itself() -> None:
    model, reference = twins(Autoencoder)
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    scatter_layers(flow, 2)
    with flow.applied():
        twin = copy.deepcopy(model)
        _assert_close(twin(X), reference(X))
    _assert_close(twin(X), reference(X))
    assert not any(child._forward_hooks for child in model.modules())


def test_before_it_is_placed_the_model_is_as_it_was() -> None:
    model, reference = twins(Autoencoder)
    with DataFlow(model, ["cpu:0", "cpu:1"]).applied() as applied:
        _assert_close(applied.loss(X), reference.loss(X))


def test_layers_do_not_move_meanwhile() -> None:
    model, _ = twins(Autoencoder)
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    flow.update_flow()
    with flow.applied():
        for change in (flow.update_flow, flow.undo):
            with pytest.raises(InputError, match=r"leave `with flow.applied\(\):` first"):
                change()
    flow.update_flow()


def test_clones_and_scripts_are_refused() -> None:
    flow = DataFlow(Autoencoder(), ["cpu:0", "cpu:1"], enable_clone=True)
    flow.update_flow()
    with pytest.raises(InputError, match="enable_clone"), flow.applied():
        pass
    flow = DataFlow(
        nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2)), ["cpu:0", "cpu:1"]
    )
    flow.update_flow()
    with pytest.raises(CaptureError, match=r"compiled by torch\.jit"), flow.applied():
        pass


@pytest.mark.parametrize("make", [Autoencoder, Asks])
def test_other_threads_wait_for_the_end(make: type[Autoencoder]) -> None:
    model, reference = twins(make)
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    flow.layer_gpus.update(down=0, mean=1, up=0)
    flow.update_flow()
    found: list[Tensor] = []
    other = threading.Thread(target=lambda: found.append(flow(X)))
    with flow.applied():
        other.start()
        other.join(0.2)
        assert not found
        _assert_close(model(X), reference(X))
    other.join(60)
    _assert_close(found, [reference(X)])


def _generating(name: str) -> tuple[Any, Any]:
    return twins(CASES[name].make, training=False)


@pytest.mark.covering(every=2, first=1)
@pytest.mark.parametrize(
    "name",
    ["LlamaForCausalLM", pytest.param("T5ForConditionalGeneration", marks=pytest.mark.exhaustive)],
)
def test_generate_gives_what_it_gives_unsplit(name: str) -> None:
    model, reference = _generating(name)
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3)
        ids = torch.randint(2, 50, (2, 5), generator=torch.Generator().manual_seed(1))
        for ways in ({}, {"num_beams": 3}, {"do_sample": True}):
            torch.manual_seed(0)
            expected = reference.generate(ids, max_new_tokens=3, pad_token_id=0, **ways)
            with flow.applied():
                torch.manual_seed(0)
                found = model.generate(ids, max_new_tokens=3, pad_token_id=0, **ways)
            assert found.tolist() == expected.tolist()
        assert flow.not_captured_because == ""


@pytest.mark.covering(every=2)
def test_a_cache_stays_with_the_layers_that_fill_it() -> None:
    """Else half of it would be sent to and fro for every token."""
    model, _ = _generating("LlamaForCausalLM")
    with logical_devices(2):
        flow = DataFlow(model, fine_grained=True)
        flow.layer_gpus.update({name: int("layers.1" in name) for name in flow.layer_gpus})
        flow.update_flow()
        with flow.applied():
            made = model.generate(
                torch.ones(2, 5, dtype=torch.int64),
                max_new_tokens=4,
                pad_token_id=0,
                return_dict_in_generate=True,
            )
        places = [devices.location(layer.keys) for layer in made.past_key_values.layers]
        assert places == [torch.device("cpu", 0), torch.device("cpu", 1)]


@pytest.mark.exhaustive
def test_where_calls_do_not_wait_generating_has_a_model_captured_three_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For the prompt, for a token after it, and for one after a cache of any length; a second
    prompt needs one more."""
    model, _ = _generating("LlamaForCausalLM")
    flow = DataFlow(model, ["cpu:0", "cpu:1"], fine_grained=True)
    scatter_layers(flow, 2)
    made = count_captures(monkeypatch)
    monkeypatch.setattr(Waiting, "waits", lambda *given: False)
    with flow.applied(record=False):
        for length, captures in ((5, 3), (5, 3), (7, 4), (6, 4)):
            model.generate(
                torch.arange(2, 2 + length).repeat(2, 1), max_new_tokens=4, pad_token_id=0
            )
            assert len(made) == captures


class Normed(Autoencoder):
    """Statistics of its own, which no module has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("middle", torch.zeros(3))
        self.register_buffer("width", torch.ones(3))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = super().encode(x)
        return functional.batch_norm(mean, self.middle, self.width, training=True), spread


def _halve(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def _follow(model: nn.Module) -> None:
    ahead = [parameter.detach() + 1 for parameter in model.parameters()]
    with torch.no_grad():
        torch._foreach_lerp_(list(model.parameters()), ahead, 0.25)


def _step(model: Autoencoder, **options: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    model.loss(X).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def _step_in_lists(model: Autoencoder) -> None:
    _step(model, foreach=True)


def _step_in_one(model: Autoencoder) -> None:
    _step(model, fused=True)


@pytest.mark.parametrize("change", [_halve, _follow, _step, _step_in_lists, _step_in_one])
def test_an_operation_on_lists_changes_every_tensor_where_it_is(change: Any) -> None:
    # Lists were brought to one device like all that an operation is given, and what changed was the
    # copies.
    model, reference = twins(Autoencoder)
    change(reference)
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3)
        with flow.applied():
            change(model)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            _assert_close(ours.detach().cpu(), theirs.detach())


def test_running_statistics_are_written_where_they_are() -> None:
    model, reference = twins(Normed)
    reference.loss(X)
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        flow.layer_gpus.update({name: 1 + index % 2 for index, name in enumerate(flow.layer_gpus)})
        flow.update_flow()
        with flow.applied():
            model.loss(X)
        _assert_close([model.middle.cpu(), model.width.cpu()], [reference.middle, reference.width])


def test_a_class_with_a_call_of_its_own_has_that_run_once() -> None:
    class Raised(Autoencoder):
        def __call__(self, x: Tensor) -> Tensor:
            result: Tensor = super().__call__(x) + 1
            return result

    model, reference = twins(Raised)
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3)
        with flow.applied():
            _assert_close([model(X).cpu(), model.loss(X).cpu()], [reference(X), reference.loss(X)])


def test_another_thread_that_calls_the_model_is_told_instead_of_left_waiting() -> None:
    # Whoever starts `model.generate` in a thread and reads its streamer inside waited for ever.
    model, _ = twins(Autoencoder)
    flow = DataFlow(model, ["cpu:0", "cpu:1"])
    flow.update_flow()
    errors: list[InputError] = []

    def call() -> None:
        with pytest.raises(InputError, match="in another thread") as caught:
            model(X)
        errors.append(caught.value)

    other = threading.Thread(target=call, daemon=True)
    with flow.applied():
        other.start()
        other.join(30)
        assert errors


@pytest.mark.parametrize("always_call", [False, True])
def test_hooks_of_the_flow_run_once_around_each_call_of_the_model(always_call: bool) -> None:
    model, reference = twins(Autoencoder, training=False)
    seen: list[str] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.append(f"before {type(module).__name__} {len(args)} {sorted(kwargs)}")
        return (args[0] * 2, *args[1:]), kwargs

    def after(module: nn.Module, args: Any, kwargs: Any, result: Tensor) -> Tensor:
        seen.append(f"after {type(module).__name__}")
        return result + 1

    with logical_devices(3), torch.no_grad():
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        flow.register_forward_pre_hook(before, with_kwargs=True)
        flow.register_forward_hook(after, with_kwargs=True, always_call=always_call)
        with flow.applied():
            for _ in range(3):
                found = model(X)
                expected = reference(X * 2) + 1
                torch.testing.assert_close(found.cpu(), expected, atol=TOLERANCE, rtol=TOLERANCE)
            own = flow(X)
        torch.testing.assert_close(own.cpu(), expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert seen == ["before DataFlow 1 []", "after DataFlow"] * 4


def test_backward_hooks_of_the_flow_run_once_for_each_call_of_the_model() -> None:
    model, reference = twins(Autoencoder, training=True)
    seen: list[str] = []

    def pre(module: nn.Module, gradients: Any) -> Any:
        seen.append("pre")
        return (gradients[0] * 3,)

    def post(module: nn.Module, of_inputs: Any, of_outputs: Any) -> None:
        seen.append("post")

    x, own = X.clone().requires_grad_(), X.clone().requires_grad_()
    with logical_devices(3):
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        flow.register_full_backward_pre_hook(pre)
        flow.register_full_backward_hook(post)
        with flow.applied():
            model(x).square().sum().backward()
    (reference(own).square().sum() * 3).backward()
    assert seen == ["pre", "post"]
    assert x.grad is not None and own.grad is not None
    torch.testing.assert_close(x.grad.cpu(), own.grad, atol=TOLERANCE, rtol=TOLERANCE)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        if other.grad is not None:
            assert one.grad is not None
            torch.testing.assert_close(one.grad.cpu(), other.grad, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_failed_call_inside_a_hook_leaves_the_flow_as_it_was() -> None:
    model, reference = twins(Autoencoder, training=False)
    with logical_devices(3), torch.no_grad():
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        flow.register_forward_hook(lambda *_: None)
        with flow.applied(), pytest.raises(Exception, match="shape"):
            model(torch.zeros(2, 3, dtype=torch.float64))
        found = flow(X, chunks=2)
    torch.testing.assert_close(found.cpu(), reference(X), atol=TOLERANCE, rtol=TOLERANCE)


def test_methods_that_do_not_call_the_flow_refuse_its_hooks() -> None:
    flow = DataFlow(nn.Linear(4, 4), ["cpu:0"])
    flow.update_flow()
    hook = flow.register_forward_hook(lambda *_: None)
    for method in (lambda: flow.train_step(functional.mse_loss), lambda: flow.stream([])):
        with pytest.raises(InputError, match=r"hooks.*`flow\.(train_step|stream)`.*on the model"):
            method()
    hook.remove()
    flow.train_step(functional.mse_loss)
