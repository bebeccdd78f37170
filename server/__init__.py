"""REST service that solves placements in worker processes and stores the answers.

    request ──▶ web ──▶ api ──▶ jobs (solves, measurements, evaluations) ──▶ workers ──▶ store
                         └────▶ node (this machine's devices) ──▶ workers

Each task runs in a worker process of its own.

``app`` assembles the application, and ``serving`` runs it under uvicorn. Operators configure it
with ``settings`` and ``keys``, and watch it through ``observability``. Every error is a
``problem``.
"""
