"""Bodies and tasks about stored placements and users' maps; ``placer.evaluation`` evaluates.

Each task reads a pickled ``EvaluationInput``. That is safe: this service pickled it, and the
client's bytes inside it are only parsed. Only worker processes import the solver.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from placer.errors import InputError
from placer.schema import JointRequest, LayerMap, Placement, PlacementRequest, Replica
from placer.schema.base import FormatName

from ..problem import read_body
from ..workers.solving import read_request
from ..workers.worker import Report

MAX_MAPS = 8

Map = dict[str, str]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EvaluateBody(_Body):
    """Map to evaluate, as `layer_devices`, possibly with `replicas`, or as `text`.

    Attributes:
        request: Request that the map answers; if omitted, the request of the placement `?id=`.
        format: Format of another engine. The map is compared with placements that this format can
            express.
        text: Map in the format, such as `8,9,9,6` of `vllm`; stage i is on the i-th device.
        layer_devices: Device of each layer.
        replicas: For each device of `layer_devices` whose layers several devices hold, all of
            these, itself first, with the samples of a micro-batch that each computes; none if each
            layer is on one device.
    """

    request: PlacementRequest | None = None
    format: FormatName | None = None
    text: str | None = None
    layer_devices: Map | None = Field(None, validate_default=True)
    replicas: dict[str, tuple[Replica, ...]] = {}

    @field_validator("layer_devices")
    @classmethod
    def _one_map(cls, given: Map | None, info: ValidationInfo) -> Map | None:
        """Check that the body has one map."""
        text = info.data.get("text")
        if (given is None) == (text is None):
            raise ValueError(
                "is missing; give the device of each layer, or a text and its format"
                if given is None
                else "is given together with text; give one of the two"
            )
        return given

    @field_validator("replicas")
    @classmethod
    def _of_a_map(
        cls, given: dict[str, tuple[Replica, ...]], info: ValidationInfo
    ) -> dict[str, tuple[Replica, ...]]:
        """Check that a text comes without replicas."""
        if given and info.data.get("text") is not None:
            raise ValueError("are given together with text; give layer_devices instead")
        return given


class CompareBody(_Body):
    """Maps to compare with one another and with the placements `?id=`.

    Attributes:
        request: Request for which all maps are evaluated; if omitted, the first placement's
            request.
        maps: Device of each layer, by the name of the map.
        replicas: Replicas as in the body of `:evaluate`, by the name of the map that has some.
    """

    request: PlacementRequest | None = None
    maps: Annotated[dict[str, Map], Field(max_length=MAX_MAPS)] = {}
    replicas: dict[str, dict[str, tuple[Replica, ...]]] = {}

    @field_validator("replicas")
    @classmethod
    def _of_maps(
        cls, given: dict[str, dict[str, tuple[Replica, ...]]], info: ValidationInfo
    ) -> dict[str, dict[str, tuple[Replica, ...]]]:
        """Check that replicas belong to a map."""
        maps = info.data.get("maps", {})
        if unknown := [name for name in given if name not in maps]:
            raise ValueError(f"are given for {unknown[0]!r}, which is not a map; give it in maps")
        return given


class StoredPlacement(NamedTuple):
    """A placement of the store and its request, each as JSON."""

    id: str
    placement: bytes
    request: bytes


class SolveLimits(NamedTuple):
    """Limits of a solve that a client waits for.

    Attributes:
        time_s: Longest time in seconds.
        workers: Largest number of cores.
    """

    time_s: float
    workers: int


class EvaluationInput(NamedTuple):
    """Input of an evaluation.

    Attributes:
        body: The body that was sent.
        stored: The placements that the query names.
        best: Limits of the solve for the best placement; None without such a solve.
    """

    body: bytes
    stored: tuple[StoredPlacement, ...]
    best: SolveLimits | None = None


def evaluate_task(payload: bytes, report: Report, stop: threading.Event) -> bytes:
    """Evaluate a map, and return an Evaluation as JSON; the body is an EvaluateBody."""
    from placer.evaluation.evaluate import evaluated, for_format, map_of, with_best

    given: EvaluationInput = pickle.loads(payload)
    body = read_body(EvaluateBody, given.body)
    request = for_format(body.request or _request_of(given.stored), body.format)
    if body.layer_devices is None:
        given_map = map_of(request, body.text)
    else:
        given_map = LayerMap(layer_devices=body.layer_devices, replicas=body.replicas)
    known = _known_best(request, given.stored)
    found = evaluated(request, given_map, known)
    if given.best is not None:
        found = with_best(found, request, known or _solved(request, given.best, stop))
    return found.model_dump_json().encode()


def compare_task(payload: bytes, report: Report, stop: threading.Event) -> bytes:
    """Compare maps, and return a Comparison as JSON; the body is a CompareBody or empty."""
    from placer.evaluation.compare import compare
    from placer.evaluation.evaluate import map_of

    given: EvaluationInput = pickle.loads(payload)
    body = read_body(CompareBody, given.body or b"{}")
    request = body.request or _request_of(given.stored)
    placements = {
        stored.id: Placement.model_validate_json(stored.placement) for stored in given.stored
    }
    maps = {name: map_of(request, placement) for name, placement in placements.items()}
    own = {
        name: LayerMap(layer_devices=where, replicas=body.replicas.get(name, {}))
        for name, where in body.maps.items()
    }
    return compare(request, {**maps, **own}, placements).model_dump_json().encode()


def export_task(payload: bytes, report: Report, stop: threading.Event) -> bytes:
    """Return an Export of the stored placement as JSON; the body is the format's name."""
    given: EvaluationInput = pickle.loads(payload)
    placement = Placement.model_validate_json(given.stored[0].placement)
    return placement.export(given.body.decode()).model_dump_json().encode()  # type: ignore[arg-type]


def together_task(payload: bytes, report: Report, stop: threading.Event) -> bytes:
    """Return the JointPlacement of a stored joint placement; the body is its JointRequest."""
    from placer.solver.together import divided

    given: EvaluationInput = pickle.loads(payload)
    joint = Placement.model_validate_json(given.stored[0].placement)
    return divided(JointRequest.model_validate_json(given.body), joint).model_dump_json().encode()


def _request_of(stored: Sequence[StoredPlacement]) -> PlacementRequest:
    if not stored:
        raise InputError("no request is given: send one in the body, or name a placement with ?id=")
    return read_request(stored[0].request)


def _known_best(request: PlacementRequest, stored: Sequence[StoredPlacement]) -> Placement | None:
    key = request.content_hash()
    # An answer to a request of an older schema version has another id than the request has today.
    found = [
        Placement.model_validate_json(one.placement)
        for one in stored
        if one.id == key or read_request(one.request).content_hash() == key
    ]
    return found[0] if found and found[0].objective_value is not None else None


def _solved(request: PlacementRequest, limits: SolveLimits, stop: threading.Event) -> Placement:
    """Return the best placement that is found within the limits of the service."""
    from placer.solver.solve import solve

    limited = {
        "time_limit_s": min(request.time_limit_s, limits.time_s),
        "workers": min(request.workers, limits.workers),
    }
    return solve(request.model_copy(update=limited), stop=stop)
