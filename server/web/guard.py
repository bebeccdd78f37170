"""Middleware for access (host, origin, key, rate, request id, headers), and for HEAD requests."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

import placer
from placer.schema import SCHEMA_VERSION

from ..keys import Keys
from ..observability.logs import REQUEST_ID
from ..problem import Problem, clip

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/openapi.json"})
OPEN_FOLDER = "/page/"

# Header in which a client lists the schema versions that it reads, and the service its own.
VERSION_HEADER = b"placer-schema-version"

HEADERS = [
    (VERSION_HEADER, SCHEMA_VERSION.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        b" img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
]

_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_LOCAL_HOST = re.compile(rb"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)


class Guard:
    """Middleware that admits or rejects requests.

    Without keys, only requests that name this machine as their host are admitted. A page of another
    site can then not reach the service through a DNS name with this machine's address, nor with the
    requests that browsers may send anywhere, such as a POST without a body.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or reject it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = dict(scope["headers"])
        # Accept the client's or proxy's request id only if it cannot disturb the log.
        given = sent.get(b"x-request-id", b"")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(8).encode()
        REQUEST_ID.set(request_id.decode())

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    *HEADERS,
                    (b"x-request-id", request_id),
                ]
            await send(message)

        try:
            self._admit(scope, sent)
            if versions := sent.get(VERSION_HEADER):
                _check_version(versions)
        except Problem as problem:
            await problem.response()(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _admit(self, scope: Scope, sent: Mapping[bytes, bytes]) -> None:
        path = scope["path"]
        # Without keys, the host check prevents DNS rebinding, and the origin check other sites.
        if not self._keys:
            host, origin = sent.get(b"host", b""), sent.get(b"origin", b"")
            if host and not _LOCAL_HOST.fullmatch(host):
                raise _wrong_host(host)
            if origin and not _LOCAL_HOST.fullmatch(origin.partition(b"://")[2]):
                raise _wrong_origin(origin)
            return
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return
        authorization = sent.get(b"authorization")
        if not authorization:
            raise _no_key("no key was given")
        kind, _, token = authorization.decode("latin-1").partition(" ")
        if kind.lower() != "bearer":
            raise _no_key("the authorization is not of type Bearer")
        key = self._keys.find(token.strip())
        if key is None:
            raise _no_key("the given key is unknown")
        scope["placer.client"] = key.name
        if seconds := key.rate.take():
            raise _rate_exceeded(key.rate.per_s, seconds)
        needed = "read" if scope["method"] in ("GET", "HEAD") else "solve"
        needed = "metrics" if path == "/metrics" else needed
        if needed not in key.scopes:
            raise _no_scope(key.name, needed)


def supports_head(path: str) -> bool:
    """Return whether a path supports HEAD; an event stream has no final length, so it does not."""
    return not path.endswith("/events")


class HeadRequests:
    """Middleware that answers HEAD on every path with GET, for load balancers and ``curl -I``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, a HEAD as a GET whose body is dropped."""
        if scope["type"] != "http" or scope["method"] != "HEAD" or not supports_head(scope["path"]):
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        inner = {**scope, "method": "GET"}
        try:
            await self._app(inner, receive, send_without_body)
        finally:
            if "route" in inner:
                # The metrics count the request under this route.
                scope["route"] = inner["route"]


def _check_version(versions: bytes) -> None:
    """Reject a client that reads none of this service's schema versions."""
    given = versions.decode("latin-1")
    if SCHEMA_VERSION not in [one.strip() for one in given.split(",")]:
        detail = (
            f"the client reads schema versions {clip(given, 80)!r}, but this service, Placer"
            f" {placer.__version__}, uses {SCHEMA_VERSION!r}: upgrade the older of the two"
        )
        raise Problem(406, "no-common-version", "No common schema version", detail)


def _wrong_host(host: bytes) -> Problem:
    detail = (
        f"the host is {clip(host.decode('latin-1'), 80)!r}, but a service without keys answers only"
        " to localhost: set PLACER_KEYS_FILE, or use http://127.0.0.1"
    )
    return Problem(421, "strange-host", "The host is not this service's", detail)


def _wrong_origin(origin: bytes) -> Problem:
    detail = (
        f"the origin is {clip(origin.decode('latin-1'), 80)!r}, but a service without keys answers"
        " only to pages of this machine: set PLACER_KEYS_FILE"
    )
    return Problem(403, "strange-origin", "The request comes from another origin", detail)


def _no_key(what: str) -> Problem:
    detail = f"{what}; send 'Authorization: Bearer KEY', or set PLACER_KEY for Placer's clients"
    headers = {"WWW-Authenticate": 'Bearer realm="placer"'}
    return Problem(401, "no-key", "A key is needed", detail, headers=headers)


def _no_scope(name: str, needed: str) -> Problem:
    detail = f"key {name!r} lacks the scope {needed!r}, which this request needs"
    return Problem(403, "no-scope", "The key lacks a scope", detail)


def _rate_exceeded(per_s: float, seconds: int) -> Problem:
    detail = f"this key may send {per_s:g} requests per second; try again in {seconds} s"
    return Problem(429, "too-often", "Too many requests", detail, retry_s=seconds)
