#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
#
# Builds docker/Dockerfile where there is no container engine, and runs what needs no GPU:
#
#   tests/docker/cuda_image.sh [WORDS FOR buildah bud]
#
# Takes 40 GB of disk and an hour; image.sh says what else. The last line says `ok`.
# WHEEL: a wheel for CUDA to use instead of compiling one, which saves half of it.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "$0")/image.sh"

dockerfile=docker/Dockerfile context=.
if [ -n "${WHEEL:-}" ]; then
  context=$scratch/context
  mkdir -p "$context/tools"
  cp -r tools/__init__.py tools/fork "$context/tools"
  cp "$WHEEL" "$context"
  dockerfile=$scratch/Dockerfile
  sed '/^# nvcc/,/pip wheel/ c\
COPY tools tools\
COPY *.whl /dist/' docker/Dockerfile > "$dockerfile"
fi
build vllm-hetero:cuda "$dockerfile" "$context" "$@"

echo "== what is in it"
inside sh -c "test \$(id -u) = 1000 && touch ~/mine"
absent pip make nvcc
# What the driver brings is not there, and is not asked for before there is a GPU.
inside python -c '
import pathlib, re, subprocess
missing = {}
for library in pathlib.Path("/opt/vllm").rglob("*.so*"):
    said = subprocess.run(["ldd", library], capture_output=True, text=True).stdout
    for name in re.findall(r"(\S+) => not found", said):
        missing.setdefault(name, []).append(library.name)
for name, by in sorted(missing.items()):
    print(f"not in the image: {name}, for {len(by)}: {by[:3]}")
'

echo "== imports"
inside python -c '
import torch, vllm, exl3.ops
print(f"vllm {vllm.__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}")
'

echo "== commands"
for words in "${entry[*]} --help" "vllm exl3 --help" "exl3 --help" "hf --help" "ray --version"; do
  # shellcheck disable=SC2086
  inside $words > "$scratch/said" || { cat "$scratch/said" >&2; exit 1; }
  echo "$words: $(wc -l < "$scratch/said") lines"
done
inside exl3 inspect /models/demo

echo "== without a GPU"
if inside "${entry[@]}" --model /models/demo > "$scratch/said" 2>&1; then
  echo "it serves, without a GPU" >&2
  exit 1
fi
tail -n 5 "$scratch/said"
if inside python -c "$health" 2> "$scratch/said"; then
  echo "healthy, without a server" >&2
  exit 1
fi
tail -n 1 "$scratch/said"
echo ok
