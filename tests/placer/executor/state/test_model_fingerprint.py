"""A look at a model costs little, and sees whatever a call depends on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from placer import DataFlow
from placer.executor.state.model_fingerprint import Census


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x))) * self.scale


def _hook(*_: object) -> None:
    return


def _replace_hooks(model: Model) -> None:
    model.first._forward_hooks = OrderedDict({0: _hook})


CHANGES: dict[str, Callable[[Model], object]] = {
    "a module in another's place": lambda model: setattr(model, "first", nn.Linear(4, 4)),
    "a module more": lambda model: setattr(model, "more", nn.ReLU()),
    "a module less": lambda model: delattr(model, "first"),
    "a parameter": lambda model: setattr(model.last, "weight", nn.Parameter(torch.zeros(2, 4))),
    "a parameter less": lambda model: setattr(model.last, "bias", None),
    "an equal buffer": lambda model: setattr(model, "scale", torch.ones(())),
    "a buffer more": lambda model: model.first.register_buffer("more", torch.ones(())),
    "a constant": lambda model: setattr(model.norm, "momentum", 0.5),
    "a constant less": lambda model: delattr(model.norm, "momentum"),
    "a mode": lambda model: model.norm.eval(),
    "a hook": lambda model: model.first.register_forward_hook(_hook),
    "a hook before": lambda model: model.first.register_forward_pre_hook(_hook),
    "a hook backwards": lambda model: model.first.register_full_backward_hook(_hook),
    "hooks in another dict": _replace_hooks,
    "another class": lambda model: setattr(model.first, "__class__", nn.Identity),
    "a forward of its own": lambda model: setattr(model.first, "forward", torch.relu),
    "parameters in another dict": lambda model: setattr(model.first, "_parameters", {}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_seen(change: Callable[[Model], object]) -> None:
    model = Model()
    census = Census(model)
    assert census.holds()
    change(model)
    assert not census.holds()
    assert Census(model).holds()


def test_new_values_are_no_change() -> None:
    model = Model()
    census = Census(model)
    model(torch.randn(4, 4)).sum().backward()
    with torch.no_grad():
        model.first.weight.add_(1)
    model.first.requires_grad_(False)
    assert census.holds()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_hides_its_fields_is_looked_at_anew_each_time() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    census = Census(scripted)
    assert not census.holds()
    scripted.eval()
    assert Census(scripted).modes != census.modes


@pytest.mark.parametrize("chunks", [1, 8])
def test_a_call_looks_at_the_model_once(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    holds = Census.holds
    monkeypatch.setattr(Census, "holds", lambda census: bool(looks.append(census)) or holds(census))
    flow = DataFlow(Model().eval(), device_ids=2)
    flow.update_flow()
    for _ in range(3):
        looks.clear()
        with torch.no_grad():
            flow(torch.randn(8, 4), chunks=chunks)
    assert len(looks) == 1
