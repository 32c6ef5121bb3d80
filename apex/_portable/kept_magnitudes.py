"""kept_magnitudes: csrc/bindings/kept_magnitudes.h in Python."""

from __future__ import annotations

from apex._portable import interface, tensors
from apex._portable.functional import kernel
from apex.reference import kept_magnitudes as reference

_OP = "kept_magnitudes"
_pack = interface.layout("KeptMagnitudes").packer(
    "columns", "groups", "sums", "count", "rows", "groups_count"
)
_c_run = interface.function("apex_kept_magnitudes")


@kernel
def kept_magnitudes(columns, groups):
    reference.check(columns, groups, tensors.dtype_name)
    place = tensors.place_of(columns)
    if place is None:
        return None
    x, g = columns.contiguous(), groups.contiguous()
    made = x.new_empty((g.shape[0], len(reference.FOURS)))
    packed = _pack(x.data_ptr(), g.data_ptr(), made.data_ptr(), x.shape[0], x.shape[1], g.shape[0])
    status = _c_run(place, packed)
    return None if status and tensors.must_use_reference(status, _OP) else made
