"""The layer graph of a model that cannot be captured, from running it and watching its modules.

    run 1, hooks on every module     which modules call which             (_record_calls)
           granularity               which of them become layers
    run 2, hooks on every module     what each layer reads and returns    (_Recorder)

    x ──▶ layer a ──▶ h ──▶ (h + 1).relu() ──▶ k ──▶ layer b ──▶ y
          └─ writes h, and k: functional operations count to the latest layer before them

A layer's function calls its module unchanged, and returns k as recorded in run 2. So every layer
can be measured alone.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from placer import devices
from placer.capture import granularity as granularities
from placer.capture import input_forms
from placer.capture.export.tracing_environment import with_tracing_lock
from placer.capture.granularity import Granularity, OpenedModules
from placer.capture.hook_path.device_alignment import Alignment
from placer.capture.hook_path.packed_sequences import LengthsOnHost
from placer.capture.layers import (
    Layer,
    LayerGraph,
    Value,
    attached_state,
    attachments,
    graph_hash,
    named_state,
    tensor_bytes,
)
from placer.capture.python_state.isolated_runs import isolated_run
from placer.capture.python_state.module_side_effects import restored_modules
from placer.capture.pytrees import CONSTANTS, Structure, flatten, flatten_inputs
from placer.errors import CaptureError
from placer.schema.base import WHOLE
from placer.utils.python_objects import fields, is_torchs


@dataclass
class ModuleCall:
    """One call of a module, with the fields of an fx.Node that ``granularity`` reads."""

    meta: dict[str, Any]
    target: None = None
    all_input_nodes: tuple[()] = ()


@dataclass
class _LayerDraft:
    """A layer while the model runs.

    Attributes:
        name: the layer's name: path and number of the call.
        path: of the module.
        module: the module.
        inputs: structure of ``(args, kwargs)``.
        reads: names of the values in them.
        given_objects: whether the inputs contain objects in which the module may keep something.
        outputs: names of the values that the module returned.
        extras: values of functional operations after the module, by name.
    """

    name: str
    path: str
    module: nn.Module
    inputs: Structure
    reads: list[str]
    given_objects: bool
    outputs: list[str] = field(default_factory=list)
    extras: dict[str, Tensor] = field(default_factory=dict)


@with_tracing_lock
def trace_modules(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    granularity: Granularity,
    reason: str,
    batch_size: int = 1,
) -> LayerGraph:
    """Run the model twice and record which module reads which values.

    It runs without gradients, unless it fails without them.

    Args:
        model: left unchanged, buffers and random numbers included.
        args: example positional arguments.
        kwargs: example keyword arguments.
        granularity: as for ``capture_graph``.
        reason: why the model could not be captured.
        batch_size: number of samples in the example; 1 by default.

    Returns:
        The layer graph, with ``captured`` False.

    Raises:
        CaptureError: the model fails on the example, or has no data to run on.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise CaptureError(
            f"{reason}; and a model on the meta device cannot run through hooks instead: load "
            "weights into it"
        )
    refuse_scripts(model, reason)
    gradients = False
    try:
        calls = _record_calls(model, args, kwargs, gradients)
    except CaptureError:
        # Some models compute gradients inside forward.
        gradients = torch.is_grad_enabled()
        if not gradients:
            raise
    if gradients:
        calls = _record_calls(model, args, kwargs, gradients)
    opened = granularities.opened_modules(granularity, model, calls)  # type: ignore[arg-type]
    recorder = _Recorder(model, opened)
    tensors, inputs = flatten_inputs(args, kwargs)
    names = recorder.inputs(tensors)
    with (
        isolated_run(model),
        devices.unobserved(),
        torch.set_grad_enabled(gradients),
        recorder.recording(),
    ):
        result = _run_model(model, inputs, tensors)
    leaves, structure = flatten(result)
    outputs = [recorder.name(leaf) for leaf in leaves]
    graph = recorder.graph(
        tuple(names),
        tuple(outputs),
        batch_size,
        granularities.granularity_name(granularity),
        reason,
    )
    graph.result = structure
    return graph


def refuse_scripts(model: nn.Module, reason: str = "") -> None:
    """Raise a CaptureError if a module allows no hooks.

    Args:
        model: the model to inspect.
        reason: why the model must run through hooks; empty if unknown.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            name = f"module {path!r}" if path else "the model"
            raise CaptureError(
                f"{name} was compiled by torch.jit, so it can neither be captured nor run through "
                f"hooks: give the module that it was made from{reason and f' ({reason})'}"
            )


def _run_model(model: nn.Module, inputs: Structure, tensors: Sequence[Any]) -> Any:
    args, kwargs = inputs.unflatten(tensors)
    try:
        return model(*args, **kwargs)
    except Exception as error:
        help = input_forms.input_advice(error, args)
        raise CaptureError(
            f"the model fails on the example inputs: {type(error).__name__}: {error}{help}"
        ) from error


def _record_calls(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: bool
) -> list[ModuleCall]:
    """Run the model once and return every call of a module, with the stack of calls around it."""
    calls: list[ModuleCall] = []
    stack: dict[str, tuple[str, str]] = {}
    counts: dict[str, int] = {}
    handles = []

    def enter(path: str, module: nn.Module) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            # torch.compile traces a branch of torch.cond here, which belongs to the module that
            # calls it.
            if torch.compiler.is_dynamo_compiling():
                return
            number = counts[path] = counts.get(path, -1) + 1
            name = f"module.{path}" if path else "module"
            stack[f"{name}@{number}" if number else name] = (name, type(module).__name__)

        return hook

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        example = next((leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)), None)
        calls.append(ModuleCall({"nn_module_stack": dict(stack), "val": example}))
        stack.popitem()

    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path, module), prepend=True))
        handles.append(module.register_forward_hook(leave))
    tensors, inputs = flatten_inputs(args, kwargs)
    try:
        with isolated_run(model), devices.unobserved(), torch.set_grad_enabled(gradients):
            _run_model(model, inputs, tensors)
    finally:
        for handle in handles:
            handle.remove()
    return calls


class _Recorder:
    """A recorder of layers, values and their producers while the model runs.

    Args:
        model: the model.
        opened: which modules are opened.
    """

    def __init__(self, model: nn.Module, opened: OpenedModules) -> None:
        self._model = model
        self._opened = opened
        self._attached = attached_state(model)
        self._state = named_state(model) | self._attached
        self._constants: dict[str, Tensor] = {}
        self._drafts: list[_LayerDraft] = []
        self._values: dict[str, Value] = {}
        self._names = WeakIdKeyDictionary()
        self._stack: list[tuple[str, int]] = []
        self._counts: dict[str, int] = {}
        self._inside: list[_LayerDraft] = []
        # Held: the identity of a freed tensor could be reused for another tensor.
        self._kept: list[Tensor] = []

    def inputs(self, tensors: Sequence[Any]) -> list[str]:
        """Name the inputs of the model.

        Args:
            tensors: the flattened inputs.
        """
        return [self._add(leaf, f"input_{index}", None) for index, leaf in enumerate(tensors)]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside."""
        handles = []
        for path, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter(path), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
        try:
            with Alignment():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_dynamo_compiling():
                return
            number = self._counts[path] = self._counts.get(path, -1) + 1
            # A layer begins where the stack first reaches a module that is not opened.
            outer = self._opened.layer_of(self._stack) if self._stack else None
            self._stack.append((path, number))
            if self._inside or outer is not None or self._opened.layer_of(self._stack) is None:
                return
            tensors, structure = flatten(_copy_objects((args, kwargs), self._model))
            name = f"{path}@{number}" if number else path
            reads = [self.name(leaf) for leaf in tensors]
            draft = _LayerDraft(
                name or WHOLE, path, module, structure, reads, _holds_objects((args, kwargs))
            )
            self._inside.append(draft)

        return hook

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        self._stack.pop()
        if (
            not self._inside
            or self._inside[-1].module is not module
            or self._inside[-1].path in dict(self._stack)
        ):
            return
        draft = self._inside.pop()
        self._drafts.append(draft)
        for index, leaf in enumerate(flatten(output)[0]):
            draft.outputs.append(self._add(leaf, f"{draft.name}.output_{index}", draft.name))

    def name(self, leaf: Any) -> str:
        """Return the name of a value.

        A value without a name was made by functional operations after the latest layer. It is
        recorded as one of that layer's results.

        Args:
            leaf: a tensor or a number.
        """
        known = self._names.get(leaf) if isinstance(leaf, Tensor) else None  # type: ignore[no-untyped-call]
        if known is not None:
            return str(known)
        if not self._drafts:
            # Made before the first layer ran, so no layer can return it.
            name = f"constant before {len(self._constants)}"
            self._constants[name] = leaf if isinstance(leaf, Tensor) else torch.tensor(leaf)
            return self._add(leaf, name, None)
        latest = self._drafts[-1]
        name = self._add(leaf, f"{latest.name}.after_{len(latest.extras)}", latest.name)
        latest.extras[name] = leaf
        return name

    def _add(self, leaf: Any, name: str, source: str | None) -> str:
        if not isinstance(leaf, Tensor):
            self._values[name] = Value(name, (), None, 0, None, False, source)
            return name
        known = self._names.get(leaf)  # type: ignore[no-untyped-call]
        if known is not None and source is None:
            return str(known)
        self._names[leaf] = name
        self._kept.append(leaf)
        # The convention: the first dimension of every tensor is the batch.
        batch = 0 if leaf.dim() else None
        gradient = leaf.is_floating_point() and source is not None and self._model.training
        self._values[name] = Value(
            name, tuple(leaf.shape), leaf.dtype, tensor_bytes(leaf), batch, gradient, source
        )
        return name

    def graph(
        self,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        batch: int,
        granularity: int | str,
        reason: str,
    ) -> LayerGraph:
        """Return the layer graph of the recorded run.

        Args:
            inputs: names of the model's input values.
            outputs: names of the model's result values.
            batch: number of samples in the example.
            granularity: how the layers were cut.
            reason: why the model could not be captured.
        """
        if not self._drafts:
            raise CaptureError(
                f"{reason}; and the model called none of its modules, so it has no layers to place"
            )
        layers = self._layers()
        sharing: dict[str, list[str]] = {}
        for layer in layers:
            for name in layer.state:
                sharing.setdefault(name, []).append(layer.name)
        return LayerGraph(
            layers=layers,
            values=self._values,
            inputs=inputs,
            outputs=outputs,
            colocated=tuple(
                dict.fromkeys(
                    tuple(names)
                    for state, names in sharing.items()
                    if len(names) > 1
                    and state not in self._constants
                    and state not in self._attached
                )
            ),
            state=self._state | self._constants,
            constants=frozenset(self._constants),
            training=self._model.training,
            batch_size=batch,
            granularity=granularity,
            captured=False,
            not_captured_because=reason,
            hash=graph_hash(layers),
            model=type(self._model).__name__,
        )

    def _layers(self) -> list[Layer]:
        covered: set[str] = set()
        own: list[list[str]] = []
        first_name = {id(tensor): name for name, tensor in reversed([*self._state.items()])}
        for draft in self._drafts:
            inner = named_state(draft.module) | attached_state(draft.module)
            own.append([first_name[id(tensor)] for tensor in inner.values()])
            covered.update(own[-1])
        # State that only functional operations use belongs to the first layer.
        unused = [name for name in self._state if name not in covered]
        return [
            self._layer(draft, names, unused if index == 0 else [])
            for index, (draft, names) in enumerate(zip(self._drafts, own, strict=True))
        ]

    def _layer(self, draft: _LayerDraft, names: list[str], unused: list[str]) -> Layer:
        constants = [name for name in dict.fromkeys(draft.reads) if name in self._constants]
        reads = [name for name in dict.fromkeys(draft.reads) if name not in self._constants]
        state = (*names, *constants, *unused)
        shapes = [str(self._values[name].shape) for name in draft.reads]
        buffers = {id(buffer) for buffer in draft.module.buffers()}
        return Layer(
            name=draft.name,
            modules=(draft.path,),
            module_type=type(draft.module).__name__,
            state=state,
            mutated=tuple(
                name for name in names if id(self._state[name]) in buffers and draft.module.training
            ),
            reads=tuple(reads),
            writes=(*draft.outputs, *draft.extras),
            function=_layer_function(draft, names, constants, reads),
            # Two modules of one class may run different code, so every layer has a signature of its
            # own.
            signature=hashlib.sha256("\n".join([draft.name, *shapes]).encode()).hexdigest()[:24],
            random=True,
            signature_is_complete=False,
        )


def _copy_objects(nest: Any, model: nn.Module) -> Any:
    """Return inputs with copied objects and the same tensors.

    So a cache that a layer fills is empty in the layer's next run.
    """
    kept = [*flatten(nest)[0], *model.modules(), *model.parameters(), *model.buffers()]
    try:
        return copy.deepcopy(nest, {id(item): item for item in kept})
    except Exception:
        # A user's object may raise anything when it is copied.
        return nest


def _holds_objects(nest: Any) -> bool:
    """Return whether a layer could leave something in an object among its inputs.

    Lists and dicts do not count: they are made again for each run.
    """
    return not all(isinstance(leaf, (Tensor, nn.Module, *CONSTANTS)) for leaf in tree_leaves(nest))


def _runs_only_torch_code(module: nn.Module) -> bool:
    """Return whether all code of a module is torch's, which leaves nothing on the module."""
    return all(
        is_torchs(type(child))
        and not (child._forward_pre_hooks or child._forward_hooks or "forward" in vars(child))
        for child in module.modules()
    )


def _layer_function(
    draft: _LayerDraft, names: list[str], constants: list[str], reads: list[str]
) -> Callable[..., tuple[Any, ...]]:
    unchanged = nullcontext if _runs_only_torch_code(draft.module) else restored_modules
    relative = [*named_state(draft.module)]
    objects = _AttachedObjects(draft.module)
    # The order of ``state``: the module's own tensors, its attached ones, constants, unused ones.
    extras = tuple(draft.extras.values())

    def run(
        device: torch.device, state: Sequence[Tensor], values: Sequence[Any]
    ) -> tuple[Any, ...]:
        env = dict(zip(reads, values, strict=True))
        env |= dict(zip(constants, state[len(names) : len(names) + len(constants)], strict=True))
        args, kwargs = draft.inputs.unflatten([env[name] for name in draft.reads])
        if draft.given_objects:
            args, kwargs = _copy_objects((args, kwargs), draft.module)
        given = dict(zip(relative, state[: len(relative)], strict=True))
        has_lengths = any(
            isinstance(value, Tensor) and value.dtype == torch.int64 for value in values
        )
        attached = objects.replaced(state, state[len(relative) : len(names)])
        with unchanged(draft.module), attached, LengthsOnHost() if has_lengths else nullcontext():
            result = torch.func.functional_call(draft.module, given, args, kwargs)
        made = [devices.copy(item, device) if isinstance(item, Tensor) else item for item in extras]
        return (*flatten(result)[0], *made)

    return run


class _AttachedObjects:
    """The objects in which the modules of a layer keep state, such as quantisation state.

    Some libraries move state from a weight into such an object in the first call. So objects that
    belong to one weight stay with it as long as it lives.

    Args:
        module: the layer's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tensors = [*attached_state(module).values()]
        self._all = [(child, name, value) for _, child, name, value in attachments(module)]
        known = {(id(child), name) for child, name, _ in self._all}
        for child in module.modules():
            if any(map(_has_attached_state, child._parameters.values())):
                named = [(name, value) for name, value in vars(child).items() if fields(value)]
                self._all += [
                    (child, name, value) for name, value in named if (id(child), name) not in known
                ]
        self._made = WeakIdKeyDictionary()

    @contextmanager
    def replaced(self, state: Sequence[Tensor], tensors: Sequence[Tensor]) -> Iterator[None]:
        """Give the modules copies of these objects with other tensors inside.

        Args:
            state: the layer's state.
            tensors: one for each of ``attached_state(module)``, in the same order.
        """
        if not self._all:
            yield
            return
        made: list[Any] | None = self._made.get(state[0])  # type: ignore[no-untyped-call]
        if made is None:
            made = self._made[state[0]] = self._copies_with(tensors)
        try:
            for (child, name, _), value in zip(self._all, made, strict=True):
                vars(child)[name] = value
            yield
        finally:
            for child, name, value in self._all:
                vars(child)[name] = value

    def _copies_with(self, tensors: Sequence[Tensor]) -> list[Any]:
        others = {id(was): tensor for was, tensor in zip(self._tensors, tensors, strict=True)}
        made: dict[int, Any] = {}
        for _, _, value in self._all:
            if id(value) not in made:
                made[id(value)] = copy.copy(devices.with_tensors(value, others))
        return [made[id(value)] for _, _, value in self._all]


def _has_attached_state(parameter: Tensor | None) -> bool:
    """Return whether a parameter is more than its numbers."""
    return parameter is not None and not (
        devices.is_block(parameter) and not devices.attached(parameter)
    )
