#!/bin/sh
# A placement over HTTP, with curl alone: sh examples/http_curl.sh
# The service needs no torch; the profile was written by
#   placer profile placer.zoo.seqnet:SeqNet --input 128x1x8x8 --devices 2 --memory 6MiB -o examples/seqnet_profile.json
set -eu
cd "$(dirname "$0")"
port=${PORT:-8642}
url=http://127.0.0.1:$port
call() { curl --silent --show-error --fail --noproxy 127.0.0.1 "$@"; echo; }

${PLACER:-placer} serve --host 127.0.0.1 --port "$port" --database :memory: --log-level warning &
service=$!
trap 'kill $service 2> /dev/null || true' EXIT
until curl --silent --fail --noproxy 127.0.0.1 --output /dev/null "$url/readyz"; do
    kill -0 $service 2> /dev/null || { echo "the service did not start" >&2; exit 1; }
    sleep 0.2
done

echo "the question: where should the layers run, in batches of 8 micro-batches?"
printf '{"profile": %s, "objective": "throughput", "chunks": 8}' "$(cat seqnet_profile.json)" > "${TMPDIR:-/tmp}/request.$$"
answer=$(call --header 'Content-Type: application/json' --data-binary "@${TMPDIR:-/tmp}/request.$$" "$url/v1/placements?wait=30")
rm "${TMPDIR:-/tmp}/request.$$"
echo "$answer"

id=$(echo "$answer" | sed -n 's/.*"id": *"\([^"]*\)".*/\1/p' | head -n 1)
echo "the same placement again, by its id $id:"
call --output /dev/null --write-out '%{http_code} after %{time_total} s' "$url/v1/placements/$id"
echo "an invalid request is answered with problem+json:"
curl --silent --noproxy 127.0.0.1 --header 'Content-Type: application/json' --data '{"profile": {"layers": []}}' "$url/v1/placements"
echo
