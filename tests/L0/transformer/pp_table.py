"""What each rank of the whole table of splits runs."""

from __future__ import annotations

import pp_splits

CASES = pp_splits.WHOLE
