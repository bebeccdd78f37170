"""Estimates of captured graphs, as a service answers them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import placer
from placer.errors import InputError
from placer.estimator.graph_estimate import estimated_request
from placer.profiler.remote.sending import describe
from placer.schema import EstimateRequest

WIDTH = 512


def model() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))


def asked(size: int = 64, training: bool = True, **fields: Any) -> EstimateRequest:
    (graph,) = describe(model(), torch.zeros(size, WIDTH), training=training)
    return EstimateRequest(graph=graph, **fields)


def test_a_graph_is_estimated_like_its_model() -> None:
    options = {"reserve_bytes": 0, "chunks": 4, "schedule": "fill-drain"}
    of_graph = estimated_request(asked(devices="2x1GiB", **options))
    of_model = placer.estimate(model(), torch.zeros(64, WIDTH), "2x1GiB", training=True, **options)
    assert of_graph.devices == of_model.devices
    assert of_graph.layer_devices == of_model.layer_devices


def test_a_smaller_graph_is_tried_where_the_first_does_not_fit() -> None:
    smaller = asked(32).graph
    needed = estimated_request(asked(devices="1GiB", reserve_bytes=0)).fullest.total_bytes
    found = estimated_request(asked(devices=f"{needed - 1}B", reserve_bytes=0, smaller=(smaller,)))
    assert found.fits is False
    assert [one.batch_size for one in found.changes if one.kind == "batch-size"] == [32]


def test_the_cache_that_a_client_counted_is_placed() -> None:
    found = estimated_request(asked(training=False, devices="1GiB", cache_bytes={"0": 1000}))
    assert found.devices[0].cache_bytes == 1000


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cache_bytes": {"nothing": 5}}, "which the graph does not have"),
        ({"cache_bytes": {"0": 5}}, "training has no cache"),
        ({"devices": "2"}, "without its unit"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        estimated_request(asked(**fields))


def test_a_smaller_graph_must_divide_the_micro_batch() -> None:
    with pytest.raises(InputError, match="48 samples do not divide a micro-batch of 64"):
        estimated_request(asked(smaller=(asked(48).graph,)))
