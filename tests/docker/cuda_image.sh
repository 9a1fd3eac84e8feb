#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
#
# Executes docker/Dockerfile where there is no container engine, and in what it makes
# runs what needs no GPU, which is in without_gpu.py:
#
#   tests/docker/cuda_image.sh [WORDS FOR buildah bud]
#
# Takes 20 GB of disk and an hour; image.sh says what else. The last line says `ok`.
# WHEEL: a wheel for CUDA to use instead of compiling one, which saves half of it.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "$0")/image.sh"

dockerfile=$scratch/Dockerfile context=.
cp docker/Dockerfile "$dockerfile"
if [ -n "${WHEEL:-}" ]; then
  context=$scratch/context
  mkdir -p "$context/tools"
  cp -r tools/__init__.py tools/fork "$context/tools"
  cp "$WHEEL" "$context"
  sed -i '/^# nvcc/,/pip wheel/ c\
COPY tools tools\
COPY *.whl /dist/' "$dockerfile"
fi
# An image is written four times over on its way into the store, and this one has 9 GB.
# So what is checked is the step that it would be made of, and the build ends there.
echo 'RUN python /repo/tests/docker/without_gpu.py && touch /out/ok && false' \
  >> "$dockerfile"
build "$dockerfile" --volume "$PWD:/repo:ro" --volume "$scratch/out:/out" "$@" \
  "$context" || true
test -e "$scratch/out/ok"
echo ok
