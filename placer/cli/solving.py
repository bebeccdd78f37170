"""``placer solve`` and ``placer suggest``: find a placement, here or on a server."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from placer import errors
from placer.cli.files import emit, load_cluster, load_profile, load_question
from placer.cli.options import (
    AlsoProfiles,
    Arguments,
    AsJson,
    BatchSize,
    Bottleneck,
    BreakTies,
    CacheFolder,
    Chunks,
    Contiguous,
    Devices,
    Explain,
    Forbidden,
    Granularity,
    Inference,
    Inputs,
    Loss,
    MaxDevices,
    MaxLayers,
    Memory,
    MinDevices,
    Model,
    NoCache,
    ObjectiveOption,
    Optimizer,
    Output,
    Pins,
    Recompute,
    RecomputeOn,
    ScheduleOption,
    Server,
    Sizes,
    SplitTied,
    StepsOption,
    Target,
    TimeLimit,
    TransfersOption,
    WorkLimit,
)
from placer.cli.profiling import (
    as_limited,
    cached,
    devices_of,
    loss_of,
    measure_sizes,
    sample_counts,
    sizes_of,
)
from placer.cli.terminal import spinner
from placer.errors import InputError
from placer.request_spec import blank_profiles, layer_of, limited, request_for, rules
from placer.schema import Placement, PlacementRequest, Profile


def solve(
    context: typer.Context,
    file: Annotated[
        str,
        typer.Argument(
            metavar="[FILE|-]",
            help="a profile, or a whole request, which stands as it is; - for stdin",
        ),
    ] = "-",
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-", help="JSON of the devices to place on; the profile's own else"
        ),
    ] = None,
    memory: Memory = [],  # noqa: B006
    objective: ObjectiveOption = "throughput",
    chunks: Chunks = 1,
    batch_size: BatchSize = None,
    also: AlsoProfiles = [],  # noqa: B006
    schedule: ScheduleOption = None,
    steps: StepsOption = None,
    transfers: TransfersOption = "added",
    pin: Pins = [],  # noqa: B006
    forbid: Forbidden = [],  # noqa: B006
    max_devices: MaxDevices = None,
    min_devices: MinDevices = None,
    max_layers: MaxLayers = None,
    recompute: Recompute = False,
    recompute_on: RecomputeOn = [],  # noqa: B006
    contiguous: Contiguous = None,
    time_limit: TimeLimit = 30.0,
    work_limit: WorkLimit = None,
    bottleneck: Bottleneck = None,
    break_ties: BreakTies = False,
    explain: Explain = False,
    split_tied: SplitTied = False,
    server: Server = None,
    output: Output = None,
    json: AsJson = False,
) -> None:
    """Find the best placement for a profile, and how good any could be."""
    subject = load_question(file)
    if isinstance(subject, PlacementRequest):
        _refuse_rest(context, file)
        answer(subject, server, output, json)
    target = load_cluster(cluster) if cluster else subject.cluster
    if target is None:
        raise InputError(f"the profile in {file} has no cluster; give one with --cluster")
    target = limited(target, memory)
    limits = rules(
        target,
        pin,
        forbid,
        max_devices,
        contiguous,
        min_devices,
        max_layers,
        recompute,
        recompute_on,
    )
    others = [load_profile(name) for name in also]
    if split_tied:
        subject, others = subject.untied(), [other.untied() for other in others]
    given = (objective, chunks, schedule, transfers, time_limit, explain, batch_size, others)
    request = request_for(
        subject, target, limits, *given, break_ties, bottleneck, work_limit, steps
    )
    answer(request, server, output, json)


def suggest(
    model: Model,
    arg: Arguments = [],  # noqa: B006
    input: Inputs = [],  # noqa: B006
    devices: Devices = None,
    memory: Memory = [],  # noqa: B006
    inference: Inference = False,
    optimizer: Optimizer = "adam",
    granularity: Granularity = "auto",
    cache: CacheFolder = None,
    no_cache: NoCache = False,
    loss: Loss = None,
    target: Target = None,
    objective: ObjectiveOption = "throughput",
    chunks: Chunks = 1,
    batch_size: BatchSize = None,
    micro_batches: Sizes = None,
    schedule: ScheduleOption = None,
    steps: StepsOption = None,
    transfers: TransfersOption = "added",
    pin: Pins = [],  # noqa: B006
    forbid: Forbidden = [],  # noqa: B006
    max_devices: MaxDevices = None,
    min_devices: MinDevices = None,
    max_layers: MaxLayers = None,
    recompute: Recompute = False,
    recompute_on: RecomputeOn = [],  # noqa: B006
    contiguous: Contiguous = None,
    time_limit: TimeLimit = 30.0,
    work_limit: WorkLimit = None,
    bottleneck: Bottleneck = None,
    break_ties: BreakTies = False,
    explain: Explain = False,
    split_tied: SplitTied = False,
    server: Server = None,
    output: Output = None,
    json: AsJson = False,
) -> None:
    """Profile a model here and find its best placement: profile and solve in one."""
    keep, lost, sizes = cached(cache, no_cache), loss_of(loss, target), _sizes(micro_batches)

    def asked(profiles: list[Profile]) -> PlacementRequest:
        profiles = [one.untied() for one in profiles] if split_tied else profiles
        measured = profiles[-1]  # the largest micro-batch
        cluster = measured.cluster
        assert cluster is not None  # profile() measures the devices
        limits = rules(
            cluster,
            pin,
            forbid,
            max_devices,
            contiguous,
            min_devices,
            max_layers,
            recompute,
            recompute_on,
        )
        given = (
            objective,
            chunks,
            schedule,
            transfers,
            time_limit,
            explain,
            batch_size,
            profiles[:-1],
        )
        return request_for(
            measured, cluster, limits, *given, break_ties, bottleneck, work_limit, steps
        )

    _refuse_no_url(server)
    layers = [layer_of(text) for text in (*pin, *forbid)]
    asked(
        as_limited(
            blank_profiles(not inference, layers, devices_of(devices), sizes_of(input, sizes)),
            memory,
        )
    )
    where = (model, arg, input, devices, memory, inference, optimizer, granularity)
    answer(asked(measure_sizes(*where, keep, sizes, **lost)), server, output, json)


def _refuse_rest(context: typer.Context, file: str) -> None:
    """A whole request says all that options say; those beside it would do nothing."""
    with_it = {"file", "server", "output", "json"}
    sources = {name: context.get_parameter_source(name) for name in set(context.params) - with_it}
    options = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    given = sorted(
        options[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"
    )
    if given:
        one = "is" if len(given) == 1 else "are"
        raise InputError(
            f"{file} holds a whole request, which stands as it is, so {', '.join(given)} {one} of no use; leave that"
            " out, or give the profile alone"
        )


def _refuse_no_url(server: str | None) -> None:
    """Before a model is measured."""
    if server is not None:
        from placer_client.connection import url_of

        url_of(server)


def _sizes(text: str | None) -> list[int] | None:
    if text is None:
        return None
    sizes = sample_counts(text)
    if sizes is None:
        raise InputError(f"--micro-batches {text!r}: give numbers of samples, as in 8,16")
    return sizes


def answer(
    request: PlacementRequest, server: str | None, output: str | None, as_json: bool
) -> NoReturn:
    """Solve, print the placement, and leave with the code that tells its status."""
    with spinner(f"asking {server}" if server else "solving"):
        placement = ask(request, server)
    emit(placement, output, as_json)
    if placement.infeasible is not None:
        raise errors.InfeasibleError(placement.infeasible.reason)
    if not placement.layer_devices:
        raise errors.SolveLimitError(
            f"no placement was found within {request.time_limit_s} s; allow more --time-limit"
        )
    raise typer.Exit(0)


def ask(request: PlacementRequest, server: str | None) -> Placement:
    """Solve here, or ask the server."""
    if server is None:
        from placer.solver.solve import solve as solve_here

        return solve_here(request)
    from placer_client.client import Client

    with Client(server) as client:
        return client.place(request)
