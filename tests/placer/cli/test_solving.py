from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import MIB, TOY, Run, chain

import placer
from placer import cli
from placer.errors import InputError
from placer.schema import Cluster, Device, Placement, PlacementRequest

# solve


def test_solve_finds_the_smallest_bottleneck(run: Run, chain_file: Path) -> None:
    answer = run("solve", chain_file)
    assert answer.code == 0, answer.err
    assert answer.placement.status == "optimal"
    assert answer.placement.objective_value == pytest.approx(3.0, abs=1e-6)
    devices = answer.placement.layer_devices
    assert len({devices["l1"], devices["l2"], devices["l3"]} - {devices["l0"]}) == 1


def test_recomputing_is_allowed_where_it_is_asked_for(run: Run) -> None:
    """Eight micro-batches that save 1 MiB in each layer do not fit two devices of 4 MiB unless they
    recompute."""
    profile = chain([1.0, 1.0])
    layers = [
        layer.model_copy(update={"saved_bytes": MIB, "backward_ms": layer.forward_ms})
        for layer in profile.layers
    ]
    trained = profile.model_copy(update={"training": True, "layers": tuple(layers)})
    asked = ("--memory", "4MiB", "--chunks", "8", "--schedule", "fill-drain")
    assert run("solve", "-", *asked, stdin=trained.to_json()).code == 3
    answer = run("solve", "-", *asked, "--recompute", stdin=trained.to_json())
    assert answer.code == 0, answer.err
    assert answer.placement.recompute
    answer = run(
        "solve", "-", "--chunks", "8", "--recompute-on", "1=always", stdin=trained.to_json()
    )
    assert answer.placement.recompute == ("cuda:1",)
    assert run("solve", "-", "--recompute-on", "1=often", stdin=trained.to_json()).code == 2


def test_options_beside_a_whole_request_are_refused_as_they_would_do_nothing(
    run: Run, tmp_path: Path
) -> None:
    # They were passed over: a placement within --memory was asked for, and one without that limit
    # came.
    file = tmp_path / "request.json"
    file.write_text(PlacementRequest(profile=chain([1.0, 2.0])).model_dump_json())
    assert run("solve", file, "--json").code == 0
    answer = run("solve", file, "--memory", "1MiB", "--pin", "l0=0")
    assert answer.code == 2
    assert "holds a whole request, so --memory, --pin have no effect" in answer.err


def test_a_pin_to_a_forbidden_device_is_bad_input(run: Run, chain_file: Path) -> None:
    answer = run("solve", chain_file, "--pin", "l0=0", "--forbid", "l0=0")
    assert answer.code == 2 and "constraints.pinned" in answer.err and "forbidden" in answer.err


def test_a_step_is_chosen_among_the_profiles_that_are_given(run: Run, tmp_path: Path) -> None:
    """Two samples take as long as one: a batch of 8 goes in 4 micro-batches of 2."""
    files = []
    for size in (1, 2):
        files.append(tmp_path / f"{size}.json")
        files[-1].write_text(chain([1.0, 2.0]).model_copy(update={"batch_size": size}).to_json())
    answer = run(
        "solve", str(files[0]), "--also", str(files[1]), "--objective", "step", "--batch-size", "8"
    )
    assert answer.code == 0, answer.err
    assert (answer.placement.batch_size, answer.placement.chunks) == (2, 4)
    assert answer.placement.step is not None and answer.placement.step.batch_size == 8


def test_training_steps_are_in_a_row_unless_it_is_said_otherwise(run: Run) -> None:
    profile = chain([1.0, 2.0])
    layers = [
        layer.model_copy(update={"backward_ms": layer.forward_ms}) for layer in profile.layers
    ]
    trained = profile.model_copy(update={"training": True, "layers": tuple(layers)}).to_json()
    for options, steps in (((), "steady-state"), (("--step-kind", "isolated"), "isolated")):
        answer = run("solve", "-", "--objective", "step", "--chunks", "4", *options, stdin=trained)
        assert answer.placement.step is not None and answer.placement.step.kind == steps
    assert run("solve", "-", "--step-kind", "steady-state", stdin=trained).code == 2


def test_generations_are_placed_for_the_profiles_of_both_passes(run: Run, tmp_path: Path) -> None:
    prompt = chain([4.0, 4.0])
    token = chain([1.0, 1.0])
    layers = [layer.model_copy(update={"buffer_bytes": 1000}) for layer in token.layers]
    (tmp_path / "token.json").write_text(
        token.model_copy(update={"layers": tuple(layers), "cluster": None}).to_json()
    )
    asked = ("--objective", "generation", "--prompt-tokens", "9", "--new-tokens", "5")
    second = ("--token-profile", tmp_path / "token.json")
    answer = run("solve", "-", *asked, *second, stdin=prompt.to_json())
    assert answer.code == 0, answer.err
    # a prompt of 8 ms, and four tokens of 2 ms
    assert answer.placement.objective_value == pytest.approx(16.0, abs=1e-3)
    more = run(
        "solve", "-", *asked, *second, "--sequences-in-flight", "3", stdin=prompt.to_json()
    ).placement
    assert more.generation is not None and more.generation.sequences_in_flight == 3
    assert sum(load.memory.cache_bytes for load in more.devices) == 3 * 2 * 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-tokens", "9"], "--new-tokens is missing; give it with --objective generation"),
        (["--new-tokens", "9"], "--prompt-tokens is missing"),
        (["--prompt-tokens", "9", "--new-tokens", "0"], "new_tokens: should be greater than"),
        (["--prompt-tokens", "9", "--new-tokens", "5"], "token_profile is missing"),
        ([], "generation is missing"),
    ],
)
def test_bad_options_of_generations_are_exit_code_2(
    run: Run, chain_file: Path, arguments: list[str], message: str
) -> None:
    answer = run("solve", chain_file, "--objective", "generation", *arguments)
    assert answer.code == 2
    assert message in answer.err


def test_solve_reads_stdin(run: Run, chain_file: Path) -> None:
    assert run("solve", "-", stdin=chain_file.read_text()).placement.status == "optimal"
    assert run("solve", stdin=chain_file.read_text()).placement.status == "optimal"


def test_json_may_begin_as_editors_on_windows_begin_it(
    run: Run, chain_file: Path, tmp_path: Path
) -> None:
    text, marked = chain_file.read_text(), tmp_path / "marked.json"
    marked.write_text(text, encoding="utf-8-sig")
    assert marked.read_bytes()[:3] == b"\xef\xbb\xbf"
    assert run("solve", str(marked)).placement.status == "optimal"
    assert run("solve", "-", stdin=marked.read_text(encoding="utf-8")).placement.status == "optimal"


def test_solve_answers_a_whole_request_as_it_stands(run: Run) -> None:
    request = PlacementRequest(profile=chain([1.0, 1.0]), objective="memory")
    assert run("solve", "-", stdin=request.model_dump_json()).placement.objective == "memory"


def test_solve_prints_a_table_on_a_terminal(run: Run, chain_file: Path) -> None:
    answer = run("solve", chain_file, terminal=True)
    assert "bottleneck per micro-batch" in answer.out
    assert "optimal: proven" in answer.out


def test_json_asks_for_json_on_a_terminal(run: Run, chain_file: Path) -> None:
    assert run("solve", chain_file, "--json", terminal=True).placement.status == "optimal"


def test_solve_writes_the_placement_to_a_file(run: Run, chain_file: Path, tmp_path: Path) -> None:
    assert run("solve", chain_file, "-o", tmp_path / "placed.json").out == ""
    assert Placement.model_validate_json((tmp_path / "placed.json").read_text()).status == "optimal"


def test_a_file_that_cannot_be_written_is_exit_code_2_and_the_placement_is_still_printed(
    run: Run, chain_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / ("x" * 300)
    answer = run("solve", chain_file, "-o", path, terminal=True)
    assert (answer.code, answer.placement.status) == (2, "optimal")
    assert f"cannot write {path}: File name too long" in answer.err


def test_a_file_that_cannot_be_written_is_left_as_it_was(
    run: Run, chain_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "placed.json"
    path.write_text("before")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    answer = run("solve", chain_file, "-o", path)
    assert (answer.code, answer.placement.status) == (2, "optimal")
    assert f"cannot write {path}: No space left on device" in answer.err
    assert path.read_text() == "before"


def test_pins_and_bans_are_respected(run: Run, chain_file: Path) -> None:
    pinned = run("solve", chain_file, "--pin", "l0=cuda:1", "--pin", "l3=0", "--free").placement
    assert (pinned.layer_devices["l0"], pinned.layer_devices["l3"]) == ("cuda:1", "cuda:0")
    banned = run("solve", chain_file, "--forbid", "*=cuda:0").placement
    assert set(banned.layer_devices.values()) == {"cuda:1"}


def test_max_devices_is_respected(run: Run, chain_file: Path) -> None:
    assert (
        len(set(run("solve", chain_file, "--max-devices", "1").placement.layer_devices.values()))
        == 1
    )


def test_the_fewest_devices_for_a_bottleneck(run: Run, chain_file: Path) -> None:
    placement = run("solve", chain_file, "--objective", "devices", "--bottleneck", "1000").placement
    assert (placement.objective_value, placement.status) == (1, "optimal")
    assert "bottleneck_ms" in run("solve", chain_file, "--objective", "devices").err


def test_a_limit_of_work_is_handed_on(run: Run, chain_file: Path) -> None:
    assert run("solve", chain_file, "--work-limit", "0.5").placement.status == "optimal"
    assert run("solve", chain_file, "--work-limit", "0").code == 2


def test_ties_are_broken_when_it_is_asked_for(run: Run, chain_file: Path) -> None:
    assert run("solve", chain_file, "--break-ties").placement.tie_breaks.proven
    assert run("solve", chain_file).placement.tie_breaks is None


def test_min_devices_and_max_layers_are_respected(run: Run, chain_file: Path) -> None:
    answer = run("solve", chain_file, "--min-devices", "2", "--max-layers", "2")
    assert sorted(load.layers for load in answer.placement.devices) == [2, 2]


def test_another_cluster_can_be_given(run: Run, chain_file: Path, tmp_path: Path) -> None:
    cluster = Cluster(devices=(Device(name="cuda:9", type="fast", memory_bytes=64 * MIB),))
    (tmp_path / "cluster.json").write_text(cluster.model_dump_json())
    answer = run("solve", chain_file, "--cluster", tmp_path / "cluster.json")
    assert set(answer.placement.layer_devices.values()) == {"cuda:9"}


def test_the_cluster_of_a_profile_can_be_given_and_what_has_none_is_told(
    run: Run, chain_file: Path, tmp_path: Path
) -> None:
    other, placement = tmp_path / "other.json", tmp_path / "placement.json"
    other.write_text(chain([1.0], limit_bytes=3 * MIB).to_json())
    assert run("solve", chain_file, "--cluster", other, "-o", placement).code == 0
    assert {
        load.limit_bytes for load in Placement.model_validate_json(placement.read_text()).devices
    } == {3 * MIB}
    answer = run("solve", chain_file, "--cluster", placement)
    assert (answer.code, "placement.json holds a placement; a cluster is needed" in answer.err) == (
        2,
        True,
    )


def test_a_limit_beyond_all_memory_is_named(run: Run, chain_file: Path) -> None:
    answer = run("solve", chain_file, "--memory", "2000PiB")
    assert answer.code == 2
    assert (
        "memory_bytes: should be less than or equal to 1152921504606846976, not 2251799813685248000"
        in answer.err
    )


def test_infeasible_is_exit_code_3_with_the_reason_and_the_answer(
    run: Run, chain_file: Path
) -> None:
    answer = run("solve", chain_file, "--memory", "512KiB")
    assert answer.code == 3
    assert answer.placement.status == "infeasible"
    assert answer.placement.infeasible.reason.split("\n")[0] in answer.err


def test_a_memory_limit_for_one_device_moves_the_layers_off_it(run: Run, chain_file: Path) -> None:
    answer = run("solve", chain_file, "--memory", "cuda:0=512KiB")
    assert set(answer.placement.layer_devices.values()) == {"cuda:1"}


def test_no_placement_within_the_time_limit_is_exit_code_4(
    run: Run, chain_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none_found = Placement(status="unknown", objective="throughput", bound=1.0)
    monkeypatch.setattr(cli.solving, "solve_anywhere", lambda request, server: none_found)
    answer = run("solve", chain_file, "--time-limit", "2")
    assert answer.code == 4
    assert "no placement was found within 2.0 s" in answer.err
    assert answer.placement.status == "unknown"


def test_a_server_that_is_not_there_is_exit_code_5(run: Run, chain_file: Path) -> None:
    answer = run("solve", chain_file, "--server", "http://127.0.0.1:9")
    assert answer.code == 5
    assert "line" not in answer.err  # the client is no code of the user's
    assert "127.0.0.1:9" in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("", "stdin is empty; give JSON"),
        ("[1]", "holds no profile, placement, request, refinement, cluster, measurement,"),
        ('{"layers": []}', "at least 1 item"),
        ('{"layers": [{"name": "a", "forward_ms": {"cpu": -1}}]}', "greater than or equal to 0"),
        (
            '{"layers": [{"name": "a", "forward_ms": {"cpu": 1}}]}',
            "has no cluster; give one with --cluster",
        ),
        (
            '{"status": "optimal", "objective": "latency"}',
            "holds a placement; a profile or a request is needed",
        ),
        ("[" * 100_000, "stdin is not JSON"),
    ],
)
def test_what_is_no_profile_is_refused_with_exit_code_2(
    run: Run, content: str, message: str
) -> None:
    answer = run("solve", "-", stdin=content)
    assert answer.code == 2
    assert message in answer.err
    assert len(answer.err) < 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pin", "nolayer=cuda:0"], "there is no layer 'nolayer'"),
        (["--pin", "l0=cuda:4"], "there is no device 'cuda:4'; the cluster has cuda:0, cuda:1"),
        (["--pin", "l0"], "'l0' names no layer and device; write LAYER=DEVICE"),
        (["--objective", "speed"], "'throughput', 'step', 'latency'"),
        (["--schedule", "soon"], "'zero-bubble' or 'interleaved'"),
        (["--batch-size", "8"], "only objective 'step' chooses it"),
        (["--transfers", "none"], "'added' or 'overlapped'"),
        (["--chunks", "0"], "--chunks"),
        (["--cluster", "absent.json"], "cannot read absent.json: No such file"),
    ],
)
def test_bad_options_of_solve_are_exit_code_2(
    run: Run, chain_file: Path, arguments: list[str], message: str
) -> None:
    answer = run("solve", chain_file, *arguments)
    assert answer.code == 2
    assert message in answer.err


# suggest, show, serve, doctor


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [("solve", "--chunks", "0"), ("solve", "--time-limit", "soon"), ("serve", "--port", "x")],
)
def test_a_value_that_cannot_be_used_is_named(
    run: Run, command: str, option: str, value: str
) -> None:
    answer = run(command, option, value)
    assert answer.code == 2
    message = " ".join(answer.err.replace("│", "").split())
    # Versions of typer word the fault differently.
    assert re.search(rf"'{option}': .*\b{value}\b", message)


def test_suggest_profiles_and_solves(run: Run) -> None:
    answer = run("suggest", *TOY, "--max-devices", "1")
    assert answer.code == 0, answer.err
    assert list(answer.placement.layer_devices) == ["net1", "relu", "net2"]
    assert answer.placement.training


def test_suggest_uses_as_many_devices_as_it_must(run: Run) -> None:
    # It was held against the one device of a blank profile: more than one could not be asked for.
    answer = run("suggest", *TOY, "--min-devices", "2", "--pin", "net1=1")
    assert answer.code == 0, answer.err
    devices = answer.placement.layer_devices
    assert len(set(devices.values())) == 2 and devices["net1"] == "cpu:1"


@pytest.mark.exhaustive
def test_suggest_places_whole_blocks_and_splits_ties_of_inference(run: Run) -> None:
    sizes = {"layers": 2, "width": 8, "heads": 2, "vocabulary": 11, "tied": True}
    given = [word for name, value in sizes.items() for word in ("--arg", f"{name}={value}")]
    cut = (
        "-i",
        "tokens=2x5:int64",
        "--inference",
        "--granularity",
        "blocks",
        "--devices",
        "2",
        "--min-devices",
        "2",
    )
    for more in ((), ("--split-tied",)):
        answer = run("suggest", "placer.zoo.gpt:gpt", *given, *cut, *more)
        assert answer.code == 0, answer.err
        where = answer.placement.layer_devices
        assert {"blocks.0", "blocks.1"} <= set(where)
        assert (where["token_embedding"] == where["head"]) == (not more)
        assert answer.placement.contiguous == bool(more)


@pytest.mark.exhaustive
def test_suggest_counts_the_loss_as_a_profile_with_it_does(run: Run) -> None:
    loss = ("--loss", "torch.nn.functional:mse_loss", "--target", "4x5")
    asked = ("--objective", "memory", "--max-devices", "1")
    alone, both = (
        run("suggest", *TOY, *asked).placement,
        run("suggest", *TOY, *asked, *loss).placement,
    )
    profiled = run("solve", "-", *asked, stdin=run("profile", *TOY, *loss).out).placement
    assert both.objective_value == profiled.objective_value != alone.objective_value
    assert run("suggest", *TOY, "--target", "4x5").code == 2


def test_suggest_measures_and_chooses_among_micro_batch_sizes(run: Run) -> None:
    answer = run(
        "suggest", *TOY, "--objective", "step", "--batch-sizes", "2,4", "--batch-size", "8"
    )
    assert answer.code == 0, answer.err
    placement = answer.placement
    shared = [sum(one.samples for one in members) for members in placement.replicas.values()]
    assert placement.batch_size * placement.chunks == 8
    assert placement.batch_size in (shared or (2, 4))
    choices = placement.step.choices
    assert {choice.batch_size // choice.replicas for choice in choices} == {2, 4}


def test_micro_batch_sizes_are_numbers(run: Run) -> None:
    answer = run("suggest", *TOY, "--objective", "step", "--batch-sizes", "2,many")
    assert answer.code == 2
    assert "'2,many': give different numbers of samples" in answer.err


def test_profile_solve_and_show_are_a_pipe(run: Run) -> None:
    profile = run("profile", *TOY, "--inference").out
    placement = run("solve", "-", stdin=profile).out
    shown = run("show", "-", stdin=placement)
    assert shown.code == 0
    assert "Placement of ToyModel: inference, micro-batch of 4" in shown.out


def test_doctor_reports_versions_extras_and_devices(run: Run) -> None:
    answer = run("doctor")
    report = json.loads(answer.out)
    assert answer.code == (1 if report["problems"] else 0)
    assert report["versions"]["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert report["extras"] == {"torch": "installed", "server": "installed"}
    assert report["cluster"]["devices"][0]["memory_bytes"] > 0


def test_doctor_says_that_the_server_cannot_be_reached(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_URL", "http://127.0.0.1:9")
    answer = run("doctor")
    assert answer.code == 1
    assert "http://127.0.0.1:9 cannot be reached" in json.loads(answer.out)["problems"][-1]


def test_doctor_prints_a_table_on_a_terminal(run: Run) -> None:
    answer = run("doctor", terminal=True)
    assert "This machine" in answer.out and "Devices" in answer.out


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    from placer_server.app import background
    from placer_server.settings import Settings

    with background(Settings(port=0, database=":memory:", log_level="error")) as url:
        yield url


def test_solve_asks_the_server_that_is_named(run: Run, chain_file: Path, service: str) -> None:
    here, there = run("solve", chain_file), run("solve", chain_file, "--server", service)
    assert there.code == 0, there.err
    assert there.placement.objective_value == here.placement.objective_value
    assert there.placement.id


def test_the_server_is_taken_from_the_environment(
    run: Run, chain_file: Path, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_URL", service)
    assert run("solve", chain_file, "--chunks", "3").placement.chunks == 3


def test_an_infeasible_answer_of_the_server_is_exit_code_3(
    run: Run, chain_file: Path, service: str
) -> None:
    assert run("solve", chain_file, "--memory", "512KiB", "--server", service).code == 3


def test_a_port_that_is_taken_is_exit_code_5(run: Run, service: str) -> None:
    port = service.rpartition(":")[2]
    answer = run("serve", "--port", port, "--database", ":memory:")
    assert answer.code == 5
    assert f"port {port}" in answer.err


# the command itself


def test_help_documents_the_exit_codes() -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-m", "placer", "--help"], capture_output=True, text=True, timeout=60
    )
    words = " ".join(result.stdout.replace("│", " ").split())
    for code in (
        "0 done",
        "2 bad input",
        "3 infeasible",
        "4 the time limit",
        "5 the server",
        "1 anything else",
    ):
        assert code in words


def test_version_is_that_of_the_package(run: Run) -> None:
    assert run("--version").out == f"{placer.__version__}\n"


def test_without_torch_profile_names_the_pip_command(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("torch", "placer.cli.model_arguments", "placer.profiler.profile"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    answer = run("profile", *TOY)
    assert answer.code == 1
    assert answer.err.strip() == "error: torch is not installed: pip install 'torch-placer[torch]'"


def test_a_missing_extra_names_the_pip_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "placer_server.app", None)
    answer = run("serve")
    assert answer.code == 1
    assert "pip install 'torch-placer[server]'" in answer.err


def test_on_request_an_error_of_placers_own_shows_where_it_was_raised(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_DEBUG", "1")
    with pytest.raises(InputError, match="cannot read nofile"):
        run("show", "nofile")


def test_an_unexpected_error_is_one_line_and_exit_code_1(
    run: Run, chain_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Placement:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli.solving, "solve_anywhere", broken)
    answer = run("solve", chain_file)
    assert answer.code == 1
    assert answer.err.strip() == "error: RuntimeError: a bug (PLACER_DEBUG=1 shows where)"


def test_a_reader_that_leaves_early_is_no_traceback(chain_file: Path) -> None:
    show = f"{sys.executable} -P -m placer show --json {chain_file}"
    command = f"{show} | head -c 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert result.stdout == "{"
    assert result.stderr == ""


@pytest.mark.filterwarnings("always")
def test_a_step_without_a_batch_is_warned_of_in_one_line(run: Run) -> None:
    answer = run("solve", "-", "--objective", "step", "--json", stdin=chain([1.0]).to_json())
    assert answer.code == 0, answer.err
    (line,) = answer.err.splitlines()
    assert line.startswith("warning: objective 'step' places a batch of 1 sample,")
    asked = ("--objective", "step", "--batch-size", "4", "--json")
    assert not run("solve", "-", *asked, stdin=chain([1.0]).to_json()).err


@pytest.mark.parametrize(
    ("name", "there"), [("explain", "placer show FILE"), ("apply", "DataFlow")]
)
def test_a_command_that_users_look_for_is_answered_with_what_there_is(
    run: Run, name: str, there: str
) -> None:
    answer = run(name, "profile.json")
    message = " ".join(re.sub("[^!-~ ]", " ", answer.err).split())
    assert answer.code == 2 and f"No such command '{name}'." in message and there in message
