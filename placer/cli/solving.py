"""``placer solve``, ``solve-together`` and ``suggest``: find placements, here or on a server.

placer solve profile.json
placer solve-together text_encoder=text.json unet=unet.json:50 decoder=decoder.json
placer suggest package.module:callable --input 1x3x224x224
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, NoReturn

import typer

from placer import errors
from placer.cli.files import load_cluster, load_profile, load_question
from placer.cli.option_fields import Words, expanded
from placer.cli.options import Measured, Memory, Model, Printed, Server, limited, limits
from placer.cli.terminal import profiling_log, spinner, users_code
from placer.errors import InputError
from placer.schema import (
    JointOptions,
    JointRequest,
    Placement,
    PlacementRequest,
    ProfiledModel,
    ProfileOptions,
    SuggestOptions,
)

MEASURING = frozenset({*ProfileOptions.model_fields, "batch_sizes", "profile_on_server"})
"""The options of ``suggest`` that say how to measure."""


@dataclass(frozen=True)
class Target:
    """What a profile is placed on: devices, their memory, and further profiles."""

    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            help="JSON of the devices to place on; by default the devices of the profile",
        ),
    ] = None
    memory: Memory = field(default_factory=list)
    also: Annotated[
        list[str],
        typer.Option(
            "--also",
            metavar="FILE",
            help="objective step: a profile of the same layers at another size; repeatable",
        ),
    ] = field(default_factory=list)
    token_profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="objective generation: a profile of the same layers in a pass of one token",
        ),
    ] = None

    def request(
        self, context: typer.Context, file: str, words: Words[SuggestOptions], others: set[str]
    ) -> PlacementRequest:
        """Return the request in a file, or the request for the profile in it.

        Args:
            context: of the command.
            file: of a profile or a whole request.
            words: the options of the request.
            others: parameters of the command that do not change the request.

        Raises:
            InputError: an option would change a whole request, or there is no cluster.
        """
        subject = load_question(file)
        if isinstance(subject, PlacementRequest):
            _refuse_rest(context, file, others)
            return subject
        cluster = load_cluster(self.cluster) if self.cluster else subject.cluster
        if cluster is None:
            raise InputError(f"the profile in {file} has no cluster; give one with --cluster")
        cluster = limited(cluster, self.memory)
        options = words.read([device.name for device in cluster.devices])
        # The last profile is the main one.
        profiles = [*(load_profile(name) for name in self.also), subject]
        if options.split_tied:
            profiles = [one.untied() for one in profiles]
        token = None if self.token_profile is None else load_profile(self.token_profile)
        if token is not None and options.split_tied:
            token = token.untied()
        request = PlacementRequest.from_options(options, profiles, cluster, token)
        request.warn_of_one_size(options)
        return request


@expanded(SuggestOptions, leave_out=MEASURING)
def solve(
    context: typer.Context,
    file: Annotated[
        str,
        typer.Argument(
            metavar="[FILE|-]",
            help="a profile, or a whole request, which no option changes; - for stdin",
        ),
    ] = "-",
    *,
    target: Target,
    words: Words[SuggestOptions],
    server: Server = None,
    printed: Printed,
) -> None:
    """Find the best placement for a profile, and how good any could be."""
    answer(target.request(context, file, words, {"file"}), server, printed)


@expanded(SuggestOptions, leave_out=frozenset({"profile_on_server"}))
def suggest(
    model: Model,
    measured: Measured,
    *,
    words: Words[SuggestOptions],
    server: Server = None,
    printed: Printed,
) -> None:
    """Profile a model here and find its best placement: profile and solve in one."""
    names = measured.names()
    options = words.read(names).model_copy(update={"profile_on_server": False})
    memory_bytes = limits(names, measured.memory)
    module, inputs = measured.load(model, with_inputs=options.objective != "generation")
    from placer_client.suggest import question

    with profiling_log(), users_code():
        request = question(
            module, inputs, options, devices=names, memory_bytes=memory_bytes or None, server=server
        )
    answer(request, server, printed)


@expanded(JointOptions, leave_out=frozenset({"contiguous", "recompute"}))
def solve_together(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=FILE[:RUNS]",
            help="a name and the profile of each model, and how often it runs in one request",
        ),
    ],
    *,
    words: Words[JointOptions],
    memory: Memory = [],  # noqa: B006
    server: Server = None,
    printed: Printed,
) -> None:
    """Find the best placements of models that are used one after another.

    All weights stay on their devices; only one model at a time has activations.
    """
    request = _joint_request(models, words, memory)
    # OR-Tools takes a second to import
    from placer_client.suggest_together import answer_together

    with spinner(f"asking {server}" if server else "solving"):
        found = answer_together(request, server)
    printed.emit(found)
    _require_found(found.joint, request.time_limit_s)


def _refuse_rest(context: typer.Context, file: str, others: set[str]) -> None:
    """Refuse options that a whole request would make useless; ``others`` stay useful."""
    with_it = {"server", "output", "json", *others}
    sources = {name: context.get_parameter_source(name) for name in set(context.params) - with_it}
    options = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    given = sorted(
        options[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"
    )
    if given:
        verb = "has" if len(given) == 1 else "have"
        raise InputError(
            f"{file} holds a whole request, so {', '.join(given)} {verb} no effect; leave that out,"
            " or give the profile alone"
        )


def answer(request: PlacementRequest, server: str | None, printed: Printed) -> NoReturn:
    """Solve, print the placement, and exit with the code of its status."""
    with spinner(f"asking {server}" if server else "solving"):
        placement = solve_anywhere(request, server)
    printed.emit(placement)
    request.warn_of_hooks(placement.layer_devices)
    _require_found(placement, request.time_limit_s)
    raise typer.Exit(0)


def _require_found(placement: Placement, time_limit_s: float) -> None:
    """Raise the error that gives the exit code of a placement without layers.

    Raises:
        InfeasibleError: no placement meets the requirements.
        SolveLimitError: none was found in time.
    """
    if placement.infeasible is not None:
        raise errors.InfeasibleError(placement.infeasible.reason)
    if not placement.layer_devices:
        raise errors.SolveLimitError(
            f"no placement was found within {time_limit_s} s; allow more --time-limit"
        )


def solve_anywhere(request: PlacementRequest, server: str | None) -> Placement:
    """Return the placement that this process or the server finds."""
    if server is None:
        from placer.solver.solve import solve as solve_here

        return solve_here(request)
    from placer_client.client import Client

    with Client(server) as client:
        return client.place(request)


def _joint_request(
    texts: Iterable[str], words: Words[JointOptions], memory: list[str]
) -> JointRequest:
    """Return the request for profiles in files.

    Raises:
        InputError: a text has another form, a name comes twice, or the profiles do not belong
            together.
    """
    models: dict[str, ProfiledModel] = {}
    for text in texts:
        name, file, runs = _parts(text)
        if name in models:
            raise InputError(f"{name!r} is given twice; give each model a name of its own")
        models[name] = ProfiledModel(profile=load_profile(file), runs=runs)
    cluster = limited(JointRequest(models=models).cluster, memory)
    for name, model in models.items():
        profile = model.profile.model_copy(update={"cluster": cluster})
        models[name] = model.model_copy(update={"profile": profile})
    options = words.read([device.name for device in cluster.devices])
    given = {name: getattr(options, name) for name in options.model_fields_set}
    return JointRequest(models=models, **given)


def _parts(text: str) -> tuple[str, str, int]:
    """Return the name, the file and the runs of ``NAME=FILE[:RUNS]``."""
    name, equals, rest = text.partition("=")
    file, colon, runs = rest.rpartition(":")
    if not (colon and runs.isdecimal()):
        file, runs = rest, "1"
    if not (name and equals and file):
        raise InputError(
            f"{text!r} is not NAME=FILE[:RUNS]; write unet=unet.json:50 for a model that runs 50"
            " times in a request"
        )
    return name, file, int(runs)
