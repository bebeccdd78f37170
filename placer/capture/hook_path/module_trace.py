"""The layer graph of a model that cannot be captured: by running it once and watching its modules.

Layers are modules, called as they are. What functional operations make between them counts as made
by the latest layer before, with the data of that one run, so that every layer can be measured
alone.
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
from placer.capture.export.tracing_lock import alone
from placer.capture.granularity import Granularity, Opened
from placer.capture.hook_path.device_alignment import Alignment
from placer.capture.hook_path.packed_sequences import LengthsOnHost
from placer.capture.layers import (
    Layer,
    LayerGraph,
    Value,
    attached_state,
    attachments,
    named_state,
    tensor_bytes,
)
from placer.capture.python_state.isolated_runs import undisturbed
from placer.capture.python_state.module_side_effects import put_back
from placer.capture.pytrees import CONSTANTS, Structure, flatten, flatten_inputs
from placer.errors import CaptureError
from placer.schema.base import WHOLE
from placer.utils.python_objects import fields, is_torchs


@dataclass
class Call:
    """One call of a module: what ``granularity`` needs to know of an operation."""

    meta: dict[str, Any]
    target: None = None
    all_input_nodes: tuple[()] = ()


@dataclass
class _Draft:
    """A layer while it is watched."""

    name: str
    path: str
    module: nn.Module
    inputs: Structure
    reads: list[str]
    given_objects: bool
    outputs: list[str] = field(default_factory=list)
    extras: dict[str, Tensor] = field(default_factory=dict)


@alone
def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    granularity: Granularity,
    reason: str,
    batch_size: int = 1,
) -> LayerGraph:
    """Run the model twice, without gradients where it can be, and write down which module reads
    what.

    Args:
        model: it is left as it was, buffers and random numbers included.
        args: example positional arguments.
        kwargs: example keyword arguments.
        granularity: as for ``capture``.
        reason: why the model could not be captured.
        batch_size: samples in the example.

    Raises:
        CaptureError: the model fails on the example, or has no data to run on.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise CaptureError(
            f"{reason}; and a model on meta cannot be run instead: load weights into it"
        )
    refuse_scripts(model, reason)
    gradients = False
    try:
        calls = _calls(model, args, kwargs, gradients)
    except CaptureError:
        gradients = torch.is_grad_enabled()
        if not gradients:
            raise
    if gradients:
        calls = _calls(model, args, kwargs, gradients)
    opened = granularities.opened(granularity, model, calls)  # type: ignore[arg-type]
    watch = _Watch(model, opened)
    tensors, inputs = flatten_inputs(args, kwargs)
    names = watch.inputs(tensors)
    with (
        undisturbed(model),
        devices.unobserved(),
        torch.set_grad_enabled(gradients),
        watch.installed(),
    ):
        result = _run(model, inputs, tensors)
    leaves, structure = flatten(result)
    outputs = [watch.name(leaf) for leaf in leaves]
    graph = watch.graph(
        tuple(names), tuple(outputs), batch_size, granularities.label(granularity), reason
    )
    graph.result = structure
    return graph


def refuse_scripts(model: nn.Module, reason: str = "") -> None:
    """Raise a CaptureError if a module allows no hooks.

    Args:
        model: to look at.
        reason: why it has to run through hooks, where that is known.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            name = f"module {path!r}" if path else "the model"
            raise CaptureError(
                f"{name} was compiled by torch.jit, and can neither be captured nor run through hooks: "
                f"give the module that it was made from{reason and f' ({reason})'}"
            )


def _run(model: nn.Module, inputs: Structure, tensors: Sequence[Any]) -> Any:
    args, kwargs = inputs.unflatten(tensors)
    try:
        return model(*args, **kwargs)
    except Exception as error:
        help = input_forms.advice(error, args)
        raise CaptureError(
            f"the model fails on the example inputs: {type(error).__name__}: {error}{help}"
        ) from error


def _calls(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: bool
) -> list[Call]:
    """Every call of a module, as the stack of modules around it."""
    calls: list[Call] = []
    stack: dict[str, tuple[str, str]] = {}
    counts: dict[str, int] = {}
    handles = []

    def enter(path: str, module: nn.Module) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            # a branch of torch.cond, which belongs to whatever calls it
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
        calls.append(Call({"nn_module_stack": dict(stack), "val": example}))
        stack.popitem()

    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path, module), prepend=True))
        handles.append(module.register_forward_hook(leave))
    tensors, inputs = flatten_inputs(args, kwargs)
    try:
        with undisturbed(model), devices.unobserved(), torch.set_grad_enabled(gradients):
            _run(model, inputs, tensors)
    finally:
        for handle in handles:
            handle.remove()
    return calls


class _Watch:
    """Writes down layers, values and who made them while the model runs."""

    def __init__(self, model: nn.Module, opened: Opened) -> None:
        self._model = model
        self._opened = opened
        self._attached = attached_state(model)
        self._state = named_state(model) | self._attached
        self._constants: dict[str, Tensor] = {}
        self._drafts: list[_Draft] = []
        self._values: dict[str, Value] = {}
        self._names = WeakIdKeyDictionary()
        self._stack: list[tuple[str, int]] = []
        self._counts: dict[str, int] = {}
        self._inside: list[_Draft] = []
        # a tensor that dies could hand its identity on
        self._kept: list[Tensor] = []

    def inputs(self, tensors: Sequence[Any]) -> list[str]:
        """Name the inputs of the model."""
        return [self._add(leaf, f"input_{index}", None) for index, leaf in enumerate(tensors)]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch what runs inside."""
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
            outer = self._opened.cut(self._stack) if self._stack else None
            self._stack.append((path, number))
            if self._inside or outer is not None or self._opened.cut(self._stack) is None:
                return
            tensors, structure = flatten(_apart((args, kwargs), self._model))
            name = f"{path}@{number}" if number else path
            reads = [self.name(leaf) for leaf in tensors]
            draft = _Draft(
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
        """The name of a value; one that nobody has named was made by functional operations since
        the latest layer.
        """
        known = self._names.get(leaf) if isinstance(leaf, Tensor) else None  # type: ignore[no-untyped-call]
        if known is not None:
            return str(known)
        if not self._drafts:
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
        """What was written down."""
        if not self._drafts:
            raise CaptureError(
                f"{reason}; and no module of the model was called, so it has no layers to place"
            )
        layers = self._layers()
        sharing: dict[str, list[str]] = {}
        for layer in layers:
            for name in layer.state:
                sharing.setdefault(name, []).append(layer.name)
        wiring = "\n".join(f"{layer.signature} {layer.reads} {layer.writes}" for layer in layers)
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
            hash=hashlib.sha256(wiring.encode()).hexdigest()[:32],
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
        # used by functional operations alone
        loose = [name for name in self._state if name not in covered]
        return [
            self._layer(draft, names, loose if index == 0 else [])
            for index, (draft, names) in enumerate(zip(self._drafts, own, strict=True))
        ]

    def _layer(self, draft: _Draft, names: list[str], loose: list[str]) -> Layer:
        constants = [name for name in dict.fromkeys(draft.reads) if name in self._constants]
        reads = [name for name in dict.fromkeys(draft.reads) if name not in self._constants]
        state = (*names, *constants, *loose)
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
            function=_function(draft, names, constants, reads),
            # Two modules of one class may run different code, so no two layers count as identical
            # here.
            signature=hashlib.sha256("\n".join([draft.name, *shapes]).encode()).hexdigest()[:24],
            random=True,
            told_by_signature=False,
        )


def _apart(nest: Any, model: nn.Module) -> Any:
    """Inputs whose objects are copies, though not their tensors: a cache that a layer fills is
    empty the next time.
    """
    kept = [*flatten(nest)[0], *model.modules(), *model.parameters(), *model.buffers()]
    try:
        return copy.deepcopy(nest, {id(item): item for item in kept})
    except Exception:
        # whatever objects of the user's may raise that cannot be copied
        return nest


def _holds_objects(nest: Any) -> bool:
    """Whether a layer could leave something in its inputs; lists and dicts are made anew for each
    of its runs.
    """
    return not all(isinstance(leaf, (Tensor, nn.Module, *CONSTANTS)) for leaf in tree_leaves(nest))


def _runs_torchs_code_alone(module: nn.Module) -> bool:
    """Whether a module leaves nothing on itself for sure."""
    return all(
        is_torchs(type(child))
        and not (child._forward_pre_hooks or child._forward_hooks or "forward" in vars(child))
        for child in module.modules()
    )


def _function(
    draft: _Draft, names: list[str], constants: list[str], reads: list[str]
) -> Callable[..., tuple[Any, ...]]:
    unchanged = nullcontext if _runs_torchs_code_alone(draft.module) else put_back
    relative = [*named_state(draft.module)]
    objects = _Objects(draft.module)
    extras = tuple(draft.extras.values())

    def run(
        device: torch.device, state: Sequence[Tensor], values: Sequence[Any]
    ) -> tuple[Any, ...]:
        env = dict(zip(reads, values, strict=True))
        env |= dict(zip(constants, state[len(names) : len(names) + len(constants)], strict=True))
        args, kwargs = draft.inputs.unflatten([env[name] for name in draft.reads])
        if draft.given_objects:
            args, kwargs = _apart((args, kwargs), draft.module)
        given = dict(zip(relative, state[: len(relative)], strict=True))
        has_lengths = any(
            isinstance(value, Tensor) and value.dtype == torch.int64 for value in values
        )
        attached = objects.hold(state, state[len(relative) : len(names)])
        with unchanged(draft.module), attached, LengthsOnHost() if has_lengths else nullcontext():
            result = torch.func.functional_call(draft.module, given, args, kwargs)
        made = [devices.copy(item, device) if isinstance(item, Tensor) else item for item in extras]
        return (*flatten(result)[0], *made)

    return run


class _Objects:
    """The objects in which the modules of a layer keep state; a layer that is measured has objects
    of its own.

    Some libraries move state from a weight into such an object in the first call. So what belongs
    to one weight stays together for as long as that weight lives.

    Args:
        module: of the layer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tensors = [*attached_state(module).values()]
        self._all = [(child, name, value) for _, child, name, value in attachments(module)]
        known = {(id(child), name) for child, name, _ in self._all}
        for child in module.modules():
            if any(map(_has_state_of_its_own, child._parameters.values())):
                named = [(name, value) for name, value in vars(child).items() if fields(value)]
                self._all += [
                    (child, name, value) for name, value in named if (id(child), name) not in known
                ]
        self._made = WeakIdKeyDictionary()

    @contextmanager
    def hold(self, state: Sequence[Tensor], tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the modules have other objects like theirs, with other tensors.

        Args:
            state: of the layer.
            tensors: one for each of ``attached_state(module)``, in the same order.
        """
        if not self._all:
            yield
            return
        made: list[Any] | None = self._made.get(state[0])  # type: ignore[no-untyped-call]
        if made is None:
            made = self._made[state[0]] = self._like_theirs(tensors)
        try:
            for (child, name, _), value in zip(self._all, made, strict=True):
                vars(child)[name] = value
            yield
        finally:
            for child, name, value in self._all:
                vars(child)[name] = value

    def _like_theirs(self, tensors: Sequence[Tensor]) -> list[Any]:
        others = {id(was): tensor for was, tensor in zip(self._tensors, tensors, strict=True)}
        made: dict[int, Any] = {}
        for _, _, value in self._all:
            if id(value) not in made:
                made[id(value)] = copy.copy(devices.with_tensors(value, others))
        return [made[id(value)] for _, _, value in self._all]


def _has_state_of_its_own(parameter: Tensor | None) -> bool:
    """Whether a parameter is more than its numbers."""
    return parameter is not None and not (
        devices.is_block(parameter) and not devices.attached(parameter)
    )
