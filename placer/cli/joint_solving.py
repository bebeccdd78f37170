"""``placer solve-together``: placements of several models that are used one after another.

placer solve-together text_encoder=text.json unet=unet.json:50 decoder=decoder.json
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from placer import errors
from placer.cli.files import load_profile
from placer.cli.option_fields import Words, expanded
from placer.cli.options import Memory, Printed, Server, limited
from placer.cli.terminal import spinner
from placer.errors import InputError
from placer.schema.joint import JointOptions, JointRequest, ProfiledModel


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
    request = _request(models, words, memory)
    # OR-Tools takes a second to import
    from placer_client.suggest_together import answer_together

    with spinner(f"asking {server}" if server else "solving"):
        found = answer_together(request, server)
    printed.emit(found)
    if found.joint.infeasible is not None:
        raise errors.InfeasibleError(found.joint.infeasible.reason)
    if not found.placements:
        raise errors.SolveLimitError(
            f"no placements were found within {request.time_limit_s} s; allow more --time-limit"
        )


def _request(texts: Iterable[str], words: Words[JointOptions], memory: list[str]) -> JointRequest:
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
    there = {
        name: model.model_copy(
            update={"profile": model.profile.model_copy(update={"cluster": cluster})}
        )
        for name, model in models.items()
    }
    options = words.read([device.name for device in cluster.devices])
    given = {name: getattr(options, name) for name in options.model_fields_set}
    return JointRequest(models=there, **given)


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
