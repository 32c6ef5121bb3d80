// libapex_torch.so: every op's schema and kernels, in one translation unit (torch's headers cost seconds each
// time they are read, an op next to nothing). The build generates both included files from the registry and
// csrc/ops.schemas.
#define APEX_TORCH_LIBRARY_UNIT 1
#include <torch/library.h>

TORCH_LIBRARY(apex, m) {
#define APEX_SCHEMA(text) m.def(text, {at::Tag::pt2_compliant_tag});
#include "ops_schemas.inc"
#undef APEX_SCHEMA
}

#include "ops.inc"
