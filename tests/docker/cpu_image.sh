#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
#
# Builds docker/Dockerfile.cpu where there is no container engine, and has it serve:
#
#   tests/docker/cpu_image.sh [WORDS FOR buildah bud]
#
# Needs root, buildah and debootstrap, 20 GB of disk and half an hour. The base image is
# made of Debian's packages and gets the name that the Dockerfile asks for. buildah runs
# every step in a chroot. The last line says `ok` and what the model answered.
#
# SCRATCH: where to build; it is removed at the end. PORT: where the server listens, if
# not on 8000, of which the health check asks.
set -euo pipefail
cd "$(dirname "$0")/../.."
scratch=${SCRATCH:-$(mktemp -d /var/tmp/cpu-image.XXXXXX)}
port=${PORT:-8000}
export BUILDAH_ISOLATION=chroot TMPDIR=$scratch/tmp
mkdir -p "$TMPDIR" "$scratch/models"
install --directory --owner=1000 "$scratch/pid"
store() { buildah --root "$scratch/store" --runroot "$scratch/run" "$@"; }

server=
finish() {
  # The server itself: in a chroot it outlives the buildah that started it.
  if [ -s "$scratch/pid/server" ]; then
    kill "$(cat "$scratch/pid/server")" 2> /dev/null || true
    wait "$server" || true
  fi
  store rm --all > /dev/null 2>&1 || true
  umount "$scratch/store/overlay" 2> /dev/null || true
  rm -rf "$scratch"
}
trap finish EXIT

base=$(sed -n 's/^FROM \(debian:[^ ]*\) AS .*/\1/p' docker/Dockerfile.cpu)
suite=${base#debian:}
echo "== base: $base, by debootstrap"
test -d "$scratch/base" || debootstrap --variant=minbase "${suite%%-*}" "$scratch/base"
container=$(store from scratch)
store copy --quiet "$container" "$scratch/base" /
store commit --quiet "$container" "docker.io/library/$base"
store rm "$container" > /dev/null
rm -rf "$scratch/base"

echo "== build"
# --format docker: the other format has no health check.
store bud --pull-never --format docker --file docker/Dockerfile.cpu --tag vllm-hetero:cpu \
  "$@" .
inspect() { store inspect --type image --format "{{$1}}" vllm-hetero:cpu; }
echo "user $(inspect .Docker.Config.User), entry $(inspect .Docker.Config.Entrypoint)"

echo "== serve"
cp -rL examples/demo-glm-dsa-ragged-exl3 "$scratch/models/demo"
container=$(store from --pull-never vllm-hetero:cpu)
inside() { store run --user 1000:1000 --volume "$scratch/models:/models:ro" "$@"; }
inside "$container" -- sh -c 'id -u; ! command -v pip; ! command -v nvcc'
mapfile -t entry < <(inspect 'range .Docker.Config.Entrypoint}}{{println .}}{{end' | grep .)
# shellcheck disable=SC2016
inside --env VLLM_CPU_KVCACHE_SPACE=1 --volume "$scratch/pid:/pid" "$container" -- \
  sh -c 'echo $$ > /pid/server; exec "$@"' sh "${entry[@]}" \
  --model /models/demo --served-model-name demo --max-model-len 256 --port "$port" \
  > "$scratch/server.log" 2>&1 &
server=$!
health=$(inspect 'index .Docker.Config.Healthcheck.Test 3')
for _ in $(seq 120); do
  if inside "$container" -- python -c "${health/:8000/:$port}" 2> /dev/null; then
    healthy=1
    break
  fi
  kill -0 "$server" 2> /dev/null || break
  sleep 5
done
if [ -z "${healthy:-}" ]; then
  tail -n 40 "$scratch/server.log"
  echo "the server did not become healthy" >&2
  exit 1
fi
answer=$(inside "$container" -- python -c '
import json, sys, urllib.request
body = {"model": "demo", "prompt": "The ", "max_tokens": 8, "temperature": 0}
request = urllib.request.Request(
    f"http://127.0.0.1:{sys.argv[1]}/v1/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json"},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["text"])
' "$port")
test -n "$answer"
grep -m1 "vLLM server version\|version 0" "$scratch/server.log" || true
echo "ok: $answer"
