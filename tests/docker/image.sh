#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
#
# Builds images where there is no container engine, for the scripts that source this.
# Needs root, buildah and debootstrap. The base image is made of Debian's packages and
# gets the name that the Dockerfile asks for. buildah runs every step in a chroot.
#
# SCRATCH: where to build, a new folder; it is removed at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
scratch=${SCRATCH:-$(mktemp -d /var/tmp/image.XXXXXX)}
export BUILDAH_ISOLATION=chroot TMPDIR=$scratch/tmp
mkdir -p "$TMPDIR"
# What the image's user may write to.
install --directory --owner=1000 "$scratch/out"
store() { buildah --root "$scratch/store" --runroot "$scratch/run" "$@"; }

# In a chroot a server outlives the buildah that started it, so it says who it is.
stop() { test ! -s "$scratch/out/server" || kill "$1" "$(cat "$scratch/out/server")"; }
finish() {
  stop -KILL 2> /dev/null || true
  wait
  store rm --all > /dev/null 2>&1 || true
  umount "$scratch/store/overlay" 2> /dev/null || true
  rm -rf "$scratch"
}
trap finish EXIT

# build DOCKERFILE WORDS: `buildah bud` of a Dockerfile, after its base image is made.
build() {
  local base suite container
  base=$(sed -n 's/^FROM \(debian:[^ ]*\) AS .*/\1/p' "$1")
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
  store bud --pull-never --format docker --file "$@"
}
