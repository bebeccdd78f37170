"""The profiler's benchmark: what its rows say of made-up samples, and a case from end to end at a
tiny size."""

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).parents[2]


@pytest.fixture
def part(monkeypatch):
    """A module of the benchmark by its name, at the sizes of a machine without GPUs."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return lambda name: importlib.import_module(f"benchmarks.profiler.{name}")


def test_there_are_twenty_four_cases_that_cover_every_choice(part):
    cases = part("cases")
    every = [case for model in cases.FULL for case in cases.of(model)]
    assert len({case.label for case in every}) == 24
    for model in cases.FULL:
        mine = cases.of(model)
        assert {case.half for case in mine} == {case.training for case in mine} == {True, False}
        assert {case.wanted for case in mine} == {2, 4}
        assert {case.micro_batch for case in mine} == set(model.micro_batches)


@pytest.mark.parametrize("name", ["inception", "t5"])
def test_the_models_written_for_it_have_the_sizes_of_the_real_ones(part, name):
    model = next(model for model in part("cases").FULL if model.name == name)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model.make().parameters())
    # torchvision's Inception-v3 without its auxiliary head, and two stacks of 12 blocks of T5 of
    # width 1024
    attention, mlp = 4 * 1024**2, 2 * 1024 * 4096
    t5 = (
        12 * (attention + mlp + 2 * 1024)
        + 12 * (2 * attention + mlp + 3 * 1024)
        + 2 * 32128 * 1024
        + 2 * 1024
    )
    assert size == {"inception": 23_834_568, "t5": t5}[name]


@pytest.mark.parametrize("name", ["inception", "t5"])
def test_the_models_written_for_it_run_forwards_and_backwards(part, name):
    case = part("cases").of(part("cases").known()[name])[0]
    model = case.make(torch.device("meta"))
    inputs, target = case.batch(torch.device("meta"), 2)
    case.loss(model(inputs), target).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["resnet101", "gpt", "unet", "inception", "llama", "t5"])
def test_every_model_as_a_chain_gives_what_the_model_gives(part, name):
    case = part("cases").of(part("cases").known()[name])[2]  # inference in float32
    model = case.make(torch.device("cpu"))
    inputs, _ = case.batch(torch.device("cpu"), 2)
    with torch.no_grad():
        torch.testing.assert_close(
            nn.Sequential(*part("chains").units(model))(inputs), model(inputs)
        )


@pytest.mark.integration
def test_a_case_runs_from_end_to_end(part, tmp_path):
    cases, ours = part("cases"), part("ours")
    threads = torch.get_num_threads()
    cases.prepare()
    try:
        samples = list(ours._case(cases.of(cases.known()["gpt"])[0], tmp_path))
    finally:
        torch.set_num_threads(threads)
    values = {sample.engine: sample.values for sample in samples if not sample.failed}
    assert {"profile", "stages", "step", "peers"} <= set(values)
    assert len(values["stages"]["measured_ms"]) == 2
    assert all(time > 0 for time in (*values["stages"]["measured_ms"], *values["step"]["step_ms"]))
    assert values["profile"]["warm_s"][0] < values["profile"]["cold_s"][0]
    rows = part("rows").rows(samples)
    measures = {row["measure"] for row in rows}
    assert {part("rows").STAGE, part("rows").STEP, part("rows").PASS} <= measures
    state = next(row for row in rows if row["measure"] == part("rows").STATE)
    told = [*state["peers"], *measures]  # its estimate, or why there is none
    assert any("accelerate" in one for one in told)
    assert state["peers"]["Placer"] == state["value"]


@pytest.mark.integration
def test_a_part_that_breaks_down_costs_neither_the_case_nor_the_other_cases(
    part, monkeypatch, capfd
):
    cases, ours = part("cases"), part("ours")
    model = cases.known()["gpt"]
    second = cases.of(model)[1].label

    def broken(*_):
        raise RuntimeError("no luck")

    def one_part(case, folder):
        if case.label == second:
            broken()
        yield ours._part(case, "step", broken)

    monkeypatch.setattr(ours, "_case", one_part)
    threads = torch.get_num_threads()
    samples = list(ours.measure(model))
    torch.set_num_threads(threads)
    assert [sample.case for sample in samples] == [case.label for case in cases.of(model)]
    assert {sample.failed for sample in samples} == {"RuntimeError: no luck"}
    assert "broken()" in capfd.readouterr().err  # where it was
    assert len(part("rows").rows(samples)) == 4


def test_samples_without_sense_cost_their_case_alone(part):
    cases, rows = part("cases"), part("rows")
    sample = importlib.import_module("benchmarks.executor.sample").Sample
    first, second = (case.label for case in cases.of(cases.known()["gpt"])[:2])
    nothing = sample(
        first, "stages", values={"predicted_ms": [1.0], "measured_ms": [0.0], "loss_ms": [0.0]}
    )
    fine = sample(second, "profile", values={"cold_s": [2.0], "warm_s": [1.0]})
    made = rows.rows([nothing, fine])
    assert [row["case"] for row in made] == [first, second, second]
    assert made[0]["measure"].startswith("no rows: ")


def test_a_roofline_takes_the_longer_of_arithmetic_and_bytes(part):
    a, b = torch.randn(8, 16), torch.randn(16, 32)
    flops, moved = 2 * 8 * 16 * 32, 4 * (8 * 16 + 16 * 32 + 8 * 32)
    for flops_per_ms, bytes_per_ms in ((1.0, 1e9), (1e9, 1.0)):
        with part("roofline").Roofline(flops_per_ms, bytes_per_ms) as roofline:
            product = a @ b
            product.view(-1)  # moves nothing
        assert roofline.total_ms == max(flops / flops_per_ms, moved / bytes_per_ms)


def test_a_roofline_counts_attention_with_grouped_queries_where_pytorch_refuses_it(part):
    def refusing(query, key, value, *_, out_val):
        assert query.shape[1] == key.shape[1] == value.shape[1]
        return query.shape[1] * query.shape[2] * key.shape[2]

    query, key = torch.randn(2, 8, 5, 4), torch.randn(2, 2, 7, 4)
    assert part("roofline").flops_of(refusing, (query, key, key, 0.0), {}, query) == 8 * 5 * 7


def test_a_roofline_counts_what_runs_backwards(part):
    layer = nn.Linear(16, 32, bias=False)
    x = torch.randn(8, 16, requires_grad=True)
    with part("roofline").Roofline(1.0, 1e12) as roofline:
        functional.linear(x, layer.weight).backward(torch.ones(8, 32))
    assert roofline.total_ms == pytest.approx(3 * 2 * 8 * 16 * 32, rel=1e-3)


@pytest.fixture
def made(part, monkeypatch):
    """Rows of made-up samples of two cases, as four GPUs would give them."""
    cases, sample = part("cases"), importlib.import_module("benchmarks.executor.sample").Sample
    monkeypatch.setattr(cases, "is_small", lambda: False)
    monkeypatch.setattr(
        cases, "places", lambda count=None: [torch.device("cuda", i) for i in range(count or 4)]
    )
    first, second = cases.of(cases.known()["gpt"])[:2]
    roofline, accelerate = (
        f"pass_ms {part('peers').ROOFLINE}",
        f"state_bytes {part('peers').ACCELERATE}",
    )
    samples = [
        sample(first.label, "profile", 2, 8, {"cold_s": [12.0], "warm_s": [0.5]}),
        sample(
            first.label,
            "stages",
            2,
            8,
            {
                "predicted_ms": [10.1, 19.0],
                "measured_ms": [10.0, 20.0],
                "loss_ms": [1.0],
                "predicted_loss_ms": [0.39],
                "refined_step_ms": [101.0],
            },
        ),
        sample(first.label, "peers", 2, 8, {roofline: [15.0], accelerate: [40 * 2.0**20]}),
        sample(
            first.label,
            "step",
            2,
            8,
            {
                "predicted_ms": [90.0],
                "step_ms": [100.0, 101.0, 99.0],
                "host_ms": [9.0],
                "predicted_state_bytes": [51 * 2.0**20],
                "state_bytes": [50 * 2.0**20],
            },
        ),
        sample(
            first.label,
            "memory",
            2,
            8,
            {
                "predicted_bytes": [103.0, 99.0],
                "measured_bytes": [100.0, 100.0],
                "reserved_bytes": [100.0, 110.0],
            },
        ),
        sample(
            second.label,
            "stages",
            4,
            16,
            {"predicted_ms": [10.0], "measured_ms": [10.0], "loss_ms": [0.0]},
        ),
        sample(second.label, "torchgpipe's balance_by_time", 4, 16, failed="not installed"),
        sample("t5", "ours", failed="no end within 8 s"),
    ]
    rows = part("rows")
    found = rows.rows(samples)
    return (
        {(row["case"], row["measure"]): row for row in [*rows.over_all(found), *found]},
        first.label,
        second.label,
    )


def test_a_stages_worst_error_is_kept_with_its_sign_and_held_against_the_target(made, part):
    rows, first, _ = made
    row = rows[first, part("rows").STAGE]
    assert (row["value"], row["spread"], row["target"], row["met"]) == (
        -5.0,
        [-5.0, 1.0],
        6.0,
        True,
    )


def test_a_steps_error_beyond_the_target_is_missed_though_it_is_negative(made, part):
    rows, first, _ = made
    row = rows[first, part("rows").STEP]
    assert (row["value"], row["target"], row["met"]) == (-10.0, 8.0, False)
    assert rows[first, part("rows").REFINED_STEP]["value"] == 1.0


def test_memory_above_and_below_what_was_used_have_targets_of_their_own(made, part):
    rows, first, _ = made
    assert (rows[first, part("rows").OVER]["value"], rows[first, part("rows").UNDER]["value"]) == (
        3.0,
        1.0,
    )
    assert rows[first, part("rows").RESERVED]["value"] == 5.0


def test_profiling_time_has_its_target(made, part):
    rows, first, _ = made
    cold, warm = rows[first, part("rows").COLD], rows[first, part("rows").WARM]
    assert (cold["target"], cold["met"], warm["target"], warm["met"]) == (10.0, False, 1.0, True)


def test_what_holds_over_all_cases_is_the_median_and_the_worst(made, part):
    rows, _, _ = made
    stage = part("rows").STAGE
    assert rows["all cases", f"{stage}: the median of 2 cases"]["value"] == 2.5
    worst = rows["all cases", f"{stage}: the worst of 2 cases"]
    assert (worst["value"], worst["target"], worst["met"]) == (5.0, 6.0, True)


def test_peers_stand_beside_ours_and_those_without_a_value_say_why(made, part):
    rows, first, second = made
    # no loss
    assert rows[first, part("rows").PASS]["peers"] == {
        "Placer": 28.71,
        part("peers").ROOFLINE: 15.0,
    }
    median = rows["all cases", f"{part('rows').PASS}: the median error of the predictions"]
    assert (median["value"], median["peers"]) == (0.5, {part("peers").ROOFLINE: 48.28})
    state = rows["all cases", f"{part('rows').STATE}: the median error of the predictions"]
    assert (state["value"], state["peers"]) == (2.0, {part("peers").ACCELERATE: 20.0})
    assert (second, "no value of torchgpipe's balance_by_time: not installed") in rows
    assert ("t5", "no value of ours: no end within 8 s") in rows


def test_a_run_of_some_models_keeps_the_rows_of_the_others_and_of_cases_that_it_did_not_reach(
    part, monkeypatch, tmp_path
):
    package, jobs, cases = (
        importlib.import_module("benchmarks.profiler"),
        part("jobs"),
        part("cases"),
    )
    record, rows = importlib.import_module("benchmarks.record"), part("rows")
    sample = importlib.import_module("benchmarks.executor.sample").Sample
    first, second = (case.label for case in cases.of(cases.known()["gpt"])[:2])
    other = cases.of(cases.known()["t5"])[0].label
    old = [
        record.row(rows.OVERALL, "left over", "%", 1.0),
        *(
            record.row(label, rows.COLD, "s", 1.0)
            for label in (other, first, second, "a case of the past")
        ),
        record.row("gpt", "no value of ours: no end within 8 s", "", None),
    ]
    found = [
        sample(first, "profile", values={"cold_s": [2.0], "warm_s": [0.5]}),
        sample(first, "peers"),
        sample("gpt", "ours", failed="no end within 9 s"),
    ]
    record.write("profiler", old, tmp_path)
    monkeypatch.setattr(record, "known", lambda name, folder: record.read(name, folder)["rows"])
    monkeypatch.setattr(jobs, "run", lambda names, budget_s: iter(found))
    after_the_case, at_the_end = package.progress(["gpt"], tmp_path)
    values = [(first, rows.COLD, 2.0), (first, rows.WARM, 0.5), (second, rows.COLD, 1.0)]
    expected = [
        *values,
        ("gpt", "no value of ours: no end within 9 s", None),
        (other, rows.COLD, 1.0),
    ]
    assert [(row["case"], row["measure"], row["value"]) for row in at_the_end] == expected
    assert [row["case"] for row in after_the_case] == [row["case"] for row in at_the_end]
    assert [row["case"] for row in package.run(["gpt"])] == [first, first, "gpt"]


@pytest.mark.integration
def test_a_model_that_no_device_could_hold_is_profiled_on_one(part):
    threads = torch.get_num_threads()
    (sample,) = part("large").measure()
    torch.set_num_threads(threads)
    assert not sample.failed
    (row,) = part("rows").rows([sample])  # stand-ins count no memory
    assert (row["case"], row["measure"], row["unit"]) == (
        part("large").label(),
        part("rows").COLD,
        "s",
    )
    assert row["value"] > 0


def test_what_a_model_holds_that_no_device_could_hold_is_set_against_its_largest_layer(part):
    sample = importlib.import_module("benchmarks.executor.sample").Sample
    values = {
        "seconds": [90.0],
        "held_bytes": [99.0 * 2**20],
        "largest_bytes": [90.0 * 2**20],
        "parameters": [7e10],
    }
    rows = part("rows").rows([sample(part("large").label(), "ours", values=values)])
    assert {row["measure"]: row["value"] for row in rows} == {
        part("rows").COLD: 90.0,
        part("rows").HELD: 110.0,
        "memory held at most": 99.0,
    }


def test_a_model_that_does_not_exist_is_refused_by_name(part):
    with pytest.raises(ValueError, match="'vgg' is not a case; there are resnet101, gpt"):
        list(part("jobs").run(["vgg"]))
