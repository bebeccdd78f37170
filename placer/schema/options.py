"""Options objects: what to solve, how to measure and to refine, and how a batch is split.

Python functions take them as ``options``, the REST API has the fields of ``SolveOptions`` in every
request, and the command line makes an option of each field. The first sentence below a field is
its help text there.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    SkipValidation,
    StrictBool,
    ValidationInfo,
    field_serializer,
    field_validator,
)
from pydantic.json_schema import SkipJsonSchema

from placer.errors import InputError, kind_of
from placer.schema.base import (
    FIRST,
    IN_ORDER,
    LONGEST_MS,
    MAX_DEVICES,
    MAX_LAYERS,
    Bytes,
    FormatName,
    Name,
    Objective,
    Recompute,
    Replicas,
    Schedule,
    ScheduleChoice,
    StateChoice,
    StepKind,
    Transfers,
    Wire,
)
from placer.schema.faults import nearest
from placer.utils.units import parse_bytes

O = TypeVar("O", bound=Wire)  # noqa: E741  # the kind of options

_LAST_DIMENSION = 63  # tensors have at most 64 dimensions
Dimension = Annotated[int, Field(ge=0, le=_LAST_DIMENSION)]
"""A dimension of a tensor, from 0."""

Cut = Dimension | Literal["items"] | None
"""How a value is split into micro-batches: along a dimension, by the items of a list, or not
(None)."""


def _size(given: Any) -> Any:
    """Return a size as text, such as ``"24GiB"``, in bytes; other values unchanged."""
    return parse_bytes(given) if isinstance(given, str) else given


Size = Annotated[Bytes, BeforeValidator(_size)]
"""A size in bytes; a text with a unit is also accepted."""

Reduced = Literal["mean", "sum", "max", "min", "same"]
JoinName = Dimension | Literal["items", "list"] | Reduced
Joiner = Callable[[list[Any], list[int]], Any]
"""A function from the micro-batches' results and sample counts to the batch's result."""
Join = JoinName | SkipJsonSchema[Joiner]
"""How results are joined: concatenated along a dimension or as lists, reduced, kept separate, or by
a function."""

Weigh = Callable[[Any, Any], Any]
"""A function from a batch's inputs and target to the weight of each sample in the loss, a tensor of
shape ``(N,)``."""

_CUTS: tuple[str, ...] = ("items",)
_JOINS: tuple[str, ...] = ("items", "list", *get_args(Reduced))

OTHERS = "*"
"""The name that matches every value without an entry of its own."""

Rule = TypeVar("Rule")


class Constraints(Wire):
    """Requirements that a placement must meet, in addition to memory."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    contiguous: bool | None = None
    """Whether data may not leave a stage and come back to it.

    A contiguous stage is a set of layers that no path leaves and enters again: the quotient graph
    over devices is acyclic. None: contiguous, unless a group of colocated layers would then pull
    the whole model onto one device, as tied embeddings do. In that case, all other layers are
    contiguous under objective ``throughput`` if that fits into memory, and otherwise the placement
    is free. It is also free where parameters may rest on a host whose CPU is one of the devices.
    Pins do not end contiguity: the layers between two layers that are pinned to one device are on
    that device, too."""

    recompute: Recompute | Annotated[dict[Name, Recompute], IN_ORDER] = "never"
    """Where memory would not suffice otherwise, keep less and compute forward passes twice.

    A device that recomputes keeps only the values from other devices of each micro-batch in
    flight, and repeats the forward pass before each backward pass (in training). ``never``,
    ``always``, or ``auto``: if memory would not suffice otherwise. One word for all devices, or a
    dict from device to word. The device ``*`` stands for all others; without it, they never
    recompute. Where a device always does, objective ``step`` has no free stages."""

    pinned: Annotated[dict[Name, Name], IN_ORDER] = {}
    """The name of the device that a layer must be on, as in ``cuda:1``, by layer."""

    forbidden: Annotated[dict[Name, Annotated[tuple[Name, ...], FIRST]], IN_ORDER] = {}
    """The names of devices that a layer must not be on, by layer; ``*`` stands for every layer."""

    colocated: Annotated[tuple[Annotated[tuple[Name, ...], FIRST], ...], FIRST] = ()
    """Groups of layers that must share a device, in addition to the groups of the profile."""

    max_devices: Annotated[int, Field(ge=1, le=MAX_DEVICES)] | None = None
    """The maximum number of devices in use."""

    min_devices: Annotated[int, Field(ge=1, le=MAX_DEVICES)] | None = None
    """The minimum number of devices in use."""

    max_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = None
    """The maximum number of layers on a device."""

    def recompute_on(self, device: str) -> Recompute:
        """Return the word for a device, given by its name."""
        if isinstance(self.recompute, str):
            return self.recompute
        return self.recompute.get(device, self.recompute.get("*", "never"))


class GenerationOptions(Wire):
    """What objective ``generation`` places: texts that a language model generates."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    prompt_tokens: Annotated[int, Field(ge=1, le=2**31)]
    """Tokens of a prompt, as many as the prompt that is measured."""

    new_tokens: Annotated[int, Field(ge=1, le=2**31)]
    """Tokens that are generated after a prompt."""

    sequences_in_flight: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Generations that run at the same time, each with a cache of its own.

    One: the time of a single generation counts. Several: the time between the ends of two
    generations counts, while other generations use the other devices. A batch of sequences that
    are generated together is one generation."""


class SolveOptions(Wire):
    """What to solve: the objective, the batch, the constraints and the limits of the search."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    objective: Objective = "throughput"
    """The quantity to minimise.

    ``throughput``: the bottleneck; ``step``: the time of a whole batch; ``latency``: the time of
    one sample; ``generation``: the time of a text, see ``generation``; ``memory``: the largest use
    of a device's memory; ``devices``: the number of devices that keep within ``bottleneck_ms``."""

    constraints: Constraints = Constraints()
    """Requirements that the placement must meet, in addition to memory."""

    training: bool | None = None
    """Whether to place a training step or inference; as profiled by default.

    Inference can be placed with a profile of training, but not the reverse."""

    chunks: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Micro-batches in a batch; objective ``step`` chooses their number.

    Objective ``step`` simulates each pass, and accepts at most 10,000 micro-batches."""

    batch_size: Annotated[int, Field(ge=1, le=2**31)] | None = None
    """Samples in a whole batch, for objective ``step``.

    None: ``chunks`` micro-batches of the size that was profiled."""

    schedule: ScheduleChoice | None = None
    """The order of micro-batches; 1f1b by default, and auto under objective ``step``.

    In training it decides how many micro-batches are in flight at a stage: all of them for
    ``fill-drain``, at most ``stages - stage`` for ``1f1b`` and ``interleaved``. For ``zero-bubble``
    it is as many as memory allows between that number and ``2 * stages``, and 1 for a single stage
    (contiguous placements; otherwise all of them; under objective ``step`` and ``interleaved``, as
    many as the order holds, which depends on the available memory)."""

    step_kind: StepKind | None = None
    """Which step objective ``step`` makes short: steady-state by default, isolated in inference.

    ``isolated``: a step from idle devices to idle devices. ``steady-state``: one of many steps; a
    device begins it as soon as it has finished its own part of the step before."""

    replicas: Replicas = "never"
    """Whether several devices may hold the same stage and share each batch.

    ``auto``: also consider data parallelism, and pipelines that are replicated on equal groups of
    devices. ``by-stage``: also consider stages that each have a number of replicas of their own, on
    alike devices.

    Only training under objectives ``step`` and ``throughput`` accepts ``auto`` and ``by-stage``.
    ``suggest`` uses ``auto`` for a training step by default, unless the model cannot be replicated.
    Placements that pin or forbid layers have no replicas. See the page about replicas in the
    documentation."""

    for_format: FormatName | None = None
    """Consider only placements that this format of another engine can express.

    Such a placement can be exported, see ``Placement.export``. None: all placements."""

    transfers: Transfers = "added"
    """How transfers count: as time added to compute, or overlapped with it.

    ``added``: a device computes and transfers one after the other. ``overlapped``: a device's load
    is the largest of its compute, its sends and its receives."""

    time_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    """Seconds to solve; the result is then the best placement so far, with its bound."""

    work_limit: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """A limit of work that gives the same placement on every machine.

    The unit is CP-SAT's deterministic time. The result is the same on every machine, unless the
    time limit passes first. Objective ``step`` does not use it."""

    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """The seed of the solver's random choices."""

    workers: Annotated[int, Field(ge=1, le=256)] = 2
    """CPU cores that the solver may use."""

    bottleneck_ms: Annotated[float, Field(gt=0, le=LONGEST_MS)] | None = None
    """The longest time of a device for one micro-batch, for objective ``devices``."""

    break_ties: bool = False
    """Among equal placements, prefer less transfer, then equal loads.

    Under objective ``step``, only placements with the micro-batches and the schedule of the best
    one are compared."""

    explain: bool = False
    """Report what limits the placement and what would help most.

    The solver uses the rest of the time limit to solve changed requests: for each at most a second,
    or ten times the time of the solve if that is longer."""

    generation: GenerationOptions | None = None
    """The prompt and the new tokens, for objective ``generation``."""

    host_memory_bytes: Size | None = None
    """The host memory in which parameters may rest, in bytes or as ``"24GiB"``.

    Where no placement fits otherwise, parameters of some layers rest in pinned host memory, and
    each pass copies them to the layer's device. Objectives ``latency`` and ``generation`` use it,
    for inference with one sequence in flight. If the CPU of the host is one of the devices, it
    computes layers where that is quicker, and its memory also holds what rests. None: no parameters
    rest there."""

    disk_bytes: Size | None = None
    """The disk space in which parameters may rest, in bytes or as ``"24GiB"``.

    Parameters that fit neither the devices nor ``host_memory_bytes`` rest in files of the host, and
    each pass reads them. The same objectives use it. None: no parameters rest there."""

    optimizer_state: StateChoice = "device"
    """Where the optimizer's state is between training steps: on the devices, or on the host.

    ``device``: with its parameters. ``host``: in pinned memory of each device's host. Each step
    copies it to the device and back, in buckets, and takes longer for it; two buckets count as
    reserved on every device. ``auto``: on the host only if nothing fits otherwise. See the page
    about optimizer state on the host in the documentation."""


class BatchOptions(Wire):
    """How a batch is split into micro-batches, and how their results and losses are joined.

    A value is named as in the model: an input by its parameter of ``forward`` (or its position),
    and its parts by key, index or attribute after a dot (``"targets"``, ``"batch.pixel_values"``,
    ``"0"``). Parts of targets and results are named likewise (``"logits"``, ``"losses.aux"``,
    ``"1"``). An entry applies to everything below it. ``"*"`` matches all values without an entry.

        BatchOptions(inputs=1)                                        # (length, batch, features)
        BatchOptions(inputs={"images": "items"}, target="items")      # lists of images and targets
        BatchOptions(inputs={"table": None}, outputs={"hidden": 1})   # not split; joined along 1
        BatchOptions(reduction="sum")                                 # a loss that is a sum

    Attributes:
        inputs: the batch dimension, 0 by default; ``"items"`` for a list with one item per sample;
            None for values that every micro-batch receives whole; or a dictionary of these by name.
            The first split value determines the number of samples. Tensors without an entry that
            have another size in that dimension are not split.
        target: the same for the target of a training step. ``"auto"`` (default): along the first
            dimension; if ``inputs`` declares another one, along the dimension whose size is the
            number of samples, preferring the dimension of ``inputs``.
        outputs: how results of micro-batches are joined: along a dimension, by ``"items"``, as
            ``"mean"`` (weighted by samples, or by ``weigh``), ``"sum"``, ``"max"``, ``"min"``,
            ``"same"`` (equal in all), ``"list"`` (neither joined nor compared), or ``f(parts,
            sizes)``. Without an entry, verification determines the rule. Without verification,
            tensors are joined along the dimension of ``inputs``, and scalars by their mean.
        reduction: whether the loss of a batch is the mean over its samples (default) or their sum.
        weigh: ``weigh(inputs, target)``, the weight of each sample in a loss that is a weighted
            mean, shape ``(N,)``: its number of labels, for instance. Functions here and in
            ``outputs`` are not part of the JSON form.
        verify: whether to compare a small slice of the first batch of each kind, split and unsplit,
            and the first loss with the loss of the whole batch (default True). A difference raises
            a ``BatchError``.
    """

    inputs: Cut | dict[Name, Cut] = 0
    target: Cut | Literal["auto"] | dict[Name, Cut] = "auto"
    outputs: Join | dict[Name, Join] = Field(default_factory=dict)
    reduction: Literal["mean", "sum"] = "mean"
    weigh: SkipJsonSchema[Weigh | None] = Field(default=None, exclude=True)
    verify: bool = True

    @field_validator("inputs", "target", "outputs", mode="before")
    @classmethod
    def _refuse_other_rules(cls, given: Any, field: ValidationInfo) -> Any:
        """Raise a ValueError that lists the allowed rules, instead of one error per branch."""
        is_cut = field.field_name != "outputs"
        allowed = _CUTS if is_cut else _JOINS
        if isinstance(given, Mapping):
            # positions are names, too
            given = {str(name): rule for name, rule in given.items()}
        for name, rule in given.items() if isinstance(given, dict) else [("", given)]:
            if not _is_allowed(rule, name, field.field_name):
                words = ", ".join(repr(word) for word in allowed)
                rest = "None" if is_cut else "a function of parts and sizes"
                where = f" for {name!r}" if name else ""
                raise ValueError(
                    f"{rule!r}{where} is not a rule; give a dimension (0, 1, ...), {words} or "
                    f"{rest}"
                )
        return given

    @field_serializer("outputs", mode="wrap")
    def _without_functions(self, outputs: Any, handler: SerializerFunctionWrapHandler) -> Any:
        # functions cannot be serialised; a reader of the JSON uses the defaults instead
        if callable(outputs):
            return {}
        if isinstance(outputs, dict):
            outputs = {name: join for name, join in outputs.items() if not callable(join)}
        return handler(outputs)


class ProfileOptions(Wire):
    """How to measure a model."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    optimizer: Any = "adam"
    """The optimizer whose state and step count in training, or none.

    A name from ``torch.optim``, a class, an optimizer, a list of optimizers, a function that makes
    one from a list of parameters, or None."""

    granularity: Any = "auto"
    """How to cut the model into layers: auto, blocks, submodule, fine or a depth.

    A function that decides for each module is possible, too. With ``blocks``, each repeated block
    is one layer, as ``Placement.device_map`` needs it."""

    repeats: Annotated[int, Field(ge=1, strict=True)] = 10
    """The maximum number of times that each pass is timed; medians are kept."""

    cache: SkipValidation[bool | str | os.PathLike[str]] = True
    """The folder where measurements are kept and found again.

    True: the folder that ``PLACER_CACHE`` names, or the user's own. False: measure everything, and
    keep nothing. A measurement is reused only under the same conditions. It is stored at once, so
    an interrupted run continues where it stopped."""

    disk_folder: SkipValidation[str | os.PathLike[str] | None] = None
    """The folder on whose disk parameters may rest, to measure how fast it is read.

    None: no disk is measured. With ``disk_bytes``, None means the folder that ``PLACER_DISK``
    names, or one in the user's cache; for ``from_pretrained`` the folder of the checkpoint.
    ``from_pretrained`` also writes weights there that cannot stay in the checkpoint's files."""

    loss_fn: SkipValidation[Callable[[Any, Any], Any] | None] = None
    """The loss of a training step, a function of the output and the target.

    Its time and memory count with the layer that produces the model's output. Without it,
    predictions leave the loss out. It runs on random outputs."""

    target: Any = None
    """The target of one micro-batch, for the loss."""

    batch_options: BatchOptions | None = None
    """Where the samples of a batch lie, and how its loss is reduced.

    The profile and its placements carry these options. None: the first dimension is the batch."""


class SuggestOptions(ProfileOptions, SolveOptions):
    """Everything that ``suggest`` can be asked: how to measure, and what to solve."""

    batch_sizes: SkipValidation[Sequence[int] | None] = None
    """Micro-batch sizes to measure and choose from, for objective ``step``.

    None: the size of the example inputs."""

    split_tied: StrictBool = False
    """Allow layers that share parameters on several devices, each with a copy.

    By default such layers share a device. See ``Profile.untied``."""

    profile_on_server: StrictBool | None = None
    """Whether the server's machine measures the model.

    The client sends the operations, shapes and dtypes of the model, but no weights. ``devices``
    may then be a number of devices. None: if the server has a GPU and this machine has none, and
    neither ``devices`` nor ``memory_bytes`` is given."""


class EstimateOptions(Wire):
    """What to estimate: the mode, the batch and the assumptions about devices."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    training: StrictBool = False
    """Whether to estimate a training step instead of inference."""

    generate: Annotated[int, Field(ge=1, le=2**31, strict=True)] | None = None
    """Tokens of each text, prompt included, whose keys and values the cache holds.

    For models of transformers, in inference."""

    optimizer: Any = "adamw"
    """The optimizer whose state counts in training, or none.

    A name from ``torch.optim``, a class, an optimizer, a list of optimizers, a function that makes
    one from a list of parameters, or None."""

    chunks: Annotated[int, Field(ge=1, le=1_000_000)] = 8
    """Micro-batches in a batch, in training."""

    schedule: Schedule = "1f1b"
    """The order of micro-batches: it decides how many micro-batches a device keeps."""

    recompute: Recompute | Annotated[dict[Name, Recompute], IN_ORDER] = "never"
    """Where memory would not suffice otherwise, keep less and compute forward passes twice.

    See ``Constraints.recompute``."""

    dtype: Any = None
    """The dtype of parameters and floating-point inputs, as ``"bfloat16"`` or ``torch.bfloat16``.

    None: as the model has them; of a transformers configuration, its own."""

    granularity: Any = "auto"
    """How to cut the model into layers: auto, blocks, submodule, fine or a depth."""

    loss_fn: SkipValidation[Callable[[Any, Any], Any] | None] = None
    """The loss of a training step, a function of the output and the target.

    Without it, the estimate leaves out the memory of a loss outside the model."""

    target: Any = None
    """The target of one micro-batch, for the loss."""

    batch_options: BatchOptions | None = None
    """Where the samples of a batch lie, and how its loss is reduced.

    None: the first dimension is the batch."""

    reserve_bytes: Annotated[int, Field(ge=0, le=2**50)] = 512 * 2**20
    """Memory of each device that the model cannot use.

    A CUDA context with the kernels of torch, and the workspaces of libraries. It has no effect on
    devices of a ``Cluster``, which have reserves of their own."""

    time_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 10.0
    """Seconds to solve the placement and all changes.

    Changes that were not solved in time are left out."""


class RefineOptions(Wire):
    """How ``refine`` measures stages, and when it stops."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    loss_fn: SkipValidation[Callable[[Any, Any], Any] | None] = None
    """The loss of a training step, a function of the output and the target.

    Its time counts with the layer that feeds it. None: a mean of the outputs, which takes almost
    no time."""

    target: Any = None
    """The target of one micro-batch, for the loss."""

    rounds: Annotated[int, Field(ge=1, strict=True)] = 3
    """The maximum number of placements to measure."""

    tolerance: Annotated[float, Field(ge=0)] = 0.01
    """The smallest gain that is worth another round, as a share of the objective."""

    repeats: Annotated[int, Field(ge=1, strict=True)] = 7
    """How often each pass is timed; medians are kept."""

    compile: Any = False
    """Measure stages as they run under ``torch.compile``.

    As for ``DataFlow.train_step``, or in inference ``DataFlow.stream``: True, or the name of a
    backend."""

    timer: Any = None
    """A function that times the passes on a device.

    None: CUDA graphs on a GPU, the host's clock on a CPU stand-in."""


def combined(
    kind: type[O],
    options: Any,
    fields: Mapping[str, Any],
    function: Callable[..., Any],
    used: Iterable[str] | None = None,
) -> O:
    """Return the options of a call: an options object and single fields of it.

    Args:
        kind: the options that the function takes.
        options: an object of ``kind`` or of one of its base classes, or None.
        fields: the single fields, by name.
        function: the function that is called; a misspelt field may mean one of its parameters.
        used: the fields of ``kind`` that have an effect there; by default all.

    Raises:
        InputError: ``options`` has another type; a field is unknown, has a wrong value, or is given
            in both places.
    """
    for name in fields:
        if name not in kind.model_fields:
            parameters = inspect.signature(function).parameters.values()
            known = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
            known += kind.model_fields if used is None else sorted(used)
            hint = nearest(name, dict.fromkeys(known))
            raise InputError(f"{function.__name__} has no argument {name!r}{hint}")
    if options is None:
        return kind(**fields)
    if not isinstance(options, Wire) or not issubclass(kind, type(options)):
        raise InputError(
            f"options is {kind_of(options)}; give placer.{kind.__name__}(...), or leave it out"
        )
    given = {name: getattr(options, name) for name in options.model_fields_set}
    if twice := sorted(given.keys() & fields):
        raise InputError(
            f"{twice[0]} is given as an argument and in options; leave one of the two out"
        )
    return kind(**given, **fields)


def rule_for(name: str, rules: Mapping[str, Rule], default: Rule) -> tuple[Rule, str]:
    """Return the rule of a value, and the name of the entry that defines it.

    Args:
        name: of the value, with dots before its parts.
        rules: by name; an entry applies to everything below it.
        default: the rule of a value without an entry, if ``"*"`` has none.

    Returns:
        The rule of the longest matching name, and that name; ``"*"`` for any other value.
    """
    # the name itself first, then the values around it: "a.b.c", "a.b", "a"
    while name:
        if name in rules:
            return rules[name], name
        name = name.rpartition(".")[0]
    return rules.get(OTHERS, default), OTHERS


def _is_allowed(rule: Any, name: str, field_name: str | None) -> bool:
    """Return whether a rule of the field is valid; ``name`` is empty for a rule of all values."""
    is_cut = field_name != "outputs"
    # ``type`` instead of isinstance: True and False are ints, but not dimensions
    if type(rule) is int:
        return 0 <= rule <= _LAST_DIMENSION
    if isinstance(rule, str) and rule in (_CUTS if is_cut else _JOINS):
        return True
    if rule == "auto" and field_name == "target" and not name:
        return True
    return rule is None if is_cut else callable(rule)
