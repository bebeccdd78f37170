"""The sdist and the wheel: what they hold and what they say about the project."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from project_files import ROOT, WORKFLOWS, project, workflow

pytestmark = pytest.mark.integration

LOCAL_FILES = (
    "docker/keys",
    "docker/metrics_key",
    "placements.db",
    "placer/__pycache__/old.cpython-311.pyc",
    "build/old",
)
"""Files that git ignores: secrets, state and build products."""


def tracked() -> list[str]:
    """Return the files of the repository."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a git checkout to know which files belong to the project")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def built(hook: str, source: Path, target: Path) -> Path:
    """Call a build hook of PEP 517 in a folder of sources; return the file that it makes."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.{hook}(sys.argv[1]))"
    target.mkdir()
    result = subprocess.run(
        [sys.executable, "-c", code, str(target)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    (made,) = target.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist of a copy of the repository that also holds files of its user."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in (*tracked(), *LOCAL_FILES):
        copy = folder / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if name in LOCAL_FILES:
            copy.write_text("local")
        else:
            shutil.copy(ROOT / name, copy)
    return built("build_sdist", folder / "source", folder / "built")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the unpacked sdist."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return built("build_wheel", source, folder / "built")


def test_the_sdist_holds_the_files_of_the_repository_and_no_others(sdist: Path) -> None:
    # The sdist had no tests, benchmarks, docs, Makefile or constraints, so its own tests could not
    # run.
    with tarfile.open(sdist) as archive:
        files = {
            str(PurePosixPath(*PurePosixPath(member.name).parts[1:]))
            for member in archive
            if member.isfile()
        }
    generated = {
        name
        for name in files
        if name in ("PKG-INFO", "setup.cfg") or name.startswith("torch_placer.egg-info/")
    }
    assert files - generated == set(tracked())
    # Without its metadata, this folder hides the version of the installed package where Python
    # starts in the sdist.
    assert "torch_placer.egg-info/PKG-INFO" in generated


def test_the_sdist_keeps_the_scripts_executable(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        executable = {
            member.name.partition("/")[2]
            for member in archive
            if member.isfile() and member.mode & 0o100
        }
    assert executable == {name for name in tracked() if (ROOT / name).stat().st_mode & 0o100}


def test_the_wheel_holds_the_packages_and_no_others(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {"placer": "placer", "server": "placer_server", "client": "placer_client"}
    expected = {
        sources[folder] + name[len(folder) :]
        for name in tracked()
        if (folder := name.partition("/")[0]) in sources
    }
    assert files == expected


def test_the_wheel_names_its_author_license_and_supported_versions(wheel: Path) -> None:
    # The wheel had neither author nor classifiers.
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Author"] == "The Placer authors"
    assert metadata["License-Expression"] == "MIT"
    assert metadata.get_all("License-File") == ["LICENSE"]
    matrix = workflow(WORKFLOWS / "tests.yml")["jobs"]["tests"]["strategy"]["matrix"]["python"]
    prefix = "Programming Language :: Python :: 3."
    versions = [
        text.removeprefix(prefix)
        for text in metadata.get_all("Classifier", [])
        if text.startswith(prefix)
    ]
    assert [f"3.{minor}" for minor in versions] == matrix
    assert project()["requires-python"] == f">={matrix[0]}"
