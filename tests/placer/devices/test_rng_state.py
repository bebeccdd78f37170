"""Generators have their state back; a pass that is repeated draws the same, and nothing drawn later
knows of it."""

from __future__ import annotations

import pytest
import torch

from placer import devices
from placer.devices import Repeated


def test_keep_random_state_gives_the_state_back() -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    with devices.keep_random_state([torch.device("cpu", 0)]):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_second_pass_draws_what_the_first_drew() -> None:
    repeated = Repeated(torch.device("cpu", 0))
    with repeated.first():
        first = torch.rand(8)
    torch.rand(3)
    with repeated.again():
        again = torch.rand(8)
    assert torch.equal(first, again)


def test_what_is_drawn_after_a_repetition_is_what_would_have_been_drawn_without() -> None:
    torch.manual_seed(0)
    torch.rand(8)
    expected = torch.rand(8)
    torch.manual_seed(0)
    repeated = Repeated(torch.device("cpu", 0))
    with repeated.first():
        torch.rand(8)
    with repeated.again():
        torch.rand(8)
    assert torch.equal(torch.rand(8), expected)


def test_the_generator_comes_back_from_a_repetition_that_fails() -> None:
    torch.manual_seed(0)
    expected = torch.rand(8)
    torch.manual_seed(0)
    repeated = Repeated(torch.device("cpu", 0))
    with repeated.first():
        pass
    with pytest.raises(ValueError, match="a fault"), repeated.again():
        torch.rand(3)
        raise ValueError("a fault")
    assert torch.equal(torch.rand(8), expected)


@pytest.mark.gpu
def test_recorded_passes_draw_in_step_anew_for_each_batch_and_again_after_a_seed() -> None:
    place = torch.device("cuda", 0)
    chances = [Repeated(place), Repeated(place)]
    results = [[torch.zeros(8, device=place) for _ in range(2)] for _ in chances]

    def first(index: int) -> None:
        with chances[index].first():
            results[index][0].copy_(torch.rand(8, device=place))

    def again(index: int) -> None:
        with chances[index].again():
            results[index][1].copy_(torch.rand(8, device=place))

    pool = devices.memory_pool(place)
    replays = [
        devices.record(
            [lambda index=index: first(index), lambda index=index: again(index)],  # type: ignore[misc]
            place,
            pools=[pool] * 2,
            generators=[[generator] for generator in chance.generators],
        )
        for index, chance in enumerate(chances)
    ]

    def batches() -> list[torch.Tensor]:
        torch.manual_seed(5)
        seen = []
        for _ in range(2):
            for chance in chances:
                chance.seed()
            for _ in range(2):  # each slot serves two micro-batches of a batch
                for (run, repeat), (drawn, repeated) in zip(replays, results, strict=True):
                    run()
                    repeat()
                    assert torch.equal(drawn, repeated)
                    seen.append(drawn.cpu().clone())
        return seen

    seen = batches()
    assert all(not torch.equal(one, other) for i, one in enumerate(seen) for other in seen[:i])
    assert all(torch.equal(one, other) for one, other in zip(seen, batches(), strict=True))


def test_generators_that_are_seeded_alike_draw_other_numbers_in_each_process() -> None:
    generators = [torch.Generator() for _ in range(3)]
    own = [devices.OwnSeed(number) for number in range(3)]
    drawn = []
    for seed in (7, 7, 8):
        for generator, each in zip(generators, own, strict=True):
            each.set(generator.manual_seed(seed))
            each.set(generator)  # a step without another seed changes nothing
        drawn += [generator.initial_seed() for generator in generators]
    assert drawn[0] == 7 and drawn[:3] == drawn[3:6] and len(set(drawn)) == 6
