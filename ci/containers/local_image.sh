#!/usr/bin/env bash
# Makes an image that cibuildwheel can build in, where no image registry can be reached: a Debian root file system
# with its compiler, and its Python at the place where a manylinux image has it.
#
# usage: ci/containers/local_image.sh [--name NAME] [--suite SUITE] [--mirror URL] [--engine podman|docker]
#                                     [--root-file-system FILE.tar]
#
# Default: localhost/apex-manylinux of bookworm from the mirror that this machine's apt uses, by mmdebstrap or
# debootstrap (root). FILE.tar is a root file system that is made already (a tarred chroot); it must hold python3 with
# venv and headers, and g++.
set -euo pipefail

say() { echo "local_image: $*" >&2; }
name=localhost/apex-manylinux suite=bookworm mirror="" engine="" archive=""
while [ $# -gt 0 ]; do
  case $1 in
    --name) name=$2 ;;
    --suite) suite=$2 ;;
    --mirror) mirror=$2 ;;
    --engine) engine=$2 ;;
    --root-file-system) archive=$2 ;;
    *) say "what is $1?"; sed -n '5,6s/^# //p' "$0" >&2; exit 2 ;;
  esac
  shift 2
done
if [ -z "$engine" ]; then
  engine=$(command -v podman || command -v docker) || {
    say "no engine is here; run: apt-get install podman runc"
    exit 3
  }
fi

work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
# /opt/python/cp311-cp311 is what cibuildwheel builds with, cp39-cp39 what it runs its own few lines with, whichever
# Python that is.
cat >"$work/finish" <<'END'
tag=$(python3 -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
mkdir -p /opt/python
python3 -m venv "/opt/python/$tag-$tag"
[ -e /opt/python/cp39-cp39 ] || ln -s "$tag-$tag" /opt/python/cp39-cp39
END
finish="chroot \"\$1\" /bin/sh -eu < \"$work/finish\""
packages=python3,python3-dev,python3-venv,g++,ca-certificates

[ "$(id -u)" = 0 ] || { say "making a root file system needs root; run it with sudo"; exit 1; }
mirror=${mirror:-$(bash "$(dirname "${BASH_SOURCE[0]}")/../debian_mirror.sh")}
if [ -n "$archive" ]; then
  mkdir "$work/root"
  tar -C "$work/root" -xf "$archive"
elif command -v mmdebstrap >/dev/null; then
  mmdebstrap --quiet --variant=minbase --include="$packages" --customize-hook="$finish" \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' "$suite" "$work/image.tar" "$mirror"
elif command -v debootstrap >/dev/null; then
  debootstrap --variant=minbase --include="$packages" "$suite" "$work/root" "$mirror" >&2
else
  say "mmdebstrap and debootstrap are missing; run: apt-get install mmdebstrap"
  exit 3
fi
if [ -d "$work/root" ]; then
  sh -c "$finish" - "$work/root"
  tar -C "$work/root" -cf "$work/image.tar" --exclude='./dev/*' --exclude='./var/cache/apt/archives/*.deb' .
fi
"$engine" import --change 'CMD ["/bin/bash"]' --change 'ENV LC_ALL=C.UTF-8' "$work/image.tar" "$name" >/dev/null
say "$name is ready: say --image $name, or CIBW_MANYLINUX_X86_64_IMAGE=$name"
