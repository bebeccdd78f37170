"""The options that several commands of ``placer`` share, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import typer

from placer.errors import InputError

Written = TypeVar("Written", str, Path, None)


def in_a_folder(output: Written) -> Written:
    """Before minutes go into what is to be written there."""
    if output is not None and output != "-" and not Path(output).parent.is_dir():
        raise InputError(f"cannot write {output}: there is no folder {Path(output).parent}")
    return output


Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="package.module:callable, as placer.zoo.resnet:resnet50"),
]
Arguments = Annotated[
    list[str],
    typer.Option("--arg", metavar="KEY=VALUE", help="an argument of the callable; repeatable"),
]
Inputs = Annotated[
    list[str],
    typer.Option(
        "--input",
        "-i",
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="an example input, as 8x3x224x224 or ids=2x16:int64; repeatable",
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        help="a count, or names: cuda:0,cuda:1 or cpu:0,cpu:1; all that are here if left out"
    ),
]
Loss = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="package.module:function of output and target, in training"),
]
Target = Annotated[
    str | None,
    typer.Option(metavar="SHAPE[:DTYPE]", help="of the loss, for one micro-batch: 8:int64"),
]
Memory = Annotated[
    list[str],
    typer.Option(
        "--memory",
        metavar="[DEVICE=]SIZE",
        help="what a placement may use of a device, or of each: 8GiB; repeatable",
    ),
]
Inference = Annotated[
    bool, typer.Option("--inference", help="place inference; a training step otherwise")
]
Optimizer = Annotated[
    str, typer.Option(help="whose state counts in training: adam, sgd, ... or none")
]
Granularity = Annotated[
    str, typer.Option(help="how layers are cut: auto, blocks, submodule, fine or a depth")
]
CacheFolder = Annotated[
    str | None,
    typer.Option("--cache", metavar="FOLDER", help="where measurements are kept, and found again"),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="measure everything anew, and keep nothing")
]
Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        callback=in_a_folder,
        help="write the JSON to this file; - for stdout",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on a terminal too")]
ObjectiveOption = Annotated[
    str,
    typer.Option(
        "--objective", help="what is made small: throughput, step, latency, memory or devices"
    ),
]
Bottleneck = Annotated[
    float | None,
    typer.Option(
        "--bottleneck", metavar="MS", help="objective devices: no device may be busy longer"
    ),
]
Chunks = Annotated[int, typer.Option(min=1, help="micro-batches in a batch")]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="objective step: samples in a whole batch")
]
Sizes = Annotated[
    str | None,
    typer.Option(
        "--micro-batches", metavar="8,16", help="objective step: sizes to measure and choose from"
    ),
]
AlsoProfiles = Annotated[
    list[str],
    typer.Option(
        "--also",
        metavar="FILE",
        help="objective step: a profile of the same layers at another size; repeatable",
    ),
]
ScheduleOption = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help="order of micro-batches: fill-drain, 1f1b, zero-bubble or interleaved; auto under objective step",
        show_default="1f1b; auto under objective step",
    ),
]
StepsOption = Annotated[
    str | None,
    typer.Option(
        "--steps",
        help="objective step: alone, from idle devices to idle devices; or in-a-row, as in a training loop",
        show_default="in-a-row; alone in inference",
    ),
]
TransfersOption = Annotated[
    str,
    typer.Option(
        "--transfers", help="added: computes, then transfers; or overlapped: the larger of the two"
    ),
]
Pins = Annotated[
    list[str],
    typer.Option(
        "--pin", metavar="LAYER=DEVICE", help="the layer must be on the device; repeatable"
    ),
]
Forbidden = Annotated[
    list[str],
    typer.Option(
        "--forbid",
        metavar="LAYER=DEVICE",
        help="the layer must not be there; * for every layer; repeatable",
    ),
]
MaxDevices = Annotated[int | None, typer.Option(min=1, help="use at most so many devices")]
MinDevices = Annotated[int | None, typer.Option(min=1, help="use at least so many devices")]
MaxLayers = Annotated[int | None, typer.Option(min=1, help="no device holds more layers")]
Contiguous = Annotated[
    bool | None,
    typer.Option(
        "--contiguous/--free", help="a stage is never left and come back to; or it may be"
    ),
]
Recompute = Annotated[
    bool,
    typer.Option(
        "--recompute",
        help="where memory would not do otherwise, keep less and run forwards once more",
    ),
]
RecomputeOn = Annotated[
    list[str],
    typer.Option(
        "--recompute-on",
        metavar="DEVICE=WORD",
        help="never, auto or always, for one device; repeatable",
    ),
]
TimeLimit = Annotated[
    float, typer.Option(min=0.001, help="seconds to solve; then the best so far is the answer")
]
WorkLimit = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="work to solve, too, in the solver's own measure: the same answer on every machine",
    ),
]
BreakTies = Annotated[
    bool,
    typer.Option(
        "--break-ties",
        help="of placements as good, the one with less transfer, then better balance",
    ),
]
SplitTied = Annotated[
    bool,
    typer.Option(
        "--split-tied",
        help="layers that share parameters may be on several devices, each with a copy",
    ),
]
Explain = Annotated[
    bool, typer.Option("--explain", help="also say what limits the placement and what would help")
]
Server = Annotated[
    str | None,
    typer.Option(
        metavar="URL", envvar="PLACER_URL", help="ask this service; solve here if left out"
    ),
]
