"""Layers whose weights are more than one block of numbers: wrappers, attached state, sparse and
complex tensors.

Each kind says which plain tensors a layer stores, by plain attribute access, so that tests know
what has to be counted and moved without asking Placer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

WIDTH = 16


class Scaled(torch.Tensor):
    """Whole numbers and a scale for each row; every operation works on their product."""

    numbers: Tensor
    scale: Tensor
    seen: list[Tensor] = []  # noqa: RUF012  # the whole numbers that operations met, if a test collects them

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, dtype=scale.dtype, device=numbers.device
        )

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> Scaled:
        return cls(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KEEPING:
            return cls(
                *(
                    func(inner, *args[1:], **(kwargs or {}))
                    for inner in (args[0].numbers, args[0].scale)
                )
            )
        return func(*tree_map(cls._product, args), **tree_map(cls._product, kwargs or {}))

    @classmethod
    def _product(cls, item: Any) -> Any:
        if not isinstance(item, Scaled):
            return item
        Scaled.seen.append(item.numbers)
        return item.numbers.to(item.scale.dtype) * item.scale

    @classmethod
    def of(cls, weight: Tensor) -> Scaled:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)


class Secretive(torch.Tensor):
    """Another tensor, which may be a wrapper itself; the class does not tell what it wraps."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Secretive:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inside(item: Any) -> Any:
            return item.inner if isinstance(item, cls) else item

        result = func(*tree_map(inside, args), **tree_map(inside, kwargs or {}))
        return cls(result) if func in _KEEPING else result


class Around(Secretive):
    """The same, and the class tells."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], {"a fact": 1}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> Around:
        assert context == {"a fact": 1}
        return cls(inner["inner"])


class Functional(torch.Tensor):
    """Whole numbers and a scale, with an own linear layer and nothing else, as quantisation
    libraries have it."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Functional:
        return torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, dtype=scale.dtype, device=numbers.device
        )

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], {"device": self.device}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> Functional:
        return cls(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            x, weight, bias = args
            return functional.linear(x, weight.numbers.to(x.dtype) * weight.scale, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KEEPING:
            return cls(
                *(
                    func(inner, *args[1:], **(kwargs or {}))
                    for inner in (args[0].numbers, args[0].scale)
                )
            )
        raise NotImplementedError(f"{func} of Functional")


_aten = torch.ops.aten
_KEEPING = (_aten.detach.default, _aten.clone.default, _aten.alias.default)


class Linear(nn.Linear):
    """A linear layer with a frozen weight of any kind."""

    def __init__(self, weight_of: Callable[[Tensor], Tensor]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight = nn.Parameter(weight_of(self.weight.detach()), requires_grad=False)


class State:
    """What belongs to a weight of whole numbers; one may be inside another."""

    def __init__(self, scale: Tensor, nested: State | None = None) -> None:
        self.scale, self.nested, self.kind = scale, nested, "rows"

    def value(self) -> Tensor:
        return self.scale if self.nested is None else self.scale * self.nested.value()


class Slots:
    """A state without a dictionary."""

    __slots__ = ("scale",)

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale


class Packed(nn.Parameter):
    """Whole numbers as a parameter of a class of its own, with a state."""

    state: Any

    def __new__(cls, data: Tensor, state: Any = None) -> Packed:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.state = state
        return made


class WithState(nn.Module):
    """A layer that finds the scale of its weight in the weight's attributes."""

    def __init__(
        self, attach: Callable[[Tensor, Tensor], nn.Parameter], scale_of: Callable[[Any], Tensor]
    ) -> None:
        super().__init__()
        whole = Scaled.of(torch.randn(WIDTH, WIDTH))
        self.weight = attach(whole.numbers, whole.scale)
        self.scale_of = scale_of

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype) * self.scale_of(self.weight))


def _plain(numbers: Tensor, **attributes: Any) -> nn.Parameter:
    made = nn.Parameter(numbers, requires_grad=False)
    vars(made).update(attributes)
    return made


class WithObject(nn.Module):
    """A layer that has the scale, and another name for the memory of its weight, in an object or a
    dict of its own."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        whole = Scaled.of(torch.randn(WIDTH, WIDTH))
        self.weight = nn.Parameter(whole.numbers, requires_grad=False)
        self.state = make(numbers=self.weight.data, scale=whole.scale)

    def forward(self, x: Tensor) -> Tensor:
        state = self.state if isinstance(self.state, dict) else vars(self.state)
        return functional.linear(x, state["numbers"].to(x.dtype) * state["scale"])


class Lazily(nn.Module):
    """A layer that takes the state away from its weight in its first call, as 8-bit layers of
    bitsandbytes do."""

    def __init__(self) -> None:
        super().__init__()
        whole = Scaled.of(torch.randn(WIDTH, WIDTH))
        self.weight = Packed(whole.numbers, whole.scale)
        self.own = State(None)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.state is not None:
            self.own.scale, self.weight.state = self.weight.state, None
        return functional.linear(x, self.weight.data.to(x.dtype) * self.own.scale)


class Gptq(nn.Module):
    """Four-bit numbers in whole numbers of 32 bits, groups of inputs with a scale and a zero point
    each."""

    GROUP = 8

    def __init__(self) -> None:
        super().__init__()
        groups = WIDTH // self.GROUP
        self.register_buffer(
            "qweight", torch.randint(-(2**31), 2**31 - 1, (WIDTH // 8, WIDTH), dtype=torch.int32)
        )
        self.register_buffer(
            "qzeros", torch.randint(-(2**31), 2**31 - 1, (groups, WIDTH // 8), dtype=torch.int32)
        )
        self.register_buffer("scales", torch.rand(groups, WIDTH, dtype=torch.float16) * 0.1)
        self.register_buffer("g_idx", (torch.arange(WIDTH) // self.GROUP).to(torch.int32))
        self.register_buffer("shifts", torch.arange(0, 32, 4, dtype=torch.int32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.qweight[:, None, :] >> self.shifts[None, :, None] & 15).reshape(WIDTH, WIDTH)
        zeros = (self.qzeros[:, :, None] >> self.shifts[None, None, :] & 15).reshape(-1, WIDTH)
        groups = self.g_idx.long()
        return x @ ((weight - zeros[groups]).to(x.dtype) * self.scales[groups].to(x.dtype))


class Product(nn.Module):
    """A product with a wrapper that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", Scaled.of(torch.randn(WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


class Spectral(nn.Module):
    """A complex parameter or buffer."""

    def __init__(self, as_buffer: bool) -> None:
        super().__init__()
        filters = torch.randn(WIDTH // 2 + 1, dtype=torch.complex64)
        if as_buffer:
            self.register_buffer("filters", filters)
        else:
            self.filters = nn.Parameter(filters)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filters, n=WIDTH)


class Sparse(nn.Module):
    """A sparse parameter or buffer."""

    def __init__(self, layout: str, as_buffer: bool) -> None:
        super().__init__()
        dense = torch.randn(WIDTH, WIDTH) * (torch.rand(WIDTH, WIDTH) < 0.25)
        matrix = {"coo": dense.to_sparse, "csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc}[
            layout
        ]()
        if as_buffer:
            self.register_buffer("matrix", matrix)
        else:
            self.matrix = nn.Parameter(matrix, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.matrix @ x.t()).t()


def _components(matrix: Tensor) -> list[Tensor]:
    if matrix.layout == torch.sparse_coo:
        return [matrix._indices(), matrix._values()]
    if matrix.layout == torch.sparse_csr:
        return [matrix.crow_indices(), matrix.col_indices(), matrix.values()]
    return [matrix.ccol_indices(), matrix.row_indices(), matrix.values()]


@dataclass(frozen=True)
class Kind:
    """A kind of layer.

    Attributes:
        make: a layer, (batch, width) to (batch, width).
        stored: the plain tensors that a layer stores; two that share memory are stored once.
        captured: whether torch.export captures the model.
        trained: whether the layer has a parameter that is trained.
        width: of what it takes and gives.
    """

    make: Callable[[], nn.Module]
    stored: Callable[[Any], list[Tensor]]
    captured: bool = True
    trained: bool = False
    width: int = WIDTH


def _rows(
    weight_of: Callable[[Tensor], Tensor], inside: Callable[[Any], Any], captured: bool = True
) -> Kind:
    """A linear layer around a wrapper of whole numbers and scales."""
    return Kind(
        lambda: Linear(weight_of),
        lambda layer: [inside(layer.weight).numbers, inside(layer.weight).scale, layer.bias],
        captured=captured,
        trained=True,
    )


def _attached(
    attach: Callable[[Tensor, Tensor], nn.Parameter], scale_of: Callable[[Any], Tensor]
) -> Kind:
    return Kind(
        lambda: WithState(attach, scale_of),
        lambda layer: [layer.weight.data, scale_of(layer.weight)],
        captured=False,
    )


KINDS: dict[str, Kind] = {
    "wrapper": _rows(Scaled.of, lambda weight: weight),
    "wrapper with a linear layer": _rows(
        lambda weight: Functional(*vars(Scaled.of(weight)).values()), lambda weight: weight
    ),
    "wrapper in a wrapper": _rows(
        lambda weight: Around(Scaled.of(weight)), lambda weight: weight.inner, False
    ),
    "wrapper without a protocol": _rows(
        lambda weight: Secretive(Scaled.of(weight)), lambda weight: weight.inner
    ),
    "wrapper buffer": Kind(Product, lambda layer: [layer.matrix.numbers, layer.matrix.scale]),
    "attached tensor": _attached(lambda n, s: _plain(n, scale=s), lambda w: w.scale),
    "attached object": _attached(lambda n, s: Packed(n, State(s)), lambda w: w.state.scale),
    "attached list": _attached(lambda n, s: Packed(n, [s]), lambda w: w.state[0]),
    "attached tuple": _attached(lambda n, s: Packed(n, (1, s)), lambda w: w.state[1]),
    "attached dict": _attached(
        lambda n, s: Packed(n, {"inner": {"scale": s}}), lambda w: w.state["inner"]["scale"]
    ),
    "attached namespace": _attached(
        lambda n, s: Packed(n, SimpleNamespace(scale=s)), lambda w: w.state.scale
    ),
    "attached slots": _attached(lambda n, s: Packed(n, Slots(s)), lambda w: w.state.scale),
    "attached state in a state": Kind(
        lambda: WithState(
            lambda n, s: Packed(n, State(torch.full((WIDTH, 1), 0.5), State(s))),
            lambda w: w.state.value(),
        ),
        lambda layer: [
            layer.weight.data,
            layer.weight.state.scale,
            layer.weight.state.nested.scale,
        ],
        captured=False,
    ),
    "state in an object": Kind(
        lambda: WithObject(SimpleNamespace), lambda layer: [layer.state.numbers, layer.state.scale]
    ),
    "state in a dict": Kind(
        lambda: WithObject(dict), lambda layer: [layer.state["numbers"], layer.state["scale"]]
    ),
    "state that is taken away": Kind(
        Lazily,
        lambda layer: [
            layer.weight.data,
            layer.own.scale if layer.weight.state is None else layer.weight.state,
        ],
        captured=False,
    ),
    "gptq": Kind(
        Gptq, lambda layer: [layer.qweight, layer.qzeros, layer.scales, layer.g_idx, layer.shifts]
    ),
    "complex parameter": Kind(lambda: Spectral(False), lambda layer: [layer.filters], trained=True),
    "complex buffer": Kind(lambda: Spectral(True), lambda layer: [layer.filters]),
    **{
        f"{layout} {'buffer' if as_buffer else 'parameter'}": Kind(
            lambda layout=layout, as_buffer=as_buffer: Sparse(layout, as_buffer),
            lambda layer: _components(layer.matrix),
        )
        for layout in ("coo", "csr", "csc")
        for as_buffer in (False, True)
    },
}


def model_of(kind: Kind, seed: int = 0) -> nn.Sequential:
    """Two layers of a kind, in evaluation mode."""
    torch.manual_seed(seed)
    return nn.Sequential(kind.make(), nn.Tanh(), kind.make()).eval()


def batch_of(kind: Kind, size: int = 6) -> Tensor:
    """What the model is given."""
    return torch.linspace(-1, 1, size * kind.width).reshape(size, kind.width)
