"""The referee of joint placements: recomputes time and memory from the models' own profiles.

It never builds the joint profile that the solver uses.
"""

from __future__ import annotations

from placer.schema.joint import JointPlacement, JointRequest
from placer.solver.check import check
from placer.solver.referee.claims import equal, near, require
from placer.solver.referee.latency import latency_ms
from placer.solver.referee.memory import Memory


def check_together(request: JointRequest, found: JointPlacement) -> None:
    """Raise on the first contradiction between a joint request and its placements.

    Args:
        request: the models.
        found: the answer.

    Raises:
        PlacementError: what is claimed, and what is true.
    """
    equal("runs", found.runs, {name: model.runs for name, model in request.models.items()})
    joint = found.joint
    if not joint.layer_devices:
        equal("placements", found.placements, {})
        return
    equal("placements", list(found.placements), list(request.models))
    where = {
        f"{name}/{layer}": device
        for name, placement in found.placements.items()
        for layer, device in placement.layer_devices.items()
    }
    equal("joint.layer_devices", joint.layer_devices, where)
    total_ms = 0.0
    state = {load.device: 0 for load in joint.devices}
    working = dict(state)
    for name, model in request.models.items():
        asked, placement = request.of_model(name), found.placements[name]
        check(asked, placement)
        total_ms += model.runs * latency_ms(asked, placement.layer_devices)
        # The models run in turn: the state of all of them stays on a device, but only the largest
        # of their working memories is in use at a time.
        memory = Memory(asked, placement.layer_devices, contiguous=False)
        for device in state:
            peak = max(map(sum, memory.splits(device, 1)))
            state[device] += memory.total(device, 1) - peak
            working[device] = max(working[device], peak)
    near("request_ms", found.request_ms or 0.0, total_ms)
    require(
        (found.bound_ms or 0.0) <= total_ms * (1 + 1e-9),
        f"bound {found.bound_ms} is over the time of a request, {total_ms}",
    )
    limits = {device.name: device.usable_bytes for device in request.cluster.devices}
    for load in joint.devices:
        held = state[load.device] + working[load.device]
        equal(f"memory of {load.device!r}", load.memory.total_bytes, held)
        require(
            held <= limits[load.device],
            f"{load.device!r} needs {held} bytes, {limits[load.device]} are there",
        )
