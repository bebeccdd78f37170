"""Where an optional package is not installed, whoever begins something that needs it is told what
to install.

Each program runs without the packages of an extra: an import of one fails as if it had never been
installed. The programs are forks of a process that has imported some packages of the base install,
which each would otherwise import again."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from warm_python import SMALL, WarmPython

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
BASE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
MODULES = {
    "nvidia-ml-py": "pynvml",
    "prometheus-client": "prometheus_client",
    "pydantic-settings": "pydantic_settings",
}

WITHOUT = """
import importlib.abc, runpy, sys
missing = {missing!r}
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def names(requirements: list[str]) -> set[str]:
    return {MODULES.get(Requirement(one).name, Requirement(one).name) for one in requirements}


MODEL = ["placer.zoo:resnet18", "--input", "1x3x8x8"]
RunWithout = Callable[[str, str], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    warm = WarmPython([*SMALL, "ortools.sat.python.cp_model"])
    yield warm.path
    warm.close()


@pytest.fixture
def run_without(python: str, tmp_path: Path) -> RunWithout:
    """Return ``run_without(extra, code)``, which runs a program where nothing of an extra is
    installed, nor what that installs; with what the base installs."""

    def run(extra: str, code: str) -> subprocess.CompletedProcess[str]:
        missing = names(EXTRAS[extra]) - names(BASE)
        missing |= {"starlette"} if extra == "server" else set()
        command = [python, "-c", WITHOUT.format(missing=missing) + code]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    return run


@pytest.mark.parametrize(
    "entry",
    [
        "import placer.zoo",
        "from placer.zoo import resnet50",
        "from placer.zoo.unet import unet",
        "import placer.testing",
        "import placer.distributed",
        "import placer.capture",
        "import placer.demo",
        "import placer.cli.model_arguments",
        "from placer.executor.dataflow import DataFlow",
        "import placer; placer.DataFlow",
        "import placer; placer.profile",
        "import placer; placer.capture_graph",
        "import placer; placer.refine",
        "import placer; placer.estimate",
        "import placer; placer.load",
        "import placer; placer.on_meta",
        "import placer; placer.gather_profile",
        "import placer; placer.testing",
        "import placer; placer.distributed",
        "import placer; placer.suggest(object(), None)",
    ],
)
def test_without_torch_the_error_names_the_extra(entry: str, run_without: RunWithout) -> None:
    # placer.zoo, and what else was not had by way of the package, ended in a ModuleNotFoundError.
    result = run_without("torch", entry)
    last = result.stderr.strip().splitlines()[-1]
    assert (
        last.startswith("placer.errors.MissingExtraError: ")
        and "pip install 'torch-placer[torch]'" in last
    )


@pytest.mark.parametrize(
    "entry",
    [
        "import placer_server.app",
        "from placer_server.app import background, create_app, run",
        "from placer_server.settings import Settings",
        "import placer_server.serving",
    ],
)
def test_without_the_servers_packages_the_error_names_the_extra(
    entry: str, run_without: RunWithout
) -> None:
    result = run_without("server", entry)
    last = result.stderr.strip().splitlines()[-1]
    assert (
        last.startswith("placer.errors.MissingExtraError: ")
        and "pip install 'torch-placer[server]'" in last
    )


@pytest.mark.parametrize(
    ("extra", "commands"),
    [
        ("server", [["serve"]]),
        (
            "torch",
            [
                ["demo"],
                ["profile", *MODEL],
                ["estimate", *MODEL],
                ["suggest", *MODEL],
                ["measure", *MODEL, "placement.json"],
                ["refine", *MODEL, "placement.json", "--profile", "p.json"],
                ["profile", "--gather", *MODEL],
            ],
        ),
    ],
)
def test_a_command_ends_with_one_line_that_names_the_extra(
    extra: str, commands: list[list[str]], run_without: RunWithout, tmp_path: Path
) -> None:
    (tmp_path / "placement.json").write_text('{"status": "optimal", "objective": "throughput"}')
    (tmp_path / "p.json").write_text('{"layers": [{"name": "a", "forward_ms": {"cpu": 1}}]}')
    code = f"""
from placer.cli import main
for arguments in {commands!r}:
    try:
        main(arguments)
    except SystemExit as left:
        print(left.code)
"""
    result = run_without(extra, code)
    assert result.stdout.split() == ["1"] * len(commands)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == len(commands)
    for line in lines:
        assert line.startswith("error: ") and f"pip install 'torch-placer[{extra}]'" in line


def test_a_key_is_made_where_nothing_is_installed_that_a_service_needs(
    run_without: RunWithout,
) -> None:
    # It was a ModuleNotFoundError: the settings were imported for a type alone.
    code = "sys.argv = ['keys', 'ci', 'read']; "
    code += "runpy.run_module('placer_server.keys', run_name='__main__')"
    result = run_without("server", code)
    assert result.returncode == 0 and result.stdout.startswith("ci read "), result.stderr


def test_the_health_check_needs_nothing_that_is_not_pythons_own(run_without: RunWithout) -> None:
    code = "runpy.run_module('placer_server.healthcheck', run_name='__main__')"
    result = run_without("server", f"import os; os.environ['PLACER_PORT'] = '1'; {code}")
    assert (result.returncode, result.stderr) == (1, "")


def test_without_safetensors_a_checkpoint_is_refused_with_the_extra(
    run_without: RunWithout, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").touch()
    code = "from placer.checkpoints.files import read_checkpoint; read_checkpoint('.')"
    last = run_without("safetensors", code).stderr.strip().splitlines()[-1]
    assert last == (
        "placer.errors.MissingExtraError: safetensors is not installed: pip install"
        " 'torch-placer[safetensors]'"
    )


def test_what_needs_no_extra_works_without_any(run_without: RunWithout) -> None:
    code = "import placer, placer_client, placer.report.page; "
    code += "placer.solve; placer.merge_profiles; print('done')"
    for extra in ("torch", "server", "postgres"):
        assert run_without(extra, code).stdout == "done\n"


def test_a_database_whose_driver_is_missing_is_told_with_the_extra(run_without: RunWithout) -> None:
    code = "from placer_server.store.database import open_database; open_database('postgresql://a@127.0.0.1:1/b')"
    result = run_without("postgres", code)
    last = result.stderr.strip().splitlines()[-1]
    assert (
        last.startswith("placer.errors.MissingExtraError: ")
        and "pip install 'torch-placer[postgres]'" in last
    )
