#!/bin/sh
# Builds the image on a base, starts it as a platform would (read-only, no capabilities, not root), asks it for a
# placement, and stops it. Leaves nothing behind. Exit code 0 only if every step went well.
#
#   docker/smoke.sh [BASE_IMAGE]
#
# Uses docker where a daemon answers, else buildah and podman. From the environment:
#   TARGET        solver (default) or gpu
#   PIP_CONF      a pip configuration to build with, passed as a secret
#   CA            certificates to build with, passed as a secret
#   BUILD_FLAGS   for the build: --isolation chroot --network host
#   RUN_FLAGS     for the run: --network host --runtime runc
#   PORT          on this machine: 18080
set -eu
cd "$(dirname "$0")/.."
base=${1:-docker.io/library/python:3.11-slim-bookworm}
target=${TARGET:-solver}
port=${PORT:-18080}
image=placer-smoke:$target
container=placer-smoke-$$
url=http://127.0.0.1:$port

say() { printf '%s %s\n' "$(date +%T)" "$*"; }
fail() { say "FAILED: $*"; $run logs "$container" 2>&1 | tail -n 40 || true; exit 1; }

if docker info >/dev/null 2>&1; then
    build="docker build" run=docker
elif command -v buildah >/dev/null && command -v podman >/dev/null; then
    build="buildah build --format docker --layers --ignorefile docker/Dockerfile.dockerignore" run=podman
else
    echo "neither a docker daemon nor buildah and podman are here" >&2
    exit 2
fi
trap '$run rm -f "$container" >/dev/null 2>&1 || true' EXIT

say "building $image on $base"
set -- --target "$target" --build-arg "BASE_IMAGE=$base" -t "$image" -f docker/Dockerfile
[ -z "${PIP_CONF:-}" ] || set -- "$@" --secret "id=pip_conf,src=$PIP_CONF"
[ -z "${CA:-}" ] || set -- "$@" --secret "id=ca,src=$CA"
# shellcheck disable=SC2086
$build ${BUILD_FLAGS:-} "$@" . >"${LOG:=/tmp/placer-smoke-build.$$}" 2>&1 ||
    { tail -n 40 "$LOG"; fail "the build"; }
rm -f "$LOG"
say "built: $($run image inspect --format '{{.Size}}' "$image") bytes"

case " ${RUN_FLAGS:-} " in *" host "* | *"=host "*) publish= ;; *) publish="-p 127.0.0.1:$port:$port" ;; esac
started=$(date +%s%N)
# shellcheck disable=SC2086
$run run -d --name "$container" --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges \
    -v /data -e "PLACER_PORT=$port" $publish ${RUN_FLAGS:-} "$image" >/dev/null || fail "the start"

ready=
for _ in $(seq 300); do
    if curl -fsS "$url/readyz" >/dev/null 2>&1; then ready=yes; break; fi
    sleep 0.1
done
[ -n "$ready" ] || fail "/readyz did not answer within 30 s"
say "ready after $((($(date +%s%N) - started) / 1000000)) ms"

[ "$($run exec "$container" id -u)" = 10001 ] || fail "it runs as root"
if $run exec "$container" touch /opt/placer/x 2>/dev/null; then fail "its file system can be written"; fi

curl -fsS "$url/openapi.json" | $run exec -i "$container" python3 -c '
import json, sys
body = json.load(sys.stdin)["paths"]["/v1/placements"]["post"]["requestBody"]["content"]["application/json"]
print(json.dumps(body["examples"]["throughput"]["value"]))' >"/tmp/$container.json" || fail "no example in /openapi.json"
answer=$(curl -fsS "$url/v1/placements?wait=30" -H 'Content-Type: application/json' -d "@/tmp/$container.json") ||
    fail "no placement"
rm -f "/tmp/$container.json"
case $answer in *'"status":"optimal"'*) say "placement: optimal" ;; *) fail "the placement is $answer" ;; esac

code=$(curl -s -o /dev/null -w '%{http_code}' "$url/v1/cluster")
[ "$target" != solver ] || [ "$code" = 501 ] || fail "/v1/cluster answered $code without torch"
say "/v1/cluster: $code"

started=$(date +%s%N)
$run stop -t 10 "$container" >/dev/null
say "stopped after $((($(date +%s%N) - started) / 1000000)) ms"
code=$($run inspect --format '{{.State.ExitCode}}' "$container")
[ "$code" = 0 ] || fail "it ended with exit code $code"
say "passed"
