"""Hostile request bodies: near misses of valid ones, and typical inputs of a fuzzer."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from placer_server.openapi import examples

HOSTILE_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        1e308,
        -1e308,
        2**63,
        2**64,
        10**400,
        [],
        {},
        [[]],
        [None] * 50,
        {"": {}},
        {"__class__": "os"},
    ),
    *(
        "",
        "\0",
        "é" * 300,
        "../../etc/passwd",
        "'; DROP TABLE",
        "NaN",
        "1e999",
        "true",
        "\ud7ff\uffff",
    ),
)
HOSTILE_TEXTS = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"\xff\xfe",
    b"\\ud800",
    b"[" * 400,
    b"{" * 400,
    b"9" * 5000,
)


def bodies(seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield paths and bodies forever, the same for the same seed."""
    random = Random(seed)
    valid = [
        ("/v1/placements", examples.requests()),
        ("/v1/placements:evaluate", examples.evaluations()),
        ("/v1/placements:compare", examples.comparisons()),
        ("/v1/placements:batch", examples.batches()),
    ]
    # each evaluation costs a process, and the same code reads its body
    weights = [20, 1, 1, 4]
    changes: list[Callable[[Any, Random], bytes]] = [
        _other_value,
        _other_value,
        _torn,
        _spliced,
        _noise,
        _deep,
    ]
    while True:
        path, named = random.choices(valid, weights)[0]
        content = random.choice(list(named.values()))["value"]
        yield path, random.choice(changes)(json.loads(json.dumps(content)), random)


def _other_value(content: Any, random: Random) -> bytes:
    """Change some values at random places; remove, misspell or add some fields."""
    for _ in range(random.randrange(1, 4)):
        holder, key = random.choice(list(_places(content)))
        change = random.randrange(4)
        if change == 0 and isinstance(holder, dict):
            holder[f"{key}{random.choice('xs_')}"] = holder.pop(key)
        elif change == 1:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(random.choice(HOSTILE_VALUES))
        if not content:
            break
    return json.dumps(content).encode()


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    for key in keys:
        yield content, key
        if isinstance(content[key], (dict, list)):
            yield from _places(content[key])


def _torn(content: Any, random: Random) -> bytes:
    text = json.dumps(content).encode()
    return text[: random.randrange(len(text))]


def _spliced(content: Any, random: Random) -> bytes:
    text = json.dumps(content).encode()
    at, end = sorted(random.randrange(len(text)) for _ in range(2))
    return text[:at] + random.choice(HOSTILE_TEXTS) + text[random.choice((at, end)) :]


def _noise(content: Any, random: Random) -> bytes:
    text = bytearray(json.dumps(content).encode())
    for _ in range(random.randrange(1, 20)):
        text[random.randrange(len(text))] = random.randrange(256)
    return bytes(text)


def _deep(content: Any, random: Random) -> bytes:
    depth = random.choice((10, 100, 190, 300, 3000))
    nested = (
        b'{"a":' * depth + b"1" + b"}" * depth
        if random.random() < 0.5
        else b"[" * depth + b"]" * depth
    )
    text = json.dumps({**content, "deep": "HERE"}).encode()
    return text.replace(b'"HERE"', nested)
