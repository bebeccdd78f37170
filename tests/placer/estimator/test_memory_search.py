"""Placements by memory against brute force over cuts, and changes at their exact boundaries."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations
from random import Random

import pytest

from placer.estimator import memory_search
from placer.estimator.device_sizes import cluster_of
from placer.estimator.memory_search import Asked, ShorterTexts, SmallerBatches, estimated
from placer.schema import Change, Edge, Estimate, Layer, Placement, PlacementRequest, Profile
from placer.solver import solve as solver

ASKED = Asked(
    chunks=1,
    schedule="1f1b",
    recompute="never",
    cache_bytes={},
    reserve_bytes=0,
    time_limit_s=30.0,
)


def chain(
    params: list[int],
    edges: list[int] | None = None,
    workspaces: list[int] | None = None,
    training: bool = False,
    saved: int = 0,
    batch_size: int = 1,
) -> Profile:
    """A chain of layers; ``edges[i]`` leaves layer i. In training, the optimizer has two copies."""
    names = [f"l{index}" for index in range(len(params))]
    edges = edges or [0] * (len(params) - 1)
    workspaces = workspaces or [0] * len(params)
    return Profile(
        layers=tuple(
            Layer(
                name=name,
                forward_ms={"t": 1.0},
                backward_ms={"t": 1.0} if training else {},
                param_bytes=size,
                grad_bytes=size if training else 0,
                optimizer_bytes=2 * size if training else 0,
                saved_bytes=saved,
                forward_workspace_bytes=work,
            )
            for name, size, work in zip(names, params, workspaces, strict=True)
        ),
        edges=tuple(
            Edge(source=one, targets=(other,), bytes=size)
            for (one, other), size in zip(pairwise(names), edges, strict=True)
        ),
        training=training,
        batch_size=batch_size,
    )


def on(devices: str | None, profile: Profile, asked: Asked = ASKED) -> Estimate:
    return estimated(profile, None if devices is None else cluster_of(devices, 0), asked)


def use_of(params: list[int], edges: list[int], workspaces: list[int], layers: range) -> int:
    """Return the memory of consecutive layers in inference: the worst moment of any of them."""
    around = [0, *edges, 0]
    moments = [around[layer] + around[layer + 1] + workspaces[layer] for layer in layers]
    return sum(params[layer] for layer in layers) + max(moments, default=0)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("seed", range(8))
def test_the_fullest_device_uses_as_little_as_in_the_best_of_all_cuts(seed: int) -> None:
    random = Random(seed)
    count = 6
    params = [random.choice((0, 10, 100, 250)) for _ in range(count)]
    edges = [random.choice((1, 20, 90)) for _ in range(count - 1)]
    works = [random.choice((0, 15, 200)) for _ in range(count)]
    best = min(
        max(
            use_of(params, edges, works, part)
            for part in (range(first), range(first, second), range(second, count))
        )
        for first in range(count + 1)
        for second in range(first, count + 1)
    )
    found = on("3x1MiB", chain(params, edges, works))
    assert found.fits and found.proven
    assert found.fullest.total_bytes == best


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("seed", range(12))
def test_a_chain_fits_on_unlike_devices_exactly_if_a_cut_does(seed: int) -> None:
    random = Random(seed)
    params = [random.choice((10, 100, 250)) for _ in range(6)]
    edges = [random.choice((1, 20, 90)) for _ in range(5)]
    works = [random.choice((0, 15, 200)) for _ in range(6)]
    sizes = [random.choice((300, 400, 500)) for _ in range(3)]
    parts = [
        (range(first), range(first, second), range(second, 6))
        for first in range(7)
        for second in range(first, 7)
    ]
    fits = any(
        all(
            use_of(params, edges, works, part) <= size
            for part, size in zip(cut, order, strict=True)
        )
        for cut in parts
        for order in permutations(sizes)
    )
    assert on(",".join(map(str, sizes)), chain(params, edges, works)).fits is fits


@pytest.mark.parametrize(("missing", "fits"), [(0, True), (1, False)])
def test_a_model_fits_on_exactly_the_bytes_that_it_needs(missing: int, fits: bool) -> None:
    profile = chain([100, 100, 300, 100])  # 100 + 100 + 300 and 100, or 200 and 400
    needed = on("2x1MiB", profile).fullest.total_bytes
    assert needed == 400
    assert on(f"2x{needed - missing}", profile).fits is fits


def test_reported_parts_are_the_closed_forms_of_training() -> None:
    found = on("4000", chain([100, 200], training=True, saved=7))
    (device,) = found.devices
    memory = device.memory
    assert (memory.param_bytes, memory.grad_bytes, memory.optimizer_bytes) == (300, 300, 600)
    assert memory.activation_bytes == 14
    assert device.total_bytes == 1214
    assert device.limit_bytes == 4000


def change(found: Estimate, kind: str) -> Change:
    (one,) = [one for one in found.changes if one.kind == kind]
    return one


def test_where_nothing_fits_the_smallest_larger_sizes_are_solved() -> None:
    profile = chain([100, 100, 300, 100])
    found = on("2x250", profile)
    assert found.fits is False
    assert found.fullest.total_bytes == 400
    one, both = [one for one in found.changes if one.kind == "memory"]
    assert one.memory_bytes == (400, 250) or one.memory_bytes == (250, 400)
    assert both.memory_bytes == (400, 400)
    for size, fits in ((400, True), (399, False)):
        assert on(f"{size},250", profile).fits is fits


def test_a_layer_that_fits_on_no_device_fits_where_its_state_is_sharded() -> None:
    profile = chain([1000, 10], training=True)
    found = on("4x3900", profile, replace(ASKED, chunks=8))
    assert found.fits is False  # the first layer and its state take 4000 bytes
    sharded = change(found, "sharding")
    # a quarter of 1010 each of parameters and gradients, of 2000 and of 20 of state; and both whole
    assert sharded.total_bytes == 253 + 253 + 500 + 5 + 1010 + 1010
    assert (sharded.limit_bytes, sharded.chunks, sharded.batch_size) == (3900, 2, 1)
    assert sharded.change == "shard by FSDP2, with micro-batches of 1 sample on each device"
    larger = change(on("4x3900", profile, replace(ASKED, chunks=6)), "sharding")
    assert larger.change.endswith("on each device, a batch of 4")
    for size, fits in ((3031, True), (3030, False)):
        kinds = {one.kind for one in on(f"4x{size}", profile).changes}
        assert ("sharding" in kinds) is fits
    assert on("4x3000", chain([1000, 10])).fits
    assert "sharding" not in {one.kind for one in on("1x3900", profile).changes}


def test_a_model_that_does_not_fit_may_fit_with_optimizer_state_on_the_host() -> None:
    mib = 2**20
    profile = chain([100 * mib, 100 * mib], training=True)
    # parameters and gradients of 400 MiB; two buckets of 64 MiB, and the 200 MiB of a layer
    needed = 400 * mib + 2 * 64 * mib + 200 * mib
    found = on(f"1x{needed}", profile)
    assert found.fits is False  # 800 MiB with state on the device
    host = change(found, "optimizer-state")
    assert (host.total_bytes, host.limit_bytes) == (400 * mib, 400 * mib)
    assert host.memory_bytes == (needed,)
    for smaller in (on(f"1x{needed - 1}", profile), on("1x700", chain([300], training=False))):
        assert "optimizer-state" not in {one.kind for one in smaller.changes}


@pytest.mark.parametrize("proves", [True, False])
def test_a_long_solve_follows_a_short_one_that_proves_nothing(
    proves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def solve(request: PlacementRequest) -> Placement:
        limits.append(request.work_limit)
        found = solver.solve(request)
        is_final = proves or request.work_limit is None
        return found if is_final else found.model_copy(update={"status": "feasible"})

    monkeypatch.setattr(memory_search, "solve", solve)
    assert on("2x300", chain([100] * 4)).proven
    assert limits == ([memory_search.FIRST_WORK] if proves else [memory_search.FIRST_WORK, None])


def test_the_smallest_number_of_further_devices_is_solved() -> None:
    profile = chain([100] * 7)
    found = change(on("2x150", profile), "devices")
    assert found.devices == 7
    assert on("7x150", profile).fits
    assert on("6x150", profile).fits is False


def test_the_longest_shorter_texts_that_fit_are_solved() -> None:
    def cached(tokens: int) -> dict[str, int]:
        return {"l0": 10 * tokens}

    def with_texts(tokens: int) -> Estimate:
        asked = replace(ASKED, cache_bytes=cached(tokens))
        devices = cluster_of("1x250", 0)
        return estimated(chain([40, 60]), devices, asked, shorter=ShorterTexts(tokens, cached))

    found = with_texts(40)
    assert change(found, "context").change == "texts of 15 tokens instead of 40"
    assert with_texts(15).fits
    assert with_texts(16).fits is False


def test_no_text_is_offered_where_the_weights_alone_do_not_fit() -> None:
    def cached(tokens: int) -> dict[str, int]:
        raise AssertionError("no cache needs an estimate")

    asked = replace(ASKED, cache_bytes={"l0": 10})
    found = estimated(
        chain([300, 60]), cluster_of("1x250", 0), asked, shorter=ShorterTexts(1, cached)
    )
    assert found.fits is False
    assert "context" not in {one.kind for one in found.changes}


def test_no_number_of_devices_is_offered_where_one_layer_alone_is_too_large() -> None:
    found = on("2x200", chain([100, 300]))
    assert {one.kind for one in found.changes} == {"memory"}


def test_unlike_devices_are_filled_before_the_largest_is_grown() -> None:
    found = on("300,100", chain([100, 100, 100, 100, 100]))
    assert found.fits is False
    assert [device.total_bytes for device in found.devices] == [400, 100]
    assert change(found, "memory").memory_bytes == (400, 100)


def test_recomputing_is_offered_where_it_suffices() -> None:
    asked = Asked(
        chunks=10,
        schedule="fill-drain",
        recompute="never",
        cache_bytes={},
        reserve_bytes=0,
        time_limit_s=30.0,
    )
    profile = chain([10, 10], training=True, saved=100)
    # 80 bytes of state; 10 micro-batches keep 2 x 100 bytes each, or only one of them does
    assert on("2080", profile, asked).fits
    found = on("1x1000", profile, asked)
    again = change(found, "recompute")
    assert again.recompute == ("cuda:0",)
    assert again.total_bytes == 80 + 200


def test_the_largest_smaller_micro_batch_that_fits_is_found() -> None:
    asked: list[int] = []

    def of(size: int) -> tuple[Profile, dict[str, int]]:
        asked.append(size)
        return chain([10], [], [100 * size], batch_size=size), {}

    whole = of(12)[0]
    batches = SmallerBatches([1, 2, 3, 4, 6], of)
    found = estimated(whole, cluster_of([500], 0), ASKED, batches)
    smaller = change(found, "batch-size")
    assert smaller.batch_size == 4
    assert smaller.total_bytes == 410
    assert 6 in asked


def test_micro_batches_are_not_estimated_where_the_parameters_alone_are_too_large() -> None:
    def never(size: int) -> tuple[Profile, dict[str, int]]:
        raise AssertionError(size)

    found = estimated(
        chain([600], [], [100], batch_size=2),
        cluster_of([500], 0),
        ASKED,
        SmallerBatches([1], never),
    )
    assert found.fits is False
    assert {one.kind for one in found.changes} == {"memory"}


def test_without_devices_the_fewest_common_cards_are_solved() -> None:
    gib = 2**30
    found = on(None, chain([10 * gib] * 9))
    assert found.fits is None
    assert found.fullest.limit_bytes is None
    assert found.fullest.total_bytes == 90 * gib
    # whole layers: 2, 4 and 8 of them fit on a card
    assert [(card.memory_bytes // gib, card.devices) for card in found.cards] == [
        (24, 5),
        (48, 3),
        (80, 2),
    ]


def test_cards_larger_than_one_that_suffices_are_left_out() -> None:
    found = on(None, chain([2**30]))
    assert [(card.memory_bytes, card.devices) for card in found.cards] == [(24 * 2**30, 1)]


def test_the_cache_is_placed_with_its_layers_and_reported_apart() -> None:
    asked = Asked(
        chunks=1,
        schedule="1f1b",
        recompute="never",
        cache_bytes={"l1": 50, "l2": 70},
        reserve_bytes=0,
        time_limit_s=30.0,
    )
    found = on("2x1000", chain([100, 100, 100]), asked)
    assert sum(device.cache_bytes for device in found.devices) == 120
    assert sum(device.memory.buffer_bytes for device in found.devices) == 0
    assert found.fullest.total_bytes == 250  # l0 and l1 with its cache; l2 alone has 170


def test_an_estimate_is_read_back_as_it_was_written() -> None:
    found = on("2x250", chain([100, 100, 300, 100]))
    assert Estimate.model_validate_json(found.to_json()) == found
