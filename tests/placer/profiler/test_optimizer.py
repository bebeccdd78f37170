from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from placer.errors import InputError, ProfilingError
from placer.optimizers import OptimizerState


def _real_bytes(optimizer: Optimizer, parameters: list[nn.Parameter]) -> int:
    """The state that the optimizer really holds after a step on the parameters themselves."""
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = tree_leaves([dict(kept) for kept in optimizer.state.values()])
    return sum(item.numel() * item.element_size() for item in state if isinstance(item, Tensor))


@pytest.mark.parametrize(
    "name", ["adam", "AdamW", "SGD", "rmsprop", "adagrad", "adafactor", "NAdam", "adadelta", "asgd"]
)
@settings(max_examples=15, deadline=None)
@given(shape=st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_state_equals_that_of_a_real_step(name: str, shape: list[int]) -> None:
    parameter = nn.Parameter(torch.randn(shape))
    state = OptimizerState(name)
    assert state.bytes(parameter) == _real_bytes(
        getattr(torch.optim, state.name or "")([parameter]), [parameter]
    )


def test_state_follows_the_dtype_of_the_parameter() -> None:
    parameter = nn.Parameter(torch.randn(20, 30).to(torch.bfloat16))
    assert OptimizerState("adam").bytes(parameter) == _real_bytes(
        torch.optim.Adam([parameter]), [parameter]
    )


def test_momentum_counts_where_the_optimizer_has_it() -> None:
    parameter = nn.Parameter(torch.randn(20, 30))
    assert OptimizerState("sgd").bytes(parameter) == 0
    assert (
        OptimizerState(partial(torch.optim.SGD, lr=0.1, momentum=0.9)).bytes(parameter)
        == parameter.nbytes
    )
    assert (
        OptimizerState(torch.optim.SGD([parameter], lr=0.1, momentum=0.9)).bytes(parameter)
        == parameter.nbytes
    )


def test_each_parameter_has_the_options_of_its_group() -> None:
    with_momentum, without = (nn.Parameter(torch.randn(5, 7)) for _ in range(2))
    optimizer = torch.optim.SGD(
        [{"params": [with_momentum], "momentum": 0.9}, {"params": [without]}], lr=0.1
    )
    state = OptimizerState(optimizer)
    assert (state.bytes(with_momentum), state.bytes(without)) == (with_momentum.nbytes, 0)


def test_of_a_list_each_optimizer_counts_for_the_parameters_that_it_holds() -> None:
    matrix, vector, free = (nn.Parameter(torch.randn(*shape)) for shape in ((5, 7), (5,), (3,)))
    pair = [torch.optim.Adam([matrix]), torch.optim.SGD([vector], lr=0.1, momentum=0.9)]
    state = OptimizerState(pair)
    assert state.name == "Adam+SGD"
    assert [state.bytes(one) for one in (matrix, vector, free)] == [
        2 * matrix.nbytes + 4,
        vector.nbytes,
        0,
    ]
    alone = [
        _real_bytes(type(one)([held], **options), [held])
        for one, held, options in (
            (pair[0], matrix, {}),
            (pair[1], vector, {"lr": 0.1, "momentum": 0.9}),
        )
    ]
    assert [state.bytes(matrix), state.bytes(vector)] == alone


def test_a_list_of_optimizers_is_stepped_in_full() -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    pair = [torch.optim.SGD(parameters[:1], lr=0.5), torch.optim.SGD(parameters[1:2], lr=0.25)]
    copies = [nn.Parameter(torch.ones(3)) for _ in parameters]
    for copied in copies:
        copied.grad = torch.ones(3)
    OptimizerState(pair).step(parameters, copies)()
    assert [float(copied[0].detach()) for copied in copies] == [0.5, 0.75, 1.0]


def test_temporaries_of_a_list_are_the_largest_of_one_optimizer() -> None:
    large, small = nn.Parameter(torch.randn(30, 30)), nn.Parameter(torch.randn(10, 10))
    for of_large, of_small, share in (
        (torch.optim.Adam, torch.optim.SGD, 0.9),
        (torch.optim.SGD, torch.optim.Adam, 0.1),
    ):
        state = OptimizerState([of_large([large], lr=0.1), of_small([small], lr=0.1)])
        assert state.step_share([large, small]) == pytest.approx(share)


@pytest.mark.parametrize("given", [[], ["adam"], [torch.optim.Adam]])
def test_a_list_of_what_is_no_optimizer_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match="list"):
        OptimizerState(given)


def test_an_optimizer_of_the_users_own_is_run_too() -> None:
    class Keeper(Optimizer):
        def __init__(self, parameters: list[nn.Parameter], copies: int) -> None:
            super().__init__(parameters, {"copies": copies})

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["copies"] = [
                        parameter.detach().double() for _ in range(group["copies"])
                    ]

    parameter = nn.Parameter(torch.randn(5, 7))
    assert (
        OptimizerState(Keeper([parameter], copies=3)).bytes(parameter) == 3 * 2 * parameter.nbytes
    )


def test_a_frozen_parameter_has_no_state() -> None:
    assert OptimizerState("adam").bytes(nn.Parameter(torch.randn(4), requires_grad=False)) == 0


def test_no_optimizer_has_no_state() -> None:
    state = OptimizerState(None)
    assert (state.name, state.bytes(nn.Parameter(torch.randn(4)))) == (None, 0)


def test_a_huge_parameter_is_never_made() -> None:
    parameter = nn.Parameter(torch.empty(2**20, 2**16, device="meta"))
    assert OptimizerState("adam").bytes(parameter) == 2 * parameter.nbytes + 4


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"no optimizer 'adamm'.*adam, "):
        OptimizerState("adamm")


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(InputError, match="optimizer=3"):
        OptimizerState(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "refused", ["lbfgs", torch.optim.LBFGS, torch.optim.LBFGS([nn.Parameter(torch.ones(2))])]
)
def test_an_optimizer_that_no_placed_model_can_have_is_refused_and_not_offered(
    refused: Any,
) -> None:
    with pytest.raises(InputError, match="LBFGS evaluates the loss several times"):
        OptimizerState(refused)
    with pytest.raises(InputError) as other:
        OptimizerState("nothing")
    assert "lbfgs" not in str(other.value) and "adamw" in str(other.value)


def test_an_optimizer_of_sparse_gradients_gets_them() -> None:
    parameter = nn.Parameter(torch.randn(20, 30))
    assert OptimizerState("SparseAdam").bytes(parameter) >= 2 * parameter.nbytes


def test_a_failing_step_names_optimizer_and_shape() -> None:
    with pytest.raises(
        ProfilingError, match=r"optimizer Muon failed on a parameter of shape \(3,\).*2D"
    ):
        OptimizerState("Muon").bytes(nn.Parameter(torch.randn(3)))


STEPPED = (
    ("adam", {}, 1),  # the root of the second moments
    ("adamw", {"weight_decay": 0.1}, 1),
    ("sgd", {}, 0),
    ("sgd", {"lr": 0.1, "momentum": 0.9}, 0),
    # gradients and their share of the parameters
    ("sgd", {"lr": 0.1, "weight_decay": 0.1}, 1),
    ("adam", {"foreach": False}, 0),
    ("adamw", {"fused": True}, 0),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "options", "share"), STEPPED)
def test_a_step_of_all_parameters_together_holds_temporaries_as_large(
    name: str, options: dict[str, object], share: float, dtype: torch.dtype
) -> None:
    parameter = nn.Parameter(torch.randn(20, 30).to(dtype))
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    assert OptimizerState(partial(kinds[name], **options)).step_share([parameter]) == share
    assert OptimizerState(kinds[name]([parameter], **options)).step_share([parameter]) == share


def test_parameters_of_several_options_count_as_those_that_need_most() -> None:
    """A device may hold no others; the options of the largest parameter counted for all."""
    large, small = nn.Parameter(torch.randn(30, 30)), nn.Parameter(torch.randn(3))
    groups = [{"params": [large]}, {"params": [small], "weight_decay": 0.1}]
    assert OptimizerState(torch.optim.SGD(groups, lr=0.1)).step_share([large, small]) == 1


def test_adafactor_steps_parameters_one_by_one_unless_it_is_told_otherwise() -> None:
    parameter = nn.Parameter(torch.randn(20, 30))
    assert OptimizerState("adafactor").step_share([parameter]) == 0
    assert (
        OptimizerState(partial(torch.optim.Adafactor, foreach=True)).step_share([parameter]) > 0.9
    )


@pytest.mark.parametrize(("foreach", "share"), [(None, 0), (False, 0), (True, 1)])
def test_on_a_device_the_step_runs_as_torch_itself_chooses(
    foreach: bool | None, share: float
) -> None:
    parameter = nn.Parameter(torch.randn(20, 30))
    state = OptimizerState(partial(torch.optim.Adam, foreach=foreach))
    assert state.step_share([parameter], torch.device("cpu")) == share


def test_no_step_holds_nothing() -> None:
    assert OptimizerState(None).step_share([nn.Parameter(torch.randn(3))]) == 0
    assert OptimizerState("adam").step_share([]) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "options", "share"), STEPPED)
def test_a_real_step_on_a_gpu_holds_the_share_that_was_found_on_small_tensors(
    name: str, options: dict[str, object], share: float
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    parameters = [nn.Parameter(torch.randn(2**20, device="cuda")) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[
        name
    ](parameters, **options)
    optimizer.step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    taken = torch.cuda.max_memory_allocated() - before
    all_bytes = sum(parameter.nbytes for parameter in parameters)
    largest = parameters[0].nbytes if not options.get("foreach", True) else 0
    # Parameter by parameter: a root, its quotient, and the moment without bias at one time.
    assert share * all_bytes <= taken <= share * all_bytes + 3 * largest + 2**16


BY_DEFAULT = (
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "asgd",
    "nadam",
    "radam",
    "rmsprop",
    "sgd",
)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BY_DEFAULT)
def test_the_share_that_the_host_finds_is_the_share_that_a_gpu_finds(name: str) -> None:
    state, parameter = OptimizerState(name), nn.Parameter(torch.randn(20, 30))
    on_gpu = state.step_share([parameter], torch.device("cuda", 0))
    assert state.step_share([parameter]) == pytest.approx(on_gpu, rel=0.05, abs=0.01)
