#!/usr/bin/env bash
# Makes a Debian chroot that holds the ROCm device compiler (clang + hipcc) of Debian's archive.
#
# usage: ci/provision_rocm_toolchain.sh [DIRECTORY]      (root; default: .toolchains/rocm)
#
# Needs debootstrap, which apt-get installs where it is missing. Uses the mirror that this machine's apt uses. The
# chroot appears under its final name only when it is complete, so a killed run is never taken for a toolchain.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${1:-$here/.toolchains/rocm}
packages="hipcc libamdhip64-dev rocm-device-libs-22 lld-22 llvm-22"

if [ -x "$target/usr/bin/hipcc" ]; then
  echo "already provisioned: $target"
  exit 0
fi
if [ "$(id -u)" != 0 ]; then
  echo "provision_rocm_toolchain: debootstrap needs root; run it with sudo" >&2
  exit 1
fi
if ! command -v debootstrap >/dev/null && command -v apt-get >/dev/null; then
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends debootstrap
fi
if ! command -v debootstrap >/dev/null; then
  echo "provision_rocm_toolchain: debootstrap is missing; run: apt-get install debootstrap" >&2
  exit 1
fi

mirror=$(bash "$here/ci/debian_mirror.sh")

mkdir -p "$(dirname "$target")"
build=$(mktemp -d "$(dirname "$target")/.rocm-partial.XXXXXX")
trap 'rm -rf "$build"' EXIT
debootstrap --variant=minbase sid "$build" "$mirror"
cp -r /etc/apt/apt.conf.d/. "$build/etc/apt/apt.conf.d/"
echo "deb $mirror experimental main" > "$build/etc/apt/sources.list.d/experimental.list"
chroot "$build" apt-get update -qq
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive chroot "$build" \
  apt-get install -qq -y --no-install-recommends -t experimental $packages
chroot "$build" apt-get clean
chmod 755 "$build"
mv "$build" "$target"
trap - EXIT
echo "provisioned: $target"
