"""A hash of what a capture would contain, computed without a capture.

    model, inputs ─▶ forward pass on fake tensors ─▶ modules entered, operations, arguments ─▶ hash

It takes a small part of a capture's time. The user's code itself runs, so a change of the code, of
values that it reads, or of its libraries shows if it changes the operations. Equal footprints mean
equal graphs; ``profile`` uses them to find the layers of earlier runs.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from placer.capture.export import checkpoints
from placer.capture.export.subclass_weights import refuse_weights
from placer.capture.export.tracing_environment import (
    capture_device,
    custom_functions,
    trace_input,
    tracing_environment,
    with_tracing_lock,
)
from placer.capture.layers import named_state
from placer.capture.python_state import host_rng
from placer.capture.python_state.module_hooks import refuse_hooks
from placer.capture.python_state.module_side_effects import SetAttribute, restored_modules
from placer.capture.python_state.plain_tensors import PlainTensors
from placer.capture.pytrees import flatten, flatten_inputs
from placer.errors import CaptureError, kind_of
from placer.utils.python_objects import own

# Types of arguments that are written as they print.
_PRINTABLE = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


_LATER_CALLS = 10_000
"""Number of calls to skip before a model is inspected again: a warm-up may last this long."""


@with_tracing_lock
def footprint(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return a hash of what the model does with these inputs in its present mode.

    Args:
        model: any module; it is left unchanged.
        args: example positional arguments.
        kwargs: example keyword arguments.

    Returns:
        The hash. None if it is unknown: the model could not be captured either, is compiled, keeps
        a tensor of its pass, or runs more than plain operations on tensors.
    """
    try:
        refuse_hooks(model)
        refuse_weights(model)
        if any(
            child._compiled_call_impl is not None or hasattr(child, "_orig_mod")
            for child in model.modules()
        ):
            return None
        with restored_modules(model) as left, host_rng.restored_generators() as drawn:
            parts = _describe_run(model, args, kwargs)
        return (
            None if left.changed or drawn else hashlib.sha256("\n".join(parts).encode()).hexdigest()
        )
    except Exception:
        # The model's own code may raise anything; a capture will report it.
        return None


def differs_later(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], counted: Iterable[SetAttribute]
) -> bool:
    """Return whether the model's next call, or a much later one, differs because of what it counts.

    Args:
        model: any module; it is left unchanged.
        args: example positional arguments.
        kwargs: example keyword arguments.
        counted: the attributes that it sets.

    Returns:
        Whether it differs; False if that cannot be found out.
    """
    with restored_modules(model), host_rng.restored_generators():
        try:
            first = _describe_run(model, args, kwargs)
        except Exception:
            # The model's own code may raise anything on tensors without data.
            return False
        try:
            # Calls 1 and 2, then one with the numbers of call 10,002.
            second = _describe_run(model, args, kwargs)
            for one in counted:
                fields = own(one.holder)
                number = fields.get(one.name)
                if isinstance(number, int | float) and not isinstance(number, bool):
                    fields[one.name] = number + _LATER_CALLS
            return not first == second == _describe_run(model, args, kwargs)
        except Exception:
            return True


def _describe_run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Run the model on fake tensors and return a description of each step."""
    tensors, inputs = flatten_inputs(args, kwargs)
    device = capture_device(model, tensors)
    with (
        tracing_environment(model, device),
        checkpoints.recorded_checkpoints(model) as checkpointed,
        _eager(),
    ):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        own = named_state(model)
        state: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in own.items()}
        given = [trace_input(tensor, device) for tensor in tensors]
        given = [mode.from_tensor(item) if isinstance(item, Tensor) else item for item in given]
        log = _OperationLog(model)
        log.lines += [f"input {log.describe(item)}" for item in given]
        log.lines += [
            f"state {name} {type(own[name]).__name__} {log.describe(tensor)}"
            for name, tensor in state.items()
        ]
        again, others = inputs.unflatten(given)
        plain = PlainTensors(device)
        try:
            with log.record_modules(), mode, log, plain:
                result = torch.func.functional_call(
                    model, state, again, others, tie_weights=True, strict=False
                )
        finally:
            plain.restore()
        if plain.untracked:
            raise CaptureError("gradients of plain tensors")
        leaves, outputs = flatten(result)
        if custom_functions(leaves):
            raise CaptureError("custom autograd functions")
        log.lines += [f"output {log.describe(leaf)}" for leaf in leaves]
        return [
            repr(inputs.key),
            repr(outputs.key),
            repr(checkpointed),
            *_describe_modules(model),
            *log.lines,
        ]


def _describe_modules(model: nn.Module) -> Iterator[str]:
    """Yield a description of every module and its state; layers are cut along modules."""
    numbers: dict[int, int] = {}
    for name, child in model.named_modules(remove_duplicate=False):
        held = {
            key: None if tensor is None else numbers.setdefault(id(tensor), len(numbers))
            for key, tensor in (*child._parameters.items(), *child._buffers.items())
        }
        number = numbers.setdefault(id(child), len(numbers))
        kind = f"{type(child).__module__}.{type(child).__qualname__}"
        yield f"{name} {kind} {number} {child.training} {held}"


class _OperationLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that writes down every operation, with tensors numbered in order of appearance.

    Args:
        model: the model.

    Attributes:
        lines: one line for each operation.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []
        self._names = {id(child): name for name, child in model.named_modules()}
        self._numbers: dict[int, int] = {}
        # Held so that no other tensor can take over an identity.
        self._seen: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.describe((args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        surroundings = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
        )
        self.lines.append(f"{func} {before} {self.describe(result)} {surroundings}")
        return result

    @contextmanager
    def record_modules(self) -> Iterator[None]:
        """Write down which modules are entered and left."""

        def enter(child: nn.Module, _: Any) -> None:
            if id(child) in self._names:
                self.lines.append(f"> {self._names[id(child)]}")

        def leave(child: nn.Module, _: Any, __: Any) -> None:
            if id(child) in self._names:
                self.lines.append("<")

        handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def describe(self, item: Any) -> str:
        """Return the text of an argument or result."""
        if isinstance(item, Tensor):
            return self._tensor(item)
        if isinstance(item, _PRINTABLE):
            return repr(item)
        if isinstance(item, list | tuple):
            return f"[{', '.join(map(self.describe, item))}]"
        if isinstance(item, Mapping):
            return (
                f"{{{', '.join(f'{key}: {self.describe(value)}' for key, value in item.items())}}}"
            )
        raise CaptureError(f"{kind_of(item)} is not a plain argument")

    def _tensor(self, tensor: Tensor) -> str:
        if id(tensor) in self._numbers:
            return f"t{self._numbers[id(tensor)]}"
        number = self._numbers[id(tensor)] = len(self._seen)
        self._seen.append(tensor)
        strides = tensor.stride() if tensor.layout == torch.strided else tensor.layout
        layout = f"{list(tensor.shape)} {strides} {tensor.device.type}"
        return f"t{number}:{tensor.dtype} {layout} {tensor.requires_grad}"


def _eager() -> Any:
    """Run the original Python code of functions that the user compiled."""
    return (
        torch.compiler.set_stance("force_eager")
        if "torch._dynamo" in sys.modules
        else nullcontext()
    )
