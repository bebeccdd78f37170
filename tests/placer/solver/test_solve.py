"""The answer of a solve, in addition to the optimum itself."""

import subprocess
import sys
import threading

import pytest

from placer.errors import InputError
from placer.schema import Constraints, Edge, Placement
from placer.solver.solve import Incumbent, solve


def test_equal_layers_are_shared_equally(chain):
    placement = solve(chain([1.0] * 8, devices=4))
    assert placement.objective_value == 2.0
    assert placement.status == "optimal" and placement.gap == 0.0
    assert [load.layers for load in placement.devices] == [2, 2, 2, 2]


def test_a_profile_alone_is_refused_with_the_request_to_make_of_it(chain):
    with pytest.raises(
        InputError, match=r"a Profile; give a placer\.PlacementRequest\(profile=profile\)"
    ):
        solve(chain([1.0]).profile)


def test_a_split_that_costs_more_than_it_gains_is_not_made(chain):
    # a transfer takes 10 ms, all layers 4 ms
    placement = solve(chain([1.0] * 4, devices=4, value_bytes=10))
    assert set(placement.layer_devices.values()) == {"d0"}
    assert placement.speedup == 1.0


def test_what_one_device_does_is_compared(chain):
    placement = solve(chain([1.0] * 8, devices=4))
    assert placement.single_device.objective_value == 8.0
    assert placement.single_device.fits
    assert placement.speedup == 4.0


@pytest.mark.parametrize("objective", ["throughput", "latency", "memory"])
def test_layers_that_have_no_choice_are_not_searched(chain, objective):
    pins = {f"l{index}": f"d{index % 2}" for index in range(8)}
    placement = solve(
        chain(
            [1.0] * 8, constraints=Constraints(pinned=pins, contiguous=False), objective=objective
        )
    )
    assert (placement.status, placement.gap, placement.method) == ("optimal", 0.0, "no choice")
    assert placement.layer_devices == pins


def test_a_single_device_that_is_too_small_says_how_much_is_short(chain):
    placement = solve(chain([1.0] * 4, param_bytes=300, memory_bytes=1_000))
    assert not placement.single_device.fits
    assert placement.single_device.missing_bytes == 200


def test_the_bottleneck_is_marked(chain):
    placement = solve(chain([1.0, 1.0, 5.0]))
    assert [load.device for load in placement.devices if load.bottleneck] == [
        placement.layer_devices["l2"]
    ]


def test_the_id_is_the_request_s_content_hash(chain):
    request = chain([1.0, 1.0])
    assert solve(request).id == request.content_hash()


def test_the_same_request_gives_the_same_placement_with_two_workers(grid):
    answers = {
        solve(grid(6, 4, seed=3, workers=2)).model_copy(update={"solve_time_s": 0}).to_json()
        for _ in range(3)
    }
    assert len(answers) == 1


def test_progress_reports_falling_objectives_with_bounds_below(grid):
    seen: list[Incumbent] = []
    placement = solve(
        grid(6, 4, constraints=Constraints(contiguous=False), time_limit_s=3), progress=seen.append
    )
    values = [incumbent.objective_value for incumbent in seen]
    assert values == sorted(values, reverse=True) and values[-1] == placement.objective_value
    assert all(incumbent.bound <= incumbent.objective_value for incumbent in seen)


def test_a_stop_that_is_already_set_gives_the_best_start(grid):
    stop = threading.Event()
    stop.set()
    placement = solve(
        grid(12, 6, constraints=Constraints(contiguous=False), time_limit_s=600), stop=stop
    )
    assert placement.status == "feasible" and placement.layer_devices


def test_a_stop_ends_a_long_search_with_the_best_so_far(grid):
    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    placement = solve(
        grid(12, 6, constraints=Constraints(contiguous=False), time_limit_s=100), stop=stop
    )
    assert placement.status == "feasible" and placement.layer_devices
    # a hang, not a speed: it would have run for 100
    assert placement.solve_time_s < 50


def test_a_time_limit_returns_the_best_and_its_bound(grid):
    placement = solve(grid(12, 6, constraints=Constraints(contiguous=False), time_limit_s=0.5))
    assert placement.status == "feasible"
    assert 0 < placement.bound < placement.objective_value
    assert placement.gap == pytest.approx(1 - placement.bound / placement.objective_value)


def test_tied_ends_make_the_placement_free_unless_contiguity_is_asked_for(chain):
    tied = Constraints(colocated=(("l0", "l5"),))
    assert not solve(chain([1.0] * 6, constraints=tied)).contiguous
    assert solve(
        chain([1.0] * 6, constraints=tied.model_copy(update={"contiguous": True}))
    ).contiguous


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_smallest_models_without_colocation_are_contiguous(chain, count):
    # a single layer once counted as pulled in by its own component
    assert solve(chain([1.0] * count)).contiguous


def test_neighbours_that_are_tied_leave_the_placement_contiguous(chain):
    assert solve(chain([1.0] * 6, constraints=Constraints(colocated=(("l2", "l3"),)))).contiguous


def test_tied_ends_are_kept_together_and_the_rest_is_shared(chain):
    placement = solve(chain([1.0] * 6, constraints=Constraints(colocated=(("l0", "l5"),))))
    assert placement.layer_devices["l0"] == placement.layer_devices["l5"]
    assert placement.objective_value == 3.0


def test_stages_are_listed_along_the_pipeline(chain):
    pins = Constraints(pinned={"l0": "d1", "l3": "d0"})
    assert solve(chain([1.0] * 4, constraints=pins)).stages == ("d1", "d0")


def test_a_chain_of_fifty_layers_needs_no_integer_program(chain):
    placement = solve(chain([1.0 + i % 7 for i in range(50)], devices=4, value_bytes=1))
    assert placement.method == "linear order" and placement.status == "optimal"


def test_a_placement_survives_json(chain):
    placement = solve(chain([1.0] * 4))
    assert Placement.model_validate_json(placement.to_json()) == placement


def test_a_schema_import_brings_in_neither_torch_nor_ortools():
    code = "import sys, placer.schema; assert not {'torch', 'ortools', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_solver_import_brings_in_no_torch():
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, placer.solver.solve; assert 'torch' not in sys.modules",
        ],
        check=True,
    )


@pytest.fixture
def grid(chain):
    """``grid(rows, devices, ...)``: pairs of parallel layers, both read by both of the next.

    No single order.
    """

    def make(rows, devices, **asked):
        times = [1.0 + (7 * i * i) % 11 / 3 for i in range(2 * rows)]
        request = chain(times, devices=devices, **asked)
        edges = tuple(
            Edge(
                source=f"l{2 * row + side}", targets=(f"l{2 * row + 2}", f"l{2 * row + 3}"), bytes=1
            )
            for row in range(rows - 1)
            for side in (0, 1)
        )
        return request.model_copy(
            update={"profile": request.profile.model_copy(update={"edges": edges})}
        )

    return make
