"""HEAD requests: the response to GET without its body."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
