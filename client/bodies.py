"""The bodies of requests as JSON, and the batches in which many are sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from placer.errors import InputError, kind_of
from placer.schema import JointRequest, PlacementRequest, Profile
from placer.schema.service import MAX_REQUESTS

# Largest total size of a batch's questions in bytes, with shared fields counted for each. A service
# accepts 16 MiB by default. It checks about 7 MB of expanded questions per second, which must take
# less than the client's timeout.
BATCH_BYTES = 15 * 2**20

# Fields of a question, with the value of each as JSON.
EncodedFields = dict[str, str]


def request_fields(request: PlacementRequest) -> dict[str, Any]:
    """Return the request without defaults, but with its schema versions."""
    if not isinstance(request, PlacementRequest):
        raise InputError(
            f"the request is {kind_of(request)}; give a placer.PlacementRequest(profile=profile)"
        )
    return {**_versioned(request, "profile"), "profile": _versioned(request.profile)}


def joint_fields(request: JointRequest) -> dict[str, Any]:
    """Return the request without defaults, but with its schema versions."""
    if not isinstance(request, JointRequest):
        raise InputError(
            f"the request is {kind_of(request)}; give a placer.schema.JointRequest(models=...)"
        )
    models = {
        name: {**_set_fields(model, "profile"), "profile": _versioned(model.profile)}
        for name, model in request.models.items()
    }
    return {**_versioned(request, "models"), "models": models}


def _versioned(wire: PlacementRequest | JointRequest | Profile, *left_out: str) -> dict[str, Any]:
    """Return the fields that are set, and the schema version, which other versions read first."""
    return {**_set_fields(wire, *left_out), "schema_version": wire.schema_version}


def _set_fields(wire: BaseModel, *left_out: str) -> dict[str, Any]:
    return wire.model_dump(mode="json", exclude_defaults=True, exclude={*left_out})


def body_of(request: PlacementRequest) -> bytes:
    """Return the body of a single request."""
    return json.dumps(request_fields(request)).encode()


def encoded_fields(request: PlacementRequest) -> EncodedFields:
    """Return the fields of a request, each as JSON."""
    return {name: json.dumps(value) for name, value in request_fields(request).items()}


def batches_of(questions: Sequence[EncodedFields]) -> list[list[int]]:
    """Return the indices of the questions that are sent together."""
    batches: list[list[int]] = []
    left_bytes = 0
    for number, question in enumerate(questions):
        size_bytes = sum(map(len, question.values()))
        if not batches or len(batches[-1]) == MAX_REQUESTS or size_bytes > left_bytes:
            batches.append([])
            left_bytes = BATCH_BYTES
        batches[-1].append(number)
        left_bytes -= size_bytes
    return batches


def batch_body(questions: Sequence[EncodedFields]) -> bytes:
    """Return the body of a batch, with common fields in ``shared``."""
    first, rest = questions[0], questions[1:]
    shared = {
        name: text for name, text in first.items() if all(one.get(name) == text for one in rest)
    }
    own = ({name: text for name, text in one.items() if name not in shared} for one in questions)
    requests = ", ".join(map(_json_object, own))
    return f'{{"shared": {_json_object(shared)}, "requests": [{requests}]}}'.encode()


def _json_object(fields: EncodedFields) -> str:
    return f"{{{', '.join(f'{json.dumps(name)}: {text}' for name, text in fields.items())}}}"
