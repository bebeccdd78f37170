"""Draw the pictures of README and of the documentation: ``make pictures``.

    docs/pictures/placement.svg     the placement of a measured model and the timeline of its training step
    docs/pictures/schedules.svg     the schedules over three equal stages

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
from placer.schema import PlacementRequest, Profile, Schedule
from placer.utils.units import ms_text
from placer_server.workers.timeline import timeline

FOLDER = Path(__file__).parent / "pictures"
NAMES_WIDTH = 90
"""Room for the devices' names, in the units of the drawing."""
LANE_HEIGHT, LANE_STEP = 24, 30
DIGITS_WIDTH = 14
"""A pass narrower than this shows no number."""
PHASES = {
    "forward": ("forward", 4),
    "backward": ("backward", 1),
    "weights": ("weight gradients", 2),
}
"""By phase, its name in the legend and its colour in the report's palette."""
OPTIMIZER = ("optimizer", 7)
SCHEDULES: Sequence[Schedule] = ("fill-drain", "1f1b", "zero-bubble")


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
        steps="alone",
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
        f" {ms_text(shown.step_ms)} predicted for a step; {ms_text(shown.single_device_ms)} on one device"
    )
    names = {device: layers_text(placement.layer_devices, device) for device in _lanes(boxes)}
    return picture("The timeline of a training step", [(title, boxes, names)])


def layers_text(layer_devices: dict[str, str], device: str) -> str:
    """Return the first and the last layer of a device."""
    own = [layer for layer, place in layer_devices.items() if place == device]
    return own[0] if len(own) == 1 else f"{own[0]} to {own[-1]}"


def schedules_picture(stages: int = 3, chunks: int = 5) -> str:
    """Draw one step of equal stages under each schedule.

    Args:
        stages: The number of stages, each on a device of its own.
        chunks: The number of micro-batches.
    """
    pipeline = schedule.Pipeline.chain([10.0] * stages, [20.0] * stages)
    drawn = []
    for name in SCHEDULES:
        played = schedule.simulate(pipeline, schedule.plan(name, pipeline.places, chunks))
        boxes = [
            Box(
                f"device {task.device}",
                *PHASES[task.phase],
                str(task.micro_batch + 1),
                task.start_ms,
                task.end_ms,
            )
            for task in played.tasks
        ]
        idle = 1 - sum(played.busy_ms.values()) / (stages * played.step_ms)
        drawn.append((f"{name}: devices are idle for {idle:.0%} of the step", boxes, {}))
    return picture("The schedules of a training step", drawn)


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


def _lanes(boxes: Sequence[Box]) -> list[str]:
    return list(dict.fromkeys(box.lane for box in sorted(boxes, key=lambda box: box.start_ms)))


def _box(box: Box, top: float, scale: float) -> str:
    x, width = NAMES_WIDTH + box.start_ms * scale, (box.end_ms - box.start_ms) * scale
    words = f"{box.lane}: {box.name} {box.label} {ms_text(box.end_ms - box.start_ms)}"
    shape = (
        f'<rect class="c{box.color}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{LANE_HEIGHT}" stroke="#fff">'
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
