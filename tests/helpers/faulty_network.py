"""A network with faults, between a client and a real service."""

from __future__ import annotations

import httpx

BEFORE = ("refused", "connect timeout", "429", "503")
"""The service sees nothing of the call."""

AFTER = ("lost", "read timeout", "half", "reset", "502", "504")
"""The service answers, and the answer is lost."""


class Faulty:
    """A network with faults in turn, then none; it records what reached the service."""

    def __init__(self, *faults: str, answer: httpx.Response | None = None) -> None:
        self.faults = list(faults)
        self.answer = answer  # instead of the service's
        self.seen: list[str] = []

    def before(self, asked: httpx.Request) -> str:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "refused":
            raise httpx.ConnectError("refused", request=asked)
        if fault == "connect timeout":
            raise httpx.ConnectTimeout("too slow", request=asked)
        if fault not in ("429", "503"):
            self.seen.append(f"{asked.method} {asked.url.path}")
        return fault

    @staticmethod
    def refusal(fault: str) -> httpx.Response:
        return httpx.Response(int(fault), json={"detail": "not now"}, headers={"Retry-After": "0"})

    @staticmethod
    def after(asked: httpx.Request, fault: str, reply: httpx.Response) -> httpx.Response:
        if fault in ("lost", "reset"):
            raise {"lost": httpx.RemoteProtocolError, "reset": httpx.ReadError}[fault](
                "gone", request=asked
            )
        if fault == "read timeout":
            raise httpx.ReadTimeout("too slow", request=asked)
        if fault in ("502", "504"):
            return httpx.Response(int(fault), content=b"<html>bad gateway</html>")
        if fault == "half":
            return httpx.Response(
                reply.status_code,
                headers={"Content-Type": "application/json"},
                content=reply.content[:-9],
            )
        return reply


class Sync(httpx.BaseTransport):
    def __init__(self, faulty: Faulty) -> None:
        self.faulty, self.network = faulty, httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        fault = self.faulty.before(request)
        if fault in ("429", "503"):
            return self.faulty.refusal(fault)
        reply = self.faulty.answer or self.network.handle_request(request)
        if fault:
            reply.read()
        return self.faulty.after(request, fault, reply)


class Async(httpx.AsyncBaseTransport):
    def __init__(self, faulty: Faulty) -> None:
        self.faulty, self.network = faulty, httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        fault = self.faulty.before(request)
        if fault in ("429", "503"):
            return self.faulty.refusal(fault)
        reply = self.faulty.answer or await self.network.handle_async_request(request)
        if fault:
            await reply.aread()
        return self.faulty.after(request, fault, reply)
