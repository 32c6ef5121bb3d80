// What a call takes from the caller's apex_workspace.
#pragma once
#include "apex.h"

namespace apex {
// `bytes` of it, or null for 0.
int32_t take_workspace(const apex_workspace* workspace, int64_t bytes, uint8_t** memory);

// The same, and `count` counters, zero before the next launch on the place's stream, which must leave them zero: the
// library's own, or behind the rest of the workspace where it has none for this graph.
int32_t take_workspace(const apex_place& place, const apex_workspace* workspace, int64_t bytes, int64_t count,
                       uint8_t** memory, uint32_t** counters);
}  // namespace apex
