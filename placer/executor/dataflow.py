"""DataFlow: an unmodified model whose layers run on the devices of a map or placement.

    flow = placer.DataFlow(model)
    flow.update_flow(placement)        # or edit flow.layer_gpus, then flow.update_flow()
    y = flow(x)                        # as model(x), with equal outputs and gradients
    flow.undo()                        # restores the original state

The module's source is never rewritten, and its parameters stay the same objects. A flow holds three
parts, each of which knows only those above it::

    settings   the map in force, devices and options
    placed     the model on its devices: weights, captures, segments, hooks
    calls      calls, and the streams that run them when they come again

A ``TrainStep`` is made from all three.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from os import PathLike
from typing import Any, NoReturn

import torch
from torch import nn

from placer import devices
from placer.capture.argument_checks import optimizer_list, require_module
from placer.capture.batch_dims.declared_layout import refuse_absent_outputs
from placer.capture.loss_functions import LossFunction
from placer.devices import DeviceLike
from placer.errors import InputError
from placer.executor.engine.compiled_segments import Backend, backend_of
from placer.executor.flow_hooks import call_of_model, refuse_hooks, run_with_hooks
from placer.executor.generation.findings import GenerationReport
from placer.executor.generation.generate_many import generate_many
from placer.executor.measure import measure
from placer.executor.placed_calls import PlacedCalls
from placer.executor.placed_model import PlacedModel
from placer.executor.settings import Settings, changes_of, default_map
from placer.executor.state.assignment import Assignment
from placer.executor.state.model_lock import ModelLock
from placer.executor.state.placed_weights import PlacedWeights
from placer.executor.state.state_copies import Copies
from placer.executor.training.optimizer.optimizer_memory import warn_of_other_memory
from placer.executor.training.optimizer.optimizer_update import Optimizers, Update
from placer.executor.training.train_step import TrainStep
from placer.executor.training.training_pipeline import Order
from placer.report.timeline import Measurement
from placer.schema import BatchOptions, Placement, Profile, Schedule
from placer.schema.base import StatePlace
from placer.schema.options import Weigh
from placer.utils.option_checks import require_flags

__all__ = ["DataFlow"]


def _held_by(part: str, name: str, is_flag: bool = False) -> Any:
    """Return a property that reads and writes an attribute of a part of the flow.

    Args:
        part: of the flow.
        name: of the attribute.
        is_flag: whether only True and False can be written.
    """
    path = attrgetter(f"{part}.{name}")

    def write(flow: DataFlow, value: Any) -> None:
        if is_flag:
            require_flags(**{f"flow.{name}": value})
        setattr(attrgetter(part)(flow), name, value)

    return property(path, write)


class DataFlow(nn.Module):
    """An unmodified module that runs each of its layers on the device in ``layer_gpus``.

    The module's source is never rewritten. Its Parameters stay the same objects, so existing
    optimizers stay valid, and the keys of its ``state_dict`` never change.

    Args:
        module: the model.
        device_ids: devices that layers may run on: indices, strings or ``torch.device``; None
            (default) for all available devices. Further devices of a map or placement are added.
        output_device: the device of results; the first of ``device_ids`` by default.
        inference_only: let no parameter require a gradient; ``undo`` restores the flags.
        clear_cache: return cached device memory after layers were moved (default).
        fine_grained: ``layer_gpus`` lists every leaf module instead of the module's children.
        enable_clone: keep the weights on every device, so that ``update_flow`` moves nothing. For
            inference only: it raises in training mode, and where parameters need gradients, since
            clones would not be trained.
        deferred_batch_norm: update the running statistics of batch normalisation once per whole
            batch, as in the unsplit model; otherwise every micro-batch updates them. Normalisation
            is per micro-batch either way.
        disk_folder: where parameters that rest on the disk are written, unless they are mapped from
            a file already; None (default) for the folder that ``PLACER_DISK`` names, or one in the
            user's cache. The files have no names: they go with the weights in them.

    Attributes:
        module: the model.
        device_ids: the index of each device.
        layer_gpus: by layer name, the device index (or any device name); ordered, may be edited. A
            later call of a module follows the first one, unless it has its own entry: ``relu@1``.
        chunks: number of micro-batches of a call by default.
        batch_options: batch dimensions, joining of results and reduction of the loss by default,
            see ``BatchOptions``; may be edited.
        recompute: devices that save no activations in a training step, but run forward again in the
            backward pass: less memory for more time. May be edited, like ``layer_gpus``.
        in_flight: for each segment of a training step, the maximum number of micro-batches in
            flight under ``zero-bubble`` and ``interleaved``; the useful maximum if the number of
            segments differs. Under ``zero-bubble``, fewer take less memory and lengthen the step:
            of S segments, number p (from 0) can use 2 S, and with S - p needs about the memory of
            1F1B. May be edited.
        gradients_wait: whether the next training step adds to existing gradients.
        not_captured_because: why the model runs through hooks in its latest mode; empty if it was
            captured.
        lock: held by the thread whose call or stream runs; all flows of a model share one.
        copies: of the model's state, on devices that read it and do not own it.
        settings: everything that ``update_flow`` sets, which the parts of the flow read.
        placed: the model on its devices: state, captures, segments and hooks.
        calls: the calls of the model, and its streams.
    """

    layer_gpus: OrderedDict[str, DeviceLike] = _held_by("settings", "layer_gpus")
    deferred_batch_norm: bool = _held_by("settings", "deferred_batch_norm", is_flag=True)
    chunks: int = _held_by("settings", "chunks")
    batch_options: BatchOptions = _held_by("settings", "batch_options")
    schedule: Schedule = _held_by("settings", "schedule")
    recompute: list[DeviceLike] = _held_by("settings", "recompute")
    in_flight: Sequence[int] = _held_by("settings", "in_flight")
    gradients_wait: bool = _held_by("placed", "gradients_wait", is_flag=True)
    lock: ModelLock = _held_by("placed", "lock")
    copies: Copies = _held_by("placed.weights", "copies")

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceLike] | int | None = None,
        output_device: DeviceLike | None = None,
        inference_only: bool = False,
        clear_cache: bool = True,
        fine_grained: bool = False,
        enable_clone: bool = False,
        deferred_batch_norm: bool = False,
        disk_folder: str | PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        require_module(module)
        require_flags(
            inference_only=inference_only,
            clear_cache=clear_cache,
            fine_grained=fine_grained,
            enable_clone=enable_clone,
            deferred_batch_norm=deferred_batch_norm,
        )
        self.module = module
        self.inference_only = inference_only
        self.clear_cache = clear_cache
        self.fine_grained = fine_grained
        self.enable_clone = enable_clone
        places = devices.resolve(device_ids, "device_ids")
        self.settings = Settings(places, places[0], deferred_batch_norm)
        if output_device is not None:
            self.output_device = output_device
        self.settings.reset(*default_map(self.settings, self.module, self.fine_grained))
        clone_places = places if enable_clone else None
        weights = PlacedWeights(module, inference_only, clone_places, disk_folder)
        self.placed = PlacedModel(weights, self.settings)
        self.calls = PlacedCalls(self.placed, self.settings)

    @property
    def output_device(self) -> torch.device:
        """The device of results; may be set to any name of a device."""
        return self.settings.output_device

    @output_device.setter
    def output_device(self, place: DeviceLike) -> None:
        self.settings.output_device = self.settings.device(place)

    @property
    def device_ids(self) -> list[int]:
        """Return the index of each device."""
        return [device.index for device in self.settings.devices]

    @property
    def assignment(self) -> Assignment | None:
        """Return the devices of the layers since the last ``update_flow``; None before it."""
        return self.settings.assignment

    @property
    def not_captured_because(self) -> str:
        """Why the model runs through hooks in its present mode; empty unless it does."""
        return self.placed.not_captured_because

    def update_flow(
        self,
        placement: Placement | Mapping[str, Any] | None = None,
        *,
        optimizer: Optimizers = None,
    ) -> None:
        """Move the layers to their devices in ``layer_gpus``; later calls run them there.

        An error leaves everything unchanged: the model and its optimizers, the map and all
        settings.

        Args:
            placement: sets ``layer_gpus``, the granularity, ``chunks``, ``batch_options``, the
                schedule, ``recompute``, ``in_flight``, the layers whose parameters rest on the
                host, and the links whose copies go through the host's memory. None (default) keeps
                them.
            optimizer: an optimizer, or a list of them, with existing state for the parameters. Its
                state moves with them, now and later; optimizers of training steps are included
                automatically.

        Raises:
            PlacementError: if the placement has no layers, names unknown layers or devices, does
                not fit into memory, or lets a parameter rest on the host that cannot.
            InputError: if ``optimizer`` is not an optimizer, or the flow is applied at the moment.
        """
        given = optimizer_list(optimizer)
        for one in given:
            if not isinstance(one, torch.optim.Optimizer):
                raise InputError(
                    f"optimizer is {one!r}; give the torch.optim.Optimizer whose state is to move"
                )
        with self.lock:
            changes, detours = self._changes_of(placement)
            self.placed.hooks.refuse_standing()
            routes = devices.detours()
            moved = self.placed.moved(changes["assignment"], given, self.clear_cache)
            try:
                self.calls.drop_recordings()
                with moved:
                    devices.take_detours(detours)
                    # all settings at once, after everything that may fail
                    vars(self.settings).update(changes)
            except BaseException:
                devices.set_detours(routes)
                raise

    def assignment_of(self, placement: Placement | Mapping[str, Any]) -> Assignment:
        """Return the devices that ``update_flow(placement)`` would give to the model's tensors.

        Nothing is moved.

        Args:
            placement: as ``update_flow`` takes it.

        Raises:
            PlacementError: if the placement has no layers, or names unknown layers or devices.
        """
        found: Assignment = self._changes_of(placement)[0]["assignment"]
        return found

    def _changes_of(
        self, placement: Placement | Mapping[str, Any] | None
    ) -> tuple[dict[str, Any], list[Any]]:
        return changes_of(
            self.settings, self.module, placement, self.fine_grained, self.enable_clone
        )

    def undo(self) -> None:
        """Restore the devices of all parameters, gradients and buffers, and all flags.

        Raises:
            InputError: if the flow is applied at the moment.
        """
        with self.lock:
            self.placed.hooks.refuse_standing()
            self.placed.restore()
            self.calls.drop_recordings()
            self.settings.reset(*default_map(self.settings, self.module, self.fine_grained))

    def construct_module(
        self, layer_gpus: Mapping[str, DeviceLike] | None = None, module: nn.Module | None = None
    ) -> DataFlow:
        """Return another flow with its own map, which shares this flow's clones.

        Args:
            layer_gpus: its map; None (default) for this flow's.
            module: a copy of the model whose attributes it exposes; None (default) for this flow's
                module.

        Returns:
            A module that runs like this one, with its own ``layer_gpus``; weights are shared with
            this flow's clones.

        Raises:
            InputError: if this flow was created without ``enable_clone``.
        """
        if self.placed.weights.clones is None:
            raise InputError(
                "construct_module shares clones: make the flow with DataFlow(model, "
                "enable_clone=True)"
            )
        built = copy.copy(self)
        built._modules = {"module": self.module if module is None else module}
        built.settings = copy.copy(self.settings)
        built.placed = self.placed.sharing(built.settings)
        built.calls = PlacedCalls(built.placed, built.settings)
        built.layer_gpus = OrderedDict(self.layer_gpus if layer_gpus is None else layer_gpus)
        built.update_flow()
        return built

    def forward(
        self,
        *args: Any,
        chunks: int | None = None,
        batch_options: BatchOptions | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model; before the first ``update_flow``, unplaced.

        Args:
            args: as the model takes them, on any device.
            chunks: the number of micro-batches to cut the batch into, which follow one another
                through the devices; the placement's number if None. Batch norm then sees
                micro-batches, as in any pipeline. In eval mode and without gradients, replicas
                share each micro-batch, unless ``chunks=1`` is given.
            batch_options: where the samples of the batch lie, and how results are joined; the
                flow's own if None.
            kwargs: as the model takes them.

        Returns:
            The model's result, on ``output_device``.

        Raises:
            BatchError: micro-batches give another result than the batch does.
            InputError: the options do not fit the call, or it cannot be cut.
        """
        if (call := call_of_model()) is not None:
            # ``chunks`` and ``batch_options`` are arguments of the model here
            named = {"chunks": chunks, "batch_options": batch_options}
            kwargs |= {name: given for name, given in named.items() if given is not None}
            return call(*args, **kwargs)
        options = self.batch_options if batch_options is None else batch_options
        count = self.chunks if chunks is None else chunks
        is_shared = chunks != 1
        result, _ = self.calls.run((args, kwargs), count, options, self.output_device, is_shared)
        if options is not self.batch_options:  # the flow's own may name results of its other calls
            refuse_absent_outputs(options, result)
        return result

    def train_step(
        self,
        loss_fn: LossFunction,
        optimizer: Optimizers = None,
        schedule: Order | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        max_norm: float | None = None,
        compile: bool | Backend = False,
        weigh: Weigh | None = None,
        batch_options: BatchOptions | None = None,
        optimizer_state: StatePlace | None = None,
    ) -> TrainStep:
        """Return a training step of the whole pipeline: forwards, backwards, and the optimizer.

        Args:
            loss_fn: ``loss_fn(output, target)``, a mean over the samples that it is given unless
                ``batch_options`` say otherwise; or a tuple of that and a dict of further values,
                ``(loss, {"accuracy": accuracy})``. It runs on the device of the last layer, where
                tensors of its own belong; its buffers are brought there. It becomes a part of the
                passes when they are made: what changes from step to step, such as a weight, has to
                be in the target. For another loss make another step.
            optimizer: any of torch's whose ``step`` needs no closure, stepped after every batch, or
                a list of them, stepped in its order; None to leave that to the caller, who finds
                the gradients in place. Their state moves with the parameters, wherever the flow
                moves these. A warning says so where it needs other memory than the placement
                assumed.
            schedule: the order of micro-batches; the placement's if None. ``"zero-bubble"``
                computes weight gradients apart, while a device would wait. Where a device holds
                several segments, ``"interleaved"`` runs them in turn, and all others are
                fill-drain.
            scaler: for training in float16: scales the loss, and skips the step where a gradient
                overflowed on any device.
            max_norm: clip the gradients to this norm over all parameters on all devices.
            compile: let torch.compile make one function of each segment, and one of the loss, where
                that is faster. ``step.compiled`` then says what it gained and
                ``step.not_compiled_because`` why it did not. True, or a backend.
            weigh: ``weigh(inputs, target)``, the weight of each sample of a batch in the loss,
                shape ``(N,)``: its number of labels, for instance, where the loss is a mean over
                these. The same as ``BatchOptions(weigh=...)``. ``nn.CrossEntropyLoss`` and
                ``nn.NLLLoss`` need none: the labels that they count are weighed.
            batch_options: where the samples of the batch lie, whether the loss is a mean or a sum,
                how results are joined; the flow's own if None.
            optimizer_state: where the optimizer's state is between steps: ``"device"``, with its
                parameters, or ``"host"``, from which each step copies it to the devices and back,
                bucket by bucket; the placement's if None.

        Returns:
            ``step(inputs, target) -> loss``, the loss of the batch, on the device of the last
            layer. ``inputs`` is one tensor, a tuple of positional or a dict of keyword arguments.
            With ``update=False`` a step leaves its gradients to the next one; with ``outputs=True``
            it returns the model's result as well.

        Raises:
            InputError: an argument cannot be used; the message says which, and what can.
        """
        refuse_hooks(self, "train_step")
        settings, placed = self.settings, self.placed
        settings.refuse_resting("train_step")
        chosen = settings.optimizer_state if optimizer_state is None else optimizer_state
        update = Update(optimizer, scaler, max_norm, chosen)
        order = settings.schedule if schedule is None else schedule
        step = TrainStep(
            placed,
            settings,
            self.calls,
            loss_fn,
            update,
            order,
            backend_of(compile),
            batch_options,
            weigh,
        )
        assumed = None if update.is_on_host else settings.assumed
        if assumed is not None and settings.assignment is not None:
            warn_of_other_memory(
                assumed, update.optimizers, placed.module, settings.assignment.of_state
            )
        return step

    def stream(
        self,
        batches: Iterable[Any],
        in_flight: int | None = None,
        *,
        compile: bool | Backend = False,
        batch_options: BatchOptions | None = None,
    ) -> Generator[Any, None, None]:
        """Run batch after batch without gradients, each behind the others through the devices.

        A batch enters the first device while earlier ones are in later devices. In eval mode,
        replicated pipelines take turns, each in proportion to its samples. Do not change the model
        or its map while a stream is open; close it, or exhaust it, before.

        Args:
            batches: an iterable of batches, each one tensor, a tuple or list of positional, or a
                dict of keyword arguments. Their shapes may differ; a shape is recorded as CUDA
                graphs when it comes for the second time.
            in_flight: batches that are taken from the source before the first result is handed out,
                and so the most that take memory; two more than there are segments in all pipelines
                if None. 1 takes none ahead.
            compile: let torch.compile make one function of each segment, where that is faster, when
                a shape comes for the second time. ``flow.compiled`` then says what it gained and
                ``flow.not_compiled_because`` why it did not. True, or a backend, the same one each
                time. The latest eight shapes are kept, and one that comes back later is compiled
                again. Layers that draw random numbers draw others than without it.
            batch_options: where the samples of a batch lie, so that batches of other sizes need no
                capture of their own; the flow's if None. Batches are not cut.

        Returns:
            A generator of the model's result for each batch, in their order, on ``output_device``.

        Raises:
            InputError: these are not batches, ``in_flight`` is not a count, or torch has no such
                backend.
            StageError: from the generator, when it comes to a batch on which a layer failed;
                results before are whole.
        """
        refuse_hooks(self, "stream")
        return self.calls.streams.open(batches, in_flight, backend_of(compile), batch_options)

    @property
    def compiled(self) -> dict[str, str]:
        """By segment that torch.compile made faster in a stream: by how much."""
        return {place: gain for place, (gain, _) in self.calls.streams.compiling().items() if gain}

    @property
    def not_compiled_because(self) -> dict[str, str]:
        """By segment that a stream runs without torch.compile though it was asked for: why."""
        return {place: why for place, (_, why) in self.calls.streams.compiling().items() if why}

    def generate_many(
        self,
        prompts: Iterable[Any],
        *,
        in_flight: int | None = None,
        compile: bool | Backend = False,
        **options: Any,
    ) -> Generator[Any, None, None]:
        """Generate text for prompt after prompt, several at a time, each on other devices.

            for ids in flow.generate_many(prompts, max_new_tokens=20):
                print(tokenizer.batch_decode(ids))

        While one device computes a token of one prompt, the others compute tokens of other prompts.
        Each result is what ``model.generate(prompt, **options)`` returns in ``applied()``. Sampling
        takes its random numbers from torch's generators in the order in which tokens come, so a
        seed does not fix it.

        Every generation in flight has a static cache with room for its whole text, and thus needs
        as much memory for keys and values as a single generation; its recorded passes and the
        workspaces of libraries come on top, for each device. It stays for the next call,
        until ``update_flow`` or ``undo``, or until a prompt is short of memory. Closing the
        iterator early frees it.

        Args:
            prompts: an iterable of prompts, each a tensor of token ids, ``(sequences, tokens)``, or
                a dict of ``generate``'s arguments, which come before ``options``.
            in_flight: most prompts that are generated at the same time; the number of devices with
                weights if None. Results that wait for an earlier prompt do not count; there are at
                most as many.
            compile: compile the recorded passes with ``torch.compile``, as for ``applied``.
            options: keyword arguments of the model's ``generate``, for all prompts.

        Returns:
            A generator of the result for each prompt, in their order. What fails is raised in the
            position of its prompt, and ends the generator. Close it to cancel what runs.

        Raises:
            InputError: if the flow is not placed or has clones, the model has no ``generate``,
                ``prompts`` is not an iterable of prompts, ``in_flight`` is not a count, or an
                option cannot be shared by several texts.
        """
        calls = self.calls
        return generate_many(
            self.placed, calls.decoding, calls.applied, prompts, in_flight, compile, options
        )

    def applied(
        self, record: bool = True, *, compile: bool | Backend = False
    ) -> AbstractContextManager[nn.Module]:
        """Let the model itself run placed, for a while.

            with flow.applied() as model:
                ids = model.generate(ids, max_new_tokens=20)

        A call of the model is a call of the flow, in one micro-batch, with the flow's own hooks;
        its other methods run through hooks. This holds in this thread. Other threads may apply the
        flow at the same time: their generations take turns with this one at every pass of the
        model, so that different texts are on different devices. Each has a cache and recordings of
        its own. A thread that calls only ``model.generate`` joins by itself; its other calls of
        the model raise. Calls of the flow wait until no thread applies it. Operations of the
        caller's own code are aligned meanwhile, too: tensors of two devices are brought to one.
        What checkpoints run again in a backward pass, which may come later, runs as it did in
        here.

        transformers' ``Trainer`` and accelerate's ``Accelerator``, made and used in here, neither
        move nor wrap the model: it has an attribute ``hf_device_map`` meanwhile.

        Args:
            record: run calls with one token per sequence and a cache of transformers, as
                ``generate`` makes them, through recorded passes over a static cache (default). See
                ``generation_report``.
            compile: compile these passes with ``torch.compile``: True, or the name of a backend.
                Each device's part of a pass is compiled for each capacity of the cache, while the
                first text of its kind waits. The result is used only where it is faster, see
                ``generation_report``. False (default): as in an ``applied`` around this one, or
                without.

        Returns:
            The model.

        Raises:
            CaptureError: a module was compiled by torch.jit, which allows no hooks.
            InputError: the flow has clones, which the model's own methods do not use.
        """
        require_flags(record=record)
        backend = backend_of(compile)
        if backend is not None and not record:
            raise InputError("compile needs recorded passes; leave record=False or compile out")
        return self.calls.applied(record, backend, around=partial(run_with_hooks, self))

    @property
    def generation_report(self) -> GenerationReport:
        """How the tokens of ``model.generate`` inside ``applied()`` were computed."""
        return self.calls.decoding.report

    def measure(
        self,
        inputs: Any,
        target: Any = None,
        *,
        step: TrainStep | None = None,
        chunks: int | None = None,
        profile: Profile | None = None,
        compile: bool | Backend = False,
        batch_options: BatchOptions | None = None,
    ) -> Measurement:
        """Measure when each device works on which micro-batch, to compare with the prediction.

        It runs the batch three times and changes nothing but gradients: the optimizer does not
        step, and buffers are restored.

        Args:
            inputs: a batch: one tensor, a tuple of positional or a dict of keyword arguments.
            target: the target of a training step; None where its loss needs none.
            step: from ``train_step``: its forward and backward passes are measured. None measures
                inference, the micro-batches streamed.
            chunks: micro-batches; the placement's number if None.
            profile: what the placement was solved from, for the prediction; None for no prediction.
                With replicas, it is of one pipeline's part of a micro-batch.
            compile: in inference, as for ``stream``; a step has its own.
            batch_options: in inference, where the samples of the batch lie; the flow's if None. A
                step has its own.

        Returns:
            The timelines, with ``table()`` and ``save_trace(path)``; ``rows`` has every pass. With
            replicas, a step's passes are of parts of micro-batches, numbered in the order of
            samples. Inference is measured in the first pipeline.

        Raises:
            InputError: the flow is not placed; the model runs through hooks; the profile is of
                other layers, or replicas have unlike shares; there is a target without a step;
                ``step`` is not a step of this flow; ``chunks`` is more than the samples; or torch
                has no such backend.
        """
        return measure(
            self.settings,
            self.placed,
            self.calls,
            inputs,
            target,
            step,
            chunks,
            profile,
            compile,
            batch_options,
        )

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an InputError: the flow manages its own graphs."""
        raise InputError(
            "a flow is not compiled as a whole: give compile=True to flow.train_step and "
            "flow.stream"
        )

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a ``state_dict`` with the flow's keys (prefix ``module.``) or the model's own.

        Args:
            state_dict: the state.
            strict: as for ``nn.Module.load_state_dict``.
            assign: as for ``nn.Module.load_state_dict``; captures are then made again.

        Returns:
            Missing and unexpected keys, as torch reports them.
        """
        own = {f"module.{name}" for name in self.module.state_dict()}
        if not any(name in own for name in state_dict):
            result = self.module.load_state_dict(state_dict, strict=strict, assign=assign)
        else:
            result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        self.placed.weights.note_change()
        if assign:  # assignment replaces the parameter objects
            self.placed.captures.forget()
            self.calls.forget()
        return result
