from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import placer
from placer import cli
from placer.schema import Cluster, Device, Edge, Layer, Link, Placement, PlacementRequest, Profile

MIB = 1024**2
TOY = ("placer.zoo.toy:ToyModel", "--input", "4x10", "--devices", "2")


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def placement(self) -> Placement:
        return Placement.model_validate_json(self.out)

    @property
    def profile(self) -> Profile:
        return Profile.model_validate_json(self.out)


Run = Callable[..., Answer]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("PLACER_URL", raising=False)

    def run(*arguments: str, stdin: str = "", terminal: bool = False) -> Answer:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
        with pytest.raises(SystemExit) as left:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Answer(int(left.value.code or 0), captured.out, captured.err)

    return run


def chain(times_ms: list[float], limit_bytes: int = 64 * MIB, param_bytes: int = MIB) -> Profile:
    """Layers in a row over two devices whose link costs next to nothing."""
    names = [f"l{index}" for index in range(len(times_ms))]
    return Profile(
        model="Chain",
        layers=tuple(
            Layer(name=name, module="Linear", forward_ms={"fast": time}, param_bytes=param_bytes)
            for name, time in zip(names, times_ms, strict=True)
        ),
        edges=tuple(Edge(source=a, targets=(b,), bytes=8) for a, b in itertools.pairwise(names)),
        cluster=Cluster(
            devices=tuple(Device(name=f"cuda:{i}", type="fast", memory_bytes=limit_bytes) for i in range(2)),
            links=(
                Link(source="cuda:0", target="cuda:1", bandwidth_bytes_per_s=1e12),
                Link(source="cuda:1", target="cuda:0", bandwidth_bytes_per_s=1e12),
            ),
        ),
    )


@pytest.fixture
def chain_file(tmp_path: Path) -> Path:
    file = tmp_path / "chain.json"
    file.write_text(chain([3.0, 1.0, 1.0, 1.0]).to_json())
    return file


# profile


def test_profile_prints_json_into_a_pipe(run: Run) -> None:
    answer = run("profile", *TOY)
    assert answer.code == 0, answer.err
    assert [layer.name for layer in answer.profile.layers] == ["net1", "relu", "net2"]
    assert answer.profile.batch_size == 4
    assert answer.profile.training
    assert [device.name for device in answer.profile.cluster.devices] == ["cpu:0", "cpu:1"]


def test_profile_prints_a_table_on_a_terminal(run: Run) -> None:
    answer = run("profile", *TOY, terminal=True)
    assert "Profile of ToyModel: training with Adam, micro-batch of 4" in answer.out
    assert "net1" in answer.out


def test_profile_writes_the_file_that_output_names(run: Run, tmp_path: Path) -> None:
    answer = run("profile", *TOY, "--inference", "-o", tmp_path / "toy.json")
    assert (answer.code, answer.out) == (0, "")
    profile = Profile.model_validate_json((tmp_path / "toy.json").read_text())
    assert not profile.training
    assert all(not layer.backward_ms for layer in profile.layers)


def test_profile_passes_arguments_to_the_callable(run: Run) -> None:
    answer = run("profile", "placer.zoo.toy:ToyModel", "--arg", "features=6", "-i", "2x6", "--optimizer", "none")
    first = answer.profile.layers[0]
    assert first.param_bytes == 4 * (6 * 6 + 6)
    assert first.optimizer_bytes == 0


def test_profile_takes_whole_number_inputs_by_keyword(run: Run) -> None:
    sizes = [word for size in ("layers=1", "width=8", "heads=2", "vocabulary=11") for word in ("--arg", size)]
    answer = run("profile", "placer.zoo.gpt:gpt", *sizes, "-i", "tokens=2x5:int64", "--granularity", "submodule")
    assert answer.code == 0, answer.err
    assert answer.profile.batch_size == 2
    assert answer.profile.granularity == "submodule"


def test_profile_sets_memory_limits_by_device(run: Run) -> None:
    answer = run("profile", *TOY, "--memory", "3MiB", "--memory", "cpu:1=1MiB")
    assert [device.usable_bytes for device in answer.profile.cluster.devices] == [3 * MIB, MIB]


def test_profile_finds_a_model_in_the_working_directory(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_net_of_a_user.py").write_text("import torch\nmodel = torch.nn.Linear(3, 2)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    answer = run("profile", "own_net_of_a_user:model", "-i", "5x3", "--inference")
    assert answer.profile.model == "Linear"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_colon", "-i", "2x3"], "'no_colon' names no model; write package.module:callable"),
        (["no.such.module:f", "-i", "2x3"], "cannot import 'no.such.module'"),
        (["placer.zoo.toy:Absent", "-i", "2x3"], "there is no 'Absent' in module 'placer.zoo.toy'"),
        (["json:dumps", "-i", "2x3"], "json:dumps() failed: TypeError"),
        (["collections:OrderedDict", "-i", "2x3"], "made a OrderedDict; it must make a torch.nn.Module"),
        (["placer.zoo.toy:__name__", "-i", "2x3"], "is a str; name a callable"),
        (["placer.zoo.toy:ToyModel", "-i", "2xten"], "'2xten' is no input; write SHAPE or SHAPE:dtype"),
        (["placer.zoo.toy:ToyModel", "-i", "2x10:float33"], "'2x10:float33' is no input"),
        (["placer.zoo.toy:ToyModel", "-i", "x=2x10", "-i", "2x10"], "name each of them once, or none"),
        (["placer.zoo.toy:ToyModel", "-i", "2x10", "--arg", "features"], "'features' is no argument; write KEY=VALUE"),
        (["placer.zoo.toy:ToyModel", "-i", "2x10", "--memory", "cuda:7=1GiB"], "there is no device 'cuda:7'"),
        (["placer.zoo.toy:ToyModel", "-i", "2x10", "--memory", "much"], "'much' is no size"),
        (["placer.zoo.toy:ToyModel"], "--input"),
        (["placer.zoo.toy:ToyModel", "-i", "2x11"], "the model fails on the example inputs"),
        (
            ["placer.zoo.toy:ToyModel", "-i", "2x10", "-o", "/no/such/folder/x"],
            "cannot write /no/such/folder/x: No such",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run: Run, arguments: list[str], message: str) -> None:
    answer = run("profile", *arguments)
    assert answer.code == 2
    assert message in answer.err
    assert "Traceback" not in answer.err
    assert len(answer.err.strip().splitlines()) <= 2


def test_profile_keeps_measurements_where_it_is_told_to(run: Run, tmp_path: Path) -> None:
    first = run("profile", *TOY, "--cache", tmp_path / "kept")
    again = run("profile", *TOY, "--cache", tmp_path / "kept")
    assert again.profile.layers == first.profile.layers
    # three layers and the link
    assert "4 entries" in run("cache", "--folder", tmp_path / "kept").out
    assert "4 entries removed" in run("cache", "clear", "--folder", tmp_path / "kept").out
    assert "0 entries, 0 B" in run("cache", "size", "--folder", tmp_path / "kept").out


def test_two_wishes_for_the_cache_contradict_each_other(run: Run) -> None:
    answer = run("profile", *TOY, "--cache", "here", "--no-cache")
    assert answer.code == 2
    assert "--no-cache and --cache here contradict each other" in answer.err


def test_the_cache_knows_two_things_to_do(run: Run) -> None:
    assert "write size or clear" in run("cache", "delete").err
    assert "PLACER_CACHE turns the cache off" in run("cache").err


def two_hosts(folder: Path) -> list[Path]:
    files = []
    for number, kind in enumerate(("fast", "slow")):
        of_kind = json.loads(chain([3.0, 1.0]).to_json().replace("fast", kind))
        for device in of_kind["cluster"]["devices"]:
            device["host"] = f"node{number}"
        files.append(folder / f"{kind}.json")
        files[-1].write_text(json.dumps(of_kind))
    return files


def test_profiles_of_unlike_hosts_are_merged(run: Run, tmp_path: Path) -> None:
    merged = run("profile", "--merge", *two_hosts(tmp_path), "--network", "100Gbit/s,20us").profile
    assert merged.layers[0].forward_ms == {"fast": 3.0, "slow": 3.0}
    assert [device.name for device in merged.cluster.devices][1:3] == ["node0/cuda:1", "node1/cuda:0"]
    link = merged.cluster.link("node0/cuda:0", "node1/cuda:0")
    assert (link.bandwidth_bytes_per_s, link.latency_s) == (12.5e9, 2e-5)


def test_limits_of_merged_devices_go_by_their_names_there(run: Run, tmp_path: Path) -> None:
    merged = run("profile", "--merge", *two_hosts(tmp_path), "--memory", "node1/cuda:0=3MiB").profile
    assert [device.memory_bytes // MIB for device in merged.cluster.devices] == [64, 64, 3, 64]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b"], "without it, name one model"),
        (["a", "--network", "1GB/s"], "go with --merge"),
        (["--merge", "CLUSTER"], "holds a cluster; --merge needs profiles"),
        (["--merge", "CHAIN", "OTHER"], "other layers than the first"),
        (["--merge", "CHAIN", "--network", "quick"], "'quick' is no bandwidth"),
        (["--merge", "CHAIN", "--network", "1GB/s,2"], "'2' is no time"),
        (["--merge", "absent.json"], "cannot read absent.json"),
        (["placer.zoo.toy:ToyModel", "--gather"], "--gather joins the processes that torchrun starts"),
    ],
)
def test_what_cannot_be_merged_or_gathered_is_exit_code_2(
    run: Run, chain_file: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "other.json").write_text(chain([1.0]).to_json())
    (tmp_path / "cluster.json").write_text(chain([1.0]).cluster.model_dump_json())
    files = {"CHAIN": chain_file, "OTHER": tmp_path / "other.json", "CLUSTER": tmp_path / "cluster.json"}
    answer = run("profile", *(files.get(word, word) for word in arguments))
    assert answer.code == 2
    assert message in " ".join(answer.err.split())


def test_under_torchrun_the_profile_is_that_of_all_hosts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"TORCHELASTIC_RUN_ID": "run", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (launched | {"MASTER_PORT": "0"}).items():
        monkeypatch.setenv(name, value)
    answer = run("profile", *TOY, "--gather", "--memory", "cpu:1=2MiB")
    assert answer.code == 0, answer.err
    assert [device.usable_bytes for device in answer.profile.cluster.devices][1] == 2 * MIB


# solve


def test_solve_finds_the_smallest_bottleneck(run: Run, chain_file: Path) -> None:
    answer = run("solve", chain_file)
    assert answer.code == 0, answer.err
    assert answer.placement.status == "optimal"
    assert answer.placement.objective_value == pytest.approx(3.0, abs=1e-6)
    devices = answer.placement.layer_devices
    assert len({devices["l1"], devices["l2"], devices["l3"]} - {devices["l0"]}) == 1


def test_a_step_is_chosen_among_the_profiles_that_are_given(run: Run, tmp_path: Path) -> None:
    """Two samples take as long as one: a batch of 8 goes in 4 micro-batches of 2."""
    files = []
    for size in (1, 2):
        files.append(tmp_path / f"{size}.json")
        files[-1].write_text(chain([1.0, 2.0]).model_copy(update={"batch_size": size}).to_json())
    answer = run("solve", str(files[0]), "--also", str(files[1]), "--objective", "step", "--batch-size", "8")
    assert answer.code == 0, answer.err
    assert (answer.placement.batch_size, answer.placement.chunks) == (2, 4)
    assert answer.placement.step is not None and answer.placement.step.batch_size == 8


def test_solve_reads_stdin(run: Run, chain_file: Path) -> None:
    assert run("solve", "-", stdin=chain_file.read_text()).placement.status == "optimal"
    assert run("solve", stdin=chain_file.read_text()).placement.status == "optimal"


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


def test_pins_and_bans_are_respected(run: Run, chain_file: Path) -> None:
    pinned = run("solve", chain_file, "--pin", "l0=cuda:1", "--pin", "l3=0", "--free").placement
    assert (pinned.layer_devices["l0"], pinned.layer_devices["l3"]) == ("cuda:1", "cuda:0")
    banned = run("solve", chain_file, "--forbid", "*=cuda:0").placement
    assert set(banned.layer_devices.values()) == {"cuda:1"}


def test_max_devices_is_respected(run: Run, chain_file: Path) -> None:
    assert len(set(run("solve", chain_file, "--max-devices", "1").placement.layer_devices.values())) == 1


def test_ties_are_broken_when_it_is_asked_for(run: Run, chain_file: Path) -> None:
    assert run("solve", chain_file, "--break-ties").placement.ties.proven
    assert run("solve", chain_file).placement.ties is None


def test_min_devices_and_max_layers_are_respected(run: Run, chain_file: Path) -> None:
    answer = run("solve", chain_file, "--min-devices", "2", "--max-layers", "2")
    assert sorted(load.layers for load in answer.placement.devices) == [2, 2]


def test_another_cluster_can_be_given(run: Run, chain_file: Path, tmp_path: Path) -> None:
    cluster = Cluster(devices=(Device(name="cuda:9", type="fast", memory_bytes=64 * MIB),))
    (tmp_path / "cluster.json").write_text(cluster.model_dump_json())
    answer = run("solve", chain_file, "--cluster", tmp_path / "cluster.json")
    assert set(answer.placement.layer_devices.values()) == {"cuda:9"}


def test_infeasible_is_exit_code_3_with_the_reason_and_the_answer(run: Run, chain_file: Path) -> None:
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
    monkeypatch.setattr(cli.solving, "ask", lambda request, server: none_found)
    answer = run("solve", chain_file, "--time-limit", "2")
    assert answer.code == 4
    assert "no placement was found within 2.0 s" in answer.err
    assert answer.placement.status == "unknown"


def test_a_server_that_is_not_there_is_exit_code_5(run: Run, chain_file: Path) -> None:
    answer = run("solve", chain_file, "--server", "http://127.0.0.1:9")
    assert answer.code == 5
    assert "127.0.0.1:9" in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds no profile, placement, request or cluster"),
        ('{"layers": []}', "at least 1 item"),
        ('{"layers": [{"name": "a", "forward_ms": {"cpu": -1}}]}', "greater than or equal to 0"),
        ('{"layers": [{"name": "a", "forward_ms": {"cpu": 1}}]}', "has no cluster; give one with --cluster"),
        ('{"status": "optimal", "objective": "latency"}', "holds a placement; solve needs a profile"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_what_is_no_profile_is_refused_with_exit_code_2(run: Run, content: str, message: str) -> None:
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
def test_bad_options_of_solve_are_exit_code_2(run: Run, chain_file: Path, arguments: list[str], message: str) -> None:
    answer = run("solve", chain_file, *arguments)
    assert answer.code == 2
    assert message in answer.err


# suggest, show, serve, doctor


def test_suggest_profiles_and_solves(run: Run) -> None:
    answer = run("suggest", *TOY, "--max-devices", "1")
    assert answer.code == 0, answer.err
    assert list(answer.placement.layer_devices) == ["net1", "relu", "net2"]
    assert answer.placement.training


def test_suggest_measures_and_chooses_among_micro_batch_sizes(run: Run) -> None:
    answer = run("suggest", *TOY, "--objective", "step", "--micro-batches", "2,4", "--batch-size", "8")
    assert answer.code == 0, answer.err
    placement = answer.placement
    assert placement.batch_size in (2, 4) and placement.batch_size * placement.chunks == 8
    assert {choice.batch_size for choice in placement.step.choices} == {2, 4}


def test_micro_batch_sizes_are_numbers(run: Run) -> None:
    answer = run("suggest", *TOY, "--objective", "step", "--micro-batches", "2,many")
    assert answer.code == 2
    assert "'2,many': give numbers of samples" in answer.err


def test_profile_solve_and_show_are_a_pipe(run: Run) -> None:
    profile = run("profile", *TOY, "--inference").out
    placement = run("solve", "-", stdin=profile).out
    shown = run("show", "-", stdin=placement)
    assert shown.code == 0
    assert "Placement of ToyModel: inference, micro-batch of 4" in shown.out


def test_show_tells_profiles_clusters_and_requests_apart(run: Run, chain_file: Path) -> None:
    profile = chain([1.0, 2.0])
    assert "Profile of Chain" in run("show", chain_file).out
    assert "Profile of Chain" in run("show", "-", stdin=PlacementRequest(profile=profile).model_dump_json()).out
    assert "1000.00 GB/s" in run("show", "-", stdin=profile.cluster.model_dump_json()).out


def test_show_json_gives_back_what_it_read(run: Run, chain_file: Path) -> None:
    assert run("show", chain_file, "--json").profile == Profile.model_validate_json(chain_file.read_text())


def test_doctor_reports_versions_extras_and_devices(run: Run) -> None:
    answer = run("doctor")
    report = json.loads(answer.out)
    assert answer.code == (1 if report["problems"] else 0)
    assert report["versions"]["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert report["extras"] == {"torch": "installed", "server": "installed"}
    assert report["cluster"]["devices"][0]["memory_bytes"] > 0


def test_doctor_says_that_the_server_cannot_be_reached(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_infeasible_answer_of_the_server_is_exit_code_3(run: Run, chain_file: Path, service: str) -> None:
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
    for code in ("0 done", "2 bad input", "3 infeasible", "4 the time limit", "5 the server", "1 anything else"):
        assert code in words


def test_version_is_that_of_the_package(run: Run) -> None:
    assert run("--version").out == f"{placer.__version__}\n"


def test_without_torch_profile_names_the_pip_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch", "placer.model_spec", "placer.profiler.profile"):
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


def test_an_unexpected_error_is_one_line_and_exit_code_1(
    run: Run, chain_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Placement:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli.solving, "ask", broken)
    answer = run("solve", chain_file)
    assert answer.code == 1
    assert answer.err.strip() == "error: RuntimeError: a bug (PLACER_DEBUG=1 shows where)"


def test_a_reader_that_leaves_early_is_no_traceback(chain_file: Path) -> None:
    command = f"{sys.executable} -P -m placer show --json {chain_file} | head -c 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert result.stdout == "{"
    assert result.stderr == ""
