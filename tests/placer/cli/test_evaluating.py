from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from commands import Run, chain

from placer.cli import other_engines
from placer.schema import (
    Cluster,
    Device,
    Evaluation,
    Link,
    Placement,
    PlacementRequest,
    Profile,
)
from placer.solver.solve import solve

# The layers take 3, 1, 1 and 1 ms, and transfers next to nothing.
EVEN = {"l0": "cuda:0", "l1": "cuda:0", "l2": "cuda:1", "l3": "cuda:1"}
BEST = {"l0": "cuda:0", "l1": "cuda:1", "l2": "cuda:1", "l3": "cuda:1"}


@pytest.fixture
def blocks_file(tmp_path: Path) -> Path:
    """Write a profile of four blocks of 3, 1, 1 and 1 ms."""
    text = chain([3.0, 1.0, 1.0, 1.0]).to_json()
    for number in range(4):
        text = text.replace(f'"l{number}"', f'"blocks.{number}"')
    file = tmp_path / "blocks.json"
    file.write_text(Profile.model_validate_json(text).to_json())
    return file


def judged(answer: str) -> Evaluation:
    return Evaluation.model_validate_json(answer)


def plain(shown: str) -> str:
    """Return what a terminal shows as one line without styles."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", shown).split())


def test_a_text_is_judged_against_the_best_text_of_its_format(run: Run, blocks_file: Path) -> None:
    answer = run("evaluate", "--from", "vllm", "--text", "2,2", "--profile", blocks_file)
    assert answer.code == 0, answer.err
    found = judged(answer.out)
    assert found.objective_value == pytest.approx(4.0)
    assert found.best is not None and found.best.export is not None
    assert found.best.export.text == "1,3"
    assert found.best.speedup == pytest.approx(4 / 3)


def test_the_first_line_on_a_terminal_has_the_value_and_the_gain(
    run: Run, blocks_file: Path
) -> None:
    arguments = ("--from", "vllm", "--text", "2,2", "--profile", blocks_file)
    shown = plain(run("evaluate", *arguments, terminal=True).out)
    assert shown.split(" The map, by device")[0] == (
        "valid: bottleneck per micro-batch 4.00 ms; the best placement for vllm, '1,3', takes"
        " 3.00 ms (1.33x faster)"
    )


def test_a_file_or_stdin_holds_the_text_too(run: Run, blocks_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "partition"
    file.write_text("2,2\n")
    options = ("--from", "vllm", "--profile", blocks_file, "--no-best")
    for arguments, stdin in (((file,), ""), (("-",), "2,2"), ((), "2,2")):
        answer = run("evaluate", *arguments, *options, stdin=stdin)
        assert judged(answer.out).objective_value == pytest.approx(4.0)
        assert judged(answer.out).best is None


@pytest.mark.parametrize("given", ["map", "placement"])
def test_a_map_of_layers_or_a_placement_is_judged(
    run: Run, chain_file: Path, tmp_path: Path, given: str
) -> None:
    file = tmp_path / "map.json"
    placement = Placement(status="feasible", objective="throughput", layer_devices=EVEN)
    file.write_text(json.dumps(EVEN) if given == "map" else placement.to_json())
    found = judged(run("evaluate", file, "--profile", chain_file).out)
    assert (found.objective_value, found.best_value) == pytest.approx((4.0, 3.0))


def test_options_make_the_request_as_for_solve(run: Run, chain_file: Path) -> None:
    options = ("--objective", "latency", "--memory", "2MiB", "--pin", "l0=1")
    answer = run("evaluate", "--profile", chain_file, *options, stdin=json.dumps(BEST))
    found = judged(answer.out)
    assert found.objective == "latency"
    # l0 is pinned elsewhere, and cuda:1 holds 3 MiB of weights.
    assert [fault.kind for fault in found.faults] == ["pin-broken", "out-of-memory"]


def test_a_map_with_replicas_is_judged_in_training(run: Run, tmp_path: Path) -> None:
    profile = chain([3.0, 1.0])
    layers = [
        one.model_copy(update={"backward_ms": one.forward_ms, "grad_bytes": 1000})
        for one in profile.layers
    ]
    file, copies = tmp_path / "profile.json", tmp_path / "copies.json"
    file.write_text(
        profile.model_copy(update={"layers": tuple(layers), "training": True}).to_json()
    )
    members = [{"device": f"cuda:{number}", "samples": profile.batch_size} for number in (0, 1)]
    content = {"layer_devices": {"l0": "cuda:0", "l1": "cuda:0"}, "replicas": {"cuda:0": members}}
    copies.write_text(json.dumps(content))
    options = ("--profile", file, "--training", "--objective", "step", "--chunks", "4")
    answer = run("evaluate", copies, *options)
    assert not answer.err, answer.err
    found = judged(answer.out)
    # each copy computes two micro-batches of 3 + 1 ms, forwards and backwards
    assert found.objective_value == pytest.approx(16.0, rel=1e-3)
    assert [one.layers for one in found.devices[:2]] == [2, 2]
    copies.write_text(json.dumps({**content, "replicas": {"cuda:1": members}}))
    answer = run("evaluate", copies, *options)
    assert answer.code == 2
    assert "replicas are given for ['cuda:1']" in answer.err
    copies.write_text(json.dumps({**content, "replicas": {"cuda:0": [{"device": "cuda:0"}]}}))
    answer = run("evaluate", copies, *options)
    assert answer.code == 2
    assert "copies.json: LayerMap.replicas.cuda:0.0.samples: is missing" in plain(answer.err)
    copies.write_text(json.dumps({"layer_devices": content["layer_devices"]}))
    # one device computes all four micro-batches
    assert judged(run("evaluate", copies, *options).out).objective_value == pytest.approx(32.0)


def test_a_map_with_replicas_by_stage_is_judged_and_compared_with_the_best(
    run: Run, tmp_path: Path
) -> None:
    profile = chain([4.0, 2.0])
    names = ["cuda:0", "cuda:1", "cuda:2"]
    cluster = Cluster(
        devices=[Device(name=name, type="fast", memory_bytes=2**40) for name in names],
        links=[
            Link(source=a, target=b, bandwidth_bytes_per_s=1e12)
            for a, b in itertools.permutations(names, 2)
        ],
    )
    layers = [
        one.model_copy(update={"backward_ms": one.forward_ms, "grad_bytes": grad_bytes})
        for one, grad_bytes in zip(profile.layers, (0, 2**33), strict=True)
    ]
    request = PlacementRequest(
        profile=profile.model_copy(update={"layers": tuple(layers), "training": True}),
        cluster=cluster,
        objective="step",
        chunks=8,
        replicas="by-stage",
        schedule="1f1b",
    )
    file, own = tmp_path / "request.json", tmp_path / "map.json"
    file.write_text(request.model_dump_json())
    members = [{"device": name, "samples": profile.batch_size} for name in names[:2]]
    where = {"l0": "cuda:0", "l1": "cuda:2"}
    own.write_text(json.dumps({"layer_devices": where, "replicas": {"cuda:0": members}}))
    answer = run("evaluate", own, "--profile", file)
    assert not answer.err, answer.err
    found = judged(answer.out)
    # the last stage waits 4 ms for two units, and computes four times as many; no gradient returns
    assert found.objective_value == pytest.approx(4 + 4 * 2 * (2 + 2), rel=1e-3)
    assert (found.valid, found.best_value) == (True, pytest.approx(found.objective_value))
    shown = run("evaluate", own, "--profile", file, terminal=True)
    assert "valid: a whole batch 36.0" in plain(shown.out)


def test_a_whole_request_is_judged_as_it_stands(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    request = PlacementRequest(profile=chain([3.0, 1.0]), objective="memory")
    file.write_text(request.model_dump_json())
    where = json.dumps({"l0": "cuda:0", "l1": "cuda:0"})
    assert judged(run("evaluate", "--profile", file, stdin=where).out).objective == "memory"
    answer = run("evaluate", "--profile", file, "--chunks", "4", stdin=where)
    assert answer.code == 2
    assert "holds a whole request, so --chunks has no effect" in answer.err


def test_an_invalid_map_is_exit_code_1_and_its_first_fault_is_the_first_line(
    run: Run, chain_file: Path
) -> None:
    wrong = json.dumps(EVEN | {"l3": "cuda:7"})
    answer = run("evaluate", "--profile", chain_file, stdin=wrong, terminal=True)
    assert answer.code == 1
    assert plain(answer.out) == (
        "not valid: 'cuda:7' is not a device of the cluster, which has 'cuda:0', 'cuda:1'; the"
        " best placement takes 3.00 ms"
    )


def test_no_possible_placement_is_exit_code_3_after_the_evaluation(
    run: Run, chain_file: Path
) -> None:
    options = ("--profile", chain_file, "--memory", "1MiB")
    answer = run("evaluate", *options, stdin=json.dumps(EVEN))
    assert answer.code == 3
    assert {fault.kind for fault in judged(answer.out).faults} == {"out-of-memory"}


def test_the_server_solves_for_the_best_placement(
    run: Run, blocks_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def solve_there(request: PlacementRequest, server: str | None) -> Placement:
        asked.append((request.for_format, server))
        return solve(request)

    monkeypatch.setattr(other_engines, "solve_anywhere", solve_there)
    options = ("--profile", blocks_file, "--server", "http://host:8080")
    assert run("evaluate", "--from", "vllm", "--text", "2,2", *options).code == 0
    assert asked == [("vllm", "http://host:8080")]


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (("FILE", "--text", "2,2", "--from", "vllm"), "", "give one of the two"),
        (("--text", "2,2"), "", "--text '2,2' needs its format"),
        (("--text", "3,2", "--from", "vllm"), "", "states 5 blocks in total"),
        (("--from", "vlm", "--text", "2,2"), "", "'vlm'"),
        ((), "[]", "stdin holds no profile, placement"),
        ((), '{"devices": []}', "stdin"),
        ((), "", "stdin is empty"),
        ((), chain([1.0]).to_json(), "stdin holds a profile; a placement, or an object"),
    ],
)
def test_what_cannot_be_judged_is_exit_code_2(
    run: Run, blocks_file: Path, arguments: tuple[str, ...], stdin: str, message: str
) -> None:
    answer = run("evaluate", *arguments, "--profile", blocks_file, stdin=stdin)
    assert answer.code == 2
    assert message in " ".join(answer.err.split())


def test_show_prints_an_evaluation_again(run: Run, blocks_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "evaluation.json"
    options = ("--from", "vllm", "--text", "2,2", "--profile", blocks_file)
    assert run("evaluate", *options, "-o", file).out == ""
    shown = run("show", file, terminal=True).out
    assert shown == run("evaluate", *options, terminal=True).out
    answer = run("show", file, "--svg", tmp_path / "x.svg")
    assert answer.code == 2
    assert "holds an evaluation" in answer.err


def test_the_first_line_of_an_evaluation_is_whole_in_a_narrow_terminal(
    run: Run, blocks_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--from", "vllm", "--text", "2,2", "--profile", blocks_file)
    evaluation = run("evaluate", *options).out
    monkeypatch.setenv("COLUMNS", "50")
    shown = run("show", "-", stdin=evaluation).out
    assert shown.splitlines()[0].endswith("(1.33x faster)")
