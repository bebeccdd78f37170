"""What a capture depends on, told without capturing: the operations that a model's code runs, on
tensors without data.

    model, inputs ──▶ forward pass on fake tensors ──▶ modules entered, operations, arguments ──▶
    hash

It takes a small part of the time of ``capture``. The user's code itself runs, as it is now, so that
no change of it, of what it reads, or of the libraries that it calls goes unseen where it changes
what is done. Equal footprints are equal graphs; that is what ``profile`` finds the layers of
earlier runs by.
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
from placer.capture.export.trace_session import custom_functions
from placer.capture.export.tracing_environment import capture_device, example, traceable
from placer.capture.export.tracing_lock import alone
from placer.capture.layers import named_state
from placer.capture.python_state import host_rng
from placer.capture.python_state.module_hooks import refuse_hooks
from placer.capture.python_state.module_side_effects import Counted, put_back
from placer.capture.python_state.plain_tensors import PlainTensors
from placer.capture.pytrees import flatten, flatten_inputs
from placer.errors import CaptureError, kind_of
from placer.utils.python_objects import own

_PLAIN = (
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


_LATER = 10_000
"""How many calls later a model is looked at once more; what it does at first may last as long as a
warm-up."""


@alone
def footprint(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """A hash of what the model does with these inputs, in its present mode.

    Args:
        model: any module; it is left as it was.
        args: example positional arguments.
        kwargs: example keyword arguments.

    Returns:
        The hash; None where it cannot be told: the model could not be captured either, is compiled,
        keeps something of its pass, or runs what is no plain operation on tensors.
    """
    try:
        refuse_hooks(model)
        refuse_weights(model)
        if any(
            child._compiled_call_impl is not None or hasattr(child, "_orig_mod")
            for child in model.modules()
        ):
            return None
        with put_back(model) as left, host_rng.given_back() as drawn:
            parts = _run(model, args, kwargs)
        return (
            None if left.changed or drawn else hashlib.sha256("\n".join(parts).encode()).hexdigest()
        )
    except Exception:
        # whatever the model's own code may raise: a capture will tell
        return None


def differs_later(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], counted: Iterable[Counted]
) -> bool:
    """Whether the model does something else in its next call, or in a far later one, for what it
    counts itself.

    Args:
        model: it is left as it was.
        args: example positional arguments.
        kwargs: example keyword arguments.
        counted: the attributes that it sets.

    Returns:
        Whether it does; False, too, where it cannot be told.
    """
    with put_back(model), host_rng.given_back():
        try:
            first = _run(model, args, kwargs)
        except Exception:
            # whatever the model's own code may raise on tensors without data
            return False
        try:
            second = _run(model, args, kwargs)
            for one in counted:
                fields = own(one.holder)
                number = fields.get(one.name)
                if isinstance(number, int | float) and not isinstance(number, bool):
                    fields[one.name] = number + _LATER
            return not first == second == _run(model, args, kwargs)
        except Exception:
            return True


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """What is done, line by line."""
    tensors, inputs = flatten_inputs(args, kwargs)
    device = capture_device(model, tensors)
    with traceable(model, device), checkpoints.noticed(model) as checkpointed, _eager():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        own = named_state(model)
        state: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in own.items()}
        given = [example(tensor, device) for tensor in tensors]
        given = [mode.from_tensor(item) if isinstance(item, Tensor) else item for item in given]
        log = _Log(model)
        log.parts += [f"input {log.spelt(item)}" for item in given]
        log.parts += [
            f"state {name} {type(own[name]).__name__} {log.spelt(tensor)}"
            for name, tensor in state.items()
        ]
        again, others = inputs.unflatten(given)
        plain = PlainTensors(device)
        try:
            with log.modules(), mode, log, plain:
                result = torch.func.functional_call(
                    model, state, again, others, tie_weights=True, strict=False
                )
        finally:
            plain.put_back()
        if plain.untracked:
            raise CaptureError("gradients of plain tensors")
        leaves, outputs = flatten(result)
        if custom_functions(leaves):
            raise CaptureError("custom autograd functions")
        log.parts += [f"output {log.spelt(leaf)}" for leaf in leaves]
        return [repr(inputs.key), repr(outputs.key), repr(checkpointed), *_tree(model), *log.parts]


def _tree(model: nn.Module) -> Iterator[str]:
    """The modules, which layers are cut along, and which state each has."""
    numbers: dict[int, int] = {}
    for name, child in model.named_modules(remove_duplicate=False):
        held = {
            key: None if tensor is None else numbers.setdefault(id(tensor), len(numbers))
            for key, tensor in (*child._parameters.items(), *child._buffers.items())
        }
        number = numbers.setdefault(id(child), len(numbers))
        yield f"{name} {type(child).__module__}.{type(child).__qualname__} {number} {child.training} {held}"


class _Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation: tensors by number, in the order in which they first appear.

    Attributes:
        parts: what was written, a line each.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: list[str] = []
        self._names = {id(child): name for name, child in model.named_modules()}
        self._numbers: dict[int, int] = {}
        # held, so that no other tensor takes the place of one
        self._seen: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.spelt((args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        surroundings = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
        )
        self.parts.append(f"{func} {before} {self.spelt(result)} {surroundings}")
        return result

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Write down which modules are entered and left."""

        def enter(child: nn.Module, _: Any) -> None:
            if id(child) in self._names:
                self.parts.append(f"> {self._names[id(child)]}")

        def leave(child: nn.Module, _: Any, __: Any) -> None:
            if id(child) in self._names:
                self.parts.append("<")

        handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def spelt(self, item: Any) -> str:
        """Anything that an operation takes or gives."""
        if isinstance(item, Tensor):
            return self._tensor(item)
        if isinstance(item, _PLAIN):
            return repr(item)
        if isinstance(item, list | tuple):
            return f"[{', '.join(map(self.spelt, item))}]"
        if isinstance(item, Mapping):
            return f"{{{', '.join(f'{key}: {self.spelt(value)}' for key, value in item.items())}}}"
        raise CaptureError(f"{kind_of(item)} is no plain argument")

    def _tensor(self, tensor: Tensor) -> str:
        if id(tensor) in self._numbers:
            return f"t{self._numbers[id(tensor)]}"
        number = self._numbers[id(tensor)] = len(self._seen)
        self._seen.append(tensor)
        strides = tensor.stride() if tensor.layout == torch.strided else tensor.layout
        return f"t{number}:{tensor.dtype} {list(tensor.shape)} {strides} {tensor.device.type} {tensor.requires_grad}"


def _eager() -> Any:
    """Functions that the user compiled run as they are written."""
    return (
        torch.compiler.set_stance("force_eager")
        if "torch._dynamo" in sys.modules
        else nullcontext()
    )
