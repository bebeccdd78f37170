"""The executor's benchmark: its peers compute what the model computes, and its rows say what was
found."""

import copy
import importlib
import itertools
import multiprocessing
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forks import TORCH
from torch.nn import functional

from placer import zoo

ROOT = Path(__file__).parents[2]


@pytest.fixture
def part(monkeypatch):
    """A module of the benchmark by its name, at the sizes of a machine without GPUs."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return lambda name: importlib.import_module(f"benchmarks.executor.{name}")


MODELS = {
    "resnet": (zoo.resnet18, lambda: torch.randn(4, 3, 64, 64)),
    "gpt": (lambda: zoo.gpt(2, 16, 2, 8, 32), lambda: torch.randint(32, (4, 8))),
    "unet": (lambda: zoo.unet(width=2), lambda: torch.randn(4, 3, 32, 32)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_chain_by_hand_computes_what_its_model_computes(part, name):
    torch.manual_seed(0)
    make, data = MODELS[name]
    model, inputs = make().eval(), data()
    value = inputs
    for unit in part("parts").units(model):
        value = unit(value)
    assert torch.equal(value, model(inputs))


@pytest.mark.parametrize("name", MODELS)
def test_a_chain_by_hand_holds_every_parameter_once(part, name):
    model = MODELS[name][0]()
    units = part("parts").units(model)
    assert sorted(id(p) for unit in units for p in unit.parameters()) == sorted(
        id(p) for p in model.parameters()
    )


def test_parts_are_cut_as_brute_force_cuts_them(part):
    random.seed(0)
    for _ in range(50):
        times = [random.randint(1, 9) for _ in range(random.randint(3, 7))]
        count = random.randint(1, 3)

        def slowest(ends, times=times):
            return max(sum(times[a:b]) for a, b in itertools.pairwise(ends))

        inner = itertools.combinations(range(1, len(times)), count - 1)
        best = min(slowest([0, *ends, len(times)]) for ends in inner)
        found = part("parts").cuts(times, count)
        assert len(found) == count + 1
        assert slowest(found) == best


def test_the_tutorials_pipeline_has_the_gradients_of_the_unsplit_model(part):
    torch.manual_seed(0)
    model = zoo.gpt(3, 16, 2, 8, 32).double()
    tokens, target = torch.randint(32, (6, 8)), torch.randint(32, (6, 8))
    units = part("parts").units(copy.deepcopy(model))
    places = [torch.device("cpu", index) for index in range(3)]
    split = part("tutorial").Pipeline(part("parts").cut(units, [0, 2, 4, 5]), places, split_size=2)
    for run in (model, split):
        functional.cross_entropy(run(tokens).flatten(0, 1), target.flatten()).backward()
    for expected, found in zip(model.parameters(), split.parameters(), strict=True):
        assert torch.allclose(expected.grad, found.grad, atol=1e-12)


@pytest.fixture
def started(part, monkeypatch):
    """Processes of ranks need not import torch first."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(TORCH)
    monkeypatch.setattr(part("ranks"), "START", "forkserver")


PEERS = [
    "DDP",
    "DDP-compiled",
    "FSDP2",
    "torch.distributed",
    "torch.distributed interleaved",
    "placer.distributed",
]


@pytest.mark.integration
@pytest.mark.slow
def test_every_engine_of_a_training_case_takes_its_turns_and_has_a_row(part, started):
    chosen = [
        f"gpt:{engine}" for engine in ("ours", *PEERS, "torch.distributed zero-bubble", "tutorial")
    ]
    found = importlib.import_module("benchmarks.executor").run(chosen)
    rows = {row["measure"]: row for row in found}
    assert {row["case"] for row in found} == {"tiny: GPT, 2 layers, d=32, 8 x 16 tokens, 2 devices"}
    assert not [measure for measure in rows if measure.startswith("no value")]
    labels = {part("figures").PEERS.get(engine, engine) for engine in PEERS} | {"tutorial's split"}
    step = rows["training step"]
    assert step["value"] > 0 and labels - {"placer.distributed"} <= set(step["peers"])
    assert all(
        rows[f"training step, {label}"]["spread"] for label in labels - {"placer.distributed"}
    )
    assert rows["training step by placer.distributed, a process for each device"]["value"] > 0
    assert rows["training step, eager PyTorch on one device"]["value"] > 0
    assert rows["turns of each engine"]["value"] == part("timing").repetitions().repeats
    assert rows["loss, largest difference to the unsplit model"]["value"] < 1e-4
    assert all(row["target"] is None for row in found)


def _first_step(here, engine):
    """The mean over the processes of the first losses of an engine; looked up by name in every
    process."""
    in_ranks = importlib.import_module("benchmarks.executor.in_ranks")
    turn = in_ranks.Turn(engine)
    in_ranks.build(here, "gpt", turn)
    step = here.kept[str(turn)].step
    losses = torch.stack([step().detach().float() for _ in range(3)])
    torch.distributed.all_reduce(losses)
    return (losses / here.count).tolist()


@pytest.mark.integration
@pytest.mark.slow
def test_data_parallel_engines_train_on_the_same_global_batch_as_one_device(part, started):
    """Losses after steps agree only if the shards make up the batch and gradients are its mean."""
    case = part("cases").training("gpt")
    model, batch = case.model(torch.device("cpu")), case.batch(torch.device("cpu"))
    expected = part("ours").reference(model, *batch, case.loss, chunks=1)
    pool = part("ranks").Ranks(2)
    try:
        for engine in part("replicas").ENGINES:
            assert pool.run(_first_step, engine) == pytest.approx(expected, abs=1e-5), engine
    finally:
        pool.close()


@pytest.mark.integration
@pytest.mark.slow
def test_an_engine_that_fails_leaves_the_others_in_the_contest(part, started):
    """The batch does not divide by three; the processes end with that, and are started again."""
    in_ranks, distributed = part("in_ranks"), part("distributed")
    peers = in_ranks.Peers("gpt", 2)
    try:
        one, failed = peers.contender([in_ranks.Turn(distributed.ENGINE, 4)])
        assert one is not None and not failed
        best, failed = peers.contender(
            [in_ranks.Turn(distributed.ENGINE, chunks) for chunks in (3, 2)]
        )
        assert best is not None and (best.chunks, [sample.chunks for sample in failed]) == (2, [3])
        assert one.turn() > 0 and best.turn() > 0
    finally:
        peers.close()


def _fails_in_one(here):
    if here.rank == 1:
        raise torch.OutOfMemoryError("tried to allocate")
    here.meet()  # for ever


@pytest.mark.integration
@pytest.mark.slow
def test_a_process_that_fails_ends_those_that_wait_for_it_and_says_why(part, started):
    pool = part("ranks").Ranks(2)
    with pytest.raises(part("ranks").RankError, match=r"^out of memory$"):
        pool.run(_fails_in_one)
    assert not pool._processes


def contender(part, engine, times, chunks=1, failing=99):
    """An engine whose turns take these times, in order, and which notes that it had one."""
    left = iter(times)

    def turn():
        TURNS.append(engine)
        if TURNS.count(engine) >= failing:
            raise torch.OutOfMemoryError("tried to allocate")
        return next(left)

    return part("contest").Contender(engine, 2, chunks, turn)


TURNS: list[str] = []


def test_engines_take_turns_and_every_other_round_goes_backwards(part):
    TURNS.clear()
    both = [contender(part, "a", [1.0, 3.0, 2.0]), contender(part, "b", [5.0, 4.0, 6.0])]
    samples = list(part("contest").alternate("case", both, rounds=3))
    assert TURNS == ["a", "b", "b", "a", "a", "b"]
    assert [sample.values["step_ms"] for sample in samples] == [[1.0, 3.0, 2.0], [5.0, 4.0, 6.0]]


def test_an_engine_that_fails_in_a_turn_has_no_times_and_no_further_turns(part):
    TURNS.clear()
    both = [contender(part, "a", [1.0] * 3, failing=2), contender(part, "b", [2.0] * 3)]
    one, other = part("contest").alternate("case", both, rounds=3)
    assert (one.failed, one.values, TURNS.count("a")) == ("out of memory", {}, 2)
    assert other.values["step_ms"] == [2.0] * 3


def test_of_several_variants_the_fastest_takes_part(part):
    variants = [
        contender(part, "a", [ms], chunks) for ms, chunks in ((3.0, 4), (2.0, 8), (5.0, 16))
    ]
    best, failed = part("contest").fastest("case", variants)
    assert best.chunks == 8 and not failed


def test_a_contest_whose_time_is_up_begins_no_further_round(part, monkeypatch):
    contest = part("contest")
    monkeypatch.setattr(contest, "_ends", 10.0)
    now = itertools.count(step=2.0)
    # a round lasts 2 s
    monkeypatch.setattr(contest, "perf_counter", lambda: next(now))
    (sample,) = contest.alternate("case", [contender(part, "a", [1.0] * 9)], rounds=9)
    assert len(sample.values["step_ms"]) == 3  # begun at 0, 4 and 8 s


@pytest.mark.integration
def test_a_job_in_a_process_of_its_own_hands_its_samples_on(part):
    jobs = part("jobs")
    (job,) = jobs._chosen(["switching"])
    samples = list(jobs.apart(job, limit_s=120))
    assert [sample.engine for sample in samples] == ["clones", "moves"]
    assert all(sample.values and not sample.failed for sample in samples)


def test_a_job_that_takes_too_long_is_ended_and_says_so(part):
    jobs = part("jobs")
    (job,) = jobs._chosen(["switching"])
    assert [sample.failed for sample in jobs.apart(job, limit_s=0.1)] == ["no end within 0 s"]


def test_what_breaks_down_is_a_sample_with_the_reason(part):
    def fail():
        raise torch.OutOfMemoryError("tried to allocate")

    assert part("sample").attempt("gpt", "eager", 1, 1, fail).failed == "out of memory"


@pytest.fixture
def made(part, monkeypatch):
    """Rows of made-up samples, as two contests on four GPUs would give them, of which one broke
    down."""
    cases, sample = part("cases"), partial(part("sample").Sample, beside=4)
    monkeypatch.setattr(cases, "is_small", lambda: False)
    ours = {
        "step_ms": [100.0, 96.0, 104.0],
        "predicted_ms": [90.0],
        "loss_difference": [0.0],
        "stages": [4.0],
    }
    ours |= {"alone_ms": [110.0], "host_ms": [30.0]}
    samples = [
        sample("gpt", "eager", 1, 1, {"step_ms": [300.0] * 3}),
        sample("gpt", "ours", 4, 16, ours),
        sample("gpt", "tutorial", 4, 8, {"step_ms": [150.0] * 3}),
        sample("gpt", "DDP", 4, 1, {"step_ms": [80.0, 75.0, 90.0]}),
        sample("gpt", "torchgpipe", 4, 8, failed="out of memory"),
        sample("gpt", "ours", 0, 0, failed="no end within 900 s", beside=2),
    ]
    return part("rows").rows(samples)


def _row(rows, measure, devices="4 devices"):
    return next(
        row for row in rows if row["measure"].startswith(measure) and row["case"].endswith(devices)
    )


def test_a_speed_up_is_over_eager_pytorch_of_the_same_contest_beside_the_peers(made):
    row = _row(made, "training step, speed-up")
    assert (row["value"], row["peers"]) == (3.0, {"tutorial's split": 2.0, "DDP": 3.75})
    assert row["spread"] == [2.885, 3.125]


def test_a_target_that_was_missed_says_so(made):
    over = _row(made, "training step, over the best peer")
    assert (over["value"], over["target"], over["met"]) == (0.8, 0.99, False)
    issuing = _row(made, "host issues")
    assert (issuing["value"], issuing["target"], issuing["met"]) == (30.0, 25.0, False)


def test_a_peer_has_its_time_with_its_spread_and_the_turns_are_told(made):
    row = _row(made, "training step, DDP")
    assert (row["value"], row["spread"]) == (80.0, [75.0, 90.0])
    assert _row(made, "turns of each engine")["value"] == 3


def test_a_contest_that_broke_down_misses_its_target_and_says_why(made):
    row = _row(made, "training step, over the best peer", "2 devices")
    assert (row["value"], row["target"], row["met"]) == (None, 0.99, False)
    assert _row(made, "no value of ours", "2 devices")["measure"].endswith("no end within 900 s")


def test_a_peer_without_a_value_has_a_row_with_the_reason(made):
    assert _row(made, "no value of torchgpipe")["measure"].endswith(
        "8 micro-batches: out of memory"
    )


def test_eager_pytorch_that_ran_after_the_others_says_so(part):
    sample = partial(part("sample").Sample, beside=2)
    one = sample("gpt", "eager", 1, 1, {"step_ms": [300.0], "alternating": [0.0]})
    (row,) = [
        row
        for row in part("rows").rows([one])
        if "eager PyTorch on one device" in row["measure"][:50]
    ][-1:]
    assert (
        row["measure"]
        == "training step, eager PyTorch on one device, after the others: memory does not hold both"
    )


@pytest.fixture
def streamed(part, monkeypatch):
    """Rows of made-up streams, as four GPUs would give them."""
    cases, sample = part("cases"), partial(part("sample").Sample, beside=4)
    monkeypatch.setattr(cases, "is_small", lambda: False)
    ours = {
        "step_ms": [50.0],
        "host_ms": [1.0],
        "predicted_ms": [45.0],
        "difference": [0.0],
        "eager_stages": [0.0],
    }
    samples = [
        sample("stream-gpt", "eager", 1, 1, {"step_ms": [200.0]}),
        sample("stream-gpt", "ours", 4, 4, ours),
        sample("stream-gpt", "tutorial", 4, 4, {"step_ms": [80.0]}),
        sample("stream-gpt", "accelerate", 4, 0, failed="not installed"),
    ]
    return part("rows").rows(samples)


def test_a_streams_speed_up_is_beside_its_peers(streamed):
    row = _row(streamed, "a batch in a stream, speed-up")
    assert (row["value"], row["peers"]) == (4.0, {"tutorial's split": 2.5})
    assert (row["target"], row["met"]) == (3.8, True)


def test_a_peer_of_a_stream_that_is_not_installed_says_so(streamed):
    assert _row(streamed, "no value of accelerate's dispatch_model")["measure"].endswith(
        "not installed"
    )


def test_rows_of_a_stream_belong_to_its_case_alone(part, streamed):
    rows = part("rows")
    assert {rows.belongs(row["case"], "stream-gpt@4") for row in streamed} == {True}
    others = ("gpt@4", "stream-resnet101@4", "stream-gpt@2")
    assert {rows.belongs(row["case"], name) for row in streamed for name in others} == {False}


def test_a_stream_gives_times_and_results_that_are_the_unsplit_models(part):
    stream, cases = part("stream"), part("cases")
    samples = list(stream.measure(cases.training("gpt"), 2, ["ours", "tutorial"]))
    assert [sample.failed for sample in samples] == [""] * 3
    assert all(
        len(sample.values["step_ms"]) == part("timing").repetitions().repeats for sample in samples
    )
    ours = next(sample for sample in samples if sample.engine == "ours")
    assert ours.values["difference"][0] < 1e-5
    assert ours.values["step_ms"] and ours.devices == 2


@pytest.fixture
def steps(part):
    """A sample of the training step of an engine, in a contest on two devices."""
    sample = part("sample").Sample
    return lambda engine, ms, devices=2, **more: sample(
        "gpt", engine, devices, 4, {"step_ms": [ms]} | more, beside=2
    )


@pytest.fixture
def ran(part, monkeypatch, tmp_path):
    """Return ``ran(NAME, samples)``: the rows in the results after a job with these samples."""
    package, jobs = importlib.import_module("benchmarks.executor"), part("jobs")
    record = importlib.import_module("benchmarks.record")

    def run(name, samples):
        (job,) = jobs._chosen([name])
        monkeypatch.setattr(
            jobs, "run", lambda names, budget_s: iter([(job, sample) for sample in samples])
        )
        for rows in package.progress([name], tmp_path):
            record.write("executor", rows, tmp_path)
        return record.read("executor", tmp_path)["rows"]

    return run


OURS = {
    "alone_ms": [1.0],
    "host_ms": [1.0],
    "predicted_ms": [1.0],
    "loss_difference": [0.0],
    "eager_stages": [0.0],
}


def test_a_case_that_runs_again_takes_the_place_of_all_that_it_gave(ran, steps):
    """Else a row would stand beside peers of another run."""
    ran("gpt", [steps("eager", 30.0, 1), steps("ours", 10.0, **OURS), steps("DDP", 5.0)])
    rows = ran("gpt:ours", [steps("eager", 30.0, 1), steps("ours", 15.0, **OURS)])
    row = _row(rows, "training step, speed-up", "2 devices")
    assert (row["value"], row["peers"]) == (2.0, {})


def test_a_job_that_found_no_time_leaves_what_it_gave_before(ran, steps, part):
    ran("gpt", [steps("eager", 30.0, 1), steps("ours", 10.0, **OURS)])
    rows = ran(
        "gpt", [part("sample").Sample("gpt", "ours", 0, 0, failed="not run, no time", beside=2)]
    )
    assert not [row for row in rows if row["measure"].startswith("no value")]
    assert _row(rows, "training step, speed-up", "2 devices")["value"] == 3.0


def test_processes_that_run_jobs_at_the_same_time_lose_none_of_their_samples(part, steps, tmp_path):
    one, other = part("store").Store(tmp_path), part("store").Store(tmp_path)
    one.add("gpt@2", steps("ours", 10.0))
    other.add("unet@2", steps("tutorial", 20.0))
    one.add("gpt@2", steps("eager", 30.0, 1))
    found = [steps("ours", 10.0), steps("eager", 30.0, 1), steps("tutorial", 20.0)]
    assert all(part("store").Store(tmp_path).samples().count(sample) == 1 for sample in found)
    assert len(one.samples()) == 3


def test_what_a_run_found_is_written_before_its_next_job_breaks_it_off(
    part, monkeypatch, tmp_path, steps
):
    package, jobs = importlib.import_module("benchmarks.executor"), part("jobs")
    (job,) = jobs._chosen(["gpt"])

    def run(names, budget_s):
        yield job, steps("eager", 30.0, 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "run", run)
    with pytest.raises(KeyboardInterrupt):
        list(package.progress([], tmp_path))
    assert part("store").Store(tmp_path).samples() == [steps("eager", 30.0, 1)]


def test_rows_without_samples_stay_with_their_date_where_machine_and_versions_are_the_same(
    ran, tmp_path, steps
):
    record = importlib.import_module("benchmarks.record")
    kept = record.row("overhead, ResNet-50", "forward", "x", 1.0)
    gone = record.row("tiny: GPT, 2 layers, d=32, 8 x 16 tokens, 2 devices", "of old", "ms", 1.0)
    older = record.row("tiny: GPT, 2 layers, d=32, 8 x 16 tokens, 1 device", "of old", "ms", 1.0)
    path = record.write("executor", [kept, gone, older], tmp_path)
    path.write_text(
        path.read_text().replace(
            f'"date": "{record.read("executor", tmp_path)["date"]}"', '"date": "2000-01-01"'
        )
    )
    rows = ran("gpt", [steps("eager", 30.0, 1)])
    assert {**kept, "figures": {"measured": "2000-01-01"}} in rows
    assert not any(row["measure"] == "of old" for row in rows)
    assert {row["figures"]["measured"] for row in rows if "GPT" in row["case"]} == {
        record.read("executor", tmp_path)["date"]
    }


def test_samples_of_other_versions_are_left_out(part, tmp_path, steps, monkeypatch):
    part("store").Store(tmp_path).add("gpt@2", steps("eager", 30.0, 1))
    monkeypatch.setattr(
        importlib.import_module("benchmarks.record"), "versions", lambda: {"torch": "another"}
    )
    assert part("store").Store(tmp_path).samples() == []


def test_engines_of_a_case_are_chosen_together_and_the_order_is_that_of_the_names(
    part, monkeypatch
):
    monkeypatch.setattr(part("cases"), "counts", lambda: [4, 2])
    chosen = part("jobs")._chosen(["switching", "unet@2", "gpt:DDP", "gpt@4:ours", "gpt:DDP"])
    every = "+".join(part("training").ENGINES)
    assert [job.name for job in chosen] == [
        "switching:ours",
        f"unet@2:{every}",
        "gpt@4:ours+DDP",
        "gpt@2:DDP",
    ]


@pytest.mark.parametrize("name", ["vgg", "gpt@3", "gpt:horovod", "switching@2"])
def test_a_case_or_an_engine_that_does_not_exist_is_refused(part, name):
    with pytest.raises(ValueError, match=f"'{name}' is not a case; there are resnet101, gpt"):
        part("jobs")._chosen([name])


def test_what_lies_in_gaps_of_earlier_memory_counts_and_what_was_there_does_not(part, monkeypatch):
    """The GPT's weights and gradients lay in pieces that earlier work had taken: 3 GB of them were
    not counted."""
    memory, cuda = part("memory"), torch.cuda
    pieces = {1: (100, 10), 2: (50, 50)}
    monkeypatch.setattr(memory, "release", lambda: None)
    monkeypatch.setattr(memory, "_pieces", lambda place: dict(pieces))
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda place: None)
    monkeypatch.setattr(cuda, "max_memory_reserved", lambda place: 385)
    monkeypatch.setattr(cuda, "memory_reserved", lambda place: 380)
    meter = memory.Meter([torch.device("cuda", 0)])
    pieces.update({1: (100, 70), 3: (200, 0)})
    del pieces[2]
    load = SimpleNamespace(device="cuda:0", memory=SimpleNamespace(total_bytes=300))
    found = meter.against(SimpleNamespace(devices=[load]))
    assert found == {"peak_bytes": [60 + 200 + 5], "predicted_bytes": [300]}


def test_memory_is_held_against_its_prediction_device_by_device(part, monkeypatch):
    monkeypatch.setattr(part("cases"), "is_small", lambda: False)
    values = {"peak_bytes": [100.0, 200.0], "predicted_bytes": [103.0, 188.0]}
    (row,) = part("figures").memory_row("GPT", part("sample").Sample("gpt", "ours", 2, 4, values))
    assert (row["value"], row["spread"], row["target"], row["met"]) == (6.0, [3.0, 6.0], 5.0, False)


def test_overheads_are_over_the_median_of_the_model_alone(part, monkeypatch):
    monkeypatch.setattr(part("cases"), "is_small", lambda: False)
    sample = part("sample").Sample
    names = {
        "ours": 10.2,
        "graph": 10.0,
        "graph passes": 10.0,
        "eager": 20.0,
        "ours stream": 6.0,
        "graph forward": 5.0,
    }
    rows = part("rows").rows(
        [sample("overhead", name, 1, 1, {"step_ms": [ms]}) for name, ms in names.items()]
    )
    found = {row["measure"]: (row["value"], row["met"]) for row in rows}
    assert found["training step by train_step, over the model alone, CUDA graph"] == (1.02, True)
    behind = (
        "training step by train_step, over the model alone, CUDA graph, the optimizer behind it"
    )
    assert found[behind] == (1.02, True)
    assert found["training step by train_step, over the model alone, eager model"] == (0.51, True)
    assert found["a batch in a stream, over the model alone, CUDA graph"] == (1.2, False)


def test_the_compilers_gain_is_shown_where_a_segment_was_kept_compiled(part):
    sample = part("sample").Sample
    one = [sample("compile-gpt", "eager", 1, 1, {"step_ms": [15.0]})]
    one += [sample("compile-gpt", "torch.compile", 1, 1, {"step_ms": [12.0]})]
    for kept, expected in ((1.0, [2.0, 3.0]), (0.0, [])):
        compiled = sample(
            "compile-gpt", "compiled", 2, 4, {"step_ms": [5.0], "compiled_segments": [kept]}
        )
        rows = part("rows").rows(
            [sample("compile-gpt", "ours", 2, 4, {"step_ms": [10.0]}), compiled, *one]
        )
        gains = [row for row in rows if "speed-up" in row["measure"]]
        assert [row["value"] for row in gains] == expected
        assert [row["peers"] for row in gains[1:]] == [{"torch.compile on one device": 1.25}] * len(
            gains[1:]
        )
        assert all(part("rows").belongs(row["case"], "compile-gpt") for row in rows)


@pytest.mark.integration
def test_the_compiler_at_its_tiny_size_gives_values_and_rows(part):
    part("cases").prepare()
    samples = list(part("compiling").measure(part("compiling").training("gpt")))
    assert [sample.failed for sample in samples] == [""] * 5
    rows = part("rows").rows(samples)
    assert rows and all(row["value"] is not None for row in rows)


@pytest.mark.integration
def test_a_compiled_stream_at_its_tiny_size_gives_values_and_rows(part):
    part("cases").prepare()
    samples = list(part("compiling").measure_stream(part("compiling").training("gpt")))
    assert [sample.failed for sample in samples] == [""] * len(samples)
    assert {sample.engine for sample in samples} == {"eager", "ours", "compiled", "torch.compile"}
    rows = part("rows").rows(samples)
    assert rows and all(row["value"] is not None for row in rows)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["switching", "overhead", "tutorial_resnet50"])
def test_a_case_at_its_tiny_size_gives_values_and_rows(part, name):
    part("cases").prepare()
    samples = list(part(name).measure())
    assert [sample.failed for sample in samples] == [""] * len(samples)
    assert all(row["value"] is not None for row in part("rows").rows(samples))


@pytest.mark.integration
@pytest.mark.slow
def test_the_large_model_trains_in_turns_with_fsdp2(part, started):
    samples = [
        replace(found, beside=2) for found in part("large").measure(2, part("large").ENGINES)
    ]
    assert {sample.engine: sample.failed for sample in samples} == {"ours": "", "FSDP2": ""}
    rows = {row["measure"]: row for row in part("rows").rows(samples)}
    assert rows["training step"]["peers"] == {"FSDP2": rows["training step, FSDP2"]["value"]}
    assert rows["turns of each engine"]["value"] == part("timing").repetitions().repeats
    assert rows["loss after 2 steps on one batch, over the first"]["value"] < 1


def test_the_large_model_is_profiled_with_the_optimizer_that_trains_it(part, monkeypatch):
    """It was profiled as Adam by its name, whose foreach version holds temporaries that the fused
    one does not make."""
    large, given = part("large"), {}
    monkeypatch.setattr(large, "profile", lambda *_, **options: given.update(options) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        large._ours(2)
    made = given["optimizer"]([torch.nn.Parameter(torch.ones(2))])
    assert (
        type(made) is torch.optim.Adam
        and made.defaults == large.adam([torch.nn.Parameter(torch.ones(2))]).defaults
    )


def test_a_parked_model_holds_no_memory_and_trains_on_after_it(part):
    large, model = part("large"), torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    parked = large.Parked(model, optimizer)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        parked.park()
        states = [value for state in optimizer.state.values() for value in state.values()]
        assert {tensor.untyped_storage().size() for tensor in (*model.parameters(), *states)} == {0}
        assert all(parameter.grad is None for parameter in model.parameters())
        parked.wake()
        assert model.weight.isfinite().all() and model.weight.std() > 0


def test_a_row_of_steps_lasts_as_long_as_clocks_take_to_swing(part, monkeypatch):
    timing = part("timing")
    monkeypatch.setattr(timing, "TINY", replace(timing.TINY, row_s=2.0))
    assert timing.row_of([90.0, 110.0, 100.0]) == 20
    assert timing.row_of([2000.0]) == timing.TINY.shortest_row


def test_repetitions_follow_the_size_wherever_the_module_was_imported(part, monkeypatch):
    """An import under the full size made every later test of the process a full measurement."""
    timing, contest = part("timing"), part("contest")
    assert (timing.repetitions(), contest.alone()) == (timing.TINY, 2)
    with monkeypatch.context() as changed:
        changed.setattr(part("cases"), "is_small", lambda: False)
        assert (timing.repetitions(), contest.alone()) == (timing.FULL, 3)
    assert (timing.repetitions(), contest.alone()) == (timing.TINY, 2)


@pytest.fixture
def experiment(part, tmp_path):
    """Samples of the tutorial's experiment, beside results in a folder."""
    store, sample = part("store").Store(tmp_path), part("sample").Sample
    steps = {
        ("eager", 1, 120): 40.0,
        ("tutorial", 2, 120): 50.0,
        ("tutorial", 2, 20): 35.0,
        ("ours", 2, 20): 22.0,
    }
    for (engine, devices, split), ms in steps.items():
        store.add("tutorial", sample("tutorial", engine, devices, split, {"step_ms": [ms, ms + 1]}))
    return tmp_path


def test_the_tutorials_pictures_show_every_engine_and_are_the_same_file_each_time(part, experiment):
    pictures = part("pictures")
    assert pictures.main(experiment) == 0
    first = (experiment / pictures.NAME).read_bytes()
    assert pictures.main(experiment) == 0
    assert (experiment / pictures.NAME).read_bytes() == first
    for label in ("one device", "split", "Placer", "20 at a time"):
        assert f"<!-- {label}".encode() in first


def test_without_samples_of_the_experiment_there_is_no_picture(part, tmp_path, capsys):
    assert part("pictures").main(tmp_path) == 2
    assert "no samples of the case 'tutorial'" in capsys.readouterr().err


def test_the_prediction_of_a_sharded_step_has_a_row(part):
    jobs, rows, sample = part("jobs"), part("rows"), part("sample").Sample
    job = next(job for job in jobs.every() if job.case == "sharded-gpt" and job.devices == 2)
    times = {"step_ms": [8.0, 10.0, 12.0], "predicted_ms": [11.0]}
    made = rows.rows([sample(job.case, "FSDP2", 2, 1, times, beside=2)])
    assert all(rows.belongs(row["case"], job.contest) for row in made)
    assert {row["measure"]: row["value"] for row in made} == {
        "training step": 10.0,
        "training step, as predicted": 11.0,
        "relative error of that prediction": pytest.approx(0.1),
        "turns of each engine": 3,
    }
