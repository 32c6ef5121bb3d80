#!/bin/sh
# Runs while an image is baked: PYTHON, TORCH (torch==2.13.0+cpu, or nothing), TORCH_INDEX, APEX (apex-cpu==1.10.0+cpu)
# and ROOT (cpu) are the arguments of Containerfile.
set -eu

# shellcheck disable=SC1091
. /run/secrets/pip
if [ -s /run/secrets/ca ]; then PIP_CERT=/run/secrets/ca; export PIP_CERT; fi
export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Compiled Python is then checked by content, not by the time of its source, which an image need not keep.
export SOURCE_DATE_EPOCH=315532800

if [ -n "$TORCH" ]; then
  "$PYTHON" -m pip install --quiet ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$TORCH"
fi
# The project's index is all that this sees: apex asks for torch alone, which is there.
unset PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CONSTRAINT PIP_NO_INDEX
PIP_CONFIG_FILE=/dev/null "$PYTHON" -m pip install --quiet --index-url "file:///run/bake/index/whl/$ROOT/" "$APEX"
