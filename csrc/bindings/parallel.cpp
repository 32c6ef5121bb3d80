// CPU variants run on torch's own threads.
//
// at::parallel_for is a template that is parallel only where it is compiled with OpenMP, which the bindings must not
// be: its runtime would be a second one beside torch's. TensorIterator's loop is compiled in torch, so it runs on the
// threads that torch's own operators use, whatever they are, and keeps their rules: at::get_num_threads(), no threads
// within a parallel region, what a thread throws is thrown again by the caller.
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>

#include "api.h"
#include "host/apex.h"

extern "C" APEX_TORCH_API void apex_torch_parallel_for(int64_t begin, int64_t end, int64_t grain, apex_range_body body,
                                                       void* context) {
  if (begin >= end) return;
  if (end - begin <= grain || at::get_num_threads() == 1 || at::in_parallel_region()) return body(context, begin, end);
  // Element i, a byte, stands for begin + i; its address is taken, and never read.
  static char first = 0;
  const at::Tensor range = at::from_blob(&first, {end - begin}, at::TensorOptions().dtype(at::kByte));
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false).check_all_same_dtype(false).resize_outputs(false).add_output(range);
  const auto piece = [&](char** data, const int64_t*, int64_t count, int64_t) {
    const int64_t at = begin + (data[0] - &first);
    body(context, at, at + count);
  };
  config.build().for_each(at::TensorIteratorBase::loop2d_t(piece), grain);
}

namespace apex {
namespace {
[[maybe_unused]] const bool threads_are_lent = (apex_set_parallel_for(&apex_torch_parallel_for), true);
}  // namespace
}  // namespace apex
