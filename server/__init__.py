"""The REST service: placements solved in processes of their own, answered from a store when asked
again.

    request ──▶ web ──▶ api ──▶ jobs ──▶ workers (one process a solve) ──▶ store
                         ├────▶ judge (a user's own map) ──▶ workers
                         └────▶ node (its devices, and graphs to be measured on them) ──▶ workers

``app`` puts it together, ``serving`` runs it under uvicorn, ``settings`` and ``keys`` are what an
operator gives; ``observe`` is what an operator sees, ``alive`` what a health check runs, and
``openapi`` what a client's programmer reads. Every error is a ``problem``.
"""
