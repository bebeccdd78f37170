"""The answer: the device of each layer, with predictions and proofs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from placer.errors import PlacementError
from placer.schema.base import (
    SCHEMA_VERSION,
    Bytes,
    FormatName,
    Limiting,
    Milliseconds,
    Name,
    Objective,
    Schedule,
    StatePlace,
    Status,
    StepKind,
    Tier,
    Wire,
    refuse_duplicates,
    refuse_unknown,
)
from placer.schema.export import Export, Place, device_map
from placer.schema.options import BatchOptions
from placer.utils.units import bytes_text, count_text, ms_text


class MemoryUse(Wire):
    """A device's memory at its peak, by kind, in bytes.

    Attributes:
        param_bytes: parameters; of those that rest elsewhere, the two buffers for them.
        grad_bytes: their gradients; where replicas share a stage, also the buffers of their
            exchange.
        optimizer_bytes: the optimizer's state.
        buffer_bytes: buffers.
        cache_bytes: keys and values of all sequences in flight, under objective ``generation``.
        activation_bytes: values and, in training, all tensors saved by micro-batches in flight; at
            the peak, also values and gradients that wait for another layer.
        workspace_bytes: of the layer that runs at the peak.
    """

    param_bytes: Bytes = 0
    grad_bytes: Bytes = 0
    optimizer_bytes: Bytes = 0
    buffer_bytes: Bytes = 0
    cache_bytes: Bytes = 0
    activation_bytes: Bytes = 0
    workspace_bytes: Bytes = 0

    @property
    def total_bytes(self) -> int:
        """Return the sum in bytes."""
        return (
            self.param_bytes
            + self.grad_bytes
            + self.optimizer_bytes
            + self.buffer_bytes
            + self.cache_bytes
            + self.activation_bytes
            + self.workspace_bytes
        )


class DeviceLoad(Wire):
    """The load of one device for one micro-batch.

    Attributes:
        device: its name.
        layers: number of layers that it holds.
        compute_ms: forward and, in training, backward time of its layers.
        send_ms: time to send values and gradients.
        receive_ms: time to receive values and gradients.
        load_ms: compute and transfer time, combined as the request states.
        memory: by kind, at the peak.
        limit_bytes: the bytes that it may use.
        bottleneck: whether no device is busier.
        resting_bytes: parameters of its layers that rest in the host's memory or on its disk.
        disk_bytes: the part of them on the disk.
        streaming_ms: time to copy these parameters to the device once, which each pass does; of
            experts that are copied as tokens choose them, the expected part. In a generation, the
            mean of its passes.
    """

    device: Name
    layers: Annotated[int, Field(ge=0)]
    compute_ms: Milliseconds
    send_ms: Milliseconds
    receive_ms: Milliseconds
    load_ms: Milliseconds
    memory: MemoryUse
    limit_bytes: Bytes
    bottleneck: bool = False
    resting_bytes: Bytes = 0
    disk_bytes: Bytes = 0
    streaming_ms: Milliseconds = 0.0


class Replica(Wire):
    """A device that holds a stage together with others and shares each micro-batch with them.

    Attributes:
        device: its name.
        samples: the samples of each micro-batch that it computes.
    """

    device: Name
    samples: Annotated[int, Field(ge=1)]


def holders(
    layer_devices: Mapping[str, str], replicas: Mapping[str, Sequence[Replica]]
) -> dict[str, str]:
    """Return, by layer, the name of its device, or the names of all devices that hold it."""
    return {
        layer: ", ".join(one.device for one in replicas.get(device, ())) or device
        for layer, device in layer_devices.items()
    }


class SingleDevice(Wire):
    """The best result of one device alone, to judge whether splitting pays.

    Attributes:
        device: the fastest device that the model fits on; if it fits on none, the fastest device.
        objective_value: the objective on this device, in its unit.
        fits: whether the model fits.
        missing_bytes: the missing bytes if it does not.
        load_ms: under the objective ``devices``, its busy time per micro-batch, to compare with
            ``bottleneck_ms``; None otherwise.
    """

    device: Name
    objective_value: Annotated[float, Field(ge=0)]
    fits: bool
    missing_bytes: Bytes = 0
    load_ms: Annotated[float, Field(ge=0)] | None = None


class TieBreaks(Wire):
    """The secondary objectives among placements of equal objective.

    Attributes:
        transfer_ms: total time of transfers, at both ends.
        imbalance_ms: among placements with equal transfers, the largest minus the smallest compute
            time of the devices that hold layers.
        proven: whether no placement transfers less, and none of those is better balanced.
    """

    transfer_ms: Annotated[float, Field(ge=0)]
    imbalance_ms: Annotated[float, Field(ge=0)]
    proven: bool


class Infeasibility(Wire):
    """Requirements that cannot hold together.

    Attributes:
        reason: as text, with the values.
        layers: the layers concerned.
        devices: the devices concerned.
        missing_bytes: the missing bytes, if memory is the reason.
        requirements: a group of requirements, as text, that contradict each other; empty if none
            was found in time.
        minimal: whether no smaller group exists; False if the time ended before this was proven.
    """

    reason: str
    layers: tuple[Name, ...] = ()
    devices: tuple[Name, ...] = ()
    missing_bytes: Bytes = 0
    requirements: tuple[str, ...] = ()
    minimal: bool = False

    @property
    def text(self) -> str:
        """Return the reason, with the first few requirements if it does not name them."""
        if not self.requirements or self.requirements[0] in self.reason:
            return self.reason
        more = f" and {len(self.requirements) - 6} more" if len(self.requirements) > 6 else ""
        return f"{self.reason}; cannot hold together: {'; '.join(self.requirements[:6])}{more}"


class Improvement(Wire):
    """A change that improves the placement, found by solving the changed request.

    Attributes:
        change: as text: ``2 GiB more on cuda:1``.
        objective_value: the value reached with it; better values may exist.
        speedup: the placement's objective divided by this value.
    """

    change: str
    objective_value: Annotated[float, Field(ge=0)]
    speedup: Annotated[float, Field(ge=0)]


class Limits(Wire):
    """The limiting factor of a placement.

    Attributes:
        kind: ``memory`` if the answer is better without memory limits; otherwise the cause of the
            busiest device's load: its ``link`` (transfers, if they exceed computation), one
            ``layer``, or the ``compute`` of several.
        detail: as text, with the values.
        improvements: changes that would help, largest first; only those solved in time.
    """

    kind: Limiting
    detail: str
    improvements: tuple[Improvement, ...] = ()


class StepChoice(Wire):
    """A number of micro-batches and a schedule that the solver considered.

    Attributes:
        batch_size: samples in a micro-batch.
        chunks: micro-batches in a batch.
        schedule: the order of micro-batches.
        contiguous: whether each device has one stage.
        replicas: pipelines among which each micro-batch is shared; where stages have numbers of
            replicas of their own, the largest of them.
        replicas_by_stage: the number of replicas of each stage in the shortest step found, in
            pipeline order, where stages have numbers of their own; empty otherwise.
        stages: the devices of a pipeline in the shortest step found; None without one, and where
            no replicas were asked for.
        objective_value: the shortest step found, in ms; None without one.
        bound: a proven lower bound of the step, in ms; None if there is no feasible step.
    """

    batch_size: Annotated[int, Field(ge=1)]
    chunks: Annotated[int, Field(ge=1)]
    schedule: Schedule
    contiguous: bool
    replicas: Annotated[int, Field(ge=1)] = 1
    replicas_by_stage: tuple[Annotated[int, Field(ge=1)], ...] = ()
    stages: Annotated[int, Field(ge=1)] | None = None
    objective_value: Annotated[float, Field(ge=0)] | None = None
    bound: Annotated[float, Field(ge=0)] | None = None


class Step(Wire):
    """Further results of the objective ``step``.

    Attributes:
        batch_size: samples in a whole batch.
        samples_per_s: samples per second.
        bubble: the idle share of the used devices' time, from 0 to 1: of an isolated step while
            micro-batches run, or of a steady-state step.
        optimizer_ms: the optimizer's time at the end of an isolated step.
        reduction_ms: the time in which replicas sum up gradients and exchange the new parameters,
            on the device that waits longest for it; 0 without replicas.
        reduction_hidden_ms: the part of it during which this device still runs backward passes.
        measured_batch_sizes: the measured micro-batch sizes between which the times of the shares
            of unlike devices are interpolated; empty if every share has a measured size.
        kind: the minimised step: ``isolated`` or ``steady-state``.
        isolated_ms: time of an isolated step, from idle devices to idle devices.
        steady_state_ms: time of a steady-state step.
        in_flight: in training equal to ``Placement.in_flight``; in inference 1 for each stage.
        choices: all choices that were considered.
    """

    batch_size: Annotated[int, Field(ge=1)]
    samples_per_s: Annotated[float, Field(ge=0)] | None
    bubble: Annotated[float, Field(ge=0, le=1)]
    optimizer_ms: Milliseconds = 0.0
    reduction_ms: Milliseconds = 0.0
    reduction_hidden_ms: Milliseconds = 0.0
    measured_batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] = ()
    kind: StepKind = "isolated"
    isolated_ms: Annotated[float, Field(ge=0)] | None = None
    steady_state_ms: Annotated[float, Field(ge=0)] | None = None
    in_flight: tuple[Annotated[int, Field(ge=1)], ...] = ()
    choices: tuple[StepChoice, ...] = ()

    @property
    def alone_ms(self) -> float | None:
        """Return ``isolated_ms``, which had this name in schema version 1."""
        return self.isolated_ms

    @property
    def in_a_row_ms(self) -> float | None:
        """Return ``steady_state_ms``, which had this name in schema version 1."""
        return self.steady_state_ms


class ShardedStep(Wire):
    """A step of fully sharded data parallelism (FSDP2) on all devices, as predicted.

    PyTorch runs it, with a process for each device; see ``code``. The prediction leaves out the
    host's work to shard; predictions were 11% and 39% shorter than two measured steps.

    Attributes:
        step_ms: time of a step, without the host's work to shard.
        compute_ms: the part of it in which the slowest device computes passes.
        memory_bytes: the most that a device holds.
        batch_size: samples of a micro-batch on each device.
        chunks: micro-batches of a device in a step.
        modules: paths of the modules to shard one by one, in execution order.
    """

    step_ms: Milliseconds
    compute_ms: Milliseconds
    memory_bytes: Bytes
    batch_size: Annotated[int, Field(ge=1)]
    chunks: Annotated[int, Field(ge=1)]
    modules: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """Return the lines that shard ``model``, in each process of an initialised group."""
        owners = dict.fromkeys(path.rpartition(".")[0] for path in self.modules)
        lines = ["from torch.distributed.fsdp import fully_shard", ""]
        for owner in owners:
            children = f"model.get_submodule({owner!r})" if owner else "model"
            lines += [f"for module in {children}.children():", "    fully_shard(module)"]
        return "\n".join([*lines, "fully_shard(model)  # then make the optimizer"])

    @property
    def text(self) -> str:
        """Return time, memory and micro-batches in words, with the error of the time."""
        sizes = f"{count_text(self.chunks, 'micro-batch', 'micro-batches')} of {self.batch_size}"
        return (
            f"{ms_text(self.step_ms)} a step by fully sharded data parallelism, "
            f"{bytes_text(self.memory_bytes)} and {sizes} on each device; the time leaves out the "
            "host's work to shard, and measured steps took 1.12 and 1.65 times their predictions"
        )


class Generation(Wire):
    """Further results of the objective ``generation``.

    Attributes:
        prompt_tokens: of each prompt.
        new_tokens: generated after each prompt.
        sequences_in_flight: generations at the same time.
        first_token_ms: time of the prompt's pass, which gives the first token, while no other
            generation runs.
        host_ms: time that the host needs in ``generate`` before this pass, while the devices wait;
            no other time contains it. ``placer.suggest`` measures it; None otherwise.
        token_ms: time of the pass of each later token, likewise; None if there is no later token.
        generation_ms: time from a prompt to its last token, with all generations in flight.
        tokens_per_s: new tokens per second, of all sequences of all generations together.
        copies: the devices that a whole model each would be on, with the caches of all sequences in
            flight shared among them; empty if one sequence is in flight, if the request pins or
            forbids layers, or if fewer than two devices have the memory.
        copies_tokens_per_s: new tokens per second of these copies, each for its own sequences; None
            without copies.
    """

    prompt_tokens: Annotated[int, Field(ge=1)]
    new_tokens: Annotated[int, Field(ge=1)]
    sequences_in_flight: Annotated[int, Field(ge=1)] = 1
    first_token_ms: Annotated[float, Field(ge=0)]
    host_ms: Annotated[float, Field(ge=0)] | None = None
    token_ms: Annotated[float, Field(ge=0)] | None = None
    generation_ms: Annotated[float, Field(ge=0)]
    tokens_per_s: Annotated[float, Field(ge=0)] | None = None
    copies: tuple[Name, ...] = ()
    copies_tokens_per_s: Annotated[float, Field(ge=0)] | None = None


class Placement(Wire):
    """The device of each layer, with predictions and proofs.

    Attributes:
        id: the content hash of the request.
        status: ``optimal``: proven; ``feasible``: the best found in time; ``infeasible``: proven to
            have no solution; ``unknown``: none found in time.
        objective: the minimised quantity.
        objective_value: its value, ms or bytes; None without a placement. Under the objective
            ``throughput``, R replicas share micro-batches that are R times the profiled size; the
            value is the busiest device's time for such a micro-batch, divided by R. Where stages
            have numbers of replicas of their own, R is the least common multiple of them.
        bound: a proven lower bound of the objective.
        gap: (objective_value - bound) / objective_value.
        method: the algorithm that found and proved it.
        solve_time_s: seconds of solving.
        model: the name of the model's class.
        layer_devices: the device of each layer, in execution order; empty without a placement.
        replicas: for each device of ``layer_devices`` whose layers several devices hold: all of
            these, the device itself first. Their samples add up to ``batch_size``. Where all stages
            have equally many, the replicas at one position of all devices form a pipeline of their
            own. Otherwise each micro-batch is divided again between stages. Empty if every layer
            is on one device.
        resting: by layer, where its parameters rest between passes: ``host``, in the memory of its
            device's host, or ``disk``, in a file there. A pass copies them to the device, into one
            of two buffers, while earlier layers compute. The parameters of other layers stay on
            their device.
        optimizer_state: where the optimizer's state is between training steps: on the device of its
            parameters, or in the memory of that device's host. From there each step copies it to
            the device and back; ``limit_bytes`` of the devices leave room for the buffers.
        granularity: of the profile; ``update_flow`` uses it.
        training: whether a training step was placed.
        optimizer: the optimizer whose memory was assumed; None without one.
        optimizer_workspace_ratio: temporaries of its step, in bytes per byte of gradients.
        batch_size: samples in a micro-batch.
        batch_options: of the profile; ``update_flow`` uses them.
        chunks: micro-batches in a batch.
        schedule: the order of micro-batches.
        contiguous: whether the stages are contiguous.
        recompute: the devices that run forward again before each backward pass, and save less.
        stages: the devices that hold layers, in pipeline order. For contiguous stages, every value
            flows forward in this order, and memory was computed for it; otherwise devices are
            ordered by their first layer.
        in_flight: for each stage of a training step, the number of micro-batches between forward
            and last backward pass for which memory was computed; ``update_flow`` uses it. Under the
            objective ``step``, a device may have several stages, one for each of its segments.
            Empty if every device has room for all micro-batches, as in non-contiguous placements
            under other objectives.
        devices: the load of each device. Under the objective ``generation``, times are of a mean
            pass: the passes of a generation divided by their number.
        single_device: the best single device, with all parameters in its memory.
        speedup: single_device.objective_value / objective_value, for times; None without a
            placement.
        tie_breaks: the secondary objectives, if the request asks for them.
        infeasible: why there is no placement.
        limits: the limiting factor, if the request asks to explain.
        links_through_host: links (source, target) that corrupt bytes. Their traffic goes through
            the host's memory when the placement is applied.
        step: further results of the objective ``step``.
        sharded: under the objective ``step``, a step of fully sharded data parallelism on all
            devices, if it is predicted to be clearly shorter than the placement's step, or to fit
            where no placement was found.
        generation: further results of the objective ``generation``.
    """

    schema_version: Literal["3"] = SCHEMA_VERSION
    id: Annotated[str, StringConstraints(max_length=128)] = ""
    status: Status
    objective: Objective
    objective_value: Annotated[float, Field(ge=0)] | None = None
    bound: Annotated[float, Field(ge=0)] | None = None
    gap: Annotated[float, Field(ge=0, le=1)] | None = None
    method: str = ""
    solve_time_s: Annotated[float, Field(ge=0)] = 0.0
    model: str = ""
    # the map
    layer_devices: dict[Name, Name] = {}
    replicas: dict[Name, tuple[Replica, ...]] = {}
    resting: dict[Name, Tier] = {}
    optimizer_state: StatePlace = "device"
    granularity: int | str = "auto"
    # the assumptions under which it was solved
    training: bool = False
    optimizer: str | None = None
    optimizer_workspace_ratio: Annotated[float, Field(ge=0)] = 0.0
    batch_size: int = 1
    batch_options: BatchOptions = BatchOptions()
    chunks: int = 1
    schedule: Schedule = "1f1b"
    contiguous: bool = True
    recompute: tuple[Name, ...] = ()
    # the resulting pipeline and its predicted loads
    stages: tuple[Name, ...] = ()
    in_flight: tuple[Annotated[int, Field(ge=1)], ...] = ()
    devices: tuple[DeviceLoad, ...] = ()
    single_device: SingleDevice | None = None
    speedup: float | None = None
    # explanations, if requested
    tie_breaks: TieBreaks | None = None
    infeasible: Infeasibility | None = None
    limits: Limits | None = None
    links_through_host: tuple[tuple[Name, Name], ...] = ()
    step: Step | None = None
    sharded: ShardedStep | None = None
    generation: Generation | None = None

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        """Check that the replicas of each stage share whole micro-batches."""
        for device, members in self.replicas.items():
            if len(members) < 2:
                raise ValueError(
                    f"replicas: {device!r} lists {count_text(len(members), 'replica')}; list all "
                    "devices that hold its layers, itself included, or leave it out"
                )
            if members[0].device != device:
                raise ValueError(
                    f"replicas: the first replica of {device!r} is {members[0].device!r}; list "
                    f"{device!r} itself first"
                )
            refuse_duplicates(
                f"replicas: of the replicas of {device!r}, device", [one.device for one in members]
            )
            samples = sum(one.samples for one in members)
            if samples != self.batch_size:
                raise ValueError(
                    f"replicas: the replicas of {device!r} compute "
                    f"{count_text(samples, 'sample')} of each micro-batch, but batch_size is "
                    f"{self.batch_size}; give shares that add up to batch_size"
                )
        return self

    @model_validator(mode="after")
    def _check_resting(self) -> Self:
        """Check that only parameters of placed layers rest, and only in inference."""
        refuse_unknown("resting", self.resting, self.layer_devices)
        if self.resting and (self.training or self.replicas):
            kind = "training" if self.training else "replicas"
            raise ValueError(
                f"resting: parameters of {count_text(len(self.resting), 'layer')} rest off their "
                f"device, which a placement with {kind} does not support; leave resting out"
            )
        return self

    @model_validator(mode="after")
    def _check_optimizer_state(self) -> Self:
        """Check that optimizer state rests on the host only in training."""
        if self.optimizer_state == "host" and not self.training:
            raise ValueError(
                "optimizer_state is 'host', but the placement is for inference, which has no "
                "optimizer; leave optimizer_state out"
            )
        return self

    @property
    def replicas_by_stage(self) -> tuple[int, ...]:
        """Return the number of devices that hold each stage, in pipeline order."""
        used = dict.fromkeys(self.layer_devices.values())
        # a map that was changed by hand may have other stages
        stages = self.stages if set(self.stages) == set(used) else used
        return tuple(len(self.replicas.get(device, ())) or 1 for device in stages)

    def device_map(self, model: Any = None) -> dict[str, Place]:
        """Return the device map for accelerate's ``dispatch_model`` and for ``from_pretrained``.

        A module that is called several times goes where its first call is.

        Args:
            model: the ``nn.Module`` that was placed, possibly on meta. With it, the map covers all
                parameters and buffers, names modules on one device as a whole, and is verified to
                run. None (default) for a map of the placement's layers only.

        Returns:
            Paths of modules, or of parameters of the model itself, to GPU indices, ``"cpu"`` or
            ``"disk"``; in execution order. Layers whose parameters rest on the host are on
            ``"cpu"``, and those on its disk on ``"disk"``, from which accelerate offloads them.

        Raises:
            PlacementError: if there is no placement, its devices are on several hosts, or it is of
                another model; or if accelerate could not run it, because it cuts inside a module
                that ``model._no_split_modules`` keeps whole (``granularity="blocks"`` avoids this),
                or splits a tied parameter.
        """
        return device_map(self._offloaded(), model)

    def export(self, format: FormatName, model: Any = None) -> Export:
        """Return the placement in the format of another engine.

        Args:
            format: ``"accelerate"``, ``"deepspeed"``, ``"llama.cpp"``, ``"megatron"``,
                ``"pipedream"``, ``"pipelining"`` (of torch.distributed), ``"piper"``,
                ``"torchgpipe"``, ``"torchtitan"`` or ``"vllm"``.
            model: the ``nn.Module`` that was placed, possibly on meta. With it, formats that name
                or count modules also cover modules without operations. None (default): the modules
                that layers name.

        Returns:
            The text for the engine, and notes about what the text cannot say.

        Raises:
            InputError: the format is unknown.
            PlacementError: the format cannot express this placement; the message names the layers.
                ``for_format`` of ``suggest`` and of requests restricts a search to placements that
                a format can express.
        """
        # Formats use types of this package, so they are imported when they are first used.
        from placer.exports.formats import format_named
        from placer.exports.plan import Plan

        exporter = format_named(format)
        if self.resting and format != "accelerate":
            raise PlacementError(
                f"format {format!r} has no parameters that rest on the host or its disk, as this "
                f"placement has them for {count_text(len(self.resting), 'layer')}; solve without "
                "host_memory_bytes and disk_bytes"
            )
        if self.optimizer_state == "host":
            raise PlacementError(
                f"format {format!r} has no optimizer state that rests on the host, which this "
                "placement needs; solve with optimizer_state='device'"
            )
        members = self.replicas.items()
        plan = Plan(
            layer_devices=self._offloaded(),
            replicas={device: [one.device for one in replicas] for device, replicas in members},
            samples={device: [one.samples for one in replicas] for device, replicas in members},
            stages=self.stages,
            devices=[load.device for load in self.devices],
            recompute=self.recompute,
            training=self.training,
            batch_size=self.batch_size,
            chunks=self.chunks,
            schedule=self.schedule,
            contiguous=self.contiguous,
            model=model,
        )
        return exporter.export(plan)

    def _offloaded(self) -> dict[str, str]:
        """Return the place of each layer, ``cpu`` or ``disk`` where its parameters rest there."""
        rests = {layer: "cpu" if at == "host" else at for layer, at in self.resting.items()}
        return self.layer_devices | rests
