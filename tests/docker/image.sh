#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
#
# Builds an image where there is no container engine, for the scripts that source this.
# Needs root, buildah and debootstrap. The base image is made of Debian's packages and
# gets the name that the Dockerfile asks for. buildah runs every step in a chroot.
#
# SCRATCH: where to build, a new folder; it is removed at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
scratch=${SCRATCH:-$(mktemp -d /var/tmp/image.XXXXXX)}
export BUILDAH_ISOLATION=chroot TMPDIR=$scratch/tmp
mkdir -p "$TMPDIR" "$scratch/models"
cp -rL examples/demo-glm-dsa-ragged-exl3 "$scratch/models/demo"
install --directory --owner=1000 "$scratch/pid"
store() { buildah --root "$scratch/store" --runroot "$scratch/run" "$@"; }

# In a chroot the server outlives the buildah that started it, so it says who it is.
stop() { test ! -s "$scratch/pid/server" || kill "$1" "$(cat "$scratch/pid/server")"; }
finish() {
  stop -KILL 2> /dev/null || true
  wait
  store rm --all > /dev/null 2>&1 || true
  umount "$scratch/store/overlay" 2> /dev/null || true
  rm -rf "$scratch"
}
trap finish EXIT

# build TAG DOCKERFILE CONTEXT [WORDS FOR buildah bud]
build() {
  tag=$1 dockerfile=$2 context=$3
  local base suite container
  base=$(sed -n 's/^FROM \(debian:[^ ]*\) AS .*/\1/p' "$dockerfile")
  suite=${base#debian:}
  echo "== base: $base, by debootstrap"
  debootstrap --variant=minbase "${suite%%-*}" "$scratch/base" > "$scratch/base.log"
  container=$(store from scratch)
  store copy --quiet "$container" "$scratch/base" / > /dev/null
  store commit --quiet "$container" "docker.io/library/$base" > /dev/null
  store rm "$container" > /dev/null
  rm -rf "$scratch/base"

  echo "== build"
  # --format docker: the other format has no health check.
  store bud --pull-never --format docker --file "$dockerfile" --tag "$tag" "${@:4}" \
    "$context"
  container=$(store from --pull-never "$tag")
  in_it=(--user 1000:1000 --volume "$scratch/models:/models:ro" "$container" --)
  mapfile -t entry < <(inspect 'range .Docker.Config.Entrypoint}}{{println .}}{{end' \
    | grep .)
  # shellcheck disable=SC2034 # for those that source this
  health=$(inspect 'index .Docker.Config.Healthcheck.Test 3')
  store images --format 'size {{.Size}}' "$tag"
  echo "user $(inspect .Docker.Config.User), entry point ${entry[*]}"
  inside du -sh /opt/vllm
}
inspect() { store inspect --type image --format "{{$1}}" "$tag"; }
# inside WORDS: runs them in the image, as its user.
inside() { store run "${in_it[@]}" "$@"; }
# absent PROGRAMS: fails if the image has one on its path.
absent() {
  local program
  for program in "$@"; do
    if inside sh -c "command -v $program"; then
      echo "the image has $program on its path" >&2
      return 1
    fi
  done
}
