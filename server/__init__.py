"""REST service that solves placements in worker processes and stores the answers.

    request ──▶ web ──▶ api ──▶ jobs ──▶ workers (one process per solve) ──▶ store
                         ├────▶ judge (maps that users made) ──▶ workers
                         └────▶ node (this machine's devices; graphs to measure) ──▶ workers

``app`` assembles the application, and ``serving`` runs it under uvicorn. Operators configure it
with ``settings`` and ``keys``, and watch it through ``observe``. Every error is a ``problem``.
"""
