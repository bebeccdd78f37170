"""torch.export, as Placer uses it: one flat graph of ATen operations over the user's own parameters.

    module, example inputs  ->  Exported(nodes with module stacks, structure of inputs and outputs)

Regions that export nests (``torch.no_grad()``, ``torch.autocast``) are laid flat again and every node is told in
which it stands, so that a layer border may pass through a region.
"""

from __future__ import annotations

import io
import logging
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import _disable_current_modes

from placer import devices
from placer.errors import CaptureError
from placer.graph import attributes, chance, checkpoints, nested
from placer.graph.inlining import inline_regions
from placer.graph.leftovers import put_back, read_before_written
from placer.graph.structure import Structure, flatten
from placer.graph.tracing import GradientMode, OneDevice

PREFIX = "module."
"""The user's model is the attribute ``module`` of what is exported."""

_SAFE_HOOKS = ("WeightNorm", "SpectralNorm", "RecomputeNorm", "Arrival", "Again")
_SAFE_FUNCTIONS = ("output_capturing_hook", "make_inputs_require_grads")
"""Hooks of transformers: what the one collects is a part of the result, and the other serves checkpoints."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


_REENTRANT = "a reentrant checkpoint (CheckpointFunction; one with use_reentrant=False is captured)"


@dataclass
class Exported:
    """A captured model.

    Attributes:
        module: the graph; its ``get_attr`` targets are the user's names behind ``PREFIX``, or constants.
        inputs: structure of ``(args, kwargs)``.
        outputs: structure of the result.
        device: the device that the graph was captured on; other devices take its place when a layer runs.
        batch_symbol: the symbol of the batch size, or None where it is fixed.
        batch_size: of the example.
        checkpoints: the modules that ran under ``torch.utils.checkpoint``.
        attributes: the modules and names of the plain attributes whose values the graph holds.
    """

    module: fx.GraphModule
    inputs: Structure
    outputs: Structure
    device: torch.device
    batch_symbol: Any
    batch_size: int
    checkpoints: tuple[str, ...] = ()
    attributes: tuple[tuple[nn.Module, str], ...] = ()

    @property
    def placeholders(self) -> list[fx.Node]:
        """One for each tensor of the inputs."""
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    def covers(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the graph holds for inputs of these shapes and dtypes."""
        for node, tensor in zip(self.placeholders, tensors, strict=True):
            example = node.meta["val"]
            if example.dtype != tensor.dtype or example.dim() != tensor.dim():
                return False
            for expected, given in zip(example.shape, tensor.shape, strict=True):
                if expected != given if isinstance(expected, int) else given < 2:  # torch has free sizes begin at 2
                    return False
        guards = getattr(self.module, "_guards_fn", None)
        try:
            if guards is not None:
                guards(*tensors)
        except (AssertionError, RuntimeError):
            return False
        return True


class _Flat(nn.Module):
    """Takes and returns flat tensors, so that no container of the user's has to be registered with torch."""

    def __init__(self, module: nn.Module, inputs: Structure, outputs: list[Structure]) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self._inputs, self._outputs = inputs, outputs
        self.custom: set[str] = set()
        self.kept: set[str] = set()
        self.replaced: set[str] = set()

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        args, kwargs = self._inputs.unflatten(tensors)
        with put_back(self.module) as left, GradientMode() as mode, OneDevice(tensors[0].device if tensors else None):
            leaves, structure = flatten(self.module(*args, **kwargs))
            left.write_buffers()
        self._outputs.append(structure)
        self.kept.update(left.tensors)
        self.replaced.update(left.replaced)
        self.custom.update(custom_functions(leaves) or mode.custom)
        return tuple(leaves)


def export(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exported:
    """Capture the module in its present mode (train or eval).

    Args:
        module: any module, its state on any devices.
        args: example positional arguments.
        kwargs: example keyword arguments.

    Raises:
        CaptureError: torch.export refuses the model, or it has hooks whose side effects a graph would not run.
    """
    refuse_hooks(module)
    tensors, inputs = flatten((args, kwargs))
    device = capture_device(module, tensors)
    batch = batch_size(tensors)
    with traceable(module, device), checkpoints.noticed(module) as checkpointed, attributes.noted(module) as notes:
        examples = tuple(example(tensor, device) for tensor in tensors)
        with chance.given_back() as drawn:
            graph_module, outputs = _export(module, inputs, examples, batch)
    if drawn:
        raise CaptureError(f"forward {' and '.join(drawn)}, and a graph would keep what came of it")
    _refuse_generators(graph_module)
    _refuse_shapes_from_values(graph_module.graph)
    inline_regions(graph_module)
    if nested.has_bodies(graph_module):
        notes.read_all()
    _free_strides(graph_module.graph)
    graph_module.graph.eliminate_dead_code(is_impure_node=_has_effect)
    symbol = _batch_symbol(graph_module.graph)
    return Exported(graph_module, inputs, outputs, device, symbol, batch, tuple(checkpointed), notes.only_read())


def batch_size(tensors: Sequence[Any]) -> int:
    """The first dimension of the first tensor that has one; 1 where none has."""
    return next((int(tensor.shape[0]) for tensor in tensors if isinstance(tensor, Tensor) and tensor.dim()), 1)


def refuse_hooks(module: nn.Module) -> None:
    """Raise a CaptureError if a module has hooks whose effects outside the graph would be lost."""
    for name, child in module.named_modules():
        for kind in _unsafe_hooks(child.__dict__):
            raise CaptureError(
                f"module {name or '(the model)'!r} has {kind.strip('_').replace('_', ' ')}, "
                "which a captured graph would not run"
            )


def modes(module: nn.Module) -> list[tuple[bool, bool]]:
    """Of every module, whether it trains, and whether it has hooks whose effects outside the graph would be lost.

    Every call of a flow asks for it, so it costs as little as can be: a module that is used twice is listed twice.
    """
    found, waiting = [], [module]
    while waiting:
        child = waiting.pop()
        fields = child.__dict__
        hooked = any(map(fields.get, _HOOKS)) and next(_unsafe_hooks(fields), None) is not None
        # Wrappers (torch.compile, torch.jit) have these as properties.
        found.append((fields["training"] if "training" in fields else child.training, hooked))
        inner = fields["_modules"] if "_modules" in fields else child._modules
        if inner:
            waiting += [module for module in inner.values() if module is not None]
    return found


def _unsafe_hooks(fields: Mapping[str, Any]) -> Iterator[str]:
    for kind in _HOOKS:
        hooks = fields.get(kind)
        if hooks and not all(map(_is_safe, hooks.values())):
            yield kind


def _is_safe(hook: Any) -> bool:
    if type(hook).__name__ in _SAFE_HOOKS:
        return True
    return getattr(hook, "__name__", "") in _SAFE_FUNCTIONS and hook.__module__.partition(".")[0] == "transformers"


def _export(
    module: nn.Module, inputs: Structure, examples: tuple[Any, ...], batch: int
) -> tuple[fx.GraphModule, Structure]:
    failure: Exception | None = None
    for dynamic in (True, False) if batch > 1 else (False,):
        structures: list[Structure] = []
        flat = _Flat(module, inputs, structures)
        shapes = [_dynamic(tensor, batch) if dynamic else None for tensor in examples]
        try:
            program = torch.export.export(flat, examples, strict=False, dynamic_shapes=(tuple(shapes),))
        except Exception as error:  # whatever the model's own code may raise while it is traced
            failure = failure or error
            if "data-dependent" in str(error).lower():  # no fixed shape would help
                break
            continue
        if flat.custom:
            raise CaptureError(
                f"{', '.join(sorted(flat.custom))}: a graph would lose the backward pass that it defines"
            )
        if flat.kept:
            raise CaptureError(
                f"forward keeps a tensor in {', '.join(sorted(flat.kept))}, which a graph would not leave there"
            )
        module = program.module()
        read_before_written(module.graph, {f"{PREFIX}{name}" for name in flat.replaced})
        return module, structures[-1]
    assert failure is not None
    raise CaptureError(_reason(failure)) from failure


def _refuse_shapes_from_values(graph: fx.Graph) -> None:
    """Raise a CaptureError if a result is as large as the values of tensors say: nothing could be laid out before."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, Tensor) else ():
            if isinstance(size, torch.SymInt) and not size.node.has_hint():
                raise CaptureError(f"the shape that {node.target} gives depends on values of tensors")


def _refuse_generators(module: fx.GraphModule) -> None:
    """Raise a CaptureError if random numbers come from a generator of the model's own: a graph would not seed it."""
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(operator.attrgetter(node.target)(module), torch.Generator):
            raise CaptureError("forward draws from a torch.Generator of its own, which a graph would not seed")


def custom_functions(leaves: Sequence[Any]) -> set[str]:
    """The custom autograd functions that a result went through: export keeps what their forward does, and no more."""
    found: set[str] = set()
    seen: set[Any] = set()
    stack = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction) and not _is_of_operator(type(node)):
            name = type(node).__name__.removesuffix("Backward")
            is_checkpoint = name == "CheckpointFunction"
            found.add(_REENTRANT if is_checkpoint else f"custom autograd function {name}")
        stack.extend(following for following, _ in node.next_functions)
    return found


def _is_of_operator(kind: type) -> bool:
    """Whether an autograd function belongs to an operator, which a graph calls whole: a custom one, or torch.cond."""
    return getattr(kind, "_forward_cls", kind).__module__.startswith(("torch._library.", "torch._higher_order_ops."))


def _dynamic(tensor: Any, batch: int) -> dict[int, Any] | None:
    if isinstance(tensor, Tensor) and tensor.dim() and tensor.shape[0] == batch:
        return {0: torch.export.Dim.AUTO}
    return None


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"torch.export: {type(error).__name__}: {lines[0] if lines else ''}"[:1000]


def capture_device(module: nn.Module, tensors: Sequence[Any]) -> torch.device:
    """Where the state is, if it is in one place; else the CPU."""
    places = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if not places:
        places = {tensor.device for tensor in tensors if isinstance(tensor, Tensor)}
    return places.pop() if len(places) == 1 else torch.device("cpu")


def example(tensor: Any, device: torch.device) -> Any:
    """An input as the capture takes it: a tensor of its shape on the device of the capture."""
    if not isinstance(tensor, Tensor) or tensor.device == device:
        return tensor
    return torch.empty_like(tensor, device=device, requires_grad=tensor.requires_grad)


@contextmanager
def traceable(module: nn.Module, device: torch.device) -> Iterator[None]:
    """State in one place, gradients on, autocast off: what is captured must not depend on the surroundings."""
    with ExitStack() as stack:
        stack.enter_context(devices.unobserved())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in {"cpu", devices.default_kind()}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_quiet())
        stack.enter_context(_gathered(module, device))
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.export prints the whole graph of a model that it refuses; the reason alone is kept."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _gathered(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Stand uninitialised twins in for state that is elsewhere: export needs shapes, and all on one device."""
    undo: list[tuple[dict[str, Any], str, Tensor]] = []
    twins: dict[int, Tensor] = {}
    for child in module.modules():
        tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or tensor.device == device:
                    continue
                if id(tensor) not in twins:
                    twin = torch.empty_like(tensor, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    twins[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if is_parameter else twin
                undo.append((table, name, tensor))
    for table, name, tensor in undo:
        table[name] = twins[id(tensor)]
    try:
        yield
    finally:
        for table, name, tensor in undo:
            table[name] = tensor


def _batch_symbol(graph: fx.Graph) -> Any:
    """The symbol of the batch size, which is that of the same input as ``batch_size``; None where it is fixed."""
    shapes = (node.meta["val"].shape for node in graph.nodes if node.op == "placeholder")
    size = next((shape[0] for shape in shapes if len(shape)), None)
    return size.node.expr if isinstance(size, torch.SymInt) else None


def _has_effect(node: fx.Node) -> bool:
    """Whether a node without users must stay: it writes in place, draws random numbers, or is a border."""
    if node.op in ("placeholder", "output") or nested.is_transform(node):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and (node.target._schema.is_mutable or draws_random(node))


def draws_random(node: fx.Node) -> bool:
    """Whether the node draws from the device's random number generator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _free_strides(graph: fx.Graph) -> None:
    """Let views become reshapes: an operation may lay its result out otherwise on the device where it will run.

    Where the strides are those of the capture, a reshape is the view.
    """
    for node in graph.nodes:
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default
