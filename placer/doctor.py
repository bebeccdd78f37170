"""A report on this machine: devices, links, versions, extras and problems."""

from __future__ import annotations

import importlib
import platform
from importlib.metadata import PackageNotFoundError, version

import httpx
from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import placer
from placer.errors import PlacerError
from placer.report.cluster import fault_texts
from placer.report.explain import table
from placer.schema import Cluster

__all__ = ["Report", "examine"]

_EXTRAS = {
    "torch": ("torch", "numpy"),
    "server": (
        "fastapi",
        "uvicorn",
        "pydantic-settings",
        "prometheus-client",
        "sqlalchemy",
        "alembic",
    ),
}
_USES = {"torch": "profile models and apply placements", "server": "serve placements"}
_TIMEOUT_S = 5.0


class Report(BaseModel):
    """The findings.

    Attributes:
        versions: of python, placer and what it stands on; only what is installed.
        extras: by extra: ``installed``, or the pip command that would.
        cluster: the devices and links, measured; None without torch.
        server: the service that was asked, and what it said.
        problems: what would stop a placement.
        notes: what is good to know.
    """

    versions: dict[str, str]
    extras: dict[str, str]
    cluster: Cluster | None = None
    server: str = ""
    problems: list[str] = []
    notes: list[str] = []

    def table(self) -> RenderableType:
        """Return a table for people."""
        grid = Table(show_header=False, title="This machine", title_justify="left")
        for name, number in self.versions.items():
            grid.add_row(name, number)
        for extra, state in self.extras.items():
            grid.add_row(f"extra {extra!r}", state)
        if self.server:
            grid.add_row("server", self.server)
        parts: list[RenderableType] = [grid]
        if self.cluster is not None:
            parts.append(table(self.cluster))
        parts.extend(Text(f"note: {note}") for note in self.notes)
        parts.extend(Text(f"problem: {problem}", style="bold red") for problem in self.problems)
        if not self.problems:
            parts.append(Text("nothing would stop a placement", style="green"))
        return Group(*parts)


def examine(server: str | None = None) -> Report:
    """Look at this machine.

    Args:
        server: the URL of a service to ask too.
    """
    report = Report(versions=_versions(), extras={extra: _state(extra) for extra in _EXTRAS})
    for extra, state in report.extras.items():
        if state != "installed" and extra == "torch":
            report.problems.append(f"cannot {_USES[extra]}: {state}")
        elif state != "installed":
            report.notes.append(f"to {_USES[extra]}: {state}")
    if report.extras["torch"] == "installed":
        _look_at_devices(report)
    _try_solver(report)
    if server:
        _check_server(report, server)
    return report


def _versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "machine": platform.platform(),
        "placer": placer.__version__,
    }
    for name in ("torch", "ortools", "pydantic", "fastapi"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _state(extra: str) -> str:
    for name in _EXTRAS[extra]:
        try:
            version(name)
        except PackageNotFoundError:
            return f"{name} is not installed: pip install 'torch-placer[{extra}]'"
    return "installed"


def _look_at_devices(report: Report) -> None:
    try:
        import torch

        from placer.profiler.links.cluster import measure_cluster
    except (ImportError, OSError) as error:
        # installed, but a library of it is missing or does not fit
        report.problems.append(
            f"cannot {_USES['torch']}: torch is installed and cannot be imported: {error}"
        )
        return
    report.versions["CUDA"] = str(torch.version.cuda or "none: this torch was built for CPUs")
    if not torch.cuda.is_available():
        report.notes.append(
            "torch sees no GPU; CPU stand-ins cpu:0, cpu:1, ... try placements without one"
        )
    try:
        report.cluster = measure_cluster(progress=False)
    except (PlacerError, RuntimeError) as error:
        report.problems.append(f"the devices cannot be measured: {error}")
        return
    for device in report.cluster.devices:
        if device.usable_bytes == 0:
            report.problems.append(f"{device.name} has no free memory; other programs hold it")
    report.notes += fault_texts(report.cluster)


def _try_solver(report: Report) -> None:
    try:
        importlib.import_module("placer.solver.solve")
    except ImportError as error:
        report.problems.append(f"cannot solve here: {error}")


def _check_server(report: Report, server: str) -> None:
    try:
        answer = httpx.get(f"{server.rstrip('/')}/readyz", timeout=_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        report.server = f"{server}: not reached"
        report.problems.append(
            f"{server} cannot be reached: {error}; is `placer serve` running there?"
        )
        return
    report.server = f"{server}: {'ready' if answer.is_success else f'answers {answer.status_code}'}"
    if not answer.is_success:
        report.problems.append(f"{server} is not ready: status {answer.status_code}")
