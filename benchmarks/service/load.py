"""A client that sends as fast as a socket takes requests, so that the service is the limit."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True)
class Reply:
    """The status and body of an answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One HTTP/1.1 connection that is kept open."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def get(self, path: str) -> Reply:
        return self.send(message("GET", path))

    def post(self, path: str, body: bytes) -> Reply:
        return self.send(message("POST", path, body))

    def delete(self, path: str) -> Reply:
        return self.send(message("DELETE", path))

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def send(self, raw: bytes) -> Reply:
        self._socket.sendall(raw)
        status = int(self._file.readline().split()[1])
        length = 0
        while (line := self._file.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return Reply(status, self._file.read(length))


def message(method: str, path: str, body: bytes = b"") -> bytes:
    """Return one HTTP request in its wire format."""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def request_body(layers: int = 200, devices: int = 4, seed: int = 0, **fields: Any) -> bytes:
    """Return a training request with ``layers`` layers.

    It has skip connections, as a measured model has.
    """
    random = Random(seed)
    names = [f"encoder.block.{index}" for index in range(layers)]
    profile = {
        "schema_version": "3",
        "model": "Generated",
        "training": True,
        "optimizer": "adam",
        "batch_size": 8,
        "layers": [_layer(name, random) for name in names],
        "edges": [_edge(names, index, random) for index in range(layers - 1)],
    }
    request = {"schema_version": "3", "profile": profile, "cluster": _cluster(devices), **fields}
    return json.dumps(request).encode()


def _layer(name: str, random: Random) -> dict[str, Any]:
    forward_ms = round(random.uniform(0.1, 2.0), 4)
    size = random.randrange(2**20, 2**26)
    return {
        "name": name,
        "module": "Block",
        "forward_ms": {"gpu": forward_ms},
        "backward_ms": {"gpu": round(2 * forward_ms, 4)},
        "host_ms": {"gpu": 0.05},
        "param_bytes": size,
        "grad_bytes": size,
        "optimizer_bytes": 2 * size,
        "saved_bytes": random.randrange(2**20, 2**24),
    }


def _edge(names: list[str], index: int, random: Random) -> dict[str, Any]:
    targets = {index + 1, min(len(names) - 1, index + random.randrange(1, 12))}
    size = random.randrange(2**18, 2**22)
    readers = [names[target] for target in sorted(targets)]
    return {
        "source": names[index],
        "targets": readers,
        "bytes": size,
        "gradient_bytes": size,
        "saved_by": readers,
    }


def _cluster(devices: int) -> dict[str, Any]:
    names = [f"cuda:{index}" for index in range(devices)]
    return {
        "devices": [{"name": name, "type": "gpu", "memory_bytes": 80 * 2**30} for name in names],
        "links": [
            {"source": one, "target": other, "bandwidth_bytes_per_s": 2e10, "latency_s": 1e-5}
            for one in names
            for other in names
            if one != other
        ],
    }
