"""What is answered: where each layer runs, and what is proven of it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from placer.schema.base import (
    SCHEMA_VERSION,
    Bytes,
    Limiting,
    Milliseconds,
    Name,
    Objective,
    Schedule,
    Status,
    Steps,
    Wire,
)
from placer.schema.batch_options import BatchOptions
from placer.schema.device_map import Place, device_map


class MemoryUse(Wire):
    """What a device holds at its worst moment, by kind, in bytes.

    Attributes:
        param_bytes: parameters.
        grad_bytes: their gradients.
        optimizer_bytes: the optimizer's state.
        buffer_bytes: buffers.
        activation_bytes: values and, in training, all that micro-batches in flight keep for their
            backward pass; at the worst moment, also values and gradients that wait for another
            layer.
        workspace_bytes: of the layer that runs then.
    """

    param_bytes: Bytes = 0
    grad_bytes: Bytes = 0
    optimizer_bytes: Bytes = 0
    buffer_bytes: Bytes = 0
    activation_bytes: Bytes = 0
    workspace_bytes: Bytes = 0

    @property
    def total_bytes(self) -> int:
        """All of it, in bytes."""
        return (
            self.param_bytes
            + self.grad_bytes
            + self.optimizer_bytes
            + self.buffer_bytes
            + self.activation_bytes
            + self.workspace_bytes
        )


class DeviceLoad(Wire):
    """What a placement asks of one device for one micro-batch.

    Attributes:
        device: its name.
        layers: how many layers it holds.
        compute_ms: forward and, in training, backward time of its layers.
        send_ms: time of the values and gradients that it sends.
        receive_ms: time of those that it receives.
        load_ms: compute and transfers as the request joins them.
        memory: by kind, at the worst moment.
        limit_bytes: what it may use.
        bottleneck: whether no device is busier.
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


class SingleDevice(Wire):
    """The best that one device alone does: the answer to whether to split at all.

    Attributes:
        device: the fastest device on which the model fits, or, where it fits on none, the fastest.
        objective_value: the objective there, in the objective's unit.
        fits: whether it fits there.
        short_bytes: what is missing if it does not.
        load_ms: under objective ``devices``, how long it is busy for one micro-batch: it will do
            where that is within ``bottleneck_ms``. None under the others.
    """

    device: Name
    objective_value: Annotated[float, Field(ge=0)]
    fits: bool
    short_bytes: Bytes = 0
    load_ms: Annotated[float, Field(ge=0)] | None = None


class Ties(Wire):
    """How ties were broken: what was made small among the placements with as small an objective.

    Attributes:
        transfer_ms: time of all transfers, at both of their ends.
        spread_ms: of those that transfer as little: the largest compute time of a device less the
            smallest, of the devices that hold layers.
        proven: whether none transfers less, and none of those is better balanced.
    """

    transfer_ms: Annotated[float, Field(ge=0)]
    spread_ms: Annotated[float, Field(ge=0)]
    proven: bool


class Infeasibility(Wire):
    """Requirements that cannot hold together.

    Attributes:
        reason: in words, with the values.
        layers: the layers concerned.
        devices: the devices concerned.
        short_bytes: the bytes missing, where memory is the reason.
        requirements: in words, a group of requirements that cannot hold together. Empty where none
            was found in time.
        smallest: whether there is no smaller group; else the time ended before that was known.
    """

    reason: str
    layers: tuple[Name, ...] = ()
    devices: tuple[Name, ...] = ()
    short_bytes: Bytes = 0
    requirements: tuple[str, ...] = ()
    smallest: bool = False

    @property
    def text(self) -> str:
        """The reason, and the first few of the requirements where it does not name them."""
        if not self.requirements or self.requirements[0] in self.reason:
            return self.reason
        more = f" and {len(self.requirements) - 6} more" if len(self.requirements) > 6 else ""
        return f"{self.reason}; cannot hold together: {'; '.join(self.requirements[:6])}{more}"


class Help(Wire):
    """A change that would make a placement better: the changed question was solved.

    Attributes:
        change: in words: ``2 GiB more on cuda:1``.
        objective_value: what is reached with it; no promise that nothing better is.
        speedup: the placement's objective over that.
    """

    change: str
    objective_value: Annotated[float, Field(ge=0)]
    speedup: Annotated[float, Field(ge=0)]


class Limits(Wire):
    """What limits a placement.

    Attributes:
        kind: ``memory``: without its limits the answer is better; else what keeps the busiest
            device busy: its ``link`` (transfers, more than it computes), one ``layer``, or the
            ``work`` of several.
        what: in words, with the values.
        helps: what would help, the most first; only what was solved in time, and is better.
    """

    kind: Limiting
    what: str
    helps: tuple[Help, ...] = ()


class StepChoice(Wire):
    """A number of micro-batches and a schedule that were looked at.

    Attributes:
        batch_size: samples in a micro-batch.
        batch_options: of the profile, taken over by ``update_flow``.
        chunks: micro-batches in a batch.
        schedule: the order of micro-batches.
        contiguous: whether each device has one stage.
        objective_value: the shortest step found, in ms; None if none was.
        bound: none is shorter than this, in ms; None where there is none at all.
    """

    batch_size: Annotated[int, Field(ge=1)]
    chunks: Annotated[int, Field(ge=1)]
    schedule: Schedule
    contiguous: bool
    objective_value: Annotated[float, Field(ge=0)] | None = None
    bound: Annotated[float, Field(ge=0)] | None = None


class Step(Wire):
    """What objective ``step`` says beside the placement.

    Attributes:
        batch_size: samples in a whole batch.
        samples_per_s: that, over the step.
        bubble: the share of the used devices' time that is idle, from 0 to 1: of a step alone while
            micro-batches run, of one in a row from its begin to that of the next.
        optimizer_ms: of a step alone, the optimizer's part at its end.
        steps: which step was made short, and is the objective: alone, or in a row.
        alone_ms: what the step takes alone, from idle devices to idle devices.
        in_a_row_ms: what each of many takes.
        in_flight: in training the same as ``Placement.in_flight``; in inference 1 for each stage.
        choices: all that were looked at.
    """

    batch_size: Annotated[int, Field(ge=1)]
    samples_per_s: Annotated[float, Field(ge=0)] | None
    bubble: Annotated[float, Field(ge=0, le=1)]
    optimizer_ms: Milliseconds = 0.0
    steps: Steps = "alone"
    alone_ms: Annotated[float, Field(ge=0)] | None = None
    in_a_row_ms: Annotated[float, Field(ge=0)] | None = None
    in_flight: tuple[Annotated[int, Field(ge=1)], ...] = ()
    choices: tuple[StepChoice, ...] = ()


class Placement(Wire):
    """The answer: where each layer runs, what that predicts, and what is proven about it.

    Attributes:
        id: the content hash of the request.
        status: ``optimal``: proven; ``feasible``: the best found in time; ``infeasible``: proven to
            be none; ``unknown``: none found in time.
        objective: what was made small.
        objective_value: its value, ms or bytes; None without a placement.
        bound: a proven lower bound on it.
        gap: (objective_value - bound) / objective_value.
        method: what found and proved it.
        solve_time_s: how long that took.
        layer_devices: layer -> device, in execution order; empty without a placement.
        granularity: of the profile, taken over by ``update_flow``.
        training: whether a training step was placed.
        optimizer: the optimizer whose memory was assumed; None without one.
        optimizer_step_share: what its step was assumed to make and free again, in bytes per byte of
            gradients.
        batch_size: samples in a micro-batch.
        batch_options: of the profile, taken over by ``update_flow``.
        chunks: micro-batches in a batch.
        schedule: the order of micro-batches.
        contiguous: whether the stages are contiguous.
        recompute: the devices that run forwards once more before each backward pass, and keep less
            meanwhile.
        stages: the devices that hold layers, in pipeline order: of contiguous stages, an order in
            which every value runs forwards, and in which their memory was reckoned; else by their
            first layer.
        in_flight: of a training step, by stage for how many micro-batches at once its memory was
            reckoned: it holds one from the forward pass to the end of its backward passes.
            ``update_flow`` takes it over. Under objective ``step`` a device may have several
            stages, one for each of its segments. Empty where every device has room for all
            micro-batches, as placements that need not be contiguous have under other objectives.
        devices: the load of each device.
        single_device: the best that one device does.
        speedup: single_device.objective_value / objective_value, for times; None without a
            placement.
        ties: how ties were broken, where the request asks for it.
        infeasible: why there is none.
        limits: what limits it, where the request asks to explain.
        through_host: the links, as source and target, that change bytes: what goes over them goes
            by way of the host's memory where the placement is applied.
        step: under objective ``step``, what it says beside.
    """

    schema_version: Literal["1"] = SCHEMA_VERSION
    id: Annotated[str, StringConstraints(max_length=128)] = ""
    status: Status
    objective: Objective
    objective_value: Annotated[float, Field(ge=0)] | None = None
    bound: Annotated[float, Field(ge=0)] | None = None
    gap: Annotated[float, Field(ge=0, le=1)] | None = None
    method: str = ""
    solve_time_s: Annotated[float, Field(ge=0)] = 0.0
    model: str = ""
    layer_devices: dict[Name, Name] = {}
    granularity: int | str = "auto"
    training: bool = False
    optimizer: str | None = None
    optimizer_step_share: Annotated[float, Field(ge=0)] = 0.0
    batch_size: int = 1
    batch_options: BatchOptions = BatchOptions()
    chunks: int = 1
    schedule: Schedule = "1f1b"
    contiguous: bool = True
    recompute: tuple[Name, ...] = ()
    stages: tuple[Name, ...] = ()
    in_flight: tuple[Annotated[int, Field(ge=1)], ...] = ()
    devices: tuple[DeviceLoad, ...] = ()
    single_device: SingleDevice | None = None
    speedup: float | None = None
    ties: Ties | None = None
    infeasible: Infeasibility | None = None
    limits: Limits | None = None
    through_host: tuple[tuple[Name, Name], ...] = ()
    step: Step | None = None

    def to_json(self) -> str:
        """The placement as readable JSON."""
        return json.dumps(self.model_dump(mode="json"), indent=1)

    def device_map(self, model: Any = None) -> dict[str, Place]:
        """Return where each module goes, as accelerate's ``dispatch_model`` and ``from_pretrained``
        take it.

        A module that is called several times goes where its first call is.

        Args:
            model: the ``nn.Module`` that was placed, on meta too. With it the map covers all
                parameters and buffers, names modules that are on one device as a whole, and is
                known to run: without it, it names the layers of the placement and nothing else.

        Returns:
            Paths of modules, or of parameters of the model itself, to GPUs by their index, or to
            ``"cpu"``; in execution order.

        Raises:
            PlacementError: there is no placement, its devices are of several hosts, or it is of
                another model; or accelerate could not run it: it cuts inside a module that
                ``model._no_split_modules`` keeps whole (``granularity="blocks"`` does not), or
                splits a tied parameter.
        """
        return device_map(self.layer_devices, model)
