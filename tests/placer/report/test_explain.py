from __future__ import annotations

from typing import Any

import pytest

from placer.errors import InputError
from placer.report import explain
from placer.schema import (
    Cluster,
    Device,
    DeviceLoad,
    Edge,
    Generation,
    Improvement,
    Infeasibility,
    Layer,
    Limits,
    Link,
    MemoryUse,
    Placement,
    Profile,
    Replica,
    ShardedStep,
    SingleDevice,
    Step,
    StepChoice,
)

GIB = 1024**3


def load(device: str, **changes: Any) -> DeviceLoad:
    fields: dict[str, Any] = {
        "device": device,
        "layers": 2,
        "compute_ms": 12.25,
        "send_ms": 1.5,
        "receive_ms": 0.25,
        "load_ms": 14.0,
        "memory": MemoryUse(param_bytes=GIB, activation_bytes=GIB),
        "limit_bytes": 8 * GIB,
    }
    return DeviceLoad(**fields | changes)


def placement(**changes: Any) -> Placement:
    fields: dict[str, Any] = {
        "status": "feasible",
        "objective": "throughput",
        "objective_value": 14.0,
        "bound": 13.5,
        "gap": 0.0357,
        "method": "cp-sat",
        "solve_time_s": 1.234,
        "model": "ResNet",
        "layer_devices": {
            "stem": "cuda:0",
            "layer1": "cuda:0",
            "layer2": "cuda:1",
            "head": "cuda:1",
        },
        "training": True,
        "batch_size": 16,
        "devices": (load("cuda:0", bottleneck=True), load("cuda:1", compute_ms=9.87, load_ms=11.6)),
        "single_device": SingleDevice(device="cuda:0", objective_value=22.1, fits=True),
        "speedup": 22.1 / 14.0,
    }
    return Placement(**fields | changes)


def row(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if word in line)


def test_each_device_shows_its_layers_times_and_memory_against_its_limit() -> None:
    first = row(explain(placement()), "│ cuda:0")
    for shown in (" 2 ", "12.25 ms", "1.75 ms", "14.00 ms", "2.0 / 8.0 GiB 25%"):
        assert shown in first
    assert "cuda:0      stem … layer1\ncuda:1      layer2 … head\n" in explain(placement())


def test_memory_far_below_its_limit_keeps_its_own_unit() -> None:
    small = load("cuda:0", memory=MemoryUse(param_bytes=3 * 1024**2))
    assert "3.0 MiB / 8.0 GiB 0%" in explain(placement(devices=(small,)))


def test_the_name_of_a_file_is_refused_with_the_command_that_shows_files() -> None:
    with pytest.raises(InputError, match=r"explain was given a str; .*`placer show FILE`"):
        explain("placement.json")  # type: ignore[arg-type]


def test_only_the_bottleneck_is_marked() -> None:
    text = explain(placement())
    assert "▶" in row(text, "│ cuda:0")
    assert "▶" not in row(text, "│ cuda:1")


def test_what_is_proven_is_said() -> None:
    text = explain(placement())
    assert "bottleneck per micro-batch 14.00 ms" in row(text, "objective")
    assert "13.50 ms, gap 3.57%" in row(text, "bound ")
    assert "feasible: the best found in time" in row(text, "status")
    assert "1.234 s by cp-sat" in row(text, "solve time")


def test_the_speed_up_over_one_device_is_said() -> None:
    assert "speed-up 1.58x over cuda:0 alone: 22.10 ms" in explain(placement())


def test_a_model_too_large_for_one_device_says_how_much_is_missing() -> None:
    single = SingleDevice(
        device="cuda:0", objective_value=22.1, fits=False, missing_bytes=int(1.2 * GIB)
    )
    assert "does not fit on one device: 1.2 GiB are missing on cuda:0" in explain(
        placement(single_device=single)
    )


def test_a_training_step_of_one_micro_batch_says_that_it_is_no_pipeline() -> None:
    # ``chunks`` was forgotten, and the reader saw a speed-up that no step reached.
    remark = "one device works at a time; give chunks"
    assert remark in row(explain(placement(chunks=1)), "batch       ")
    for changes in ({"chunks": 4}, {"chunks": 1, "training": False}):
        assert remark not in explain(placement(**changes))


def test_a_placement_on_one_device_says_that_splitting_is_no_better() -> None:
    alone = placement(
        layer_devices={"stem": "cuda:0", "head": "cuda:0"},
        devices=(load("cuda:0", bottleneck=True),),
    )
    assert "splitting would not be better" in explain(alone)


def test_a_device_with_several_segments_lists_them() -> None:
    devices = {"a": "cuda:0", "b": "cuda:1", "c": "cuda:0", "d": "cuda:0"}
    assert "cuda:0      a, c … d\n" in explain(placement(layer_devices=devices))


def test_many_segments_are_cut_short_with_their_number() -> None:
    devices = {f"l{index}": f"cuda:{index % 2}" for index in range(12)}
    assert "and 3 more segments" in explain(placement(layer_devices=devices))


def test_the_memory_objective_is_in_bytes() -> None:
    text = explain(
        placement(objective="memory", objective_value=2 * GIB, bound=1.5 * GIB, speedup=None)
    )
    assert "largest memory use 2.0 GiB" in text
    assert "1.5 GiB" in row(text, "bound ")


def test_a_generation_shows_its_tokens_its_rate_and_its_cache() -> None:
    found = Generation(
        prompt_tokens=512,
        new_tokens=64,
        sequences_in_flight=4,
        first_token_ms=20.5,
        token_ms=9.0,
        generation_ms=700.0,
        tokens_per_s=365.7,
        copies=("cuda:0", "cuda:1"),
        copies_tokens_per_s=402.27,
    )
    memory = MemoryUse(param_bytes=GIB, cache_bytes=GIB // 2)
    answer = placement(
        objective="generation",
        generation=found,
        training=False,
        devices=(load("cuda:0", memory=memory), load("cuda:1")),
    )
    text = explain(answer)
    assert "objective   generation: time between the ends of two generations 14.00 ms" in text
    assert "the first after 20.50 ms for a prompt of 512 tokens, each later one 9.00 ms" in text
    timed = answer.model_copy(update={"generation": found.model_copy(update={"host_ms": 4.0})})
    assert "512 tokens and 4.00 ms of the host before, each" in explain(timed)
    assert "64 tokens in 700 ms, 4 in flight, 365.7 tokens/s" in text
    assert "cache       cuda:0 512.0 MiB\n" in " ".join(text.split(" "))
    assert "copies      a whole model on each of 2 devices has 402.3 tokens/s, 1.10x" in text
    assert "1.5 / 8.0 GiB" in text


def test_devices_that_recompute_are_named() -> None:
    assert "recompute " not in explain(placement())
    assert "cuda:1 run forwards once more" in row(
        explain(placement(recompute=("cuda:1",))), "recompute "
    )


def test_a_whole_batch_is_shown_with_the_best_that_was_not_chosen() -> None:
    def choice(chunks: int, value: float | None) -> StepChoice:
        return StepChoice(
            batch_size=64 // chunks,
            chunks=chunks,
            schedule="1f1b",
            contiguous=True,
            objective_value=value,
        )

    step = Step(
        batch_size=64,
        samples_per_s=4571.4,
        bubble=0.25,
        isolated_ms=15.0,
        steady_state_ms=14.0,
        choices=(
            choice(4, 14.0),
            choice(8, 15.5),
            choice(16, 20.0),
            choice(32, 30.0),
            choice(64, 40.0),
            choice(2, None),
        ),
    )
    text = explain(placement(objective="step", chunks=4, schedule="1f1b", step=step))
    assert "a whole batch 14.00 ms" in row(text, "objective ")
    assert "64 samples: 4 micro-batches of 16, 1f1b, 4571 samples/s, devices idle 25%" in row(
        text, "batch       "
    )
    line = row(text, "a step      ")
    assert "14.00 ms steady-state, as in a training loop; 15.00 ms isolated" in line
    others = [line for line in text.splitlines() if "instead " in line]
    assert len(others) == 3 and "8 micro-batches of 8, 1f1b: 15.50 ms" in others[0]


def replicated(**changes: Any) -> Placement:
    """Four alike devices; the choice of each shape."""

    def choice(replicas: int, stages: int | None, value: float | None, bound: float) -> StepChoice:
        return StepChoice(
            batch_size=16,
            chunks=4,
            schedule="1f1b",
            contiguous=True,
            replicas=replicas,
            stages=stages,
            objective_value=value,
            bound=bound,
        )

    step = Step(
        batch_size=64,
        samples_per_s=1000.0,
        bubble=0.1,
        reduction_ms=9.0,
        reduction_hidden_ms=7.0,
        isolated_ms=53.0,
        steady_state_ms=53.0,
        choices=(
            choice(4, 1, 53.0, 53.0),
            choice(2, 2, 58.0, 53.0),
            choice(1, 4, 62.0, 53.0),
            choice(1, 1, 190.0, 53.0),
            choice(3, None, None, 55.0),
        ),
    )
    replicas = tuple(Replica(device=f"cuda:{i}", samples=4) for i in range(4))
    where = dict.fromkeys(("stem", "layer1", "layer2", "head"), "cuda:0")
    given = {"layer_devices": where, "replicas": {"cuda:0": replicas}, "step": step, "chunks": 4}
    given |= {"objective": "step", "objective_value": 53.0, "batch_size": 16}
    return placement(**given | changes)


def test_shapes_are_compared_from_the_shortest_step_on() -> None:
    text = explain(replicated())
    assert row(text, "shapes ").endswith(
        "4 replicas: 53.00 ms; 3 replicas: at least 55.00 ms; 2 stages x 2 replicas: 58.00 ms; "
        "4 stages: 62.00 ms"
    )
    assert "gradient reduction takes 9.00 ms, of which 7.00 ms are hidden" in row(text, "exchange ")
    assert "4: each computes 4 samples of a micro-batch" in row(text, "replicas    ")
    assert "cuda:0, cuda:1, cuda:2, cuda:3  stem … head" in text
    assert "splitting would not be better" not in text


def test_a_sharded_step_is_shown_with_its_code_also_where_nothing_fits() -> None:
    sharded = ShardedStep(
        step_ms=40.0,
        compute_ms=30.0,
        memory_bytes=3 * GIB,
        batch_size=8,
        chunks=2,
        modules=("model.layers.0", "model.layers.1"),
    )
    text = explain(replicated(sharded=sharded), width=300)
    assert row(text, "FSDP2 ").endswith(
        "predicted 1.32x faster: 40.00 ms a step by fully sharded data parallelism, 3.0 GiB and 2 "
        "micro-batches of 8 on each device; the time leaves out the host's work to shard, and "
        "measured steps took 1.12 and 1.65 times their predictions:"
    )
    assert "for module in model.get_submodule('model.layers').children():" in text
    why = Infeasibility(reason="too large")
    none = Placement(status="infeasible", objective="step", infeasible=why, sharded=sharded)
    assert "fully_shard(model)" in explain(none)
    none = Placement(status="unknown", objective="step", sharded=sharded)
    assert "fully_shard(model)" in explain(none)


def test_a_bottleneck_of_replicas_is_told_for_one_share() -> None:
    text = explain(replicated(objective="throughput", step=None))
    assert "bottleneck per 4 samples 53.00 ms" in row(text, "objective ")
    assert "4: each computes 4 samples of a micro-batch" in row(text, "replicas    ")


def test_replicas_by_stage_are_compared_and_told_in_pipeline_order() -> None:
    step = replicated().step
    assert step is not None
    own = step.choices[0].model_copy(
        update={"replicas": 3, "replicas_by_stage": (3, 1), "stages": 2, "objective_value": 48.0}
    )
    step = step.model_copy(update={"choices": (own, *step.choices)})
    replicas = tuple(Replica(device=f"cuda:{i}", samples=5) for i in range(3))
    where = {"stem": "cuda:0", "layer1": "cuda:0", "layer2": "cuda:0", "head": "cuda:3"}
    changed = {"batch_size": 15, "objective_value": 48.0, "layer_devices": where}
    text = explain(replicated(replicas={"cuda:0": replicas}, step=step, **changed), width=200)
    assert "3-1 replicas by stage: 48.00 ms; 4 replicas: 53.00 ms" in row(text, "shapes ")
    assert "3-1 by stage: each computes 5 samples, 15 samples of a micro-batch" in text


def test_uneven_shares_name_the_measured_sizes() -> None:
    shares = Replica(device="cuda:0", samples=5), Replica(device="cuda:1", samples=11)
    step = replicated().step
    assert step is not None
    step = step.model_copy(update={"measured_batch_sizes": (4, 16)})
    text = explain(replicated(replicas={"cuda:0": shares}, step=step), width=200)
    assert "2: cuda:0 5, cuda:1 11 samples of a micro-batch; times are interpolated between" in text
    assert "the measured sizes 4, 16" in text


@pytest.mark.parametrize(
    "shown", ["layer 'head' needs 9.2 GiB", "short of    1.2 GiB", "cuda:0, cuda:1", "head"]
)
def test_an_infeasible_request_is_answered_in_words(shown: str) -> None:
    why = Infeasibility(
        reason="layer 'head' needs 9.2 GiB; the largest limit is 8.0 GiB",
        layers=("head",),
        devices=("cuda:0", "cuda:1"),
        missing_bytes=int(1.2 * GIB),
    )
    assert shown in explain(Placement(status="infeasible", objective="throughput", infeasible=why))


def test_a_time_out_without_placement_says_so_and_keeps_the_bound() -> None:
    text = explain(Placement(status="unknown", objective="latency", bound=3.25, solve_time_s=30.0))
    assert "no placement was found within 30.0 s" in text
    assert "3.25 ms" in text


def test_a_profile_lists_each_layer_with_times_and_memory() -> None:
    profile = Profile(
        model="Net",
        training=True,
        optimizer="adam",
        batch_size=4,
        layers=(
            Layer(
                name="conv",
                module="Conv2d",
                forward_ms={"cpu": 1.25},
                backward_ms={"cpu": 2.5},
                param_bytes=3 * 1024,
                grad_bytes=1024,
                optimizer_bytes=2048,
                saved_bytes=5 * 1024,
            ),
            Layer(name="head", module="Linear", forward_ms={"cpu": 0.5}, backward_ms={"cpu": 0.75}),
        ),
        edges=(Edge(source="conv", targets=("head",), bytes=64),),
        cluster=Cluster(
            devices=(Device(name="cpu:0", type="cpu", memory_bytes=GIB, reserve_bytes=GIB // 2),)
        ),
    )
    text = explain(profile)
    for shown in ("Conv2d", "1.25 ms", "2.50 ms", "3.0 KiB", "5.0 KiB"):
        assert shown in row(text, "│ conv")
    assert "training with adam, micro-batch of 4" in text
    assert "cpu: 5.00 ms in all" in text
    assert "1.0 GiB" in row(text, "│ cpu:0") and "512.0 MiB" in row(text, "│ cpu:0")


@pytest.mark.parametrize(("apart", "told"), [(0.2, False), (0.9, True)])
def test_a_profile_of_a_busy_device_says_so(apart: float, told: bool) -> None:
    layers = [
        Layer(name="long", forward_ms={"cpu": 8.0}, spread={"cpu": apart}),
        Layer(name="short", forward_ms={"cpu": 2.0}, spread={"cpu": 0.4}),
    ]
    profile = Profile(layers=tuple(layers))
    assert profile.spread("cpu") == pytest.approx(0.8 * apart + 0.2 * 0.4)
    assert ("timings on cpu are 80% apart" in explain(profile)) == told
    assert bool(profile.unsteady("cpu")) == told


def test_a_profile_says_whether_it_has_the_loss_and_what_weight_passes_wait_with() -> None:
    layers = [
        Layer(name=name, forward_ms={"t": 1.0}, backward_ms={"t": 2.0}, deferred_bytes=1024)
        for name in "ab"
    ]
    shown = explain(Profile(layers=layers, training=True, with_loss=True))
    assert "training with no optimizer and the loss" in shown
    assert "left to weight passes under zero-bubble: 2.0 KiB a micro-batch" in " ".join(
        shown.split()
    )
    plain = explain(
        Profile(
            layers=[layer.model_copy(update={"deferred_bytes": 0}) for layer in layers],
            training=True,
        )
    )
    assert "loss" not in plain and "weight passes" not in plain


def test_an_inference_profile_has_no_backward_column() -> None:
    profile = Profile(layers=(Layer(name="a", forward_ms={"cpu": 1.0}),))
    assert "forward" in explain(profile)
    assert "backward" not in explain(profile)


def test_a_profile_that_was_not_captured_says_why() -> None:
    profile = Profile(
        captured=False,
        not_captured_because="a numpy call",
        layers=(Layer(name="a", forward_ms={}),),
    )
    assert "not captured, so it runs through hooks: a numpy call" in explain(profile)


def test_a_cluster_lists_its_links_in_both_directions() -> None:
    devices = tuple(Device(name=f"cuda:{index}", type="H", memory_bytes=GIB) for index in range(2))
    links = (
        Link(source="cuda:0", target="cuda:1", bandwidth_bytes_per_s=384e9, latency_s=18e-6),
        Link(source="cuda:1", target="cuda:0", bandwidth_bytes_per_s=12.5e9),
    )
    text = explain(Cluster(devices=devices, links=links))
    assert "384.00 GB/s" in text and "18.0 µs" in text and "12.50 GB/s" in text


def full_cluster(count: int, bandwidth: float = 5e9) -> Cluster:
    names = [f"cuda:{index}" for index in range(count)]
    pairs = [(a, b) for a in names for b in names if a != b]
    return Cluster(
        devices=tuple(Device(name=name, type="H", memory_bytes=GIB) for name in names),
        links=tuple(Link(source=a, target=b, bandwidth_bytes_per_s=bandwidth) for a, b in pairs),
    )


def test_links_that_are_all_alike_are_one_row() -> None:
    text = explain(full_cluster(4))
    assert "each other" in row(text, "5.00 GB/s")
    assert text.count("GB/s") == 1


def test_links_that_differ_are_listed_and_cut_short_with_their_number() -> None:
    cluster = full_cluster(5)
    faster = cluster.links[0].model_copy(update={"bandwidth_bytes_per_s": 9e9})
    text = explain(cluster.model_copy(update={"links": (faster, *cluster.links[1:])}))
    assert "9.00 GB/s" in text
    assert "and 8 more links" in text


def test_what_limits_a_placement_and_what_would_help_is_shown_where_it_was_asked_for() -> None:
    improvements = (Improvement(change="2 GiB more on cuda:1", objective_value=13.1, speedup=1.07),)
    text = explain(
        placement(limits=Limits(kind="memory", detail="cuda:1 is full", improvements=improvements))
    )
    assert "memory: cuda:1 is full" in row(text, "limited by")
    assert "2 GiB more on cuda:1: 13.10 ms, 1.07x" in row(text, "would help")
    assert "limited by" not in explain(placement())


def test_the_kind_of_what_limits_a_placement_is_named_once() -> None:
    limits = Limits(kind="memory", detail="memory: without its limits 9 ms instead of 14 ms")
    shown = row(explain(placement(limits=limits)), "limited by")
    assert shown == "limited by  memory: without its limits 9 ms instead of 14 ms"
