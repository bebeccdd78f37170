"""Draw the pictures of README and of the documentation: ``make pictures``.

    docs/pictures/placement.svg      the placement of a measured model and its training step
    docs/pictures/schedules.svg      one step under each schedule
    docs/pictures/zero_bubble.svg    zero-bubble steps with more and more micro-batches in flight
    docs/pictures/steps.svg          two steps that follow one another
    docs/pictures/architecture.svg   the packages of the project and what passes between them

The model's profile lies next to the pictures. It was measured on a CPU by

    placer profile placer.zoo.resnet:resnet50 --input 8x3x128x128 --devices 4 -o
    docs/pictures/resnet50_profile.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from placer import schedule, solve
from placer.report.charts import WIDTH, drawing, legend
from placer.schema import PlacementRequest, Profile
from placer.utils.units import ms_text
from placer_server.judge.timeline import timeline

FOLDER = Path(__file__).parent / "pictures"
NAMES_WIDTH = 90
"""Width of the devices' names, in the units of the drawing."""
LANE_HEIGHT, LANE_STEP = 24, 30
DIGITS_WIDTH = 14
"""A narrower pass shows no number."""
PHASES = {
    "forward": ("forward", 4),
    "backward": ("backward", 1),
    "weights": ("weight gradients", 2),
}
"""By phase, its name in the legend and its colour in the report's palette."""
OPTIMIZER = ("optimizer", 7)
STAGES, CHUNKS = 3, 6
"""Stages and micro-batches of the drawn schedules. Megatron's interleaved order needs a multiple of
the number of devices as the number of micro-batches."""
FORWARD_MS, BACKWARD_MS = 10.0, 20.0
"""Times of a drawn pass: a backward pass computes two gradients where a forward pass computes one
product."""


class Box(NamedTuple):
    """One pass, or the optimizer's step, in a timeline.

    Attributes:
        lane: The device's name.
        name: What runs, as in the legend.
        color: Index into the report's palette.
        label: The number of the micro-batch; empty for the optimizer.
        start_ms: From the start of the step.
        end_ms: From the start of the step.
    """

    lane: str
    name: str
    color: int
    label: str
    start_ms: float
    end_ms: float


def main() -> int:
    """Write the pictures; return the exit code."""
    profile = Profile.model_validate_json((FOLDER / "resnet50_profile.json").read_text())
    (FOLDER / "placement.svg").write_text(placement_picture(profile))
    (FOLDER / "schedules.svg").write_text(schedules_picture())
    (FOLDER / "zero_bubble.svg").write_text(zero_bubble_picture())
    (FOLDER / "steps.svg").write_text(steps_picture())
    (FOLDER / "architecture.svg").write_text(architecture_picture())
    return 0


def placement_picture(profile: Profile) -> str:
    """Solve a profile for a training step of eight micro-batches, and draw the step.

    Args:
        profile: The model's profile, with its devices.
    """
    # The work limit, and not the time, ends the search, so that every machine draws the same
    # picture.
    request = PlacementRequest(
        profile=profile,
        objective="step",
        schedule="auto",
        step_kind="isolated",
        batch_size=8 * profile.batch_size,
        time_limit_s=300,
        work_limit=20,
    )
    placement = solve(request)
    shown = timeline(request, placement)
    boxes = [
        Box(item.device, *PHASES[item.phase], str(item.micro_batch + 1), item.start_ms, item.end_ms)
        for item in shown.passes
    ]
    last_ms = max(box.end_ms for box in boxes)
    boxes += [
        Box(device.device, *OPTIMIZER, "", last_ms, last_ms + device.optimizer_ms)
        for device in shown.devices
        if device.optimizer_ms
    ]
    # one device has the memory for this model
    assert shown.single_device_ms is not None
    title = (
        f"ResNet-50 on {len(shown.devices)} devices, {shown.schedule} schedule:"
        f" {ms_text(shown.step_ms)} predicted for a step;"
        f" {ms_text(shown.single_device_ms)} on one device"
    )
    names = {device: layers_text(placement.layer_devices, device) for device in _lanes(boxes)}
    return picture("The timeline of a training step", [(title, boxes, names)])


def layers_text(layer_devices: dict[str, str], device: str) -> str:
    """Return the first and the last layer of a device."""
    own = [layer for layer, place in layer_devices.items() if place == device]
    return own[0] if len(own) == 1 else f"{own[0]} to {own[-1]}"


def schedules_picture() -> str:
    """Draw one step under each schedule, of equal stages and equal work for each device."""
    chain = _chain()
    rounds = _chain(rounds=2)
    drawn = [
        _step(name, chain, schedule.plan(name, chain.places, CHUNKS))
        for name in ("fill-drain", "1f1b", "zero-bubble")
    ]
    drawn.append(_step("interleaved", rounds, schedule.plan("interleaved", rounds.places, CHUNKS)))
    return picture("The schedules of a training step", drawn)


def zero_bubble_picture() -> str:
    """Draw zero-bubble steps, each with more micro-batches in flight than the one before."""
    chain = _chain()
    rooms = {
        "as many as under 1f1b": [STAGES - stage for stage in range(STAGES)],
        f"{STAGES} at every stage (ZB-H1)": [STAGES] * STAGES,
        f"{2 * STAGES} at every stage (ZB-H2)": [2 * STAGES] * STAGES,
    }
    drawn = [
        _step(name, chain, schedule.plan("zero-bubble", chain.places, CHUNKS, room=room))
        for name, room in rooms.items()
    ]
    return picture("Micro-batches in flight under zero-bubble", drawn)


def steps_picture() -> str:
    """Draw two steps that follow one another: one drains while the next one fills."""
    chain = _chain()
    played = schedule.simulate(chain, schedule.plan("zero-bubble", chain.places, CHUNKS), steps=2)
    title = f"two zero-bubble steps: micro-batches 1 to {CHUNKS}, then {CHUNKS + 1} to {2 * CHUNKS}"
    return picture("Two steps that overlap", [(title, _boxes(played.tasks), {})])


def _chain(rounds: int = 1) -> schedule.Pipeline:
    """Return a chain of equal stages that visits each device once per round."""
    count = STAGES * rounds
    return schedule.Pipeline.chain(
        [FORWARD_MS / rounds] * count,
        [BACKWARD_MS / rounds] * count,
        places=list(range(STAGES)) * rounds,
    )


def _step(
    name: str, pipeline: schedule.Pipeline, plan: schedule.Plan
) -> tuple[str, list[Box], dict[str, str]]:
    """Return a simulated step as ``picture`` takes it."""
    played = schedule.simulate(pipeline, plan)
    return f"{name}: devices are idle for {played.bubble:.0%} of the step", _boxes(played.tasks), {}


def _boxes(tasks: Sequence[schedule.TimelineTask]) -> list[Box]:
    # A device's second stage has a mark behind the number of the micro-batch.
    return [
        Box(
            f"device {task.device}",
            *PHASES[task.phase],
            str(task.micro_batch + 1) + "\N{PRIME}" * (task.stage // STAGES),
            task.start_ms,
            task.end_ms,
        )
        for task in tasks
    ]


def picture(name: str, timelines: Sequence[tuple[str, Sequence[Box], dict[str, str]]]) -> str:
    """Draw timelines below one another, all to the same scale.

    Args:
        name: For readers who cannot see the picture.
        timelines: Of each its title, its passes, and by device a text that stands below the
            device's passes.
    """
    scale = (WIDTH - NAMES_WIDTH - 8) / max(
        box.end_ms for _, boxes, _ in timelines for box in boxes
    )
    shapes, y = [], 8
    for title, boxes, texts in timelines:
        shapes.append(_text(8, y + 14, title))
        y += 24
        step = LANE_STEP + (14 if texts else 0)
        lanes = {lane: y + number * step for number, lane in enumerate(_lanes(boxes))}
        for lane, top in lanes.items():
            shapes.append(_text(8, top + 16, lane))
            if lane in texts:
                shapes.append(_text(NAMES_WIDTH, top + LANE_HEIGHT + 13, texts[lane], "faint"))
        shapes += [_box(box, lanes[box.lane], scale) for box in boxes]
        y += len(lanes) * step + 8
    keys = dict.fromkeys((box.name, box.color) for _, boxes, _ in timelines for box in boxes)
    names, height = legend(list(keys), y)
    height += y + 8
    # Where a page is dark the reader's browser may show the picture on black, and its text is dark.
    back = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return drawing(name, back + "".join(shapes) + names, height, style=True) + "\n"


class Package(NamedTuple):
    """A box of the architecture's picture.

    Attributes:
        path: The folder or file, relative to the root of the repository.
        text: What it does.
        x: The left edge, in columns of the picture.
        y: The upper edge, in rows of the picture.
        columns: The width, in columns.
    """

    path: str
    text: str
    x: float
    y: int
    columns: float = 1


PACKAGES = (
    Package("client", "placer.suggest; clients of the service", 0, 0, 2),
    Package("placer/cli", "commands", 2, 0),
    Package("server", "REST, jobs, store, web page", 3, 0),
    Package("placer/pretrained", "from a checkpoint to text in one call", 0, 1, 4 / 3),
    Package("placer/refinement", "measures stages, solves again", 4 / 3, 1, 4 / 3),
    Package("placer/evaluation", "judges maps of one's own", 8 / 3, 1, 4 / 3),
    Package("placer/estimator", "memory without devices", 0, 2, 4 / 3),
    Package("placer/checkpoints", "weights from files to devices", 4 / 3, 2, 4 / 3),
    Package("placer/distributed", "runs a process for each device", 8 / 3, 2, 4 / 3),
    Package("placer/profiler", "measures layers and links", 0, 3),
    Package("placer/solver", "finds and proves a placement", 1, 3),
    Package("placer/executor", "runs the model as placed", 2, 3, 2),
    Package("placer/report", "tables, timelines, pages", 0, 4, 2),
    Package("placer/capture", "from nn.Module to layer graph", 2, 4, 2),
    Package("placer/schema", "requests and answers", 0, 5),
    Package("placer/exports", "other engines' formats", 1, 5),
    Package("placer/schedule", "orders of passes as data", 2, 5),
    Package("placer/devices", "CUDA devices and stand-ins", 3, 5),
)
"""A package imports only packages in rows below its own, and others of the last row."""
CAPTIONS = (
    "entry points",
    "what joins the parts",
    "what is built on the parts",
    "the parts, which never import one another",
    "what the parts use",
    "shared by all",
)
COLUMN, ROW, BOX_HEIGHT = 238, 74, 50
"""Units of the drawing."""


def architecture_picture() -> str:
    """Draw the packages in rows, each above what it imports."""
    shapes = [_text(8, row * ROW + 14, caption, "faint") for row, caption in enumerate(CAPTIONS)]
    for package in PACKAGES:
        x, y = 4 + package.x * COLUMN, package.y * ROW + 18
        width = package.columns * COLUMN - 10
        shapes.append(
            f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{BOX_HEIGHT}" rx="4" fill="#eef3f8"'
            f' stroke="#0072b2"/>'
        )
        shapes.append(_text(x + 8, y + 20, package.path + "/"))
        shapes.append(_text(x + 8, y + 39, package.text, "faint"))
    height = len(CAPTIONS) * ROW + 8
    back = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return drawing("The packages of Placer", back + "".join(shapes), height, style=True) + "\n"


def _lanes(boxes: Sequence[Box]) -> list[str]:
    return list(dict.fromkeys(box.lane for box in sorted(boxes, key=lambda box: box.start_ms)))


def _box(box: Box, top: float, scale: float) -> str:
    x, width = NAMES_WIDTH + box.start_ms * scale, (box.end_ms - box.start_ms) * scale
    words = f"{box.lane}: {box.name} {box.label} {ms_text(box.end_ms - box.start_ms)}"
    shape = (
        f'<rect class="c{box.color}" x="{x:.1f}" y="{top}" width="{width:.1f}"'
        f' height="{LANE_HEIGHT}" stroke="#fff">'
        f"<title>{escape(words)}</title></rect>"
    )
    if width < DIGITS_WIDTH or not box.label:
        return shape
    return (
        shape
        + f'<text x="{x + width / 2:.1f}" y="{top + 16}" text-anchor="middle">{box.label}</text>'
    )


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{mark}>{escape(words)}</text>'


if __name__ == "__main__":
    sys.exit(main())
