"""A coverage-guided fuzzer for the reading of bodies: ``python -m benchmarks.service.fuzz RUNS``.

Reading must end with a request or with a problem of at most 4 KB that is not a 5xx; anything else
ends the fuzzer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

MEMORY_MIB = 1500


def target(data: bytes) -> None:
    """Read a body as each path would."""
    from placer_server.problem import MAX_BYTES, Problem
    from placer_server.web.validation import check, split

    for read in (check, split):
        try:
            read(data)
        except Problem as problem:
            if problem.status >= 500 or len(problem.content()) > MAX_BYTES:
                raise AssertionError(f"{problem.status}, {len(problem.content())} bytes") from None


def main(runs: int) -> None:
    """Fuzz ``runs`` times from the service's examples; exit with 0 if nothing was found."""
    import atheris

    with atheris.instrument_imports(include=["placer_server", "placer.schema", "difflib"]):
        from placer_server.openapi import examples
        from placer_server.web import validation  # noqa: F401

    with TemporaryDirectory() as corpus:
        for number, example in enumerate(
            (*examples.requests().values(), *examples.batches().values())
        ):
            Path(corpus, str(number)).write_text(json.dumps(example["value"]))
        limits = [
            f"-runs={runs}",
            f"-rss_limit_mb={MEMORY_MIB}",
            "-max_len=20000",
            "-seed=1",
            "-print_final_stats=1",
        ]
        atheris.Setup([sys.argv[0], corpus, *limits], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main(int(sys.argv[1]))
