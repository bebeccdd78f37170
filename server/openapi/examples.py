"""Example requests of the OpenAPI document; a test posts each."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from typing import Any

GIB = 2**30

Examples = dict[str, dict[str, Any]]
"""A summary and a value by the name of an example."""


def _example(name: str, summary: str, value: Any) -> Examples:
    return {name: {"summary": summary, "value": value}}


def _layer(name: str, forward_ms: float, param_gib: float) -> dict[str, Any]:
    size = int(param_gib * GIB)
    return {
        "name": name,
        "forward_ms": {"gpu": forward_ms},
        "backward_ms": {"gpu": 2 * forward_ms},
        "param_bytes": size,
        "grad_bytes": size,
        "optimizer_bytes": 2 * size,
    }


def _edge(source: str, *targets: str) -> dict[str, Any]:
    return {
        "source": source,
        "targets": list(targets),
        "bytes": 2**24,
        "gradient_bytes": 2**24,
        "saved_by": list(targets),
    }


def _cluster(memory_gib: int) -> dict[str, Any]:
    names = ["cuda:0", "cuda:1"]
    return {
        "devices": [
            {"name": name, "type": "gpu", "memory_bytes": memory_gib * GIB} for name in names
        ],
        "links": [
            {"source": one, "target": other, "bandwidth_bytes_per_s": 2e11, "latency_s": 1e-5}
            for one in names
            for other in names
            if one != other
        ],
    }


def _request(memory_gib: int, **more: Any) -> dict[str, Any]:
    names = ["embed", "block.0", "block.1", "head"]
    profile = {
        "schema_version": "3",
        "model": "Example",
        "training": True,
        "optimizer": "adam",
        "batch_size": 8,
        "layers": [
            _layer("embed", 0.5, 0.5),
            _layer("block.0", 2.0, 1),
            _layer("block.1", 2.0, 1),
            _layer("head", 0.5, 0.5),
        ],
        "edges": [_edge(source, target) for source, target in pairwise(names)],
    }
    return {
        "schema_version": "3",
        "profile": profile,
        "cluster": _cluster(memory_gib),
        "time_limit_s": 10,
        **more,
    }


def _generation() -> dict[str, Any]:
    """Return a request with a profile of the prompt's pass, and of a pass of one token."""
    prompt = _request(16)
    token = deepcopy(prompt["profile"])
    for layer in token["layers"]:
        layer["forward_ms"] = {"gpu": layer["forward_ms"]["gpu"] / 4}
        layer["buffer_bytes"] = GIB // 8
    for edge in token["edges"]:
        edge["bytes"] //= 512
    return {
        **prompt,
        "objective": "generation",
        "training": False,
        "token_profile": token,
        "generation": {"prompt_tokens": 512, "new_tokens": 64, "sequences_in_flight": 4},
    }


def requests() -> Examples:
    """Return the examples of ``POST /v1/placements`` by name, each with a summary and a value."""
    latency = _request(
        16,
        objective="latency",
        training=False,
        constraints={"pinned": {"head": "cuda:1"}, "contiguous": True},
    )
    return {
        **_example(
            "throughput",
            "Training: four layers on two devices with the smallest bottleneck",
            _request(16, chunks=4),
        ),
        **_example(
            "latency", "Inference: smallest latency of one sample, with a pinned layer", latency
        ),
        **_example(
            "generation",
            "Inference: texts of 64 tokens after prompts of 512, four at the same time",
            _generation(),
        ),
        **_example(
            "infeasible",
            "Too large for the devices: a placement with status infeasible",
            _request(2),
        ),
    }


def joint_requests() -> Examples:
    """Return the examples of ``:together``."""
    names = ["conv_in", "mid", "conv_out"]
    encoder = {
        "schema_version": "3",
        "model": "Encoder",
        "layers": [_layer("embed", 0.5, 2), _layer("block", 1.0, 6)],
        "edges": [_edge("embed", "block")],
        "cluster": _cluster(16),
    }
    unet = {
        "schema_version": "3",
        "model": "UNet",
        "layers": [_layer(name, 2.0, 4) for name in names],
        "edges": [_edge(source, target) for source, target in pairwise(names)],
        "cluster": _cluster(16),
    }
    value = {
        "schema_version": "3",
        "models": {"encoder": {"profile": encoder}, "unet": {"profile": unet, "runs": 50}},
        "time_limit_s": 10,
    }
    summary = "A text encoder that runs once, then a UNet that runs fifty times"
    return _example("pipeline", summary, value)


def evaluations() -> Examples:
    """Return the examples of ``:evaluate``."""
    request = _request(16, chunks=4)
    own = {"request": request, "layer_devices": own_map()}
    text = {"request": request, "format": "vllm", "text": "1,1"}
    return {
        **_example("own map", "Three layers on the first device", own),
        **_example(
            "text of vLLM",
            "One block on the first device, as VLLM_PP_LAYER_PARTITION says it",
            text,
        ),
    }


def comparisons() -> Examples:
    """Return the examples of ``:compare``."""
    even = {"embed": "cuda:0", "block.0": "cuda:0", "block.1": "cuda:1", "head": "cuda:1"}
    value = {"request": _request(16, chunks=4), "maps": {"even": even, "uneven": own_map()}}
    return _example("two maps", "An even map and an uneven map", value)


def batches() -> Examples:
    """Return the examples of ``:batch``."""
    objectives = [
        {"objective": "throughput"},
        {"objective": "latency"},
        {"objective": "throughput", "chunks": 8},
    ]
    value = {"shared": _request(16), "requests": objectives}
    return _example("three questions", "Three questions about one profile on one cluster", value)


def _graph() -> dict[str, Any]:
    """Return a linear layer in training, as a captured graph."""
    image = {"name": "x", "shape": [8, 16], "dtype": "float32", "batched": True}
    result = {**image, "name": "y", "differentiable": True, "source": "linear"}
    layer = {
        "name": "linear",
        "module": "Linear",
        "state": ["linear.weight"],
        "reads": ["x"],
        "writes": ["y"],
        "results": ["n0"],
        "operations": [
            {"op": "aten.linear.default", "out": "n0", "args": [{"ref": "r0"}, {"ref": "s0"}]}
        ],
    }
    weight = {
        "name": "linear.weight",
        "shape": [16, 16],
        "dtype": "float32",
        "kind": "parameter",
        "requires_grad": True,
    }
    return {
        "model": "Example",
        "training": True,
        "batch_size": 8,
        "state": [weight],
        "values": [image, result],
        "inputs": ["x"],
        "outputs": ["y"],
        "layers": [layer],
    }


def graphs() -> Examples:
    """Return the examples of ``POST /v1/profiles``."""
    value = {"schema_version": "3", "graph": _graph(), "devices": 1, "repeats": 2}
    return _example("one layer", "A linear layer of 16 features, measured on one device", value)


def estimates() -> Examples:
    """Return the examples of ``POST /v1/estimates``."""
    value = {"schema_version": "3", "graph": _graph(), "devices": "2x24GiB"}
    summary = "Training of a linear layer of 16 features on two cards of 24 GiB"
    return _example("two cards", summary, value)


def clusters() -> Examples:
    """Return the examples of ``PUT /v1/nodes/{name}``."""
    return _example("two devices", "A node with two linked devices", _cluster(16))


def own_map() -> dict[str, str]:
    """Return a map of the examples' layers, as a user would make it."""
    return {"embed": "cuda:0", "block.0": "cuda:0", "block.1": "cuda:0", "head": "cuda:1"}
