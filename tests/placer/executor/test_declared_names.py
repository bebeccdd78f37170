"""Declarations of ``BatchOptions`` that fit no value: errors name the value and the fix.

Such a declaration used to be ignored. The user then trained or ran with another layout than the
declared one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import placer
from placer import BatchOptions, DataFlow
from placer.errors import InputError
from placer.profiler.remote.sending import describe
from placer.testing import logical_devices

DEVICES = ["cpu:0", "cpu:1"]


class Open(nn.Module):
    """A model that takes arguments of any name, as wrappers such as adapters do."""

    def __init__(self, is_captured: bool = True) -> None:
        super().__init__()
        self.body, self.head, self.is_captured = nn.Linear(6, 8), nn.Linear(8, 5), is_captured

    def forward(self, x: Tensor, mask: Tensor | None = None, **kwargs: Any) -> dict[str, Any]:
        if not self.is_captured and float(x.sum()) > 1e9:
            x = -x
        hidden = self.body(x)
        if kwargs.get("scale"):
            hidden = hidden * 2
        return {"logits": self.head(hidden), "parts": (hidden, hidden.sum(1))}


@pytest.fixture(autouse=True)
def stand_ins() -> Iterator[None]:
    torch.manual_seed(0)
    with logical_devices(2):
        yield


def _flow(is_captured: bool = True) -> DataFlow:
    flow = DataFlow(Open(is_captured), device_ids=DEVICES)
    flow.layer_gpus.clear()
    flow.layer_gpus.update({"": 0, "body": 0, "head": 1})
    flow.update_flow()
    return flow


def _loss(output: dict[str, Any], target: Tensor) -> Tensor:
    return functional.cross_entropy(output["logits"], target)


def _loss_and_value(output: dict[str, Any], target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = _loss(output, target)
    return loss, {"doubled": loss.detach() * 2}


X = torch.randn(8, 6)
TARGET = torch.arange(8) % 5


def _call(flow: DataFlow, options: BatchOptions, **kwargs: Any) -> Any:
    return flow(X, chunks=2, batch_options=options, **kwargs)


def _step(flow: DataFlow, options: BatchOptions, **kwargs: Any) -> Any:
    inputs = {"x": X, **kwargs}
    return flow.train_step(_loss_and_value, batch_options=options)(inputs, TARGET, chunks=2)


def _stream(flow: DataFlow, options: BatchOptions, **kwargs: Any) -> Any:
    return list(flow.stream([{"x": X, **kwargs}], batch_options=options))


def _measure(flow: DataFlow, options: BatchOptions, **kwargs: Any) -> Any:
    return flow.measure({"x": X, **kwargs}, chunks=2, batch_options=options)


def _profile(flow: DataFlow, options: BatchOptions, **kwargs: Any) -> Any:
    more: Any = {"progress": False, "cache": False, "repeats": 1, "batch_options": options}
    flow.undo()
    return placer.profile(flow.module, {"x": X, **kwargs}, DEVICES[:1], **more)


def _describe(flow: DataFlow, options: BatchOptions, **kwargs: Any) -> Any:
    flow.undo()
    return describe(flow.module, {"x": X, **kwargs}, options=options)


Path = Callable[..., Any]
PATHS: dict[str, Path] = {
    "call": _call,
    "step": _step,
    "stream": _stream,
    "measure": _measure,
    "profile": _profile,
    "profile by REST": _describe,
}


@pytest.mark.covering
@pytest.mark.parametrize("run", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            BatchOptions(inputs=5),
            r"dimension 5 is the batch, and no tensor has that many .*x has shape \(8, 6\).*0 to 1",
        ),
        (
            BatchOptions(inputs={"unknown": 1}),
            r"inputs names 'unknown', which is not an input \(inputs: x\)",
        ),
        (BatchOptions(inputs={"x": 0, "*": 2}), None),
        (BatchOptions(inputs={"mask": 0}), None),
        (
            BatchOptions(outputs={"unknown": 0}),
            r"outputs names 'unknown'.*values: logits, parts.0, parts.1",
        ),
        (
            BatchOptions(outputs={"parts.2": 0}),
            r"outputs names 'parts.2'.*values: logits, parts.0, parts.1",
        ),
        (BatchOptions(outputs={"parts": 0, "logits": 0}), None),
    ],
    ids=str,
)
def test_a_declaration_of_no_value_is_refused_by_name(
    run: Path, options: BatchOptions, message: str | None
) -> None:
    if message is None:
        run(_flow(), options)
    else:
        with pytest.raises(InputError, match=message):
            run(_flow(), options)


@pytest.mark.parametrize("run", PATHS.values(), ids=PATHS)
def test_a_number_has_no_dimension(run: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"dimension 0 of 'scale' is the batch; it is a bool, which has no dimensions",
    ):
        run(_flow(), BatchOptions(inputs={"scale": 0}), scale=True)


@pytest.mark.parametrize("run", [_call, _step, _stream])
def test_names_are_refused_where_the_model_is_not_captured(run: Path) -> None:
    with pytest.raises(InputError, match=r"outputs names 'unknown'"):
        run(_flow(is_captured=False), BatchOptions(outputs={"unknown": 0}))


def test_a_step_without_verification_refuses_names_once_and_trains_afterwards() -> None:
    flow = _flow()
    with pytest.raises(InputError, match=r"outputs names 'unknown'"):
        _step(flow, BatchOptions(outputs={"unknown": 0}, verify=False))
    assert all(parameter.grad is None for parameter in flow.module.parameters())
    step = flow.train_step(
        _loss_and_value, batch_options=BatchOptions(outputs={"doubled": "list"}, verify=False)
    )
    for _ in range(3):
        loss, values = step(X, TARGET, chunks=2)
        torch.testing.assert_close(torch.stack(values["doubled"]).mean(), loss * 2)


def test_a_value_of_the_loss_is_known_to_a_profile_with_the_loss() -> None:
    more: Any = {
        "progress": False,
        "cache": False,
        "repeats": 1,
        "loss_fn": _loss_and_value,
        "target": TARGET,
    }
    options = BatchOptions(outputs={"doubled": "list"})
    found = placer.profile(Open(), X, DEVICES[:1], batch_options=options, **more)
    assert found.batch_options == options
    with pytest.raises(InputError, match=r"outputs names 'tripled'.*doubled"):
        placer.profile(
            Open(), X, DEVICES[:1], batch_options=BatchOptions(outputs={"tripled": "list"}), **more
        )


def test_a_nested_name_is_refused_with_the_parts_that_there_are() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 5)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            result: Tensor = self.body(batch["x"])
            return result

    flow = DataFlow(Nested(), device_ids=DEVICES)
    flow.update_flow()
    with pytest.raises(
        InputError, match=r"names 'batch.y', which is not a part of 'batch' \(parts: batch.x"
    ):
        flow({"x": X}, chunks=2, batch_options=BatchOptions(inputs={"batch.y": 0}))
    with pytest.raises(InputError, match=r"the result is one tensor, which outputs=0 declares"):
        flow({"x": X}, chunks=2, batch_options=BatchOptions(outputs={"unknown": 0}))


def test_items_of_lists_are_refused_where_there_is_no_list() -> None:
    with pytest.raises(
        InputError, match=r"items of lists are samples, and there is no list: x has shape \(8, 6\)"
    ):
        _call(_flow(), BatchOptions(inputs="items"))


@pytest.mark.parametrize("target", [5, {"unknown": 0}])
def test_a_target_without_the_declared_value_is_refused(target: Any) -> None:
    with pytest.raises(
        InputError, match=r"batch_options.target (says that dimension 5|names 'unknown')"
    ):
        _step(_flow(), BatchOptions(target=target))


def test_the_options_of_a_flow_may_fit_another_of_its_calls() -> None:
    flow = _flow()
    flow.batch_options = BatchOptions(inputs={"labels": 0}, outputs={"loss": "mean"})
    flow(X)  # an open signature: another call may have labels, and its result a loss
    flow(X, labels=TARGET, chunks=2)
    with pytest.raises(InputError, match=r"names 'labels'"):
        flow(X, chunks=2)
