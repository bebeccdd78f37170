"""Infeasible is an answer: which layer, which device, how many bytes."""

from placer.schema import Constraints
from placer.solver.solve import solve


def reason(request):
    placement = solve(request)
    assert placement.status == "infeasible"
    assert placement.layer_devices == {} and placement.objective_value is None
    return placement.infeasible


def test_a_layer_that_fits_nowhere_is_named_with_what_is_short(chain):
    why = reason(chain([1, 1, 1], param_bytes=[10, 2048, 10], memory_bytes=1024))
    assert why.layers == ("l1",) and why.missing_bytes == 1024
    assert (
        why.reason == "layer 'l1' needs 2.0 KiB; the largest limit is 1.0 KiB (d0): 1.0 KiB short"
    )


def test_layers_kept_together_that_fit_nowhere_are_named(chain):
    rules = Constraints(colocated=(("l0", "l1"),))
    why = reason(chain([1, 1, 1], param_bytes=600, memory_bytes=1000, constraints=rules))
    assert why.layers == ("l0", "l1") and why.missing_bytes == 200
    assert "kept together" in why.reason


def test_a_model_larger_than_all_devices_says_what_is_short_in_all(chain):
    why = reason(chain([1] * 5, param_bytes=500, memory_bytes=1000))
    assert why.missing_bytes == 500 and why.devices == ("d0", "d1")
    assert "in all" in why.reason


def test_fewer_devices_allowed_count_with_their_memory_alone(chain):
    why = reason(
        chain(
            [1] * 4,
            devices=4,
            param_bytes=500,
            memory_bytes=700,
            constraints=Constraints(max_devices=2),
        )
    )
    assert why.missing_bytes == 4 * 500 - 2 * 700


def test_layers_that_cannot_be_packed_say_how_near_the_nearest_is(chain):
    # 3 layers of 600 on two devices of 1000: the total, 1800, is below 2000, but some device gets
    # two of them
    why = reason(chain([1] * 3, param_bytes=600, memory_bytes=1000))
    assert why.missing_bytes == 200
    assert "200 B short" in why.reason


def test_a_layer_forbidden_everywhere_is_named(chain):
    why = reason(chain([1, 1], constraints=Constraints(forbidden={"l0": ("d0", "d1")})))
    assert why.reason == "layer 'l0' is forbidden on every device"


def test_colocated_layers_that_share_no_device_name_what_each_may_be_on(chain):
    rules = Constraints(pinned={"l0": "d0"}, forbidden={"l2": ("d0",)}, colocated=(("l0", "l2"),))
    why = reason(chain([1, 1, 1], constraints=rules))
    assert "'l0' only on 'd0'" in why.reason and "'l2' only on 'd1'" in why.reason


def test_pins_that_go_back_and_forth_stand_against_contiguity(chain):
    rules = Constraints(pinned={"l0": "d0", "l1": "d1", "l2": "d0"}, contiguous=True)
    why = reason(chain([1, 1, 1], constraints=rules))
    assert "contiguity" in why.reason and {"l0", "l1", "l2"} <= set(why.layers)


def test_pins_to_devices_without_a_link_name_the_links(chain):
    request = chain([1, 1], constraints=Constraints(pinned={"l0": "d0", "l1": "d1"}))
    cut = request.profile.cluster.model_copy(update={"links": ()})
    why = reason(
        request.model_copy(update={"profile": request.profile.model_copy(update={"cluster": cut})})
    )
    assert why.requirements[:2] == ("layer 'l0' is pinned to 'd0'", "layer 'l1' is pinned to 'd1'")
    assert "some are missing" in why.requirements[2] and len(why.requirements) == 3


def test_pins_to_more_devices_than_allowed_name_the_number(chain):
    rules = Constraints(pinned={"l0": "d0", "l1": "d1", "l2": "d2"}, max_devices=2)
    assert "max_devices = 2" in reason(chain([1, 1, 1], devices=3, constraints=rules)).reason


def test_the_text_of_a_reason_names_the_requirements_that_it_does_not_name_itself(chain):
    why = reason(chain([1, 1, 1], param_bytes=[10, 2048, 10], memory_bytes=1024))
    assert (
        why.text == f"{why.reason}; cannot hold together: 'd0' holds at most 1.0 KiB; "
        "'d1' holds at most 1.0 KiB"
    )
    why = reason(
        chain([1, 1], constraints=Constraints(pinned={"l0": "d0", "l1": "d1"}, max_devices=1))
    )
    assert why.text == why.reason
