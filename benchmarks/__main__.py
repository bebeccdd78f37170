"""The command line of the benchmarks: ``python -m benchmarks NAME`` or ``tables [--check]``.

``NAME`` measures; ``tables`` renews the tables of results, and ``--check`` only compares them.

All results are in ``benchmarks/README.md``, a few of them in ``docs/comparison/measured.md`` and
the project's ``README.md``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks import highlights, record

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent


def main() -> int:
    """Run a benchmark or make the tables, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=[*_names(), "tables"], help="a benchmark, or tables")
    parser.add_argument(
        "--check", action="store_true", help="with tables: change nothing, fail where they differ"
    )
    asked = parser.parse_args()
    return _tables(asked.check) if asked.name == "tables" else _measure(asked.name)


def _names() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))


def _measure(name: str) -> int:
    """Run one benchmark and write its rows as they come.

    A benchmark is a package with ``run() -> rows``, or with ``progress(folder)``, which yields all
    rows so far after each measurement.
    """
    package = importlib.import_module(f"benchmarks.{name}")
    found = (
        package.progress(folder=record.RESULTS) if hasattr(package, "progress") else [package.run()]
    )
    for rows in found:
        path = record.write(name, rows)
    print(f"{record.table(path.stem, whole=True)}\n\n{path}")
    return 0


def _tables(check: bool) -> int:
    renew = {
        ROOT / "README.md": highlights.readme,
        ROOT / "docs" / "comparison" / "measured.md": highlights.page,
        FOLDER / "README.md": record.with_tables,
    }
    different = {
        path: new for path, make in renew.items() if (new := make(old := path.read_text())) != old
    }
    for path, new in different.items():
        if check:
            print(
                f"{path.relative_to(ROOT)} differs from benchmarks/results; "
                "run: python -m benchmarks tables",
                file=sys.stderr,
            )
        else:
            path.write_text(new)
    return int(check and bool(different))


if __name__ == "__main__":
    sys.exit(main())
