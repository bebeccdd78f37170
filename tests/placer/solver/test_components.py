"""Graph pieces against plain reachability."""

from hypothesis import given
from hypothesis import strategies as st

from placer.solver.components import closed_groups, strong_components, topological_order

COUNT = 6
ARCS = st.lists(st.tuples(st.integers(0, COUNT - 1), st.integers(0, COUNT - 1)), max_size=12)
GROUPS = st.lists(st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=3), max_size=3)


def reach(arcs):
    """Pairs (a, b) with a path from a to b, by closing the relation."""
    pairs = {(a, b) for a, b in arcs} | {(v, v) for v in range(COUNT)}
    for middle in range(COUNT):
        pairs |= {
            (a, b)
            for a in range(COUNT)
            for b in range(COUNT)
            if {(a, middle), (middle, b)} <= pairs
        }
    return pairs


@given(groups=GROUPS)
def test_groups_that_share_a_member_become_one(groups):
    linked = reach(
        [pair for group in groups for a in group for pair in ((group[0], a), (a, group[0]))]
    )
    wanted = {tuple(b for b in range(COUNT) if (a, b) in linked) for a in range(COUNT)}
    assert set(closed_groups(groups)) == {group for group in wanted if len(group) > 1}


@given(arcs=ARCS, groups=GROUPS)
def test_a_component_is_what_reaches_each_other_with_groups_joined(arcs, groups):
    groups = closed_groups(groups)
    tied = [pair for group in groups for a in group for b in group for pair in ((a, b), (b, a))]
    pairs = reach([*arcs, *tied])
    wanted = {tuple(b for b in range(COUNT) if {(a, b), (b, a)} <= pairs) for a in range(COUNT)}
    assert {tuple(component) for component in strong_components(COUNT, arcs, groups)} == wanted


@given(arcs=ARCS, groups=GROUPS)
def test_components_come_in_an_order_in_which_arcs_run_forwards(arcs, groups):
    components = strong_components(COUNT, arcs, closed_groups(groups))
    place = {vertex: index for index, component in enumerate(components) for vertex in component}
    assert all(place[source] <= place[target] for source, target in arcs)


@given(
    arcs=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda arc: arc[0] < arc[1])
    )
)
def test_a_topological_order_keeps_the_given_order_where_it_can(arcs):
    assert topological_order(COUNT, arcs) == list(range(COUNT))


@given(
    arcs=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda arc: arc[0] < arc[1])
    ),
    data=st.data(),
)
def test_every_rank_gives_a_topological_order(arcs, data):
    rank = data.draw(st.lists(st.floats(0, 1), min_size=COUNT, max_size=COUNT))
    order = topological_order(COUNT, arcs, rank)
    assert sorted(order) == list(range(COUNT))
    assert all(order.index(source) < order.index(target) for source, target in arcs)


def test_a_topological_order_leaves_out_what_is_on_a_cycle():
    assert topological_order(3, [(1, 2), (2, 1)]) == [0]
