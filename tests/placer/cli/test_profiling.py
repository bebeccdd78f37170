from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import MIB, TOY, Run, chain

from placer.schema import Profile


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
    answer = run(
        "profile",
        "placer.zoo.toy:ToyModel",
        "--arg",
        "features=6",
        "-i",
        "2x6",
        "--optimizer",
        "none",
    )
    first = answer.profile.layers[0]
    assert first.param_bytes == 4 * (6 * 6 + 6)
    assert first.optimizer_bytes == 0


def test_profile_takes_whole_number_inputs_by_keyword(run: Run) -> None:
    sizes = [
        word
        for size in ("layers=1", "width=8", "heads=2", "vocabulary=11")
        for word in ("--arg", size)
    ]
    answer = run(
        "profile",
        "placer.zoo.gpt:gpt",
        *sizes,
        "-i",
        "tokens=2x5:int64",
        "--granularity",
        "submodule",
    )
    assert answer.code == 0, answer.err
    assert answer.profile.batch_size == 2
    assert answer.profile.granularity == "submodule"


def test_profile_sets_memory_limits_by_device(run: Run) -> None:
    answer = run("profile", *TOY, "--memory", "3MiB", "--memory", "cpu:1=1MiB")
    assert [device.usable_bytes for device in answer.profile.cluster.devices] == [3 * MIB, MIB]


def test_profile_counts_the_loss_that_is_named(run: Run) -> None:
    alone = run("profile", *TOY).profile
    both = run("profile", *TOY, "--loss", "torch.nn.functional:mse_loss", "--target", "4x5").profile
    assert both.with_loss and not alone.with_loss
    # the target
    assert both.layers[-1].saved_bytes == alone.layers[-1].saved_bytes + 4 * 4 * 5


def test_profile_finds_a_model_in_the_working_directory(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_net_of_a_user.py").write_text("import torch\nmodel = torch.nn.Linear(3, 2)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    answer = run("profile", "own_net_of_a_user:model", "-i", "5x3", "--inference")
    assert answer.profile.model == "Linear"


OWN_CODE = {
    "no_library": (
        "import no_such_library",
        "No module named 'no_such_library' (no_library.py, line 1)",
    ),
    "no_attribute": (
        "import torch\nmodel = torch.nn.NoSuchLayer()",
        "cannot import 'no_attribute': AttributeError: module 'torch.nn' has no attribute "
        "'NoSuchLayer' (no_attribute.py, line 2)",
    ),
    "no_syntax": (
        "def model( return",
        "cannot import 'no_syntax': SyntaxError: invalid syntax (no_syntax.py, line 1)",
    ),
    "no_data": (
        "raise ValueError('set MY_DATA')",
        "'no_data': ValueError: set MY_DATA (no_data.py, line 1)",
    ),
    "a_program": (
        "import sys\nsys.exit('usage: ...')",
        "module 'a_program' is a program, which ends when it is imported",
    ),
    "a_net": (
        "import torch\nclass model(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x @ x",
        "the model fails on the example inputs: RuntimeError: mat1 and mat2 shapes cannot be "
        "multiplied (2x3 and 2x3) (a_net.py, line 4)",
    ),
}


def test_a_generation_needs_no_example_inputs(run: Run) -> None:
    asked = ("--objective", "generation", "--prompt-tokens", "9", "--new-tokens", "5")
    answer = run("suggest", "torch.nn:Identity", "--devices", "1", *asked)
    assert answer.code == 2
    assert "Identity is not a model of transformers, whose cache is known" in answer.err


@pytest.mark.parametrize("name", OWN_CODE)
def test_what_fails_in_the_users_own_code_is_told_with_its_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # An AttributeError of the module was told as "there is no 'model' in module", the others with
    # exit code 1.
    source, message = OWN_CODE[name]
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    answer = run("profile", f"{name}:model", "-i", "2x3")
    assert answer.code == 2
    assert message in answer.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--objective", "speed"], "objective: should be 'throughput', 'step', "),
        (
            ["--objective", "devices"],
            "bottleneck_ms is missing: objective 'devices' needs the longest time of a device",
        ),
        (["--schedule", "fast"], "schedule: should be 'auto', 'fill-drain'"),
        (["--memory", "much"], "'much' is not a size"),
        (["--pin", "net1"], "'net1' names no layer and device"),
        (["--min-devices", "3", "--max-devices", "2"], "min_devices is 3, but"),
        (["--time-limit", "1e9"], "--time-limit: should be less than or equal to 86400"),
        (
            ["--min-devices", "3"],
            "constraints.min_devices is 3, but the cluster has 2 devices; give 2 or less",
        ),
        (["--pin", "net1=cpu:7"], "there is no device 'cpu:7'; the cluster has cpu:0, cpu:1"),
        (["--memory", "cpu:7=1GiB"], "there is no device 'cpu:7'; the cluster has cpu:0, cpu:1"),
        (["--server", "localhost:80"], "server 'localhost:80' is not the URL of a service"),
        (
            ["--objective", "step", "--batch-size", "17"],
            "17 samples cannot be divided into micro-batches of 4;",
        ),
        (
            ["--objective", "step", "--batch-size", "17", "--batch-sizes", "4,8"],
            "17 samples cannot be divided into micro-batches of 4 or 8",
        ),
    ],
)
def test_words_that_suggest_cannot_use_are_told_before_minutes_of_measuring(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("it was measured first")

    monkeypatch.setattr("placer_client.suggest._measure", measured)
    answer = run("suggest", *TOY, *arguments)
    assert answer.code == 2
    assert message in answer.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_colon", "-i", "2x3"], "'no_colon' names no model; write package.module:callable"),
        (["no.such.module:f", "-i", "2x3"], "No module named 'no'; install it, or start"),
        (["placer.zoo.toy:Absent", "-i", "2x3"], "there is no 'Absent' in module 'placer.zoo.toy'"),
        (
            ["placer.zoo.toy:ToyModl", "-i", "2x3"],
            "in module 'placer.zoo.toy'; did you mean 'ToyModel'?",
        ),
        (["json:dumps", "-i", "2x3"], "json:dumps() failed: TypeError"),
        (
            ["collections:OrderedDict", "-i", "2x3"],
            "made an OrderedDict; it must make a torch.nn.Module",
        ),
        (["placer.zoo.toy:__name__", "-i", "2x3"], "is a str; name a callable"),
        (
            ["placer.zoo.toy:ToyModel", "-i", "2xten"],
            "'2xten' is not an input; write SHAPE or SHAPE:dtype",
        ),
        (
            ["placer.zoo.toy:ToyModel", "-i", "2x10:bf16"],
            "input '2x10:bf16': no dtype of torch is 'bf16'",
        ),
        (
            ["./zoo/toy.py:ToyModel", "-i", "2x10"],
            "is a path; write the module's name, as in an import from here: zoo.toy:",
        ),
        (["placer.zoo.toy:ToyModel", "-i", "2x10:float8_e5m2"], "torch draws no float8_e5m2"),
        (
            ["placer.zoo.toy:ToyModel", "-i", "1000000000x1000000"],
            "needs 3.6 PiB, more than is available; give a smaller",
        ),
        (
            ["placer.zoo.toy:ToyModel", "-i", f"{'9' * 20}x10"],
            "more than is available; give a smaller micro-batch",
        ),
        (
            ["placer.zoo.toy:ToyModel", "-i", "2x10", "--devices", "cpu:300"],
            "'cpu:300' is beyond what torch can",
        ),
        (
            ["placer.zoo.toy:ToyModel", "-i", "2x10", "--devices", "5000"],
            "devices is 5000, more than the 128 devices of a kind",
        ),
        (
            ["placer.zoo.toy:ToyModel", "-i", "x=2x10", "-i", "2x10"],
            "name each of them once, or none",
        ),
        (
            ["placer.zoo.toy:ToyModel", "-i", "2x10", "--arg", "features"],
            "'features' is not an argument; write KEY=VALUE",
        ),
        (
            ["placer.zoo.toy:ToyModel", "-i", "2x10", "--memory", "cuda:7=1GiB"],
            "there is no device 'cuda:7'",
        ),
        (["placer.zoo.toy:ToyModel", "-i", "2x10", "--memory", "much"], "'much' is not a size"),
        (["placer.zoo.toy:ToyModel"], "--input"),
        (["placer.zoo.toy:ToyModel", "-i", "2x11"], "the model fails on the example inputs"),
        (
            ["placer.zoo.toy:ToyModel", "-i", "2x10", "-o", "/no/such/folder/x"],
            "cannot write /no/such/folder/x: there is no folder /no/such/folder",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    run: Run, arguments: list[str], message: str
) -> None:
    answer = run("profile", *arguments)
    assert answer.code == 2
    assert message in answer.err
    assert "Traceback" not in answer.err
    assert len(answer.err.strip().splitlines()) <= 2


def test_profile_keeps_measurements_where_it_is_told_to(run: Run, tmp_path: Path) -> None:
    first = run("profile", *TOY, "--cache", tmp_path / "kept")
    again = run("profile", *TOY, "--cache", tmp_path / "kept")
    assert again.profile.layers == first.profile.layers
    # three layers, the link, and the graph
    assert "5 entries" in run("cache", "--folder", tmp_path / "kept").out
    assert "5 entries removed" in run("cache", "clear", "--folder", tmp_path / "kept").out
    assert "0 entries, 0 B" in run("cache", "size", "--folder", tmp_path / "kept").out


def test_two_wishes_for_the_cache_contradict_each_other(run: Run) -> None:
    answer = run("profile", *TOY, "--cache", "here", "--no-cache")
    assert answer.code == 2
    assert "--no-cache and --cache here contradict each other" in answer.err


def test_the_cache_knows_two_things_to_do(run: Run) -> None:
    assert "write size or clear" in run("cache", "delete").err
    assert "PLACER_CACHE turns the cache off" in run("cache").err


def test_an_age_beside_the_size_of_the_cache_is_refused_as_it_would_do_nothing(
    run: Run, tmp_path: Path
) -> None:
    answer = run("cache", "size", "--folder", tmp_path, "--older-than", "3")
    assert (answer.code, answer.out) == (2, "")
    assert "--older-than 3 tells what is cleared" in answer.err


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
    assert [device.name for device in merged.cluster.devices][1:3] == [
        "node0/cuda:1",
        "node1/cuda:0",
    ]
    link = merged.cluster.link("node0/cuda:0", "node1/cuda:0")
    assert (link.bandwidth_bytes_per_s, link.latency_s) == (12.5e9, 2e-5)


def test_limits_of_merged_devices_go_by_their_names_there(run: Run, tmp_path: Path) -> None:
    merged = run(
        "profile", "--merge", *two_hosts(tmp_path), "--memory", "node1/cuda:0=3MiB"
    ).profile
    assert [device.memory_bytes // MIB for device in merged.cluster.devices] == [64, 64, 3, 64]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b"], "without it, name one model"),
        (["a", "--network", "1GB/s"], "go with --merge"),
        (["--merge", "CLUSTER"], "holds a cluster; a profile is needed"),
        (["--merge", "CHAIN", "OTHER"], "other layers than the first"),
        (["--merge", "CHAIN", "--network", "quick"], "'quick' is not a bandwidth"),
        (["--merge", "CHAIN", "--network", "1GB/s,2"], "'2' is not a time"),
        (["--merge", "absent.json"], "cannot read absent.json"),
        (
            ["placer.zoo.toy:ToyModel", "--gather"],
            "--gather joins the processes that torchrun starts",
        ),
    ],
)
def test_what_cannot_be_merged_or_gathered_is_exit_code_2(
    run: Run, chain_file: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "other.json").write_text(chain([1.0]).to_json())
    (tmp_path / "cluster.json").write_text(chain([1.0]).cluster.model_dump_json())
    files = {
        "CHAIN": chain_file,
        "OTHER": tmp_path / "other.json",
        "CLUSTER": tmp_path / "cluster.json",
    }
    answer = run("profile", *(files.get(word, word) for word in arguments))
    assert answer.code == 2
    assert message in " ".join(answer.err.split())


def test_under_torchrun_the_profile_is_that_of_all_hosts(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = {
        "TORCHELASTIC_RUN_ID": "run",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    for name, value in (launched | {"MASTER_PORT": "0"}).items():
        monkeypatch.setenv(name, value)
    answer = run("profile", *TOY, "--gather", "--memory", "cpu:1=2MiB")
    assert answer.code == 0, answer.err
    assert [device.usable_bytes for device in answer.profile.cluster.devices][1] == 2 * MIB


def test_a_terminal_is_told_what_came_from_the_cache(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "taken from the cache" not in run("profile", *TOY, "--cache", tmp_path).err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert (
        "0 layers were measured, 3 taken from the cache"
        in run("profile", *TOY, "--cache", tmp_path).err
    )


def test_profile_writes_one_file_for_each_micro_batch_size(run: Run, tmp_path: Path) -> None:
    answer = run("profile", *TOY, "--batch-sizes", "8, 2", "-o", tmp_path / "toy.json")
    assert (answer.code, answer.out) == (0, ""), answer.err
    found = {
        path.name: Profile.model_validate_json(path.read_text()) for path in tmp_path.iterdir()
    }
    assert {name: profile.batch_size for name, profile in found.items()} == {
        "toy-2.json": 2,
        "toy-8.json": 8,
    }
    small, large = found["toy-2.json"].edges[0], found["toy-8.json"].edges[0]
    assert large.bytes == 4 * small.bytes


def test_profile_shows_a_table_for_each_micro_batch_size_on_a_terminal(run: Run) -> None:
    answer = run("profile", *TOY, "--batch-sizes", "2,8", terminal=True)
    assert answer.out.index("micro-batch of 2") < answer.out.index("micro-batch of 8")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--batch-sizes", "4,x", "-o", "a.json"],
            "--batch-sizes '4,x': give different numbers of samples",
        ),
        (
            ["--batch-sizes", "4,4", "-o", "a.json"],
            "--batch-sizes '4,4': give different numbers of samples",
        ),
        (["--batch-sizes", "0", "-o", "a.json"], "each at least 1, as in 4,8,16"),
        (["--batch-sizes", "4"], "give -o profile.json for profile-4.json"),
        (["--batch-sizes", "4", "-o", "-"], "give -o profile.json for profile-4.json"),
        (
            ["--batch-sizes", "4", "-o", "nowhere/a.json"],
            "cannot write nowhere/a.json: there is no folder nowhere",
        ),
        (["-o", "/"], "cannot write /: it is a folder; name a file in it"),
        (
            ["--batch-sizes", "4", "--gather", "-o", "a.json"],
            "--batch-sizes 4 does not go with --gather",
        ),
        (["--batch-sizes", "4", "--merge"], "--batch-sizes 4 does not go with --merge"),
    ],
)
def test_profile_refuses_micro_batch_sizes_that_make_no_files(
    run: Run, words: list[str], says: str
) -> None:
    answer = run("profile", *TOY, *words)
    assert answer.code == 2
    assert says in " ".join(answer.err.split())
