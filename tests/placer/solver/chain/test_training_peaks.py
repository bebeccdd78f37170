"""Tables of the memory of intervals, against the cost model applied to each interval by itself."""

from itertools import pairwise
from random import Random

import pytest

from placer.solver import memory
from placer.solver.chain.interval_peaks import TrainingMoments
from placer.solver.problem import Problem


@pytest.mark.covering(every=3, first=1)
@pytest.mark.parametrize("seed", range(10))
def test_each_interval_is_worth_what_a_device_with_its_layers_holds(seed, training_problem):
    random = Random(seed)
    for _ in range(100):
        problem = training_problem(random)
        count = len(problem.layers)
        inner = random.sample(range(1, count), random.randint(count // 2, count - 1))
        blocks = [list(range(*ends)) for ends in pairwise(sorted({0, count, *inner}))]
        tables = TrainingMoments(problem, blocks)
        assert tables.follows
        for first in range(len(blocks)):
            for end in range(first + 1, len(blocks) + 1):
                layers = [layer for block in blocks[first:end] for layer in block]
                found = memory.footprint(problem, memory.Held(layers, list(problem.values)))
                passing = found.one.activation_bytes + found.one.workspace_bytes
                step = sum(problem.step_bytes[layer] for layer in layers)
                assert (tables.kept[first, end], max(tables.moment[first, end], step)) == (
                    found.kept_bytes,
                    passing,
                )


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("seed", range(10))
def test_with_weight_halves_apart_each_interval_is_worth_what_a_micro_batch_has_for_itself(
    seed, training_problem
):
    random = Random(seed)
    for _ in range(100):
        problem = training_problem(random, schedule="zero-bubble")
        count = len(problem.layers)
        inner = random.sample(range(1, count), random.randint(count // 2, count - 1))
        blocks = [list(range(*ends)) for ends in pairwise(sorted({0, count, *inner}))]
        tables = TrainingMoments(problem, blocks, recorded=True)
        assert tables.follows
        for first in range(len(blocks)):
            for end in range(first + 1, len(blocks) + 1):
                layers = [layer for block in blocks[first:end] for layer in block]
                left = sum(problem.deferred_bytes[layer] for layer in layers)
                held = memory.Held(layers, list(problem.values))
                ahead = max(
                    tables.ahead[first, end], tables.kept[first, end] + memory.sent_bytes(held)
                )
                found = memory.footprint(problem, held).recorded
                assert ahead + memory.crossing_bytes(held) == found.each_bytes
                assert tables.back[first, end] + left == found.backward_bytes


def test_an_order_that_is_not_the_profiles_is_not_called_exact(chain):
    assert not TrainingMoments(Problem.from_request(chain([1, 1, 1])), [[0, 2], [1]]).follows
