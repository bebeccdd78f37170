from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Run, chain

from placer.schema import PlacementRequest, Profile


def test_show_tells_profiles_clusters_and_requests_apart(run: Run, chain_file: Path) -> None:
    profile = chain([1.0, 2.0])
    assert "Profile of Chain" in run("show", chain_file).out
    assert "Profile of Chain" in run("show", "-", stdin=PlacementRequest(profile=profile).model_dump_json()).out
    assert "1000.00 GB/s" in run("show", "-", stdin=profile.cluster.model_dump_json()).out


def test_show_json_gives_back_what_it_read(run: Run, chain_file: Path) -> None:
    assert run("show", chain_file, "--json").profile == Profile.model_validate_json(chain_file.read_text())


def test_show_writes_reports_and_pictures(run: Run, chain_file: Path, tmp_path: Path) -> None:
    placement = run("solve", chain_file).out
    html, svg = tmp_path / "report.html", tmp_path / "picture.svg"
    answer = run("show", "-", "--html", html, "--svg", svg, "--profile", chain_file, stdin=placement)
    assert answer.code == 0, answer.err
    assert "Placement of Chain" in answer.out
    assert "Time by layer, by device" in html.read_text()
    assert svg.read_text().startswith("<svg xmlns")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["CLUSTER", "--svg", "x.svg"], "pictures are of profiles and placements"),
        (["CHAIN", "--html", "/no/such/folder/x"], "cannot write /no/such/folder/x: No such"),
        (["CHAIN", "--html", "x.html", "--profile", "CLUSTER"], "holds a cluster; a profile is needed"),
    ],
)
def test_what_cannot_be_shown_is_exit_code_2(
    run: Run, chain_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.json").write_text(chain([1.0]).cluster.model_dump_json())
    files = {"CHAIN": chain_file, "CLUSTER": tmp_path / "cluster.json"}
    answer = run("show", *(files.get(word, word) for word in arguments))
    assert answer.code == 2
    assert message in " ".join(answer.err.split())


def test_compare_tells_what_differs(run: Run, chain_file: Path) -> None:
    faster = chain([1.5, 1.0, 1.0, 1.0]).to_json()
    answer = run("compare", chain_file, "-", "--json", stdin=faster)
    layers = {layer["name"]: layer["time_ms"]["fast"] for layer in json.loads(answer.out)["layers"]}
    assert layers["l0"] == {"first": 3.0, "second": 1.5, "notable": True}
    assert not layers["l1"]["notable"]
    assert "0.50" in run("compare", chain_file, "-", stdin=faster).out


def test_compare_writes_a_report(run: Run, chain_file: Path, tmp_path: Path) -> None:
    run("compare", chain_file, "-", "--html", tmp_path / "both.html", stdin=chain([1.5, 1.0, 1.0, 1.0]).to_json())
    assert "Time on fast, largest changes" in (tmp_path / "both.html").read_text()


def test_compare_refuses_what_is_of_different_kinds(run: Run, chain_file: Path) -> None:
    answer = run("compare", chain_file, "-", stdin=run("solve", chain_file).out)
    assert answer.code == 2
    assert "a profile and a placement cannot be compared" in answer.err
