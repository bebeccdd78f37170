"""Running a model split and unsplit, and comparing all that a user could see of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from placer import DataFlow
from placer.capture.layers import named_state
from placer.capture.pytrees import flatten
from placer.schema import Placement
from placer.testing import logical_devices

TOLERANCE = 1e-10


@dataclass
class Outcome:
    """What one forward and backward pass left behind."""

    result: Any
    tensors: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def step(
    run: Callable[..., Any],
    model: nn.Module,
    args: Iterable[Any],
    kwargs: dict[str, Any],
    seed: int = 1,
) -> Outcome:
    """One forward pass, and a backward pass from everything that it returns.

    Args:
        run: the model, or a flow around it.
        model: whose gradients and buffers are looked at.
        args: positional arguments.
        kwargs: keyword arguments.
        seed: of dropout.
    """
    model.zero_grad()
    torch.manual_seed(seed)
    result = run(*args, **kwargs)
    tensors = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
    differentiable = [leaf for leaf in tensors if leaf.requires_grad]
    if differentiable:
        loss(differentiable).backward()
    return Outcome(
        result,
        [leaf.detach().cpu().clone() for leaf in tensors],
        {name: _copy(parameter.grad) for name, parameter in model.named_parameters()},
        {name: buffer.detach().cpu().clone() for name, buffer in model.named_buffers()},
    )


def loss(tensors: Iterable[Tensor]) -> Tensor:
    """A number in which every element of every output counts differently."""
    total: Tensor | None = None
    for tensor in tensors:
        weights = (
            torch.linspace(0.5, 1.5, tensor.numel(), dtype=tensor.dtype)
            .reshape(tensor.shape)
            .to(tensor.device)
        )
        term = (weights * tensor + 0.1 * tensor * tensor).mean()
        total = term if total is None else total + term
    assert total is not None
    return total


def assert_same(
    split: Outcome, whole: Outcome, atol: float = TOLERANCE, rtol: float = TOLERANCE
) -> None:
    """Outputs, gradients and buffers agree, and so do the types of the outputs."""
    assert type(split.result) is type(whole.result)
    assert len(split.tensors) == len(whole.tensors)
    for ours, theirs in zip(split.tensors, whole.tensors, strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol, equal_nan=True)
    assert split.gradients.keys() == whole.gradients.keys()
    for name, gradient in whole.gradients.items():
        given = split.gradients[name]
        assert (given is None) == (gradient is None), (
            f"{name}: one run has a gradient, the other none"
        )
        if gradient is not None and given is not None:
            torch.testing.assert_close(
                given, gradient, atol=atol, rtol=rtol, msg=lambda text, name=name: f"{name}: {text}"
            )
    for name, buffer in whole.buffers.items():
        _assert_close(name, split.buffers[name], buffer, atol, rtol)


def _assert_close(name: str, given: Tensor, expected: Tensor, atol: float, rtol: float) -> None:
    torch.testing.assert_close(
        given, expected, atol=atol, rtol=rtol, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )


def scatter_layers(flow: DataFlow, devices: int, seed: int = 0) -> None:
    """A random map, with at least two devices in it where there are two layers."""
    draw = random.Random(seed)
    for name in flow.layer_gpus:
        flow.layer_gpus[name] = draw.randrange(devices)
    names = list(flow.layer_gpus)
    if len(names) > 1 and len(set(flow.layer_gpus.values())) == 1:
        flow.layer_gpus[names[-1]] = (int(str(flow.layer_gpus[names[0]])) + 1) % devices
    flow.update_flow()


def assert_split_equals_unsplit(
    make: Callable[[], nn.Module],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    training: bool = True,
    kinds: Sequence[str] = ("fine", "submodule", "placement"),
    captured: bool = True,
) -> None:
    """Run a model on four stand-ins under random maps, and compare with the unsplit model.

    Args:
        make: builds the model; it is run in float64.
        args: positional arguments.
        kwargs: keyword arguments.
        training: the mode.
        kinds: of maps: ``fine`` and ``submodule`` name those layers, ``placement`` the ``auto``
            layers.
        captured: whether the model can be captured.
    """
    both = CapturedOnce(make, training)
    whole = step(both.reference, both.reference, args, kwargs or {})
    assert_split_equals(whole, both, args, kwargs, kinds=kinds, captured=captured)


def assert_split_equals(
    whole: Outcome,
    both: CapturedOnce,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    kinds: Sequence[str] = ("fine", "submodule", "placement"),
    captured: bool = True,
) -> None:
    """As ``assert_split_equals_unsplit``, for a model that is kept, of which is known what the
    unsplit one leaves."""
    for seed, kind in enumerate(kinds):
        with logical_devices(4), both.flow(fine_grained=kind == "fine") as flow:
            if kind == "placement":
                flow.update_flow(random_placement(flow, args, kwargs or {}, seed))
            else:
                scatter_layers(flow, 4, seed)
            split = step(flow, both.model, args, kwargs or {})
            assert (flow.not_captured_because == "") == captured, flow.not_captured_because
        assert_same(split, whole)


def random_placement(
    flow: DataFlow, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int = 0
) -> Placement:
    """A placement of the model's ``auto`` layers on random devices of the flow, colocated ones
    together."""
    # the flow's own: captures are dear
    captured = flow.placed.captured(flow.placed.laid_out((args, kwargs)))
    assert captured is not None, flow.not_captured_because
    graph = flow.placed.captures.graph(captured, "auto")
    draw = random.Random(seed)
    devices = [str(device) for device in flow.settings.devices]
    places = {layer.name: draw.choice(devices) for layer in graph.layers}
    for group in graph.colocated:
        places |= dict.fromkeys(group, places[group[0]])
    return Placement(status="feasible", objective="throughput", layer_devices=places)


def twins(
    make: Callable[[], nn.Module], training: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, nn.Module]:
    """Two models that are equal and share nothing: one to split, one to compare with."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make().to(dtype).train(training))
    return models[0], models[1]


class CapturedOnce:
    """Two equal models, one to split, one to compare with, for several tests: each flow finds both
    as they were made.

    Captures are dear, and of one mode and shape every flow would make the same: they share theirs.

    Attributes:
        model: the one that flows split.
        reference: its equal.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        training: bool = True,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.model, self.reference = twins(make, training, dtype)
        self._initial = {
            name: tensor.detach().clone() for name, tensor in named_state(self.model).items()
        }
        self._captures = DataFlow(self.model).placed.captures

    @contextmanager
    def flow(self, **options: Any) -> Iterator[DataFlow]:
        """A flow of the model, undone in the end.

        Args:
            options: of ``DataFlow``.
        """
        for module in (self.model, self.reference):
            module.zero_grad()
            with torch.no_grad():
                for name, tensor in named_state(module).items():
                    tensor.copy_(self._initial[name])
        flow = DataFlow(self.model, **options)
        flow.placed.captures = self._captures
        try:
            yield flow
        finally:
            flow.undo()


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu().clone()
