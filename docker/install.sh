#!/bin/sh
# Run inside the build: installs its arguments into /opt/placer, through the index and with the certificates that the build
# was given. Nothing of those stays in the image.
set -eu
secrets=/run/secrets
if [ -s $secrets/ca ]; then export PIP_CERT=$secrets/ca SSL_CERT_FILE=$secrets/ca; fi
if [ -s $secrets/pip_conf ]; then export PIP_CONFIG_FILE=$secrets/pip_conf; fi
if [ -z "${PIP_INDEX_URL:-}" ]; then unset PIP_INDEX_URL; fi
/opt/pip/bin/pip --python /opt/placer/bin/python install --disable-pip-version-check --no-cache-dir --no-compile "$@"
find /opt/placer/lib -path '*/site-packages/pandas/tests' -prune -exec rm -r {} +
# The file system is read-only later, so what is not compiled now is compiled at every start.
/opt/placer/bin/python -m compileall -q -j 0 /opt/placer/lib || true
