"""Comparable runs: operations act as in evaluation mode and draw the same numbers in any mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from placer.capture.export.export import export
from placer.capture.python_state import comparable_runs
from placer.capture.python_state.comparable_runs import RandomNumbers, operations_in_eval_mode

OPERATIONS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "alpha dropout": lambda: nn.AlphaDropout(0.5),
    "batch norm": lambda: nn.BatchNorm1d(6),
    "batch norm without statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "rrelu": lambda: nn.RReLU(),
}


class _Drawing(nn.Module):
    """A model that draws per sample, per feature, and once for all samples."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * functional.dropout(torch.ones_like(x), 0.5, self.training) + torch.rand(len(x), 1)
        if torch.rand([]) > 0.5:  # as layers are dropped
            x = x * 2
        return x * torch.empty_like(x).bernoulli_(0.5) + torch.normal(torch.zeros_like(x), 1.0)


@pytest.mark.parametrize("make", [*OPERATIONS.values(), _Drawing], ids=[*OPERATIONS, "draws"])
def test_parts_of_a_batch_give_their_rows_of_the_whole_in_training_mode(
    make: Callable[[], nn.Module],
) -> None:
    model, x, draws = make().train(), torch.randn(4, 6), RandomNumbers()
    with operations_in_eval_mode(), draws.recorded():
        whole = model(x)
    for start in (0, 2):
        with operations_in_eval_mode(), draws.replayed(start, 2, 4):
            torch.testing.assert_close(model(x[start : start + 2]), whole[start : start + 2])


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_act_as_in_evaluation_mode(name: str) -> None:
    model, x = OPERATIONS[name]().train(), torch.randn(4, 6)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with operations_in_eval_mode():
        found = model(x)
    if "without" not in name:  # which normalises by the batch in both modes
        torch.testing.assert_close(found, model.eval()(x))
    assert {
        key: value for key, value in before.items() if "tracked" not in key
    }.keys() <= before.keys()
    for key in ("running_mean", "running_var"):
        if key in before:
            assert torch.equal(model.state_dict()[key], before[key])


def test_recurrent_networks_and_attention_keep_what_their_inputs_make_of_them() -> None:
    """torch tags attention as random because of dropout; without it, results are not replayed."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(6, 6, 2, dropout=0.5)
            self.attention = nn.MultiheadAttention(6, 2, dropout=0.5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.attention(x, x, x)[0]
            heads = x[None]
            return self.rnn(
                functional.scaled_dot_product_attention(
                    heads, heads, heads, dropout_p=0.3 * self.training
                )[0]
            )[0]

    model, x, draws = Mixing().train(), torch.randn(4, 2, 6), RandomNumbers()
    with operations_in_eval_mode(), draws.recorded():
        model(x)
    with operations_in_eval_mode(), draws.replayed(0, 2, 4):
        part = model(x[:2])
    torch.testing.assert_close(part, model.eval()(x[:2]))


def test_a_graph_acts_as_its_model() -> None:
    model, x, draws = (
        nn.Sequential(_Drawing(), *(make() for make in OPERATIONS.values())),
        torch.randn(4, 6),
        RandomNumbers(),
    )
    # without a branch on a value
    model[0].forward = lambda x: x + torch.randn_like(x)
    graph = export(model, (x,), {}).module
    with operations_in_eval_mode(), draws.recorded():
        whole = model(x)
    with operations_in_eval_mode(), draws.replayed(0, 4, 4):
        torch.testing.assert_close(graph(x)[0], whole)


def test_every_operation_that_can_be_watched_runs_in_evaluation_mode() -> None:
    # Tensor.__pow__ wraps a builtin without a signature; `x ** 2` ended every comparison unseen
    for function in torch.overrides.get_testing_overrides():
        comparable_runs._overload_parameters(function)
    with operations_in_eval_mode():
        x = torch.ones(2, requires_grad=True)
        results = [x**2, 2**x, 1 - x, 1 / x, x // 2, x % 2, -x, x @ x, abs(x), x == x, x.clone()]
        results[-1] **= 2
        assert len(results) == 11
