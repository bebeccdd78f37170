"""Whether a service on this machine lives: ``python -m placer_server.alive``, the health check of the image.

It imports nothing of the service, since it is run every few seconds; and asks no proxy.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from collections.abc import Mapping

TIMEOUT_S = 4.0


def is_alive(environment: Mapping[str, str]) -> bool:
    """Whether ``/healthz`` answers where the service listens; by TLS where that is on, whoever signed the certificate.

    Args:
        environment: with the service's PLACER_PORT and PLACER_TLS_CERT.
    """
    at = "127.0.0.1", int(environment.get("PLACER_PORT") or 8080)
    if environment.get("PLACER_TLS_CERT"):
        unverified = ssl._create_unverified_context()
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(*at, timeout=TIMEOUT_S, context=unverified)
    else:
        connection = http.client.HTTPConnection(*at, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(0 if is_alive(os.environ) else 1)
