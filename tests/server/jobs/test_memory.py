"""Ended jobs are freed."""

from __future__ import annotations

import gc

from placer_server.jobs.job import Job


def test_an_ended_job_goes_without_being_looked_for(serve, request_body):
    client = serve()
    gc.collect()
    before = _jobs()
    gc.disable()
    try:
        for seed in range(10):
            assert client.post("/v1/placements", json=request_body(seed=seed)).status_code == 200
        left = _jobs() - before
    finally:
        gc.enable()
    assert left <= 2  # the latest may still be on its way out


def _jobs():
    return sum(isinstance(found, Job) for found in gc.get_objects())
