from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
FOLDERS = {"placer": "placer", "server": "placer_server", "client": "placer_client"}


def project() -> dict[str, dict]:  # type: ignore[type-arg]
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def test_every_folder_with_sources_is_in_the_package_list() -> None:
    found = set()
    for folder, name in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join([name, *inner]))
    assert found == set(project()["tool"]["setuptools"]["packages"])


def test_every_folder_with_sources_has_an_init_file() -> None:
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("folder", ["server", "client"])
def test_the_source_folders_cannot_be_imported_under_their_own_name(
    folder: str, tmp_path: Path
) -> None:
    result = run(f"import {folder}", tmp_path)
    assert result.returncode == 1
    assert f"No module named '{folder}'" in result.stderr


@pytest.mark.parametrize("name", FOLDERS.values())
def test_the_installed_packages_can_be_imported_from_anywhere(name: str, tmp_path: Path) -> None:
    result = run(f"import {name}", tmp_path)
    assert result.returncode == 0, result.stderr


LIGHT = ["placer", "placer.schema", "placer.errors", "placer.report", "placer.cli", "placer_client"]


def test_importing_imports_neither_torch_nor_ortools_and_solving_no_torch(tmp_path: Path) -> None:
    code = "import importlib, sys, placer\n"
    code += f"for name in {LIGHT}:\n    importlib.import_module(name)\n"
    code += "    print(name, *sorted({'torch', 'ortools'} & set(sys.modules)))\n"
    code += "placer.solve\nprint('torch' in sys.modules)"
    result = run(code, tmp_path)
    assert result.stdout.splitlines() == [*LIGHT, "False"], result.stderr


def test_all_names_the_public_api() -> None:
    import placer

    for name in placer.__all__:
        assert getattr(placer, name) is not None
    assert set(dir(placer)) == {*placer.__all__, "__version__"}
    with pytest.raises(AttributeError, match="module 'placer' has no attribute 'nothing'"):
        placer.nothing  # noqa: B018


def test_the_public_names_are_the_lazy_names_and_the_errors() -> None:
    import placer
    from placer import errors

    raised = set(errors.__all__) - {"kind_of"}
    assert set(placer._HOMES) | raised | set(placer._MODULES) == set(placer.__all__)


def test_without_torch_the_error_names_the_pip_command(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None\nimport placer\nplacer.DataFlow"
    result = run(code, tmp_path)
    assert (
        "MissingExtraError: torch is not installed: pip install 'torch-placer[torch]'"
        in result.stderr
    )


def test_every_pip_command_that_an_error_names_has_the_projects_name_and_an_extra_of_it() -> None:
    tables = project()["project"]
    files = [
        path
        for folder in ("placer", "server", "client", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    named = {
        command
        for path in files
        for command in re.findall(r"pip install '([^'{]*)'", path.read_text())
    }
    assert named
    for requirement in map(Requirement, named):
        assert requirement.name == tables["name"] and requirement.extras <= set(
            tables["optional-dependencies"]
        )


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below a node; no expression holds one, so none is visited."""
    for field in ("body", "handlers", "cases", "orelse", "finalbody"):
        for inner in getattr(node, field, ()):
            yield inner
            yield from statements(inner)


@cache
def installed_packages() -> Mapping[str, list[str]]:
    """Return the distributions of each importable name."""
    return packages_distributions()


def imported(folder: str) -> set[str]:
    """Return the top-level names of other projects' modules that a folder's files import."""
    names: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in statements(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    folders = [ROOT / "tests" / name for name in ("helpers", "equivalence")]
    helpers = {path.stem for folder in folders for path in folder.glob("*.py")}
    return names - set(sys.stdlib_module_names) - set(FOLDERS.values()) - helpers - {"benchmarks"}


def declared(*extras: str) -> set[str]:
    """Return the names of the requirements of the base install and of extras, normalised."""
    tables = project()["project"]
    found: set[str] = set()
    for text in [
        *tables["dependencies"],
        *(text for extra in extras for text in tables["optional-dependencies"][extra]),
    ]:
        requirement = Requirement(text)
        if requirement.name == tables["name"]:
            found |= declared(*requirement.extras)
        else:
            found.add(canonicalize_name(requirement.name))
    return found


NOT_REQUIREMENTS = {"torchvision", "mlflow"}
"""The Makefile installs torchvision without dependencies, because it requires one exact torch.

An example imports mlflow only under ``--mlflow``, and then asks for the package if it is missing.
"""


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("placer", ["torch", "transformers", "safetensors"]),
        ("client", ["torch"]),
        ("server", ["server", "telemetry"]),
        ("examples", ["all", "examples"]),
        ("benchmarks", ["test", "benchmarks"]),
        ("tests", ["test"]),
    ],
)
def test_every_import_is_a_declared_requirement(folder: str, extras: list[str]) -> None:
    # networkx, starlette and pydantic-core were imported, but came only because other requirements
    # need them.
    installed = installed_packages()
    distributions = {
        name: {canonicalize_name(found) for found in installed.get(name, [name])}
        for name in imported(folder)
    }
    known = declared(*extras) | NOT_REQUIREMENTS
    assert (
        distributions
        and {name for name, found in distributions.items() if not found & known} == set()
    )


def test_the_tested_versions_lie_in_the_ranges() -> None:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    pins = {
        Requirement(line).name.lower(): next(iter(Requirement(line).specifier)).version
        for line in lines
    }
    tables = project()["project"]
    ranges = [
        *tables["dependencies"],
        *(text for extra in tables["optional-dependencies"].values() for text in extra),
    ]
    for text in ranges:
        requirement = Requirement(text)
        if requirement.name != "torch-placer":
            assert requirement.specifier.contains(pins[requirement.name.lower()]), text


def test_the_command_is_installed() -> None:
    (command,) = (
        point
        for point in distribution("torch-placer").entry_points
        if point.group == "console_scripts"
    )
    assert (command.name, command.value) == ("placer", "placer.cli:main")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_test_runs_lint_types_walls_tables_and_the_suite() -> None:
    commands = subprocess.run(
        ["make", "--dry-run", "test"], cwd=ROOT, capture_output=True, text=True, timeout=60
    ).stdout
    for command in (
        "ruff check placer server client benchmarks docs examples tests",
        "ruff format --check placer server client benchmarks docs examples tests",
        "codespell placer server client benchmarks docs examples tests",
        "mypy --strict",
        "lint-imports",
        "python -m benchmarks tables --check",
        "python -P -m pytest --import-mode=importlib",
    ):
        assert command in commands


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()
