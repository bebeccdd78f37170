"""Options that several commands of ``placer`` share, and groups of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from placer.cli import option_words
from placer.cli.files import Answer, emit
from placer.cli.terminal import extra, users_code
from placer.errors import InputError

Written = TypeVar("Written", str, Path, None)


def in_a_folder(output: Written) -> Written:
    """Return where to write; refuse a missing folder before minutes of work are lost.

    Raises:
        InputError: the folder does not exist.
    """
    if output is not None and output != "-" and not Path(output).parent.is_dir():
        raise InputError(f"cannot write {output}: there is no folder {Path(output).parent}")
    return output


Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="package.module:callable, as placer.zoo.resnet:resnet50"),
]
Memory = Annotated[
    list[str],
    typer.Option(
        "--memory",
        metavar="[DEVICE=]SIZE",
        help="memory that a placement may use of a device, or of each: 8GiB; repeatable",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on a terminal too")]
Server = Annotated[
    str | None,
    typer.Option(
        metavar="URL", envvar="PLACER_URL", help="ask this service; solve here if left out"
    ),
]


@dataclass(frozen=True)
class Example:
    """The arguments of the model's callable, and the example inputs."""

    arg: Annotated[
        list[str],
        typer.Option("--arg", metavar="KEY=VALUE", help="an argument of the callable; repeatable"),
    ] = field(default_factory=list)
    input: Annotated[
        list[str],
        typer.Option(
            "--input",
            "-i",
            metavar="[NAME=]SHAPE[:DTYPE]",
            help="an example input, as 8x3x224x224 or ids=2x16:int64; repeatable",
        ),
    ] = field(default_factory=list)

    @users_code()
    def load(self, spec: str, on_meta: bool = False) -> tuple[Any, Any]:
        """Return the model that a command line names, and its example inputs.

        Args:
            spec: ``package.module:callable``.
            on_meta: make the model on ``meta`` where possible, without memory for its weights.

        Raises:
            InputError: there is no such model, or it carries no example inputs and none are given.
        """
        with extra("torch"):
            from placer.capture.input_forms import carried_inputs
            from placer.cli.model_arguments import load_model, parse_inputs

        def make() -> Any:
            return load_model(spec, self.arg)

        if on_meta:
            from placer.estimator.meta_models import made_on_meta

            module = made_on_meta(make)
        else:
            module = make()
        if self.input:
            return module, parse_inputs(self.input)
        try:
            return module, carried_inputs(module, "suggest")
        except InputError as error:
            kind = type(module).__name__
            raise InputError(
                f"{kind} carries no example inputs; give each with --input, as in 8x3x224x224"
            ) from error


@dataclass(frozen=True)
class Measured(Example):
    """An example, and the devices to measure it on."""

    devices: Annotated[
        str | None,
        typer.Option(help="a number, or names: cuda:0,cuda:1 or cpu:0,cpu:1; by default all"),
    ] = None
    memory: Memory = field(default_factory=list)

    def names(self) -> list[str]:
        """Return the names of the devices.

        Raises:
            InputError: a device does not exist.
        """
        with extra("torch"):
            from placer.devices import resolve
        return [str(device) for device in resolve(option_words.device_list(self.devices))]


@dataclass(frozen=True)
class Printed:
    """Where the answer goes: a file, stdout as JSON, or a table on a terminal."""

    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            callback=in_a_folder,
            help="write the JSON to this file; - for stdout",
        ),
    ] = None
    json: AsJson = False

    def emit(self, answer: Answer) -> None:
        """Write the answer."""
        emit(answer, self.output, self.json)
