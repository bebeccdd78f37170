"""``python -m benchmarks NAME`` measures; ``python -m benchmarks tables [--check]`` renews README's tables."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks import record

FOLDER = Path(__file__).parent
README = FOLDER.parent / "README.md"


def main() -> int:
    """Run a benchmark, or make the tables; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=[*_names(), "tables"], help="a benchmark, or tables")
    parser.add_argument("--check", action="store_true", help="with tables: change nothing, fail where README differs")
    asked = parser.parse_args()
    return _tables(asked.check) if asked.name == "tables" else _measure(asked.name)


def _names() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))


def _measure(name: str) -> int:
    """A benchmark is a package with ``run() -> rows``, or with ``progress(folder)``, all rows time and again."""
    package = importlib.import_module(f"benchmarks.{name}")
    found = package.progress(folder=record.RESULTS) if hasattr(package, "progress") else [package.run()]
    for rows in found:
        path = record.write(name, rows)
    print(f"{record.table(name, whole=True)}\n\n{path}")
    return 0


def _tables(check: bool) -> int:
    old = README.read_text()
    new = record.with_tables(old)
    if check and new != old:
        print("README.md differs from benchmarks/results; run: python -m benchmarks tables", file=sys.stderr)
        return 1
    if not check:
        README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
