"""Corrections by stage times: against times that a made-up machine really takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from placer.errors import InfeasibleError
from placer.refinement.correction import corrected, improve, predicted
from placer.schema import Cluster, Device, Edge, Layer, Link, Placement, PlacementRequest, Profile
from placer.schema.refinement import StageTime
from placer.solver.solve import solve

KIND = "chip"
ALONE_MS = [3.0, 1.0, 4.0, 1.0, 5.0, 2.0]
"""What a profile has: each layer of a chain, alone."""


def _request(
    isolated_ms: Sequence[float] = ALONE_MS,
    training: bool = True,
    devices: int = 2,
    **options: object,
) -> PlacementRequest:
    layers = tuple(
        Layer(
            name=f"layer{index}",
            forward_ms={KIND: ms},
            backward_ms={KIND: 2 * ms} if training else {},
            weight_grad_ms={KIND: ms} if training else {},
        )
        for index, ms in enumerate(isolated_ms)
    )
    edges = tuple(Edge(source=a.name, targets=(b.name,), bytes=8) for a, b in pairwise(layers))
    members = tuple(
        Device(name=f"cpu:{index}", type=KIND, memory_bytes=2**30) for index in range(devices)
    )
    links = tuple(
        Link(source=a.name, target=b.name, bandwidth_bytes_per_s=1e12)
        for a in members
        for b in members
        if a != b
    )
    profile = Profile(
        training=training, layers=layers, edges=edges, cluster=Cluster(devices=members, links=links)
    )
    return PlacementRequest(profile=profile, **options)  # type: ignore[arg-type]


def _stage(device: str, *layers: int, **times: float | None) -> StageTime:
    return StageTime(device=device, layers=tuple(f"layer{index}" for index in layers), **times)  # type: ignore[arg-type]


def _forwards(profile: Profile) -> list[float]:
    return [layer.forward_ms[KIND] for layer in profile.layers]


def _backwards(profile: Profile) -> list[float]:
    return [layer.backward_ms[KIND] for layer in profile.layers]


def test_a_loss_that_the_profile_has_already_is_shared_out_with_its_layer() -> None:
    request = _request()
    request = request.model_copy(
        update={"profile": request.profile.model_copy(update={"with_loss": True})}
    )
    times: dict[str, float] = {
        "forward_ms": 16,
        "backward_ms": 32,
        "loss_forward_ms": 3,
        "loss_backward_ms": 6,
    }
    found = corrected(request.profile, request, [_stage("cpu:1", 3, 4, 5, **times)])
    # all twice as long, its last layer with its loss
    assert _forwards(found)[3:] == pytest.approx([2.0, 10.0, 4.0])
    assert _backwards(found)[3:] == pytest.approx([4.0, 20.0, 8.0])


def test_the_layers_of_a_stage_take_together_what_was_measured() -> None:
    request = _request()
    stages = [
        _stage("cpu:0", 0, 1, 2, forward_ms=4.0, backward_ms=24.0),
        _stage("cpu:1", 3, 4, 5, forward_ms=8, backward_ms=16),
    ]
    found = corrected(request.profile, request, stages)
    assert _forwards(found) == pytest.approx([1.5, 0.5, 2.0, 1.0, 5.0, 2.0])
    assert _backwards(found) == pytest.approx([9.0, 3.0, 12.0, 2.0, 10.0, 4.0])


def test_the_loss_goes_to_the_layer_that_feeds_it() -> None:
    request = _request()
    stage = _stage(
        "cpu:1",
        3,
        4,
        5,
        forward_ms=11.0,
        backward_ms=17.0,
        loss_forward_ms=3.0,
        loss_backward_ms=1.0,
        weight_grad_ms=8.0,
    )
    found = corrected(request.profile, request, [stage])
    assert _forwards(found) == pytest.approx([*ALONE_MS[:5], 2.0 + 3.0])
    assert _backwards(found) == pytest.approx([*(2 * ms for ms in ALONE_MS[:5]), 4.0 + 1.0])
    assert [layer.weight_grad_ms[KIND] for layer in found.layers] == pytest.approx(ALONE_MS)


def test_a_weight_half_that_was_not_measured_keeps_its_share() -> None:
    request = _request()
    found = corrected(
        request.profile, request, [_stage("cpu:0", 0, 1, forward_ms=4.0, backward_ms=4.0)]
    )
    assert [layer.weight_grad_ms[KIND] for layer in found.layers] == pytest.approx(
        [1.5, 0.5, *ALONE_MS[2:]]
    )


def test_layers_of_no_stage_and_times_on_other_devices_stay() -> None:
    request = _request()
    first = request.profile.layers[0].model_copy(update={"forward_ms": {KIND: 3.0, "other": 7.0}})
    profile = request.profile.model_copy(update={"layers": (first, *request.profile.layers[1:])})
    found = corrected(profile, request, [_stage("cpu:0", 0, 1, forward_ms=8.0, backward_ms=8.0)])
    assert found.layers[0].forward_ms == {KIND: pytest.approx(6.0), "other": 7.0}
    assert found.layers[2:] == profile.layers[2:]


def test_a_stage_that_took_no_time_alone_is_shared_evenly() -> None:
    request = _request([0.0, 0.0, 4.0], training=False)
    found = corrected(request.profile, request, [_stage("cpu:0", 0, 1, forward_ms=1.0)])
    assert _forwards(found) == pytest.approx([0.5, 0.5, 4.0])


def test_a_second_correction_replaces_the_first() -> None:
    request = _request(training=False)
    once = corrected(request.profile, request, [_stage("cpu:0", 0, 1, forward_ms=400.0)])
    twice = corrected(once, request, [_stage("cpu:0", 0, 1, forward_ms=4.0)])
    assert _forwards(twice) == pytest.approx(ALONE_MS)


def test_predictions_are_those_of_the_profile_of_the_round() -> None:
    request = _request()
    stage = predicted(_stage("cpu:0", 0, 1, forward_ms=9.0), request.profile, request)
    assert (stage.predicted_forward_ms, stage.predicted_backward_ms) == (4.0, 8.0)
    assert (stage.predicted_ms, stage.measured_ms) == (12.0, 9.0)


class Machine:
    """Takes other times than the profile says: each layer its own, and less for each layer that
    follows another."""

    def __init__(self, real_ms: Sequence[float], saved_ms: float = 0.0) -> None:
        self.real_ms, self.saved_ms = real_ms, saved_ms
        self.measured: list[tuple[str, ...]] = []

    def __call__(self, placement: Placement) -> list[StageTime]:
        self.measured.append(tuple(placement.layer_devices.values()))
        held: dict[str, list[int]] = {}
        for index, device in enumerate(placement.layer_devices.values()):
            held.setdefault(device, []).append(index)
        return [
            _stage(device, *layers, forward_ms=self.stage_ms(layers))
            for device, layers in held.items()
        ]

    def stage_ms(self, layers: Sequence[int]) -> float:
        return sum(self.real_ms[index] for index in layers) - self.saved_ms * (len(layers) - 1)

    def best_ms(self) -> float:
        """The bottleneck of the best cut in two, by trying every one."""
        last = len(self.real_ms)
        cuts = [
            max(self.stage_ms(range(cut)), self.stage_ms(range(cut, last)))
            for cut in range(1, last)
        ]
        return min(cuts)


def test_an_exact_profile_settles_in_one_round() -> None:
    request = _request(training=False)
    machine = Machine(ALONE_MS)
    found = improve(solve(request), request, machine, solve)
    assert found.stop_reason == "converged"
    assert len(found.rounds) == 1
    assert found.rounds[0].measured_value == pytest.approx(found.rounds[0].predicted_value)
    assert found.placement.status == "optimal"


def test_the_best_cut_is_found_though_the_profile_is_wrong() -> None:
    """The last layer takes twice as long as alone: the loss, say."""
    real_ms = [*ALONE_MS[:5], 8.0]
    request, machine = _request(training=False), Machine(real_ms)
    first = solve(request)
    found = improve(first, request, machine, solve, rounds=4)
    assert found.rounds[0].measured_value == pytest.approx(
        max(machine.stage_ms(range(3)), machine.stage_ms(range(3, 6)))
    )
    assert found.placement.objective_value == pytest.approx(machine.best_ms(), rel=1e-6)
    assert found.placement.layer_devices != first.layer_devices
    assert found.stop_reason == "converged"


def test_a_round_measures_the_placement_that_the_corrected_profile_gave() -> None:
    request, machine = _request(training=False), Machine([*ALONE_MS[:5], 8.0])
    found = improve(solve(request), request, machine, solve, rounds=4)
    assert [tuple(one.placement.layer_devices.values()) for one in found.rounds] == machine.measured
    assert len(set(machine.measured)) == len(machine.measured)


def test_no_more_rounds_run_than_were_asked_for() -> None:
    request, machine = _request(training=False), Machine([9.0, 9.0, 1.0, 1.0, 1.0, 1.0])
    found = improve(solve(request), request, machine, solve, rounds=1)
    assert (found.stop_reason, len(machine.measured)) == ("max-rounds", 1)


def test_a_placement_that_comes_back_ends_the_rounds_and_the_best_is_kept() -> None:
    """A machine on which whatever runs on the first device takes longer than promised has no
    placement to settle on."""
    request = _request([4.0, 4.0, 4.0, 4.0], training=False)

    def slow_where_it_is(placement: Placement) -> list[StageTime]:
        held: dict[str, list[int]] = {}
        for index, device in enumerate(placement.layer_devices.values()):
            held.setdefault(device, []).append(index)
        longest = max(held.values(), key=len)
        return [
            _stage(
                device,
                *layers,
                forward_ms=(20.0 if layers == longest or layers[0] == 0 else 1.0) * len(layers),
            )
            for device, layers in held.items()
        ]

    found = improve(solve(request), request, slow_where_it_is, solve, rounds=10)
    assert len(found.rounds) < 10
    values = [one.measured_value for one in found.rounds]
    assert found.placement.objective_value == pytest.approx(min(values))


def test_a_gain_below_the_tolerance_moves_nothing() -> None:
    request, machine = (
        _request([5.0, 5.05, 5.0, 5.0], training=False),
        Machine([5.0, 5.05, 5.04, 5.0]),
    )
    found = improve(solve(request), request, machine, solve, tolerance=0.05)
    assert (found.stop_reason, len(found.rounds)) == ("converged", 1)


def test_pins_of_the_request_hold_in_every_round() -> None:
    request = _request(training=False)
    pins = request.constraints.model_copy(update={"pinned": {"layer4": "cpu:0"}})
    request = request.model_copy(update={"constraints": pins})
    machine = Machine([*ALONE_MS[:5], 12.0])
    found = improve(solve(request), request, machine, solve, rounds=4)
    assert all(one.placement.layer_devices["layer4"] == "cpu:0" for one in found.rounds)


def _by_layers(times_ms: Sequence[float]) -> Callable[[Placement], list[StageTime]]:
    """A machine on which a stage takes what its layers take."""

    def measure(placement: Placement) -> list[StageTime]:
        held = {
            device: [i for i, d in enumerate(placement.layer_devices.values()) if d == device]
            for device in dict.fromkeys(placement.layer_devices.values())
        }
        return [
            _stage(d, *layers, forward_ms=sum(times_ms[i] for i in layers))
            for d, layers in held.items()
        ]

    return measure


@pytest.mark.parametrize(("objective", "passes"), [("step", 2), ("throughput", 1 / 2)])
def test_replicas_are_corrected_by_the_measurement_of_one_of_them(
    objective: str, passes: float
) -> None:
    request = _request(objective=objective, chunks=4, replicas="auto")
    first = solve(request)
    assert [len(members) for members in first.replicas.values()] == [2]
    real_ms = [*ALONE_MS[:5], 8.0]
    found = improve(first, request, _by_layers(real_ms), solve)
    # Each device runs two of four micro-batches. A throughput is of one micro-batch on both.
    # Without gradients nothing is exchanged.
    (only,) = found.rounds
    assert only.predicted_value == pytest.approx(passes * 3 * sum(ALONE_MS))
    assert only.measured_value == pytest.approx(passes * sum(real_ms))
    assert found.stop_reason == "converged" and found.placement.replicas == first.replicas


def test_stages_with_their_own_numbers_of_replicas_are_corrected_by_one_replica() -> None:
    request = _request([2.0, 1.0], devices=3, objective="throughput", chunks=4, replicas="by-stage")
    first, last = request.profile.layers
    layers = (first, last.model_copy(update={"grad_bytes": 2**29}))
    profile = request.profile.model_copy(update={"layers": layers})
    request = request.model_copy(update={"profile": profile})
    placement = solve(request)
    assert placement.replicas_by_stage == (2, 1)
    found = improve(placement, request, _by_layers([9.0, 1.0]), solve)
    # both passes were to take three times the forward pass; two devices share the first layer's
    (only,) = found.rounds
    assert only.predicted_value == pytest.approx(3 * 2.0 / 2)
    assert only.measured_value == pytest.approx(9.0 / 2)
    assert found.stop_reason == "converged" and found.placement.replicas == placement.replicas


def test_replicas_without_a_link_do_not_answer_the_request() -> None:
    request = _request(objective="step", chunks=4, replicas="auto")
    first = solve(request)
    assert first.replicas
    alone = request.placed_on.model_copy(update={"links": ()})
    request = request.model_copy(update={"cluster": alone})
    with pytest.raises(InfeasibleError, match="its replicas need other devices, links or memory"):
        improve(first, request, _by_layers(ALONE_MS), solve)


def test_a_placement_that_proves_busier_than_was_asked_for_is_followed_by_another() -> None:
    request = _request([2.0] * 6, training=False, objective="devices", bottleneck_ms=8.5)
    pins = request.constraints.model_copy(update={"pinned": {"layer3": "cpu:0", "layer4": "cpu:1"}})
    first = solve(request.model_copy(update={"constraints": pins}))
    found = improve(first, request, _by_layers([2.0, 2.0, 4.0, 2.0, 2.0, 2.0]), solve)
    assert [
        max(load.load_ms for load in one.placement.devices) for one in found.rounds
    ] == pytest.approx([10.0, 8.0])
    assert list(found.placement.layer_devices.values()) == ["cpu:0"] * 3 + ["cpu:1"] * 3


def test_that_nothing_measured_keeps_within_the_bottleneck_is_said() -> None:
    request = _request([2.0] * 6, training=False, objective="devices", bottleneck_ms=8.5)
    with pytest.raises(
        InfeasibleError, match=r"bottleneck_ms = 8.5: the nearest keeps cpu:. busy for 1[28] ms"
    ):
        improve(solve(request), request, _by_layers([6.0] * 6), solve)
