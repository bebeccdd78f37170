"""Agreement of client and service on a schema version."""

from __future__ import annotations

import pytest

from placer.schema import SCHEMA_VERSION

HEADER = "Placer-Schema-Version"


@pytest.mark.parametrize(
    "path", ["/", "/healthz", "/v1/placements", "/v1/placements/nothing", "/nothing"]
)
def test_every_answer_says_its_version(service, path):
    assert service.get(path).headers[HEADER] == SCHEMA_VERSION


@pytest.mark.parametrize(
    "versions", [SCHEMA_VERSION, f"1, {SCHEMA_VERSION}", f"7,{SCHEMA_VERSION}"]
)
def test_one_common_version_is_enough(service, versions):
    assert service.get("/v1/placements", headers={HEADER: versions}).status_code == 200


@pytest.mark.parametrize("versions", ["1", "1, 2", "one", ",", "1.0", "9" * 5000])
def test_without_a_common_version_both_are_named(service, versions):
    reply = service.get("/v1/placements", headers={HEADER: versions})
    assert (reply.status_code, reply.json()["type"]) == (
        406,
        "urn:placer:problem:no-common-version",
    )
    assert repr(SCHEMA_VERSION) in reply.json()["detail"]
    assert versions[:40] in reply.json()["detail"]
    assert len(reply.content) <= 4096
