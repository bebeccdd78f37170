"""Freeze the results of the equivalence suite: ``python tests/equivalence/freeze.py [CASE ...]``.

Without arguments it freezes the cases that are not frozen yet, and forgets those that are gone. A
case that is named (``solve/chain``, ``'rest/*'``) is frozen again: list it in ``differences.md`` in
the same commit.
"""

from __future__ import annotations

import fnmatch
import sys

from public_api import Service
from suite import FROZEN, cases, compared, digest, read_frozen, result, write_frozen


def main(patterns: list[str]) -> int:
    """Freeze what is missing or named; return the exit status."""
    known = cases()
    unused = [one for one in patterns if not fnmatch.filter(known, one)]
    if unused:
        print(f"no case matches {', '.join(unused)}; the cases are: {', '.join(known)}")
        return 2
    frozen = read_frozen() if FROZEN.exists() else {}
    frozen = {name: frozen[name] for name in known if name in frozen}
    named = {name for pattern in patterns for name in fnmatch.filter(known, pattern)}
    with Service() as service:
        for name, case in known.items():
            if name in frozen and name not in named:
                continue
            now = result(case, service)
            if name not in frozen:
                frozen[name] = {"first": digest(now), "result": now}
                print(f"{name}: frozen")
            elif changes := compared(name, frozen[name]["result"], now):
                frozen[name]["result"] = now
                print(*changes, f"{name}: frozen again; list it in differences.md", sep="\n")
            else:
                print(f"{name}: unchanged")
    write_frozen(frozen)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
