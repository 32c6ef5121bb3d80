#!/usr/bin/env bash
# Prints the mirror of Debian's archive that this machine's apt uses, else the public one.
set -euo pipefail

# No .list or no .sources files is normal.
mirror=$(sed -n -E 's/^(URIs: |deb (\[[^]]*\] )?)(https?:[^ ]*\/debian)\/?( .*)?$/\3/p' \
  /etc/apt/sources.list /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list 2>/dev/null |
  head -n 1 || true)
echo "${mirror:-http://deb.debian.org/debian}"
