#!/bin/sh
# Smoke test of the image: build it, start it as a platform would (read-only, no capabilities, not
# root), request a placement, and stop it. Only the image remains, or the log of a failed build. The
# exit code is 0 only if every step succeeded.
#
#   docker/smoke.sh [BASE_IMAGE]
#
# Uses docker if its daemon answers, else buildah and podman. Environment variables:
#   TARGET        solver (default) or gpu
#   PIP_CONF      a pip configuration for the build, passed as a secret
#   CA            certificates for the build, passed as a secret
#   BUILD_FLAGS   flags of the build, such as --isolation chroot --network host
#   RUN_FLAGS     flags of the run, such as --network host --runtime runc; if limits cannot be raised
#                 ("error setting rlimits"), --ulimit nofile=20000:20000 --ulimit nproc=4096:4096
#   PORT          port on this machine, 18080 by default
set -eu
cd "$(dirname "$0")/.."
base=${1:-docker.io/library/python:3.11-slim-bookworm}
target=${TARGET:-solver}
port=${PORT:-18080}
image=placer-smoke:$target
container=placer-smoke-$$
url=http://127.0.0.1:$port

say() { printf '%s %s\n' "$(date +%T)" "$*"; }
fail() {
    say "FAILED: $*"
    if $run container inspect "$container" >/dev/null 2>&1; then $run logs "$container" 2>&1 | tail -n 40; fi
    exit 1
}

if docker info >/dev/null 2>&1; then
    build="docker build" run=docker
elif command -v buildah >/dev/null && command -v podman >/dev/null; then
    build="buildah build --format docker --layers --ignorefile docker/Dockerfile.dockerignore" run=podman
else
    echo "neither a docker daemon nor buildah and podman are available" >&2
    exit 2
fi
keys=$(mktemp -d)
trap '$run rm -f -v "$container" >/dev/null 2>&1 || true; rm -rf "$keys"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

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
# shellcheck disable=SC2086
timeout 60 $run run --rm --no-healthcheck ${RUN_FLAGS:-} -e PLACER_KEYS_FILE= "$image" >"$keys/refused" 2>&1 &&
    fail "it starts without keys although other machines can reach it"
grep -q 'without keys: set PLACER_KEYS_FILE' "$keys/refused" || { cat "$keys/refused"; fail "it does not say that it needs keys"; }
# shellcheck disable=SC2086
$run run --rm --no-healthcheck ${RUN_FLAGS:-} --entrypoint python3 "$image" -m placer_server.keys smoke read,solve,metrics \
    >"$keys/file" 2>"$keys/told" || { cat "$keys/told"; fail "no key was made"; }
chmod 644 "$keys/file"  # the service runs as another user; the file holds only hashes
key=$(sed -n 's/^the key, shown this once: //p' "$keys/told")
authorized="Authorization: Bearer $key"

started=$(date +%s%N)
# shellcheck disable=SC2086
$run run -d --no-healthcheck --name "$container" --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges \
    -v /data -v "$keys/file:/run/secrets/placer_keys:ro" --memory "${MEMORY:-4g}" -e "PLACER_PORT=$port" $publish ${RUN_FLAGS:-} "$image" >/dev/null || fail "the start"

ready=
for _ in $(seq 300); do
    if curl -fsS "$url/readyz" >/dev/null 2>&1; then ready=yes; break; fi
    sleep 0.1
done
[ -n "$ready" ] || fail "/readyz did not answer within 30 s"
say "ready after $((($(date +%s%N) - started) / 1000000)) ms"

cap=$($run inspect --format '{{.HostConfig.Memory}}' "$container")
[ "$cap" -gt 0 ] || fail "its memory is not capped"
if $run exec "$container" python3 -c "b'x' * ($cap + 2**28)" 2>/dev/null; then fail "a process takes more memory than the cap"; fi
rm -f oom  # podman leaves this file in the working directory
curl -fsS "$url/healthz" >/dev/null || fail "a process over the memory cap takes the service down"
say "memory is capped at $cap bytes"
$run exec "$container" python3 -m placer_server.healthcheck || fail "the health check fails"
[ "$($run exec "$container" id -u)" = 10001 ] || fail "it runs as root"
if $run exec "$container" touch /opt/placer/x 2>/dev/null; then fail "its file system can be written"; fi

example() {  # PATH NAME: writes the example body of a POST
    curl -fsS "$url/openapi.json" | $run exec -i "$container" python3 -c '
import json, sys
body = json.load(sys.stdin)["paths"][sys.argv[1]]["post"]["requestBody"]["content"]["application/json"]
print(json.dumps(body["examples"][sys.argv[2]]["value"]))' "$@" >"$keys/body" || fail "no example of $1 in /openapi.json"
}
post() { curl -fsS -H "$authorized" -H 'Content-Type: application/json' -d "@$keys/body" "$url$1"; }
example /v1/placements throughput
code=$(curl -s -o /dev/null -w '%{http_code}' "$url/v1/placements")
[ "$code" = 401 ] || fail "without a key /v1/placements answered $code"
answer=$(post "/v1/placements?wait=30") || fail "no placement"
case $answer in *'"status":"optimal"'*) say "placement: optimal" ;; *) fail "the placement is $answer" ;; esac

case $(curl -fsS "$url/") in *'<title>Placer</title>'*) ;; *) fail "no page" ;; esac

code=$(curl -s -o /dev/null -w '%{http_code}' -H "$authorized" "$url/v1/cluster")
[ "$code" = "$([ "$target" = gpu ] && echo 200 || echo 501)" ] || fail "/v1/cluster answered $code"
say "/v1/cluster: $code"
if [ "$target" = gpu ]; then
    example /v1/profiles "one layer"
    profile=$(post "/v1/profiles?wait=60") || fail "no profile"
    case $profile in *'"forward_ms":'*) say "profile: measured" ;; *) fail "the profile is $profile" ;; esac
    $run exec "$container" python3 -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "devices", torch.cuda.device_count())'
fi

started=$(date +%s%N)
$run stop -t 10 "$container" >/dev/null
say "stopped after $((($(date +%s%N) - started) / 1000000)) ms"
code=$($run inspect --format '{{.State.ExitCode}}' "$container")
if $run logs "$container" 2>&1 | grep -qF "$key"; then fail "the key is in the log"; fi
[ "$code" = 0 ] || fail "it ended with exit code $code"
say "passed"
