#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
#
# Builds docker/Dockerfile.cpu where there is no container engine, and has it serve:
#
#   tests/docker/cpu_image.sh [WORDS FOR buildah bud]
#
# Takes 20 GB of disk and half an hour; image.sh says what else. The last line says `ok`
# and what the model answered. PORT: where the server listens, by default on 8000.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "$0")/image.sh"
port=${PORT:-8000}

build docker/Dockerfile.cpu --tag vllm-hetero:cpu "$@" .
container=$(store from --pull-never vllm-hetero:cpu)
inspect() { store inspect --type image --format "{{$1}}" vllm-hetero:cpu; }
store images --format 'size {{.Size}}' vllm-hetero:cpu
mapfile -t entry < <(inspect 'range .Docker.Config.Entrypoint}}{{println .}}{{end' | grep .)
health=$(inspect 'index .Docker.Config.Healthcheck.Test 3')
echo "user $(inspect .Docker.Config.User), entry point ${entry[*]}"

cp -rL examples/demo-glm-dsa-ragged-exl3 "$scratch/demo"
# inside WORDS: runs them in the image, as its user.
in_it=(--user 1000:1000 --volume "$scratch/demo:/models/demo:ro" "$container" --)
inside() { store run "${in_it[@]}" "$@"; }
inside sh -c "test \$(id -u) = 1000 && ! command -v pip && ! command -v make"
healthy() { inside python -c "${health/:8000/:$port}" 2> /dev/null; }
if healthy; then
  echo "another server listens on port $port" >&2
  exit 1
fi

echo "== serve"
# shellcheck disable=SC2016
store run --env VLLM_CPU_KVCACHE_SPACE=1 --volume "$scratch/out:/out" "${in_it[@]}" \
  sh -c 'echo $$ > /out/server; exec "$@"' sh "${entry[@]}" \
  --model /models/demo --served-model-name demo --max-model-len 256 --port "$port" \
  > "$scratch/server.log" 2>&1 &
server=$!
SECONDS=0
until healthy; do
  if ! kill -0 "$server" 2> /dev/null || [ "$SECONDS" -gt 900 ]; then
    tail -n 40 "$scratch/server.log"
    echo "the server did not become healthy" >&2
    exit 1
  fi
  sleep 5
done
echo "healthy after $SECONDS s"
answer=$(inside python -c '
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

echo "== stop"
stop -TERM
SECONDS=0
wait "$server"
echo "ended by SIGTERM after $SECONDS s"
if healthy; then
  echo "healthy, though it was stopped" >&2
  exit 1
fi
echo "ok: $answer"
