"""The solver's benchmark: its referees, searches and peers, and how its cases are selected."""

import importlib
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from placer.solver.solve import solve

ROOT = Path(__file__).parents[2]


@pytest.fixture
def part(monkeypatch):
    """A module of the benchmark by its name."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.solver.{name}")


def small_input(seed):
    """Six nodes in random order of arcs, two accelerators that hold three or four of them."""
    draw = random.Random(seed)
    nodes = [
        {
            "id": node,
            "supportedOnFpga": int(draw.random() < 0.9),
            "cpuLatency": draw.randint(1, 30),
            "fpgaLatency": draw.randint(0, 5),
            "size": draw.randint(0, 3),
            "colorClass": draw.choice([None, None, node, 0]) if node else 0,
        }
        for node in range(6)
    ]
    costs = [draw.randint(0, 6) for _ in nodes]
    edges = [
        {"sourceId": source, "destId": reader, "cost": costs[source]}
        for source, reader in itertools.combinations(range(6), 2)
        if draw.random() < 0.45
    ]
    return {"maxFPGAs": 2, "maxSizePerFPGA": draw.randint(3, 7), "nodes": nodes, "edges": edges}


def slow_latency(given, where):
    """The latency by its definition, from the input alone; None if a rule is broken."""
    nodes = {node["id"]: node for node in given["nodes"]}
    blocks = {
        device: {node for node in nodes if where[node] == device} for device in set(where) - {-1}
    }
    colours = {}
    for node in nodes.values():
        colour = node["colorClass"]
        if (
            colour is not None
            and colours.setdefault(colour, where[node["id"]]) != where[node["id"]]
        ):
            return None
    for block in blocks.values():
        if sum(nodes[node]["size"] for node in block) > given["maxSizePerFPGA"]:
            return None
        if not all(nodes[node]["supportedOnFpga"] for node in block):
            return None
    ends = {}

    def end(node, above=()):
        block = blocks.get(where[node], {node})
        unit = frozenset(block)
        if unit in above:
            raise RecursionError
        if unit not in ends:
            entering = {
                edge["sourceId"] for edge in given["edges"] if edge["destId"] in block
            } - block
            start = max((end(source, (*above, unit)) for source in entering), default=0)
            if where[node] == -1:
                ends[unit] = start + nodes[node]["cpuLatency"]
            else:
                leaving = {
                    e["sourceId"]
                    for e in given["edges"]
                    if e["sourceId"] in block and e["destId"] not in block
                }
                cost = {edge["sourceId"]: edge["cost"] for edge in given["edges"]}
                took = sum(nodes[one]["fpgaLatency"] for one in block) + sum(
                    cost[s] for s in entering | leaving
                )
                ends[unit] = start + took
        return ends[unit]

    try:
        return max(end(node) for node in nodes)
    except RecursionError:
        return None


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("seed", range(25))
def test_latency_is_proven_no_higher_than_the_best_of_all_assignments_and_found_no_lower(
    part, seed
):
    given = small_input(seed)
    best = min(
        value
        for where in itertools.product((-1, 0, 1), repeat=6)
        if (value := slow_latency(given, where)) is not None
    )
    latency = part("latency")
    placement = latency.solve(given, limit_s=0.05)
    assert placement.bound <= best * (1 + 1e-6)
    assert placement.objective_value >= best * (1 - 1e-9)
    assert latency.latency_ms(given, placement.layer_devices) == pytest.approx(
        placement.objective_value
    )


@pytest.mark.covering(every=2, first=1)
@pytest.mark.parametrize("seed", range(25))
def test_the_referee_of_latency_says_what_the_definition_says(part, seed):
    given, draw = small_input(seed), random.Random(seed)
    latency = part("latency")
    read = latency.graph(given)
    for _ in range(40):
        where = [draw.choice((-1, 0, 1)) for _ in range(6)]
        assert latency.finish_ms(read, [where[node] for node in read.ids]) == slow_latency(
            given, where
        )


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("seed", range(60))
def test_the_least_time_of_a_subgraph_with_its_waiting_is_that_of_the_best_of_all_subgraphs(
    part, seed
):
    read, draw = part("latency").graph(small_input(seed)), random.Random(seed)
    barred = np.array([draw.random() < 0.2 for _ in read.ids])
    waits = [(draw.randint(1, 20), *draw.sample(range(6), 2)) for _ in range(draw.randint(0, 4))]
    hull = frozenset(read.siblings[draw.randrange(6)])

    def took(nodes):
        whole = all(nodes.issuperset(read.siblings[node]) for node in nodes) and hull <= nodes
        if (
            not whole
            or any(barred[node] for node in nodes)
            or sum(read.size[node] for node in nodes) > read.memory
        ):
            return float("inf")
        waited = max(
            (time for time, inside, outside in waits if inside in nodes and outside not in nodes),
            default=0,
        )
        return max(0, waited - 3) + read.duration_ms(nodes)

    best = min(
        took(frozenset(nodes))
        for size in range(7)
        for nodes in itertools.combinations(range(6), size)
    )
    found = part("latency_cuts").Cuts(read).least(hull, barred, waits, since=3)
    assert found.value == pytest.approx(best, rel=1e-5)


@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    [
        "layer_bert24_inference",
        "layer_gnmt_inference",
        "layer_resnet50_inference",
        "operator_bert3_inference",
    ],
)
def test_latency_inputs_that_are_known_are_proven_at_once(part, name):
    latency = part("latency")
    placement = latency.solve(latency.load(name), limit_s=30)
    assert placement.status == "optimal"
    assert placement.objective_value == pytest.approx(latency.BEST[name], rel=1e-5)


def test_a_subgraph_that_values_leave_and_come_back_to_is_refused(part):
    latency = part("latency")
    node = {"supportedOnFpga": 1, "cpuLatency": 1, "fpgaLatency": 1, "size": 1}
    edges = [{"sourceId": 0, "destId": 1, "cost": 1}, {"sourceId": 1, "destId": 2, "cost": 1}]
    given = {
        "maxFPGAs": 1,
        "maxSizePerFPGA": 9,
        "nodes": [{"id": i} | node for i in range(3)],
        "edges": edges,
    }
    where = {"0": "accelerator:0", "1": "cpu", "2": "accelerator:0"}
    with pytest.raises(ValueError, match="values that go round"):
        latency.latency_ms(given, where)


def test_cases_are_chosen_by_group_and_by_name(part):
    jobs = part("jobs")
    assert [case.name for case in jobs.select(["overhead"])] == [
        "chain of 50 layers, 4 devices, training"
    ]
    chosen = jobs.select(["neurips20 layer_bert24_inference", "large"])
    assert {case.group for case in chosen} == {"contiguous", "free", "latency", "large"}
    assert len(jobs.select([])) == len(part("cases").every())


def test_a_choice_of_no_case_names_the_groups(part):
    with pytest.raises(ValueError, match=r"'nothing'; groups are .*latency"):
        part("jobs").select(["nothing"])


def test_what_is_wanted_of_a_case_counts_all_of_it(part):
    wanted = part("rows").Wanted(10.0, proven_s=1.0)
    figures = {"gap, %": 0.0, "time, s": 0.5, "peak, MiB": 100}
    assert wanted.met(10.00001, figures, proven=True)
    assert not wanted.met(10.1, figures, proven=True)
    assert not wanted.met(10.0, figures, proven=False)
    assert not wanted.met(10.0, figures | {"time, s": 1.5}, proven=True)
    assert part("rows").Wanted().met(10.0, figures, proven=True) is None


def test_the_plain_program_over_one_order_cuts_a_chain_as_one_would_by_hand(part):
    chain, peers = part("chain"), part("peers")
    problem = importlib.import_module("placer.solver.problem").Problem.from_request(
        chain.request(6, 2)
    )
    # forward and backward of each, in ms
    layers = [3 + i % 7 + i % 5 for i in range(6)]
    transfers = 0.2  # 1 MB there and 1 MB back over 10 GB/s
    by_hand = min(max(sum(layers[:cut]), sum(layers[cut:])) + transfers for cut in range(1, 6))
    assert peers.values(problem)[peers.ONE_ORDER] == pytest.approx(by_hand)


def test_a_model_s_profile_has_both_types_of_device_and_fits_on_the_cluster(part):
    models = part("models")
    request = models.request("unet")
    kinds = {device.type for device in request.devices}
    assert kinds == {models.FAST, models.SLOW} == set(request.profile.layers[0].forward_ms)
    assert len({device.host for device in request.devices}) == 2


def test_where_memory_is_tight_the_largest_stage_no_longer_fits(part):
    models = part("models")
    solve = importlib.import_module("placer.solver.solve").solve
    plenty, tight = models.request("unet"), models.tight("unet", 0.85, "auto")
    largest = max(load.memory.total_bytes for load in solve(plenty).devices)
    assert {device.memory_bytes for device in tight.devices} == {int(0.85 * largest)}
    assert [device.type for device in tight.devices] == [device.type for device in plenty.devices]
    assert tight.constraints.recompute == "auto"


@pytest.mark.integration
def test_a_case_in_a_process_of_its_own_gives_one_row(part):
    case = "neurips20 layer_bert24_inference, contiguous"
    command = [sys.executable, "-m", "benchmarks.solver", case]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    row = json.loads(answer.stdout.splitlines()[-1])
    assert row["case"] == case and row["value"] == pytest.approx(17.789906, rel=1e-6)
    assert row["figures"]["gap, %"] == 0.0 and row["figures"]["peak, MiB"] > 0


def test_no_stages_with_replicas_of_their_own_have_a_smaller_bottleneck(part):
    replicated, unlike = part("replicated"), part("unlike_replicas")
    asked = part("chain").request(
        5,
        4,
        chunks=16,
        replicas="auto",
        cluster=replicated.of_hosts(4, "made up", per_host=1),
    )
    layers = tuple(
        layer.model_copy(update={"grad_bytes": 10**8 * index**2})
        for index, layer in enumerate(asked.profile.layers)
    )
    asked = asked.model_copy(
        update={"profile": asked.profile.model_copy(update={"layers": layers})}
    )
    plans = unlike.UnlikeReplicas(asked)
    every = [
        plans.bottleneck(unlike.Plan(tuple(map(unlike.Stage, (0, *cuts), (*cuts, 5), counts)), 0.0))
        for stages in range(1, 5)
        for cuts in itertools.combinations(range(1, 5), stages - 1)
        for counts in itertools.product(range(1, 5), repeat=stages)
        if sum(counts) <= 4
    ]
    best = plans.best()
    assert plans.bottleneck(best) == pytest.approx(min(every))
    assert best.predicted_ms == pytest.approx(min(every))


def test_answers_by_stage_have_the_smallest_bottleneck_of_a_second_program(part):
    replicated, unlike = part("replicated"), part("unlike_replicas")
    for heavy in range(5):
        # 12 micro-batches can be shared by 1 to 4 replicas
        asked = part("chain").request(
            5,
            4,
            chunks=12,
            replicas="by-stage",
            objective="throughput",
            schedule="1f1b",
            cluster=replicated.of_hosts(4, "made up", per_host=1),
        )
        layers = tuple(
            layer.model_copy(update={"grad_bytes": 10**9 if index == heavy else 0})
            for index, layer in enumerate(asked.profile.layers)
        )
        asked = asked.model_copy(
            update={"profile": asked.profile.model_copy(update={"layers": layers})}
        )
        best = unlike.UnlikeReplicas(asked).best()
        assert len({stage.replicas for stage in best.stages}) > 1
        assert solve(asked).objective_value == pytest.approx(best.predicted_ms, rel=2e-6)


def test_answers_by_stage_are_the_configurations_of_pipedreams_authors(part):
    replicated = part("replicated")
    for devices in (4, 8):
        placement = solve(replicated.by_stage("vgg16", devices))
        shape = "-".join(map(str, placement.replicas_by_stage))
        assert shape == replicated.CONFIGURATIONS["vgg16", devices]
        assert placement.status == "optimal"


@pytest.mark.parametrize(
    ("name", "devices", "stages", "predicted_ms", "data_parallel_ms"),
    [
        ("vgg16", 4, "3-1", 176.349, 500.192),
        ("vgg16", 8, "7-1", 100.841, 277.767),
        ("vgg16", 16, "13-2-1", 54.795, 145.802),
        ("gnmt_large", 4, "1-1-1-1", 137.129, 796.635),
    ],
)
def test_plans_are_those_of_pipedreams_optimizer(
    part, name, devices, stages, predicted_ms, data_parallel_ms
):
    # Expected: `optimizer_graph_hierarchical.py -n DEVICES -b 1250000000` with an activation
    # compression ratio of 1, of github.com/msr-fiddle/pipedream, commit 7db6a1c.
    asked = part("replicated").of_profile(
        name, devices, per_host=1, objective="throughput", schedule="1f1b", step_kind="isolated"
    )
    plans = part("unlike_replicas").UnlikeReplicas(asked)
    found = plans.of_pipedream()
    assert str(found) == stages
    assert found.predicted_ms == pytest.approx(predicted_ms, abs=1e-3)
    assert plans.data_parallel_of_pipedream() == pytest.approx(data_parallel_ms, abs=1e-3)
