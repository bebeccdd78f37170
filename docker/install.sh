#!/bin/sh
# Runs inside the build: installs its arguments into /opt/placer, from the index and with the
# certificates of the build, which do not stay in the image. constraints.txt pins tested versions.
set -eu
secrets=/run/secrets
if [ -s $secrets/ca ]; then export PIP_CERT=$secrets/ca SSL_CERT_FILE=$secrets/ca; fi
if [ -s $secrets/pip_conf ]; then export PIP_CONFIG_FILE=$secrets/pip_conf; fi
if [ -z "${PIP_INDEX_URL:-}" ]; then unset PIP_INDEX_URL; fi
/opt/pip/bin/pip --python /opt/placer/bin/python install --disable-pip-version-check --no-cache-dir --no-compile \
    -c constraints.txt "$@"

# Remove files that only developers of these packages need: 90 MB. torch is left unchanged, since it
# imports helpers of its tests.
for package in numpy ortools; do
    find /opt/placer/lib -path "*/site-packages/$package/*" \
        \( -type d -name tests -o -name '*.pyi' -o -name '*.pyx' -o -name '*.h' -o -name '*.a' -o -name '*.proto' \) \
        -prune -exec rm -r {} +
done
rm -rf /opt/placer/lib/python3*/site-packages/numpy/f2py
if command -v strip >/dev/null; then
    for package in uvloop httptools sqlalchemy ortools; do
        find /opt/placer/lib -path "*/site-packages/$package/*" -name '*.so*' -exec strip --strip-unneeded {} +
    done
fi

# OR-Tools imports pandas to build models from a Series, which Placer does not do: 45 MB with pandas'
# own requirements.
for site in /opt/placer/lib/python3*/site-packages; do
    rm -rf "$site"/pandas "$site"/pandas-* "$site"/pandas.libs "$site"/pytz* "$site"/dateutil "$site"/python_dateutil-*
    cp /opt/without/pandas.py "$site"
done

# The file system is read-only at run time. Compile now what the service imports; otherwise every start
# would compile it again. -P: import what is installed, not the sources in the working directory.
env -u PYTHONDONTWRITEBYTECODE /opt/placer/bin/python -P - <<'END'
import json
from placer.cli import command
from placer.schema import PlacementRequest
from placer.solver.solve import solve
import psycopg, sqlalchemy.dialects.postgresql.psycopg
from placer_server import app, keys, serving
from placer_server.judge import evaluation, timeline
from placer_server.openapi import examples
import uvicorn.loops.auto, uvicorn.protocols.http.auto, uvicorn.lifespan.on
request = PlacementRequest.model_validate(examples.requests()["throughput"]["value"])
assert solve(request).status == "optimal"
END
