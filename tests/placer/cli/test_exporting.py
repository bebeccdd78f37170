from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Run, chain

from placer.schema import Profile


@pytest.fixture
def blocks_file(tmp_path: Path) -> Path:
    """Write a chain of an embedding, four blocks and a head."""
    names = ["embed", *(f"blocks.{number}" for number in range(4)), "head"]
    content = chain([1.0] * len(names)).model_dump(mode="json")
    renamed = {layer["name"]: name for layer, name in zip(content["layers"], names, strict=True)}
    for layer in content["layers"]:
        layer["name"] = renamed[layer["name"]]
    for edge in content["edges"]:
        edge["source"] = renamed[edge["source"]]
        edge["targets"] = [renamed[target] for target in edge["targets"]]
    file = tmp_path / "blocks.json"
    file.write_text(Profile.model_validate(content).to_json())
    return file


def test_export_prints_the_text_for_the_engine_and_notes_on_stderr(
    run: Run, blocks_file: Path
) -> None:
    placement = run("solve", blocks_file, "--for-format", "vllm").out
    answer = run("export", "-", "--to", "vllm", stdin=placement)
    assert answer.code == 0, answer.err
    assert answer.out == "2,2\n"
    assert "--pipeline-parallel-size 2" in answer.err


def test_export_writes_files_and_json(run: Run, blocks_file: Path, tmp_path: Path) -> None:
    placement = run("solve", blocks_file, "--for-format", "vllm").out
    file = tmp_path / "partition.json"
    assert run("export", "-", "--to", "vllm", "--json", "-o", file, stdin=placement).code == 0
    assert json.loads(file.read_text())["text"] == "2,2"


def test_an_unknown_format_is_exit_code_2(run: Run, blocks_file: Path) -> None:
    placement = run("solve", blocks_file).out
    answer = run("export", "-", "--to", "vlm", stdin=placement)
    assert answer.code == 2
    assert answer.err.count("'vlm'") == 1
    assert "Value error" not in answer.err


def test_a_model_without_blocks_has_no_vllm_partition(run: Run, chain_file: Path) -> None:
    placement = run("solve", chain_file).out
    answer = run("export", "-", "--to", "vllm", stdin=placement)
    assert answer.code == 2
    assert "this model has none" in answer.err
