"""The executor's benchmark: its peers compute what the model computes, and its rows say what was found."""

import copy
import importlib
import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from started import spawn
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
    assert sorted(id(p) for unit in units for p in unit.parameters()) == sorted(id(p) for p in model.parameters())


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
    monkeypatch.setattr(part("distributed"), "spawn", spawn)


@pytest.mark.slow
def test_a_case_alone_gives_rows_of_ours_and_of_every_peer(part, started):
    found = importlib.import_module("benchmarks.executor").run(["gpt"])
    rows = {row["measure"]: row for row in found if "tiny: GPT" in row["case"]}
    step = rows["training step"]
    assert step["value"] > 0
    by_processes = {f"torch.distributed {schedule}" for schedule in ("1F1B", "interleaved", "zero-bubble")}
    assert by_processes | {"tutorial's split"} <= set(step["peers"])
    assert rows["training step by placer.distributed, a process for each device"]["value"] > 0
    assert rows["loss, largest difference to the unsplit model"]["value"] < 1e-4
    assert all(row["target"] is None for row in found)


@pytest.mark.slow
def test_the_schedules_that_come_after_one_that_fails_are_run_all_the_same(part, started):
    together, cases = part("distributed"), part("cases")
    turns = [together.Turn(together.ENGINE, 2, chunks) for chunks in (3, 4)]  # the batch does not divide by three
    found = [(sample.chunks, bool(sample.failed)) for sample in together.together(cases.training("gpt"), turns)]
    assert found == [(3, True), (4, False)]


def test_a_job_in_a_process_of_its_own_hands_its_samples_on(part):
    jobs = part("jobs")
    job = next(job for job in jobs.every() if job.name == "gpt:tutorial")
    samples = list(jobs.apart(job, limit_s=120))
    assert samples
    assert all(sample.values["step_ms"] and not sample.failed for sample in samples)


def test_a_job_that_takes_too_long_is_ended_and_says_so(part):
    jobs = part("jobs")
    job = next(job for job in jobs.every() if job.name == "gpt:tutorial")
    assert [sample.failed for sample in jobs.apart(job, limit_s=0.1)] == ["no end within 0 s"]


def test_what_breaks_down_is_a_sample_with_the_reason(part):
    def fail():
        raise torch.OutOfMemoryError("tried to allocate")

    assert part("sample").attempt("gpt", "eager", 1, 1, fail).failed == "out of memory"


def test_a_case_that_does_not_exist_is_refused_by_name(part):
    with pytest.raises(ValueError, match="'vgg' is no case; there are resnet101, gpt"):
        next(part("jobs").run(["vgg"]))


@pytest.fixture
def made(part, monkeypatch):
    """Rows of made-up samples, as four GPUs would give them."""
    cases, sample = part("cases"), part("sample").Sample
    monkeypatch.setattr(cases, "is_small", lambda: False)
    monkeypatch.setattr(cases, "asked", lambda: [4, 2])
    ours = {"step_ms": [100.0], "predicted_ms": [90.0], "loss_difference": [0.0], "stages": [4.0]}
    ours |= {"alone_ms": [110.0], "host_ms": [30.0]}
    samples = [
        sample("gpt", "eager", 1, 1, {"step_ms": [300.0]}),
        sample("gpt", "ours", 4, 8, ours | {"step_ms": [110.0]}),
        sample("gpt", "ours", 4, 16, ours),
        sample("gpt", "tutorial", 4, 8, {"step_ms": [150.0]}),
        sample("gpt", "torchgpipe", 4, 8, failed="out of memory"),
    ]
    return part("rows").rows(samples)


def _row(rows, measure, devices="4 devices"):
    return next(row for row in rows if row["measure"].startswith(measure) and row["case"].endswith(devices))


def test_the_speed_up_is_that_of_the_best_micro_batches_beside_the_peers(made):
    row = _row(made, "training step, speed-up")
    assert (row["value"], row["peers"]) == (3.0, {"tutorial's split": 2.0})


def test_a_target_that_was_missed_says_so(made):
    row = _row(made, "training step, speed-up")
    assert (row["target"], row["met"]) == (3.5, False)
    over = _row(made, "training step, over the best peer")
    assert (over["value"], over["target"], over["met"]) == (1.5, 1.3, True)
    issuing = _row(made, "host issues")
    assert (issuing["value"], issuing["target"], issuing["met"]) == (30.0, 25.0, False)


def test_a_case_without_a_value_of_ours_misses_its_target(made):
    row = _row(made, "training step, speed-up", "2 devices")
    assert (row["value"], row["target"], row["met"]) == (None, 1.85, False)


def test_a_peer_without_a_value_has_a_row_with_the_reason(made):
    assert _row(made, "no value of torchgpipe", "")["measure"].endswith("4 devices, 8 chunks: out of memory")


@pytest.fixture
def streamed(part, monkeypatch):
    """Rows of made-up streams, as four GPUs would give them."""
    cases, sample = part("cases"), part("sample").Sample
    monkeypatch.setattr(cases, "is_small", lambda: False)
    monkeypatch.setattr(cases, "asked", lambda: [4])
    ours = {"step_ms": [50.0], "host_ms": [1.0], "predicted_ms": [45.0], "difference": [0.0], "eager_stages": [0.0]}
    samples = [
        sample("stream-gpt", "eager", 1, 1, {"step_ms": [200.0]}),
        sample("stream-gpt", "eager", 1, 4, {"step_ms": [210.0]}),
        sample("stream-gpt", "ours", 4, 4, ours),
        sample("stream-gpt", "ours", 4, 8, ours | {"step_ms": [60.0]}),
        sample("stream-gpt", "tutorial", 4, 4, {"step_ms": [80.0]}),
        sample("stream-gpt", "accelerate", 0, 0, failed="not installed"),
    ]
    return part("rows").rows(samples)


def test_a_streams_speed_up_is_best_over_best_beside_its_peers(streamed):
    row = _row(streamed, "a batch in a stream, speed-up")
    assert (row["value"], row["peers"]) == (4.0, {"tutorial's split": 2.5})
    assert (row["target"], row["met"]) == (3.8, True)


def test_a_peer_of_a_stream_that_is_not_installed_says_so(streamed):
    assert _row(streamed, "no value of accelerate's dispatch_model", "")["measure"].endswith("not installed")


def test_rows_of_a_stream_belong_to_its_case_alone(part, streamed):
    rows = part("rows")
    assert {rows.belongs(row["case"], "stream-gpt") for row in streamed} == {True}
    assert {rows.belongs(row["case"], name) for row in streamed for name in ("gpt", "stream-resnet101")} == {False}


def test_a_stream_gives_times_and_results_that_are_the_unsplit_models(part):
    stream, cases = part("stream"), part("cases")
    samples = list(stream.stream(cases.training("gpt")))
    assert [sample.failed for sample in samples] == [""] * len(samples)
    ours = next(sample for sample in samples if sample.engine == "ours")
    assert ours.values["difference"][0] < 1e-5
    assert ours.values["step_ms"] and ours.devices == 2


@pytest.fixture
def steps(part):
    """A sample of the training step of an engine."""
    sample = part("sample").Sample
    return lambda engine, ms, devices=2, **more: sample("gpt", engine, devices, 4, {"step_ms": [ms]} | more)


@pytest.fixture
def ran(part, monkeypatch, tmp_path):
    """``ran(CASE:ENGINE, samples)``: the rows that are in the results once a job has given these samples."""
    package, jobs = importlib.import_module("benchmarks.executor"), part("jobs")
    record = importlib.import_module("benchmarks.record")

    def run(name, samples):
        job = next(job for job in jobs.every() if job.name == name)
        monkeypatch.setattr(jobs, "run", lambda names, budget_s: iter([(job, sample) for sample in samples]))
        for rows in package.progress([name], tmp_path):
            record.write("executor", rows, tmp_path)
        return record.read("executor", tmp_path)["rows"]

    return run


OURS = {"alone_ms": [1.0], "host_ms": [1.0], "predicted_ms": [1.0], "loss_difference": [0.0], "eager_stages": [0.0]}


def test_jobs_that_run_one_by_one_give_the_rows_of_one_run(ran, steps):
    ran("gpt:ours", [steps("eager", 30.0, 1), steps("ours", 10.0, **OURS)])
    rows = ran("gpt:tutorial", [steps("tutorial", 20.0)])
    row = _row(rows, "training step, speed-up", "2 devices")
    assert (row["value"], row["peers"]) == (3.0, {"tutorial's split": 1.5})


def test_a_job_that_runs_again_takes_the_place_of_what_it_gave(ran, steps):
    ran("gpt:ours", [steps("eager", 30.0, 1), steps("ours", 10.0, **OURS)])
    rows = ran("gpt:ours", [steps("eager", 30.0, 1), steps("ours", 15.0, **OURS)])
    assert _row(rows, "training step, speed-up", "2 devices")["value"] == 2.0


def test_a_job_that_found_no_time_leaves_what_it_gave_before(ran, steps, part):
    ran("gpt:tutorial", [steps("tutorial", 20.0)])
    rows = ran("gpt:tutorial", [part("sample").Sample("gpt", "tutorial", 0, 0, failed="not run, no time")])
    assert not [row for row in rows if row["measure"].startswith("no value")]
    assert _row(rows, "training step, speed-up", "2 devices")["peers"] == {"tutorial's split": None}


def test_processes_that_run_jobs_at_the_same_time_lose_none_of_their_samples(part, steps, tmp_path):
    one, other = part("store").Store(tmp_path), part("store").Store(tmp_path)
    one.add("gpt:ours", steps("ours", 10.0))
    other.add("gpt:tutorial", steps("tutorial", 20.0))
    one.add("gpt:ours", steps("eager", 30.0, 1))
    found = [steps("ours", 10.0), steps("eager", 30.0, 1), steps("tutorial", 20.0)]
    assert all(part("store").Store(tmp_path).samples().count(sample) == 1 for sample in found)
    assert len(one.samples()) == 3


def test_rows_tell_of_the_machines_devices_however_many_a_process_sees(part, monkeypatch):
    cases, record = part("cases"), importlib.import_module("benchmarks.record")
    monkeypatch.setattr(cases, "is_small", lambda: False)
    monkeypatch.setattr(record, "machine", lambda: {"gpus": ["H200"] * 4})
    assert cases.asked() == [4, 2]


def test_what_a_run_found_is_written_before_its_next_job_breaks_it_off(part, monkeypatch, tmp_path, steps):
    package, jobs = importlib.import_module("benchmarks.executor"), part("jobs")
    job = next(job for job in jobs.every() if job.name == "gpt:ours")

    def run(names, budget_s):
        yield job, steps("eager", 30.0, 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "run", run)
    with pytest.raises(KeyboardInterrupt):
        list(package.progress([], tmp_path))
    assert part("store").Store(tmp_path).samples() == [steps("eager", 30.0, 1)]


def test_rows_without_samples_stay_where_machine_and_versions_are_the_same(ran, tmp_path, steps):
    record = importlib.import_module("benchmarks.record")
    kept = record.row("overhead, ResNet-50", "forward", "x", 1.0)
    gone = record.row("tiny: GPT, 2 layers, d=32, 8 x 16 tokens, old", "training step", "ms", 1.0)
    record.write("executor", [kept, gone], tmp_path)
    rows = ran("gpt:ours", [steps("eager", 30.0, 1)])
    assert kept in rows
    assert not any(row["case"].endswith("old") for row in rows)


def test_rows_of_ours_without_samples_stay_where_only_a_peer_was_run_anew(ran, tmp_path, steps):
    record = importlib.import_module("benchmarks.record")
    kept = record.row("tiny: GPT, 2 layers, d=32, 8 x 16 tokens, 2 devices", "training step", "ms", 1.0)
    record.write("executor", [kept], tmp_path)
    assert ran("gpt:tutorial", [steps("tutorial", 20.0)]) == [kept]
    rows = ran("gpt:ours", [steps("eager", 30.0, 1), steps("ours", 10.0, **OURS)])
    assert _row(rows, "training step, speed-up", "2 devices")["peers"] == {"tutorial's split": 1.5}


def test_samples_of_other_versions_are_left_out(part, tmp_path, steps, monkeypatch):
    part("store").Store(tmp_path).add("gpt:ours", steps("eager", 30.0, 1))
    monkeypatch.setattr(importlib.import_module("benchmarks.record"), "versions", lambda: {"torch": "another"})
    assert part("store").Store(tmp_path).samples() == []


def test_one_job_of_a_case_can_be_chosen_and_the_order_is_that_of_the_names(part):
    chosen = part("jobs")._chosen(["switching", "gpt:tutorial", "gpt:tutorial"])
    assert [job.name for job in chosen] == ["switching:ours", "gpt:tutorial"]


def test_what_lies_in_gaps_of_earlier_memory_counts_and_what_was_there_does_not(part, monkeypatch):
    """The GPT's weights and gradients lay in pieces that earlier work had taken: 3 GB of them were not counted."""
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
    names = {"ours": 10.2, "graph": 10.0, "graph passes": 10.0, "eager": 20.0, "ours stream": 6.0, "graph forward": 5.0}
    rows = part("rows").rows([sample("overhead", name, 1, 1, {"step_ms": [ms]}) for name, ms in names.items()])
    found = {row["measure"]: (row["value"], row["met"]) for row in rows}
    assert found["training step by train_step, over the model alone, CUDA graph"] == (1.02, True)
    behind = "training step by train_step, over the model alone, CUDA graph, the optimizer behind it"
    assert found[behind] == (1.02, True)
    assert found["training step by train_step, over the model alone, eager model"] == (0.51, True)
    assert found["a batch in a stream, over the model alone, CUDA graph"] == (1.2, False)


def test_the_compilers_gain_is_shown_where_a_segment_was_kept_compiled(part):
    sample = part("sample").Sample
    one = [sample("compile-gpt", "eager", 1, 1, {"step_ms": [15.0]})]
    one += [sample("compile-gpt", "torch.compile", 1, 1, {"step_ms": [12.0]})]
    for kept, expected in ((1.0, [2.0, 3.0]), (0.0, [])):
        compiled = sample("compile-gpt", "compiled", 2, 4, {"step_ms": [5.0], "compiled_segments": [kept]})
        rows = part("rows").rows([sample("compile-gpt", "ours", 2, 4, {"step_ms": [10.0]}), compiled, *one])
        gains = [row for row in rows if "speed-up" in row["measure"]]
        assert [row["value"] for row in gains] == expected
        assert [row["peers"] for row in gains[1:]] == [{"torch.compile on one device": 1.25}] * len(gains[1:])
        assert all(part("rows").belongs(row["case"], "compile-gpt") for row in rows)


def test_the_compiler_at_its_tiny_size_gives_values_and_rows(part):
    part("cases").prepare()
    samples = list(part("compiling").measure(part("compiling").training("gpt")))
    assert [sample.failed for sample in samples] == [""] * 5
    rows = part("rows").rows(samples)
    assert rows and all(row["value"] is not None for row in rows)


def test_a_compiled_stream_at_its_tiny_size_gives_values_and_rows(part):
    part("cases").prepare()
    samples = list(part("compiling").measure_stream(part("compiling").training("gpt")))
    assert [sample.failed for sample in samples] == [""] * len(samples)
    assert {sample.engine for sample in samples} == {"eager", "ours", "compiled", "torch.compile"}
    rows = part("rows").rows(samples)
    assert rows and all(row["value"] is not None for row in rows)


@pytest.mark.parametrize("name", ["switching", "overhead", "large", "tutorial_resnet50"])
def test_a_case_at_its_tiny_size_gives_values_and_rows(part, name):
    part("cases").prepare()
    samples = list(part(name).measure())
    assert [sample.failed for sample in samples] == [""] * len(samples)
    assert all(row["value"] is not None for row in part("rows").rows(samples))


def test_a_slow_step_is_repeated_as_seldom_as_can_be(part, monkeypatch):
    timing = part("timing")
    monkeypatch.setattr(timing, "ENOUGH_S", 0.0)
    assert len(timing.steps(lambda: None, part("cases").places(1), 7)["step_ms"]) == timing.FEWEST


def test_a_row_of_steps_lasts_as_long_as_clocks_take_to_swing(part, monkeypatch):
    timing = part("timing")
    monkeypatch.setattr(timing, "LASTING_S", 2.0)
    assert timing.row_of([90.0, 110.0, 100.0]) == 20
    assert timing.row_of([2000.0]) == timing.SHORTEST_ROW


@pytest.fixture
def experiment(part, tmp_path):
    """Samples of the tutorial's experiment, beside results in a folder."""
    store, sample = part("store").Store(tmp_path), part("sample").Sample
    steps = {("eager", 1, 120): 40.0, ("tutorial", 2, 120): 50.0, ("tutorial", 2, 20): 35.0, ("ours", 2, 20): 22.0}
    for (engine, devices, split), ms in steps.items():
        store.add("tutorial:ours", sample("tutorial", engine, devices, split, {"step_ms": [ms, ms + 1]}))
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
