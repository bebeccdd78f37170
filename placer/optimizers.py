"""Memory of optimizers, from real steps on small tensors: state, and temporaries of a step."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from placer.capture.argument_checks import optimizer_list, refuse_closures
from placer.capture.layers import tensor_bytes
from placer.devices.allocator.storage_watch import StorageLog
from placer.errors import InputError, ProfilingError

OptimizerLike = (
    str
    | type[Optimizer]
    | Optimizer
    | Sequence[Optimizer]
    | Callable[[list[nn.Parameter]], Optimizer]
    | None
)
"""A name of a class in ``torch.optim``, a class, one or several optimizers, or a function from a
list of parameters to an optimizer."""

# sizes of a dimension in trial steps; the state at other sizes is extrapolated linearly
_SMALL, _LARGE = 2, 3
# number of parameters, and elements of each, in steps that measure temporaries
_FEW, _TRIED = 4, 4096
# Optimizers that step parameters one by one on a GPU, too, unless ``foreach=True``, because their
# purpose is to save memory.
_ONE_BY_ONE = (torch.optim.Adafactor,)

# at most 2 ** 5 trial steps; further dimensions are merged into the first
_MAX_DIMENSIONS = 5


class OptimizerState:
    """The optimizer's state in bytes per parameter, and its step.

    Args:
        optimizer: an optimizer, or a list of optimizers that step the model together. Of a list,
            each steps the parameters that it holds. A single one counts for all parameters of the
            model.

    Attributes:
        name: of the optimizer's class, or of each in a list, joined by ``+``; None without an
            optimizer.
    """

    def __init__(self, optimizer: OptimizerLike) -> None:
        self._parts = [_OneOptimizer(one) for one in _listed(optimizer)]
        self._is_list = isinstance(optimizer, list | tuple)
        self.name = "+".join(part.name for part in self._parts if part.name is not None) or None

    def bytes(self, parameter: Tensor) -> int:
        """Return the state in bytes for a parameter; 0 if it requires no gradient.

        Raises:
            ProfilingError: if an optimizer's step failed.
        """
        return sum(part.bytes(parameter) for part in self._parts_of(parameter))

    def step(self, parameters: Sequence[Tensor], copies: Sequence[Tensor]) -> Callable[[], None]:
        """Return a function that steps the optimizers on copies of the model's parameters.

        Args:
            parameters: the model's own; each copy is stepped with the options of its parameter.
            copies: of the parameters, in order; they must have gradients when the function is
                called.
        """
        shares: dict[_OneOptimizer, tuple[list[Tensor], list[Tensor]]] = {}
        for parameter, copied in zip(parameters, copies, strict=True):
            for part in self._parts_of(parameter):
                own, twins = shares.setdefault(part, ([], []))
                own.append(parameter)
                twins.append(copied)
        steps = [part.step(own, twins) for part, (own, twins) in shares.items()]

        def run() -> None:
            for step in steps:
                step()

        return run

    def step_share(self, parameters: Sequence[Tensor], device: torch.device | None = None) -> float:
        """Return the temporaries of a step on a GPU, in bytes per byte of the parameters.

        On GPUs, torch's optimizers step all parameters of a device together by default, and hold
        temporaries as large as all of them. The share is measured by a real step on small tensors.
        Optimizers of a list step one after another, so the largest temporaries count.

        Args:
            parameters: the trained parameters.
            device: a GPU for the trial step, on which torch itself decides whether to step
                parameters together. None (default) for the host, which imitates this decision.

        Returns:
            0 if parameters are stepped one by one or in place by one kernel, or if the step fails.
        """
        total = sum(map(tensor_bytes, parameters))
        shares = [0.0]
        for part in self._parts:
            own = [parameter for parameter in parameters if part in self._parts_of(parameter)]
            shares.append(
                part.step_share(own, device) * sum(map(tensor_bytes, own)) / max(total, 1)
            )
        return max(shares)

    def _parts_of(self, parameter: Tensor) -> list[_OneOptimizer]:
        return [part for part in self._parts if not self._is_list or part.holds(parameter)]


class _OneOptimizer:
    """The state and the step of one optimizer.

    The state is every tensor in ``optimizer.state[parameter]`` after one step. Its size is assumed
    to be linear in each dimension of the parameter, which covers element-wise state (Adam),
    factored state (Adafactor) and constants.

    Attributes:
        name: of the optimizer's class; None without an optimizer.
    """

    def __init__(self, optimizer: OptimizerLike) -> None:
        self.name, self._options, self._make = _factory(optimizer)
        self._tried: dict[tuple[Any, ...], int] = {}

    def holds(self, parameter: Tensor) -> bool:
        """Return whether the optimizer was created with this parameter."""
        return id(parameter) in self._options

    def bytes(self, parameter: Tensor) -> int:
        """Return the state in bytes, see ``OptimizerState``."""
        if self.name is None or not parameter.requires_grad or parameter.numel() == 0:
            return 0
        options = self._options.get(id(parameter), {})
        return self._at(_folded(parameter.shape), parameter.dtype, options)

    def step(self, parameters: Sequence[Tensor], copies: Sequence[Tensor]) -> Callable[[], None]:
        """Return a function that steps copies, see ``OptimizerState``."""
        # one optimizer for each set of options, so that copies are stepped together as in training
        groups: dict[str, tuple[dict[str, Any], list[Tensor]]] = {}
        for parameter, copied in zip(parameters, copies, strict=True):
            options = self._options.get(id(parameter), {})
            groups.setdefault(repr(sorted(options.items())), (options, []))[1].append(copied)
        optimizers = [self._make(members, **options) for options, members in groups.values()]

        def run() -> None:
            for optimizer in optimizers:
                optimizer.step(lambda: 0.0)

        return run

    def step_share(self, parameters: Sequence[Tensor], device: torch.device | None = None) -> float:
        """Return the temporaries of a step, see ``OptimizerState``.

        The largest share over options and dtypes counts, since a device may hold only such
        parameters.
        """
        kinds = {}
        for parameter in parameters:
            options = self._options.get(id(parameter), {})
            kinds[parameter.dtype, repr(sorted(options.items()))] = options
        return max(
            (self._share(dtype, options, device) for (dtype, _), options in kinds.items()),
            default=0.0,
        )

    def _share(
        self, dtype: torch.dtype, options: Mapping[str, Any], device: torch.device | None
    ) -> float:
        if self.name is None:
            return 0.0
        try:
            few, many = (
                self._temporaries(count, dtype, options, device) for count in (_FEW, 2 * _FEW)
            )
        except Exception:  # whatever the user's optimizer may raise
            return 0.0
        return (many - few) / (_FEW * _TRIED * dtype.itemsize)

    def _temporaries(
        self,
        count: int,
        dtype: torch.dtype,
        options: Mapping[str, Any],
        device: torch.device | None,
    ) -> int:
        """Return the peak bytes beyond state of a step on a number of small parameters."""
        place = torch.device("cpu") if device is None else device
        parameters = _small_parameters(count, dtype, place)
        fused = device is None and bool(options.get("fused"))
        optimizer = self._make(parameters, **{**options, "fused": False} if fused else options)
        if device is None:
            if fused or any(group.get("fused") for group in optimizer.param_groups):
                return 0  # some versions have no fused kernels on the host
            # The parameters are on the host, where torch does not choose ``foreach`` by itself.
            for group in optimizer.param_groups:
                if group.get("foreach", False) is None and not isinstance(optimizer, _ONE_BY_ONE):
                    group["foreach"] = True
        optimizer.step(lambda: 0.0)  # the first step creates the state
        kept = tree_leaves([dict(state) for state in optimizer.state.values()])
        held = [*parameters, *(item.grad for item in parameters), *kept]
        log = StorageLog(place, [item for item in held if isinstance(item, Tensor)])
        with log:
            optimizer.step(lambda: 0.0)
        return log.peak_bytes()

    def _at(self, shape: tuple[int, ...], dtype: torch.dtype, options: Mapping[str, Any]) -> int:
        """Return the bytes at any shape, by multilinear extrapolation from trial sizes 2 and 3."""
        corners = [(size,) if size <= _LARGE else (_SMALL, _LARGE) for size in shape]
        total = 0
        for corner in itertools.product(*corners):
            weight = 1
            for size, tried in zip(shape, corner, strict=True):
                if size > _LARGE:
                    weight *= size - _SMALL if tried == _LARGE else _LARGE - size
            total += weight * self._try(corner, dtype, options)
        return max(0, total)

    def _try(self, shape: tuple[int, ...], dtype: torch.dtype, options: Mapping[str, Any]) -> int:
        key = (shape, dtype, *sorted((name, repr(value)) for name, value in options.items()))
        if key not in self._tried:
            self._tried[key] = self._step(shape, dtype, options)
        return self._tried[key]

    def _step(self, shape: tuple[int, ...], dtype: torch.dtype, options: Mapping[str, Any]) -> int:
        dense = torch.full(shape, 0.25).to(dtype)
        failure: Exception | None = None
        # SparseAdam accepts only sparse gradients
        for gradient in (dense, dense.to_sparse(1) if shape else dense):
            parameter = nn.Parameter(torch.full(shape, 0.5).to(dtype))
            parameter.grad = gradient
            try:
                with torch.enable_grad():
                    # Some versions reject fused or capturable steps on the host; the state has the
                    # same size.
                    on_host = {name: False for name in ("fused", "capturable") if options.get(name)}
                    optimizer = self._make([parameter], **{**options, **on_host})
                    optimizer.step(lambda: 0.0)
            except Exception as error:  # whatever the user's optimizer may raise
                failure = failure or error
                continue
            kept = tree_leaves([dict(state) for state in optimizer.state.values()])
            return sum(tensor_bytes(item) for item in kept if isinstance(item, Tensor))
        raise ProfilingError(
            f"optimizer {self.name} failed on a parameter of shape {shape} and {dtype}: {failure}; "
            "give another optimizer, or None to leave its state out"
        ) from failure


def _listed(optimizer: OptimizerLike) -> list[Any]:
    """Return the optimizers of a list, or the single one.

    Raises:
        InputError: if the list is empty or contains something else.
    """
    if not isinstance(optimizer, list | tuple):
        return [optimizer]
    for one in optimizer_list(optimizer):
        if not isinstance(one, Optimizer):
            raise InputError(
                f"the list of optimizers has {one!r:.80}; give optimizers that were made with "
                "parameters, which say what each of them steps, or one name or class for all "
                "parameters"
            )
    return list(optimizer)


def _factory(
    optimizer: OptimizerLike,
) -> tuple[str | None, dict[int, dict[str, Any]], Callable[..., Optimizer]]:
    """Return the optimizer's name, the options of each parameter by ``id``, and a constructor."""
    if optimizer is None:
        return None, {}, torch.optim.SGD
    if isinstance(optimizer, str):
        optimizer = _by_name(optimizer)
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    refuse_closures(kind)
    if isinstance(optimizer, Optimizer):
        return type(optimizer).__name__, _options(optimizer), _accepting(type(optimizer))
    if isinstance(optimizer, type):
        if issubclass(optimizer, Optimizer):
            return optimizer.__name__, {}, _accepting(optimizer)
    elif callable(optimizer):
        inner = optimizer.func if isinstance(optimizer, partial) else optimizer
        return getattr(inner, "__name__", type(inner).__name__), {}, optimizer
    raise InputError(
        f"optimizer={optimizer!r}: give a name from torch.optim, an Optimizer, what makes one, or "
        "None"
    )


def _by_name(name: str) -> type[Optimizer]:
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name.lower() not in known:
        names = ", ".join(sorted(known.keys() - {"lbfgs"}))
        raise InputError(
            f"there is no optimizer {name!r} in torch.optim; give one of {names}, or None"
        )
    return known[name.lower()]


def _accepting(kind: type[Optimizer]) -> Callable[..., Optimizer]:
    """Return a constructor that drops unknown options and supplies a missing learning rate."""
    accepted = inspect.signature(kind).parameters
    lr = accepted.get("lr")

    def make(parameters: Sequence[nn.Parameter], **options: Any) -> Optimizer:
        if lr is not None and lr.default is inspect.Parameter.empty:
            options.setdefault("lr", 1e-3)
        return kind(
            parameters, **{name: value for name, value in options.items() if name in accepted}
        )

    return make


def _options(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """Return the options of each parameter that the optimizer holds, from its group.

    Other parameters get the class's defaults.
    """
    options: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        of_group = {
            name: value for name, value in group.items() if name not in ("params", "param_names")
        }
        options.update((id(parameter), of_group) for parameter in group["params"])
    return options


def _folded(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape with at most five dimensions."""
    extra = len(shape) - _MAX_DIMENSIONS
    if extra <= 0:
        return tuple(shape)
    first = 1
    for size in shape[: extra + 1]:
        first *= size
    return (first, *shape[extra + 1 :])


def _small_parameters(count: int, dtype: torch.dtype, place: torch.device) -> list[nn.Parameter]:
    """Return small parameters with gradients, for a trial step."""
    parameters = [
        nn.Parameter(torch.full((_TRIED,), 0.5, device=place).to(dtype)) for _ in range(count)
    ]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.25, requires_grad=False)
    return parameters
