from __future__ import annotations

from placer_server.workers.solving import default_solver


def test_a_placement_is_exported(serve, request_body):
    client = serve(default_solver)
    body = request_body(for_format="vllm")
    key = client.post("/v1/placements?wait=30", json=body).json()["id"]
    found = client.get(f"/v1/placements/{key}/export?format=vllm").json()
    assert found["format"] == "vllm"
    assert found["text"] == "1,1"


def test_an_unknown_format_or_placement_is_a_problem(serve, request_body):
    client = serve(default_solver)
    key = client.post("/v1/placements?wait=30", json=request_body()).json()["id"]
    refused = client.get(f"/v1/placements/{key}/export?format=vlm")
    assert refused.status_code == 422
    assert "vllm" in refused.text
    missing = client.get(f"/v1/placements/{key}/export")
    assert missing.status_code == 422
    assert missing.json()["detail"] == "format: is missing; add it to the query"
    assert client.get(f"/v1/placements/{'0' * 32}/export?format=vllm").status_code == 404


def test_a_placement_that_the_format_cannot_express_is_refused(serve, request_body):
    client = serve(default_solver)
    body = request_body()
    for layer in body["profile"]["layers"]:
        layer["name"] = layer["name"].replace(".", "-")
    for edge in body["profile"]["edges"]:
        edge["source"] = edge["source"].replace(".", "-")
        edge["targets"] = [target.replace(".", "-") for target in edge["targets"]]
        edge["saved_by"] = [name.replace(".", "-") for name in edge["saved_by"]]
    key = client.post("/v1/placements?wait=30", json=body).json()["id"]
    refused = client.get(f"/v1/placements/{key}/export?format=vllm")
    assert refused.status_code == 422
    assert "this model has none" in refused.json()["detail"]
