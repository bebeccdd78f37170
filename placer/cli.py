"""The command ``placer``: the composition root; it may import everything, and does when a command needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape

import placer
from placer import errors
from placer.cli_options import (
    Arguments,
    AsJson,
    Chunks,
    Contiguous,
    Devices,
    Explain,
    Forbidden,
    Granularity,
    Inference,
    Inputs,
    MaxDevices,
    Memory,
    Model,
    ObjectiveOption,
    Optimizer,
    Output,
    Pins,
    ScheduleOption,
    Server,
    TimeLimit,
    TransfersOption,
)
from placer.errors import InputError, PlacerError
from placer.report.explain import table
from placer.request_spec import limited, request_for, rules
from placer.schema import Cluster, Placement, PlacementRequest, Profile

EXIT_CODES = (
    "Exit codes: 0 done; 2 bad input; 3 infeasible: no placement is possible; 4 the time limit passed before a "
    "placement was found; 5 the server could not be reached or failed; 1 anything else."
)

app = typer.Typer(
    help=f"Find where each layer of a PyTorch model should run.\n\n{EXIT_CODES}",
    epilog="JSON goes to stdout when it is piped, with --json or with -o; tables are for people on a terminal.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
err = Console(stderr=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(placer.__version__)
        raise typer.Exit(0)


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, help="print the version")] = False,
) -> None:
    """What goes before a command."""


@app.command()
def profile(
    model: Model,
    arg: Arguments = [],  # noqa: B006
    input: Inputs = [],  # noqa: B006
    devices: Devices = None,
    memory: Memory = [],  # noqa: B006
    inference: Inference = False,
    optimizer: Optimizer = "adam",
    granularity: Granularity = "auto",
    output: Output = None,
    json: AsJson = False,
) -> None:
    """Measure a model's layers on the devices: times, memory, and the bytes between them."""
    measured = _measure(model, arg, input, devices, memory, inference, optimizer, granularity)
    _emit(measured, output, json)


@app.command()
def solve(
    file: Annotated[
        str,
        typer.Argument(metavar="[FILE|-]", help="a profile, or a whole request, which stands as it is; - for stdin"),
    ] = "-",
    cluster: Annotated[
        Path | None, typer.Option(help="JSON of the devices to place on; the profile's own else")
    ] = None,
    memory: Memory = [],  # noqa: B006
    objective: ObjectiveOption = "throughput",
    chunks: Chunks = 1,
    schedule: ScheduleOption = "1f1b",
    transfers: TransfersOption = "added",
    pin: Pins = [],  # noqa: B006
    forbid: Forbidden = [],  # noqa: B006
    max_devices: MaxDevices = None,
    contiguous: Contiguous = None,
    time_limit: TimeLimit = 30.0,
    explain: Explain = False,
    server: Server = None,
    output: Output = None,
    json: AsJson = False,
) -> None:
    """Find the best placement for a profile, and how good any could be."""
    subject = _load(file)
    if isinstance(subject, PlacementRequest):
        _answer(subject, server, output, json)
    if not isinstance(subject, Profile):
        raise InputError(f"{file} holds a {type(subject).__name__.lower()}; solve needs a profile")
    target = Cluster.model_validate_json(_read(str(cluster))) if cluster else subject.cluster
    if target is None:
        raise InputError(f"the profile in {file} has no cluster; give one with --cluster")
    target = limited(target, memory)
    limits = rules(target, pin, forbid, max_devices, contiguous)
    request = request_for(subject, target, limits, objective, chunks, schedule, transfers, time_limit, explain)
    _answer(request, server, output, json)


@app.command()
def suggest(
    model: Model,
    arg: Arguments = [],  # noqa: B006
    input: Inputs = [],  # noqa: B006
    devices: Devices = None,
    memory: Memory = [],  # noqa: B006
    inference: Inference = False,
    optimizer: Optimizer = "adam",
    granularity: Granularity = "auto",
    objective: ObjectiveOption = "throughput",
    chunks: Chunks = 1,
    schedule: ScheduleOption = "1f1b",
    transfers: TransfersOption = "added",
    pin: Pins = [],  # noqa: B006
    forbid: Forbidden = [],  # noqa: B006
    max_devices: MaxDevices = None,
    contiguous: Contiguous = None,
    time_limit: TimeLimit = 30.0,
    explain: Explain = False,
    server: Server = None,
    output: Output = None,
    json: AsJson = False,
) -> None:
    """Profile a model here and find its best placement: profile and solve in one."""
    measured = _measure(model, arg, input, devices, memory, inference, optimizer, granularity)
    target = measured.cluster
    assert target is not None  # profile() measures the devices
    limits = rules(target, pin, forbid, max_devices, contiguous)
    request = request_for(measured, target, limits, objective, chunks, schedule, transfers, time_limit, explain)
    _answer(request, server, output, json)


@app.command()
def show(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="a profile, placement, request or cluster")],
    json: AsJson = False,
) -> None:
    """Show a profile or a placement as tables."""
    subject = _load(file)
    if isinstance(subject, PlacementRequest):
        subject = subject.profile
    if json:
        _print_json(subject)
    else:
        Console().print(table(subject))


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="the address to listen on")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="the port; 0 takes a free one")] = None,
    database: Annotated[str | None, typer.Option(help="the file that keeps placements; :memory: for none")] = None,
    keys_file: Annotated[
        str | None, typer.Option(help="bearer keys; needed where others can reach the service")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="solves that run at the same time")] = None,
    log_level: Annotated[str | None, typer.Option(help="critical, error, warning, info or debug")] = None,
) -> None:
    """Serve placements over REST; what is left out comes from PLACER_HOST, PLACER_PORT, ... or has a default."""
    with _extra("server"):
        from placer_server.app import run
        from placer_server.settings import Settings
    options = {
        "host": host,
        "port": port,
        "database": database,
        "keys_file": keys_file,
        "workers": workers,
        "log_level": log_level,
    }
    run(Settings(**{name: value for name, value in options.items() if value is not None}))


@app.command()
def doctor(json: AsJson = False) -> None:
    """Look at this machine: devices, links, torch, extras, and what would stop a placement; exit code 1 if anything."""
    from placer.doctor import examine

    with _spinner("measuring devices and links"):
        report = examine(os.environ.get("PLACER_URL"))
    if json or not sys.stdout.isatty():
        print(report.model_dump_json(indent=1))
    else:
        Console().print(report.table())
    raise typer.Exit(1 if report.problems else 0)


@app.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="smaller models and images")] = False,
) -> None:
    """Profile ResNet-50 and U-Net, place them through the service, split them, and compare with the unsplit models."""
    with _extra("torch"):
        from placer.demo import run
    raise typer.Exit(0 if run(quick=quick) else 1)


def main(arguments: list[str] | None = None) -> None:
    """Run the command; errors become one or two lines and an exit code.

    Args:
        arguments: of the command line; ``sys.argv`` if None.
    """
    try:
        try:
            app(args=arguments)
        finally:
            sys.stdout.flush()  # here, where a reader that has left can still be told
    except PlacerError as error:
        _fail(str(error), _exit_code(error))
    except ValidationError as error:
        _fail(_first_fault(error), 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter tries again at its end
        sys.exit(1)
    except Exception as error:
        if os.environ.get("PLACER_DEBUG"):
            raise
        _fail(f"{type(error).__name__}: {error} (PLACER_DEBUG=1 shows where)", 1)


def _exit_code(error: PlacerError) -> int:
    kinds = {
        errors.InputError: 2,
        errors.CaptureError: 2,  # the model fails on the inputs
        errors.InfeasibleError: 3,
        errors.SolveLimitError: 4,
        errors.ServerError: 5,
    }
    return next((code for kind, code in kinds.items() if isinstance(error, kind)), 1)


def _fail(message: str, code: int) -> NoReturn:
    first, *rest = message.strip().splitlines() or ["failed"]
    err.print(f"[bold red]error:[/] {escape(first)}", soft_wrap=True, highlight=False)
    if rest:
        err.print(escape(rest[0]), soft_wrap=True, highlight=False)
    sys.exit(code)


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in fault["loc"])
    return f"{error.title}{' at ' if where else ''}{where[:200]}: {fault['msg'].removeprefix('Value error, ')}"


def _measure(
    model: str,
    arguments: list[str],
    inputs: list[str],
    devices: str | None,
    memory: list[str],
    inference: bool,
    optimizer: str,
    granularity: str,
) -> Profile:
    with _extra("torch"):
        from placer.model_spec import load_model, parse_inputs
        from placer.profiler.profile import profile as measure
    module = load_model(model, arguments)
    measured = measure(
        module,
        parse_inputs(inputs) if inputs else _carried(module),
        _devices(devices),
        training=not inference,
        optimizer=None if optimizer == "none" else optimizer,
        granularity=int(granularity) if granularity.isdecimal() else granularity,
    )
    assert measured.cluster is not None  # profile() measures the devices
    return measured.model_copy(update={"cluster": limited(measured.cluster, memory)})


def _carried(module: Any) -> Any:
    from placer_client.suggest import _carried_inputs

    try:
        return _carried_inputs(module)
    except InputError as error:
        kind = type(module).__name__
        raise InputError(f"{kind} carries no example inputs; give each with --input, as in 8x3x224x224") from error


def _devices(text: str | None) -> int | list[str] | None:
    if text is None:
        return None
    return int(text) if text.isdecimal() else [name.strip() for name in text.split(",")]


def _answer(request: PlacementRequest, server: str | None, output: str | None, as_json: bool) -> NoReturn:
    """Solve, print the placement, and leave with the code that tells its status."""
    with _spinner(f"asking {server}" if server else "solving"):
        placement = _ask(request, server)
    _emit(placement, output, as_json)
    if placement.infeasible is not None:
        raise errors.InfeasibleError(placement.infeasible.reason)
    if not placement.layer_devices:
        raise errors.SolveLimitError(f"no placement was found within {request.time_limit_s} s; allow more --time-limit")
    raise typer.Exit(0)


def _ask(request: PlacementRequest, server: str | None) -> Placement:
    if server is None:
        from placer.solver.solve import solve as solve_here

        return solve_here(request)
    from placer_client.client import Client

    with Client(server) as client:
        return client.place(request)


def _emit(subject: Profile | Placement, output: str | None, as_json: bool) -> None:
    """JSON to where it was asked for or to a pipe; a table to a terminal."""
    if output is not None and output != "-":
        try:
            Path(output).write_text(subject.to_json() + "\n")
        except OSError as error:
            raise InputError(f"cannot write {output}: {error.strerror}") from error
    if as_json or output == "-" or (output is None and not sys.stdout.isatty()):
        _print_json(subject)
    elif sys.stdout.isatty():
        Console().print(table(subject))


def _print_json(subject: Profile | Placement | Cluster) -> None:
    print(subject.model_dump_json(indent=1) if isinstance(subject, Cluster) else subject.to_json())


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file}: {getattr(error, 'strerror', error)}") from error


def _load(file: str) -> Profile | Placement | PlacementRequest | Cluster:
    """What a JSON file holds, told by its fields."""
    import json

    text = _read(file)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON: {error}") from error
    fields: Any = content if isinstance(content, dict) else {}
    kinds: dict[str, type[Profile | Placement | PlacementRequest | Cluster]] = {
        "profile": PlacementRequest,
        "status": Placement,
        "layers": Profile,
        "devices": Cluster,
    }
    for field, kind in kinds.items():
        if field in fields:
            return kind.model_validate(content)
    raise InputError(f"{file} holds no profile, placement, request or cluster")


@contextmanager
def _extra(name: str) -> Iterator[None]:
    """Tell which extra is missing when an import fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed: pip install 'torch-placer[{name}]'"
        raise errors.MissingExtraError(missing) from error


def _spinner(text: str) -> Any:
    return err.status(text) if sys.stderr.isatty() else nullcontext()
