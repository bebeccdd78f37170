"""The executor's benchmark: its peers compute what the model computes, and its rows say what was found."""

import copy
import importlib
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
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


@pytest.mark.slow
def test_a_case_alone_gives_rows_of_ours_and_of_every_peer():
    program = "import json, benchmarks.executor as e; print('ROWS' + json.dumps(e.run(['gpt'])))"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout.partition("ROWS")[2])
    rows = {row["measure"]: row for row in found if "tiny: GPT" in row["case"]}
    step = rows["training step"]
    assert step["value"] > 0
    by_processes = {f"torch.distributed {schedule}" for schedule in ("1F1B", "interleaved", "zero-bubble")}
    assert by_processes | {"tutorial's split"} <= set(step["peers"])
    assert rows["training step by placer.distributed, a process for each device"]["value"] > 0
    assert rows["loss, largest difference to the unsplit model"]["value"] < 1e-4
    assert all(row["target"] is None for row in found)


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
        part("jobs").run(["vgg"])


@pytest.fixture
def made(part, monkeypatch):
    """Rows of made-up samples, as four GPUs would give them."""
    cases, sample = part("cases"), part("sample").Sample
    monkeypatch.setattr(cases, "is_small", lambda: False)
    monkeypatch.setattr(cases, "counts", lambda: [4, 2])
    ours = {"step_ms": [100.0], "host_ms": [30.0], "predicted_ms": [90.0], "loss_difference": [0.0], "stages": [4.0]}
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
    monkeypatch.setattr(cases, "counts", lambda: [4])
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


def test_a_run_of_some_cases_keeps_the_rows_of_the_others(part, monkeypatch):
    package, jobs = importlib.import_module("benchmarks.executor"), part("jobs")
    record = importlib.import_module("benchmarks.record")
    kept = record.row("overhead, ResNet-50", "forward", "x", 1.0)
    old = [kept, record.row("switching, 100-layer model", "update_flow", "ms", 1.0)]
    content = {"machine": record.machine(), "versions": record.versions(), "rows": old}
    monkeypatch.setattr(record, "read", lambda name: content)
    monkeypatch.setattr(jobs, "run", lambda names, budget_s: [])
    assert package.run(["switching"]) == [kept]
    content["versions"] = {"torch": "another"}
    assert package.run(["switching"]) == []
