"""What each rank runs of more ranks than the whole table has."""

from __future__ import annotations

import pp_splits

CASES = pp_splits.CASES
