"""HEAD: what GET would answer, without its body."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


def takes_head(path: str) -> bool:
    """Whether GET of a path can be asked for its head alone: not a stream, whose body tells when it
    ends.
    """
    return not path.endswith("/events")


class Heads:
    """Middleware that lets every path with GET answer HEAD, too, as load balancers and ``curl -I``
    ask.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; HEAD as GET, of whose answer the body is kept back."""
        if scope["type"] != "http" or scope["method"] != "HEAD" or not takes_head(scope["path"]):
            await self._app(scope, receive, send)
            return

        async def head_alone(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        inner = {**scope, "method": "GET"}
        try:
            await self._app(inner, receive, head_alone)
        finally:
            if "route" in inner:
                scope["route"] = inner["route"]  # by which it is counted
