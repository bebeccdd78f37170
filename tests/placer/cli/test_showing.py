from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Run, chain

from placer.report.timeline import Measurement, Row
from placer.schema import PlacementRequest, Profile, Progress


def test_show_tells_profiles_clusters_and_requests_apart(run: Run, chain_file: Path) -> None:
    profile = chain([1.0, 2.0])
    assert "Profile of Chain" in run("show", chain_file).out
    assert (
        "Profile of Chain"
        in run("show", "-", stdin=PlacementRequest(profile=profile).model_dump_json()).out
    )
    assert "1000.00 GB/s" in run("show", "-", stdin=profile.cluster.model_dump_json()).out


def test_show_json_gives_back_what_it_read(run: Run, chain_file: Path) -> None:
    assert run("show", chain_file, "--json").profile == Profile.model_validate_json(
        chain_file.read_text()
    )


def test_show_writes_reports_and_pictures(run: Run, chain_file: Path, tmp_path: Path) -> None:
    placement = run("solve", chain_file).out
    html, svg = tmp_path / "report.html", tmp_path / "picture.svg"
    answer = run(
        "show", "-", "--html", html, "--svg", svg, "--profile", chain_file, stdin=placement
    )
    assert answer.code == 0, answer.err
    assert "Placement of Chain" in answer.out
    assert "Time by layer, by device" in html.read_text()
    assert svg.read_text().startswith("<svg xmlns")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["CLUSTER", "--svg", "x.svg"], "pictures are of profiles, placements and estimates"),
        (["CHAIN", "--html", "/no/such/x"], "cannot write /no/such/x: there is no folder /no/such"),
        (
            ["CHAIN", "--html", "x.html", "--profile", "CLUSTER"],
            "holds a cluster; a profile is needed",
        ),
    ],
)
def test_what_cannot_be_shown_is_exit_code_2(
    run: Run,
    chain_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.json").write_text(chain([1.0]).cluster.model_dump_json())
    files = {"CHAIN": chain_file, "CLUSTER": tmp_path / "cluster.json"}
    answer = run("show", *(files.get(word, word) for word in arguments))
    assert answer.code == 2
    assert message in " ".join(answer.err.split())


def test_a_folder_that_is_not_there_is_told_before_the_work(run: Run) -> None:
    # minutes of measuring went before it.
    commands = (
        ("show", "FILE", "--html"),
        ("show", "FILE", "--svg"),
        ("compare", "FILE", "FILE", "--html"),
        ("measure", "MODEL", "FILE", "--trace"),
        ("refine", "MODEL", "FILE", "--save-placement"),
    )
    for command in commands:
        answer = run(*command, "/no/such/folder/x")  # FILE is not read
        assert answer.code == 2
        assert "cannot write /no/such/folder/x: there is no folder /no/such/folder" in answer.err


def test_names_that_look_like_emoji_or_markup_are_printed_as_they_are(
    run: Run, tmp_path: Path
) -> None:
    answer = run("show", "a:x:[/b]")
    assert answer.err == "error: cannot read a:x:[/b]: No such file or directory\n"
    named = json.loads(chain([1.0, 1.0]).to_json().replace("l0", "a:x:[/b]"))
    (tmp_path / "named.json").write_text(json.dumps(named))
    answer = run("show", str(tmp_path / "named.json"))
    assert answer.code == 0 and "a:x:[/b]" in answer.out, answer.err


@pytest.mark.parametrize("columns", [80, 120])
def test_no_number_of_a_table_is_broken_over_two_lines(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    # On a terminal of 80 columns a row ended with "512.0", and the next began with nothing and had
    # "KiB".
    monkeypatch.setenv("COLUMNS", str(columns))
    profile = chain([1234.5, 0.01234], param_bytes=1023 * 2**20, limit_bytes=1000 * 2**30)
    changed = {"saved_bytes": 1023 * 2**20, "grad_bytes": 1023 * 2**20, "module": "ConvTranspose2d"}
    layers = [
        layer.model_copy(update={**changed, "backward_ms": layer.forward_ms})
        for layer in profile.layers
    ]
    trained = profile.model_copy(update={"training": True, "layers": tuple(layers)})
    (tmp_path / "profile.json").write_text(trained.to_json())
    (tmp_path / "placement.json").write_text(run("solve", tmp_path / "profile.json").out)
    for name in ("profile.json", "placement.json"):
        table = run("show", tmp_path / name).out.partition("┡")[2].partition("└")[0]
        assert "│ l0 " in table or "│ cuda:0 " in table
        assert not [line for line in table.splitlines() if line.startswith("│  ")]


def test_tables_in_a_pipe_are_as_wide_as_they_are(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They were cut to the 80 columns of a terminal that is not there.
    monkeypatch.delenv("COLUMNS", raising=False)
    profile = chain([1.0])
    layer = profile.layers[0].model_copy(
        update={"name": "a_layer_with_a_name_of_fifty_letters_" + "x" * 13}
    )
    out = run("show", "-", stdin=profile.model_copy(update={"layers": (layer,)}).to_json()).out
    assert f"│ {layer.name} │ Linear │" in out


def test_a_measurement_is_shown_again(run: Run, tmp_path: Path) -> None:
    # It was told that a cluster has no such field.
    rows = [
        Row("cuda:0", "forward", 0, None, 0, 0.0, 2.0),
        Row("cuda:1", "forward", 1, None, 0, 2.5, 4.5),
    ]
    made = Measurement("Inference of Net", ("cuda:0", "cuda:1"), tuple(rows), (), ("a note",))
    assert Measurement.from_json(made.to_json()) == made
    answer = run("show", "-", stdin=made.to_json())
    assert "Inference of Net" in answer.out and "2.00 ms" in answer.out and "a note" in answer.out
    assert run("show", "-", "--json", stdin=made.to_json()).out.strip() == made.to_json()
    answer = run("show", "-", "--html", tmp_path / "x.html", stdin=made.to_json())
    assert answer.code == 2 and "holds a measurement" in answer.err
    answer = run("show", "-", stdin='{"measured": []}')
    assert answer.code == 2 and "stdin: Measurement.title: is missing" in answer.err


def test_a_profile_that_nothing_is_made_of_is_refused(run: Run, chain_file: Path) -> None:
    answer = run("show", "-", "--profile", chain_file, stdin=run("solve", chain_file).out)
    assert answer.code == 2 and "name the report with --html FILE" in answer.err


def test_placements_are_compared_by_the_names_of_their_files_in_the_units_of_their_objective(
    run: Run, chain_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It was "objective   3 | 3", of "first" and "second". Names stay whole in a terminal that is
    # narrower than they are.
    monkeypatch.setenv("COLUMNS", "60")
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    for file, objective in ((here, "throughput"), (there, "memory")):
        file.write_text(run("solve", chain_file, "--objective", objective).out)
    answer = run("compare", here, here)
    assert f"first       {here}" in answer.out
    assert "objective   3.00 ms | 3.00 ms, ratio 1.000" in answer.out
    assert "objective   2.0 MiB | 2.0 MiB, ratio 1.000" in run("compare", there, there).out


def test_compare_tells_what_differs(run: Run, chain_file: Path) -> None:
    faster = chain([1.5, 1.0, 1.0, 1.0]).to_json()
    answer = run("compare", chain_file, "-", "--json", stdin=faster)
    layers = {layer["name"]: layer["time_ms"]["fast"] for layer in json.loads(answer.out)["layers"]}
    assert layers["l0"] == {"first": 3.0, "second": 1.5, "notable": True}
    assert not layers["l1"]["notable"]
    assert "0.50" in run("compare", chain_file, "-", stdin=faster).out


def test_compare_writes_a_report(run: Run, chain_file: Path, tmp_path: Path) -> None:
    run(
        "compare",
        chain_file,
        "-",
        "--html",
        tmp_path / "both.html",
        stdin=chain([1.5, 1.0, 1.0, 1.0]).to_json(),
    )
    assert "Time on fast, largest changes" in (tmp_path / "both.html").read_text()


def test_compare_refuses_what_is_of_different_kinds(run: Run, chain_file: Path) -> None:
    answer = run("compare", chain_file, "-", stdin=run("solve", chain_file).out)
    assert answer.code == 2
    assert "a profile and a placement cannot be compared" in answer.err


def test_show_tells_how_far_a_solve_on_a_service_is(run: Run) -> None:
    """The response of a running solve has a status, and was read as a placement."""
    running = Progress(
        id="abc", status="running", incumbent=4.5, bound=4.0, gap=0.5 / 4.5, elapsed_s=3.2
    ).model_dump_json()
    answer = run("show", "-", stdin=running)
    assert answer.code == 0, answer.err
    assert "solve abc is running after 3.2 s; best objective so far 4.5, bound 4, gap 11.11%" in (
        answer.out
    )
    queued = Progress(id="abc", status="queued").model_dump_json()
    assert "no placement is known so far" in run("show", "-", stdin=queued).out
    assert json.loads(run("show", "-", "--json", stdin=queued).out)["status"] == "queued"


@pytest.mark.parametrize(
    "command",
    [("show", "-", "--html", "x.html"), ("show", "-", "--svg", "x.svg"), ("solve", "-")],
)
def test_a_solve_that_has_not_ended_is_no_placement(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = run(*command, stdin=Progress(id="abc", status="running").model_dump_json())
    assert answer.code == 2
    assert "holds the progress of" in answer.err and not list(tmp_path.iterdir())


def test_an_error_of_the_service_is_shown_as_one(run: Run) -> None:
    problem = {
        "type": "urn:placer:problem:no-such-placement",
        "title": "There is no such placement",
        "status": 404,
        "detail": "there is no placement abc; POST its request to /v1/placements",
    }
    answer = run("show", "-", stdin=json.dumps(problem))
    assert answer.code == 2
    assert "holds an error of the service: there is no placement abc" in answer.err
