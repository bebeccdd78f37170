"""What a user changes between two training steps is so in the next: what trains, what is compared,
what is where."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow, devices
from placer.errors import InputError, StageError
from placer.testing import logical_devices


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.middle, self.last = (
            nn.Linear(4, 4),
            nn.Tanh(),
            nn.Linear(4, 4),
            nn.Linear(4, 2),
        )
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.middle(self.act(self.first(inputs))) * self.scale)


class Trained:
    """A placed model and its unsplit twin, step by step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Scaled().double()
        self.whole = copy.deepcopy(self.model)
        self.flow = DataFlow(self.model, device_ids=3)
        self.flow.layer_gpus.update(first=0, act=0, middle=1, last=2)
        self.flow.update_flow()
        self.loss_fn = functional.binary_cross_entropy_with_logits
        self.step = self.flow.train_step(
            self._loss, torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        )
        self.plain = torch.optim.SGD(self.whole.parameters(), 0.1, momentum=0.9)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.loss_fn(output, target.to(output.dtype).expand_as(output))

    def check(self, target: Tensor) -> None:
        """A step of each, and that they agree."""
        inputs = torch.randn(4, 4, dtype=torch.float64)
        loss = self.step(inputs, target, chunks=2)
        self.plain.zero_grad()
        expected = self._loss(self.whole(inputs), target)
        expected.backward()
        self.plain.step()
        torch.testing.assert_close(loss.cpu(), expected.detach())
        for ours, theirs in zip(self.model.parameters(), self.whole.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            torch.testing.assert_close(ours.detach().cpu(), theirs.detach())


@pytest.mark.covering
@pytest.mark.parametrize("frozen_first", [True, False])
@pytest.mark.parametrize("part", ["first", "middle"])
def test_a_layer_that_is_frozen_or_thawed(part: str, frozen_first: bool) -> None:
    with logical_devices(3):
        trained = Trained()
        for frozen in (frozen_first, not frozen_first, frozen_first):
            for model in (trained.model, trained.whole):
                model.get_submodule(part).requires_grad_(not frozen)
            trained.check(torch.rand(4, 2, dtype=torch.float64))


def test_targets_of_another_type_or_shape_are_not_cast_to_the_first_ones() -> None:
    with logical_devices(3):
        trained = Trained()
        for target in (
            torch.randint(2, (4, 2)),
            torch.rand(4, 2),
            torch.rand(4, 1),
            torch.randint(2, (4, 2)),
        ):
            trained.check(target)
        with pytest.raises(StageError, match=r"\(loss\)"):
            trained.step(torch.randn(4, 4, dtype=torch.float64), torch.rand(4, 3), chunks=2)


def test_a_buffer_a_parameter_or_a_module_that_is_replaced() -> None:
    with logical_devices(3):
        trained = Trained()
        trained.check(torch.rand(4, 2))
        for model in (trained.model, trained.whole):
            model.scale = torch.tensor(5.0, dtype=torch.float64)
        trained.check(torch.rand(4, 2))
        for model in (trained.model, trained.whole):
            model.act = nn.Sigmoid()
        trained.check(torch.rand(4, 2))
        state = {
            name: torch.full_like(tensor, 0.25)
            for name, tensor in trained.whole.state_dict().items()
        }
        trained.model.load_state_dict(
            {name: tensor.clone() for name, tensor in state.items()}, assign=True
        )
        inputs = torch.randn(4, 4, dtype=torch.float64)
        trained.whole.load_state_dict(state)
        torch.testing.assert_close(trained.flow(inputs).cpu(), trained.whole(inputs))


def test_a_momentum_or_another_constant_of_a_module_that_is_changed() -> None:
    with logical_devices(3):
        trained = Trained()
        for model in (trained.model, trained.whole):
            model.act = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.0)).double()
        trained.step = trained.flow.train_step(trained._loss)
        trained.plain = torch.optim.SGD(trained.whole.parameters(), lr=0.0)
        for momentum, p in ((0.1, 0.0), (0.5, 0.0), (0.5, 0.9), (0.1, 0.0)):
            for model in (trained.model, trained.whole):
                norm, drop = model.act
                norm.momentum, drop.p = momentum, p
            inputs, target = torch.randn(4, 4, dtype=torch.float64), torch.rand(4, 2)
            torch.manual_seed(3)
            loss = trained.step(inputs, target, chunks=1)
            torch.manual_seed(3)
            torch.testing.assert_close(
                loss.cpu(), trained._loss(trained.whole(inputs), target).detach()
            )
        for ours, theirs in zip(trained.model.buffers(), trained.whole.buffers(), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs)
        for model in (trained.model, trained.whole):
            model.eval()
        for _ in range(2):
            trained.model.act[0].eps += 0.1
            list(trained.flow.stream([inputs, inputs]))
    # of a model as it was before nothing is kept
    assert len(trained.step.pipelines) == 1
    assert len(trained.flow.calls.streams.pipelines()) == 1


class Branching(nn.Linear):
    """A branch on a tensor's value, which no capture covers."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs if inputs.sum() > 1e9 else -inputs)


def test_a_model_is_captured_again_once_the_module_that_was_refused_is_replaced() -> None:
    with logical_devices(3):
        trained = Trained()
        for model in (trained.model, trained.whole):
            model.scale = torch.ones(1, dtype=torch.float64)
        kept = [model.middle for model in (trained.model, trained.whole)]
        for model in (trained.model, trained.whole):
            model.middle = Branching(4, 4).double()
        trained.whole.load_state_dict(trained.model.state_dict())
        trained.flow.update_flow()
        trained.check(torch.rand(4, 2))
        assert trained.flow.not_captured_because and trained.step.pipelines == []
        for model, middle in zip((trained.model, trained.whole), kept, strict=True):
            model.middle = middle
        trained.check(torch.rand(4, 2))
        assert trained.flow.not_captured_because == "" and len(trained.step.pipelines) == 1


def test_hooks_on_parameters_run() -> None:
    with logical_devices(3):
        trained = Trained()
        trained.check(torch.rand(4, 2))
        for model in (trained.model, trained.whole):
            model.first.weight.register_hook(lambda gradient: gradient * 2)
        with pytest.warns(UserWarning, match=r"parameter 'first.weight' has hooks"):
            trained.check(torch.rand(4, 2))


def _clamped(parameter: nn.Parameter) -> None:
    parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def _halved_later(parameter: nn.Parameter) -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01).mul_(0.5)

    parameter.register_post_accumulate_grad_hook(halve)  # type: ignore[arg-type]


@pytest.mark.parametrize("register", [_clamped, _halved_later])
def test_hooks_on_parameters_see_the_gradient_of_the_whole_batch(
    register: Callable[[nn.Parameter], None],
) -> None:
    # each micro-batch's gradient was clamped, which their sum is not
    with logical_devices(3):
        trained = Trained()
        for model in (trained.model, trained.whole):
            register(model.first.weight)
        for _ in range(2):
            trained.check(torch.rand(4, 2))


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    class Head(nn.Linear):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
            return functional.mse_loss(super().forward(output), target)

    flow = DataFlow(Scaled(), device_ids=2)
    with pytest.raises(InputError, match="loss_fn has a parameter of its own, 'weight'"):
        flow.train_step(Head(2, 2))
    flow.train_step(Head(2, 2).requires_grad_(False))


def test_a_tokenizers_mapping_is_keyword_arguments() -> None:
    with logical_devices(3):
        trained = Trained()
        inputs, target = torch.randn(4, 4, dtype=torch.float64), torch.rand(4, 2)
        loss = trained.step(UserDict(inputs=inputs), target, chunks=2)
        torch.testing.assert_close(
            loss.cpu(), trained._loss(trained.whole(inputs), target).detach()
        )


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_what_the_optimizer_keeps_goes_where_the_layers_go(
    kind: type[torch.optim.Optimizer],
) -> None:
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    torch.manual_seed(0)
    model = Scaled().double()
    whole = copy.deepcopy(model)
    x, y = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    ours, theirs = (kind(each.parameters(), lr=0.1, **options) for each in (model, whole))  # type: ignore[call-arg]

    def check(run: Callable[[], object]) -> None:
        run()
        theirs.zero_grad()
        functional.mse_loss(whole(x), y).backward()
        theirs.step()
        for one, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one.detach().cpu(), other.detach())

    def by_hand() -> None:
        ours.zero_grad()
        functional.mse_loss(model(x), y).backward()
        ours.step()

    with logical_devices(3):
        check(by_hand)  # so that there is something to bring along
        flow = DataFlow(model)
        flow.layer_gpus.update(first=0, act=0, middle=1, last=2)
        flow.update_flow()
        step = flow.train_step(functional.mse_loss, ours)
        check(lambda: step(x, y))
        flow.layer_gpus.update(first=2, middle=0, last=1)
        flow.update_flow()
        check(lambda: step(x, y))
        flow.undo()
        check(by_hand)


def test_gradients_that_somebody_keeps_are_not_written_to_by_later_steps() -> None:
    model = Scaled().double()
    whole = copy.deepcopy(model)
    x, *targets = torch.randn(3, 4, 4, dtype=torch.float64)
    kept, expected = [], []
    with logical_devices(3):
        flow = DataFlow(model)
        flow.layer_gpus.update(first=0, act=0, middle=1, last=2)
        flow.update_flow()
        step = flow.train_step(functional.mse_loss)
        for target in (*targets, targets[0]):
            model.zero_grad(set_to_none=True)
            step(x, target[:, :2])
            kept.append([parameter.grad for parameter in model.parameters()])
            whole.zero_grad(set_to_none=True)
            functional.mse_loss(whole(x), target[:, :2]).backward()
            expected.append([parameter.grad for parameter in whole.parameters()])
        before = [devices.addresses([g for g in kept[-1] if g is not None])]
        kept[-1].clear()
        model.zero_grad(set_to_none=True)
        step(x, targets[0][:, :2])
        # nobody keeps those
        assert [devices.addresses([parameter.grad for parameter in model.parameters()])] == before
    for ours, theirs in zip(kept[:2], expected[:2], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.cpu(), other)


def test_a_weight_whose_data_becomes_its_own_transpose_is_trained_transposed() -> None:
    # the address stays, and the strides change
    trained = Trained()
    trained.check(torch.ones(4, 1))
    for model in (trained.model, trained.whole):
        model.middle.weight.data = model.middle.weight.data.t()
    trained.check(torch.ones(4, 1))


def test_a_new_weight_whose_data_comes_from_another_device_after_its_first_step() -> None:
    """The passes of its first step stay, and would see the data that it had then."""
    data = torch.eye(4, dtype=torch.float64)
    with logical_devices(3):
        trained = Trained()
        models = trained.model, trained.whole
        trained.check(torch.ones(4, 1))
        for model in models:
            model.middle.weight = nn.Parameter(2 * model.middle.weight.detach())
        trained.check(torch.ones(4, 1))
        for model in models:
            model.middle.weight.data = data.clone()
        trained.check(torch.ones(4, 1))
