"""Bearer keys, of which a file holds the hashes.

    # name      scopes       SHA-256 of the key                     requests per second
    ci          read,solve   9f86d081884c7d659a2feaa0c55ad015...    5
    dashboard   read         60303ae22b998861bce3b28f33eec1be...

``python -m placer_server.keys NAME [SCOPES]`` makes a key and its line. PLACER_RATE_PER_S is the
rate of a line without one. A key has 256 random bits, so a plain hash reveals nothing about it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import re
import secrets
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from placer.errors import InputError

# Only for type checking: keys can be made without the packages that a service needs.
if TYPE_CHECKING:
    from .settings import Settings

# Scopes: ``read`` for GET; ``solve`` for POST, PUT and DELETE; ``metrics`` for ``/metrics``.
SCOPES = ("read", "solve", "metrics")

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")
PREFIX = "placer_"

USAGE = f"""usage: python -m placer_server.keys NAME [{",".join(SCOPES)}] >> FILE

Make a bearer key for NAME. The scopes are read (GET), solve (POST, PUT and DELETE) and metrics
(/metrics); the default is read,solve. The line for FILE holds the hash of the key. The key itself
is printed once, to stderr. A number at the end of the line limits the key's requests per second.
The service reads FILE when it starts: PLACER_KEYS_FILE=FILE placer serve"""

# Length of a burst in seconds: an idle client may send the requests of this time at once.
BURST_S = 2.0


@dataclass
class TokenBucket:
    """Token bucket that limits the request rate of a key.

    Attributes:
        per_s: Tokens that are added per second.
    """

    per_s: float
    _left: float = field(init=False)
    _at_s: float = field(default_factory=lambda: time.monotonic())

    def __post_init__(self) -> None:
        self._left = self._full

    @property
    def _full(self) -> float:
        return max(1.0, self.per_s * BURST_S)

    def take(self) -> int:
        """Take one token.

        Returns:
            0 if a token was available, else the seconds until one is.
        """
        now = time.monotonic()
        self._left = min(self._full, self._left + (now - self._at_s) * self.per_s)
        self._at_s = now
        if self._left >= 1.0:
            self._left -= 1.0
            return 0
        return max(1, math.ceil((1.0 - self._left) / self.per_s))


@dataclass(frozen=True)
class Key:
    """One key that the service accepts.

    Attributes:
        name: Name of the key's owner, shown in logs and used for fair queueing.
        scopes: Scopes that the key grants.
        digest: SHA-256 of the key.
        rate: Rate limit.
    """

    name: str
    scopes: frozenset[str]
    digest: bytes
    rate: TokenBucket


class Keys:
    """Keys of a service; without a file of keys, only a loopback address is allowed.

    Raises:
        InputError: The file cannot be used, or it is missing and other machines can reach the
            service.
    """

    def __init__(self, settings: Settings) -> None:
        self._keys = _read(settings) if settings.keys_file else []
        if not self._keys and not is_loopback(settings.host):
            raise InputError(
                f"the service would listen on {settings.host} without keys: set PLACER_KEYS_FILE to"
                " a file made with 'python -m placer_server.keys NAME', or PLACER_HOST to 127.0.0.1"
            )

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, given: str) -> Key | None:
        """Return the matching key, or None.

        Every key is compared in constant time, so the duration reveals nothing.
        """
        digest = key_digest(given)
        found = None
        # No early return: the duration must not depend on the position of the key.
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def key_digest(key: str) -> bytes:
    """Return the SHA-256 of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make(name: str, scopes: str = "read,solve") -> tuple[str, str]:
    """Return a new key and its line for the file.

    Raises:
        InputError: The name or a scope is invalid.
    """
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{name!r} is not a valid name of a key; use 1 to 64 letters, digits, '.', '_' and '-'"
        )
    if unknown := [scope for scope in scopes.split(",") if scope not in SCOPES]:
        raise InputError(f"{unknown[0]!r} is not a scope; use some of {','.join(SCOPES)}")
    key = PREFIX + secrets.token_urlsafe(32)
    return key, f"{name} {scopes} {key_digest(key).hex()}"


def _read(settings: Settings) -> list[Key]:
    path = settings.keys_file
    try:
        lines = Path(path).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"PLACER_KEYS_FILE {path!r} cannot be read: {error}") from error
    keys = [
        _parse(text, settings, f"line {number} of {path!r}")
        for number, line in enumerate(lines, 1)
        if (text := line.partition("#")[0].strip())
    ]
    if not keys:
        raise InputError(
            f"PLACER_KEYS_FILE {path!r} has no keys; 'python -m placer_server.keys NAME' makes one"
        )
    return keys


def _parse(line: str, settings: Settings, where: str) -> Key:
    """Return the key of a line.

    Error messages do not repeat the line: it may hold a key instead of its hash by mistake.
    """
    name, scopes, digest, rate, *rest = [*line.split(), "", "", ""][: max(4, len(line.split()))]
    given = frozenset(scopes.split(","))
    if not _NAME.fullmatch(name) or not _HASH.fullmatch(digest) or rest:
        raise InputError(
            f"{where} is not a key; write NAME SCOPES SHA256 [RATE], as"
            " 'python -m placer_server.keys' does"
        )
    if not given <= set(SCOPES):
        raise InputError(
            f"{where}: the scopes of {name!r} are not all known; give some of {', '.join(SCOPES)}"
        )
    try:
        per_s = float(rate or settings.rate_per_s)
    except ValueError:
        per_s = 0.0
    if not 0 < per_s < math.inf:
        raise InputError(
            f"{where}: the rate of {name!r} is not a number above 0; give requests per second"
        )
    return Key(name, given, bytes.fromhex(digest), TokenBucket(per_s))


def main(arguments: list[str]) -> int:
    """Make a key, and return the exit code.

    The line for the file goes to stdout, and the key itself to stderr.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if not 1 <= len(arguments) <= 2 or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        key, line = make(*arguments)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(line)
    print(f"the key, shown this once: {key}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
