"""The boundaries of the stages of DeepSpeed's ``PipelineModule``.

``test_the_program_of_the_page_runs`` was run with DeepSpeed 0.19.8 and torch 2.13 on the CPU. It is
not among the test packages, because it compiles an operator when it first starts.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from documentation import ROOT, blocks
from exported import cut
from torch import nn

from placer.errors import InputError
from placer.exports.formats import format_named


def read(text: str, layers: list[str], stages: int = 3) -> dict[str, str]:
    return format_named("deepspeed").read(text, layers, [f"cuda:{i}" for i in range(stages)])


def test_the_layers_between_two_boundaries_are_the_stages_of_the_placement() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.ReLU(), nn.Linear(8, 2), nn.Identity())
    placement = cut(["0", "2", "3"], "2", "3")
    parts = eval(placement.export("deepspeed", model).text)
    assert parts == [0, 2, 3, 5]
    inputs = torch.randn(2, 4)
    values = inputs
    for begin, end in pairwise(parts):
        values = model[begin:end](values)
    assert torch.equal(values, model(inputs))


@pytest.mark.integration
def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    page = "docs/guides/export/deepspeed.md"
    (program,) = [block for block in blocks() if block.page == page and "deepspeed." in block.text]
    (tmp_path / "stages.py").write_text(program.text)
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "stages.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert "the same result" in result.stdout


def test_the_stages_and_micro_batches_are_stated() -> None:
    export = cut(["0", "1"], "1", training=True, chunks=4).export("deepspeed")
    assert export.text == "[0, 1, 2]"
    assert export.notes[0] == (
        "Construct PipelineModule with num_stages=2, and set gradient_accumulation_steps to 4 in "
        "the configuration."
    )


def test_tied_layers_on_two_stages_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    export = cut(["0", "1", "2"], "2", training=True).export("deepspeed", model)
    (note,) = [note for note in export.notes if "TiedLayerSpec" in note]
    assert "'0.weight' and '2.weight'" in note


def test_replicas_are_copies_of_the_pipeline() -> None:
    replicas: Any = {
        "cuda:0": [{"device": "cuda:0", "samples": 1}, {"device": "cuda:1", "samples": 1}]
    }
    export = cut(["0"], replicas=replicas, batch_size=2).export("deepspeed")
    assert "Run 2 equal copies of the pipeline, by data parallelism." in export.notes


@pytest.mark.parametrize("text", ["[0, 1, 3]", "parts = [0, 1, 3]", "(0, 1, 3)"])
def test_boundaries_as_users_write_them_are_read(text: str) -> None:
    assert read(text, ["0", "1.a", "1.b", "2"]) == {
        "0": "cuda:0",
        "1.a": "cuda:1",
        "1.b": "cuda:1",
        "2": "cuda:1",
    }


def test_a_stage_may_be_without_layers_as_deepspeed_makes_it_for_few_layers() -> None:
    assert read("[0, 1, 1, 2]", ["0", "1"]) == {"0": "cuda:0", "1": "cuda:2"}


@pytest.mark.parametrize("text", ["[0]", "[1, 2]", "[0, 2, 1]", "{0: 1}", '["0", "2"]'])
def test_what_is_not_a_list_of_boundaries_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="give 0, the first layer of each further stage"):
        read(text, ["0", "1"])
