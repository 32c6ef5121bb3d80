#pragma once
#include "channel.h"
#include "generated/welford_parallel.h"

namespace apex {
inline void WelfordParallel::check() const {
  constexpr const char* op = name;
  const at::ScalarType type = mean.scalar_type();
  TORCH_CHECK_VALUE(mean.dim() == 2, op, ": mean must be [ranks, channels], not ", mean.sym_sizes());
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble, op, ": mean must be float32 or float64, not ", type);
  check_like(op, "var_biased", var_biased, mean.sym_sizes(), type, "the mean's ");
  check_like(op, "numel", numel, c10::SymDimVector{mean.sym_size(0)}, std::nullopt, "one for each rank, ");
  TORCH_CHECK_TYPE(numel.scalar_type() == at::kInt || numel.scalar_type() == type, op, ": numel must be int32 or ",
                   type, ", not ", numel.scalar_type());
  TORCH_CHECK_VALUE(has_value(running_mean) == has_value(running_var), op,
                    ": running_mean and running_var come together, or not at all");
  if (!has_value(running_mean)) return;
  for (const OptionalTensor* r : {&running_mean, &running_var}) {
    const char* what = r == &running_mean ? "running_mean" : "running_var";
    check_like(op, what, *r, c10::SymDimVector{mean.sym_size(1)}, std::nullopt);
    element_type(op, (*r)->scalar_type());
    TORCH_CHECK_TYPE((*r)->scalar_type() == running_mean->scalar_type() &&
                         ((*r)->scalar_type() == at::kDouble) == (type == at::kDouble),
                     op, ": running statistics must have one dtype, and be float64 beside float64 alone, not ",
                     (*r)->scalar_type());
    // Strides of a meta tensor may be symbols.
    if (!(*r)->is_meta()) refuse_overlap(**r, std::string("welford_parallel: ") + what);
  }
  if (has_value(num_batches_tracked)) {
    TORCH_CHECK_TYPE(num_batches_tracked->scalar_type() == at::kLong, op, ": num_batches_tracked must be int64, not ",
                     num_batches_tracked->scalar_type());
    TORCH_CHECK_VALUE(num_batches_tracked->sym_numel() == 1, op, ": num_batches_tracked must be one number");
  }
}
inline WelfordParallel::Result WelfordParallel::outputs() const {
  const auto options = mean.options().memory_format(at::MemoryFormat::Contiguous);
  const auto per_channel = [&] { return at::empty_symint({mean.sym_size(1)}, options); };
  return {per_channel(), per_channel(), per_channel(), at::empty({1}, options)};
}
inline bool WelfordParallel::launch(const apex_place& place, Result& made) const {
  const bool running = has_value(running_mean);
  // Kernels write running statistics where they are.
  if (running && !(running_mean->is_contiguous() && running_var->is_contiguous())) return false;
  const auto rows = [](const at::Tensor& t) { return t.size(1) <= 1 || t.stride(1) == 1 ? t : t.contiguous(); };
  const at::Tensor m = rows(mean), v = rows(var_biased);
  made = outputs();
  gpu::WelfordParallel a{};
  const auto& [out_mean, out_var, out_inv_std, out_count] = made;
  a.mean = bytes(m), a.var = bytes(v), a.count = bytes(numel);
  a.out_mean = mutable_bytes(out_mean), a.out_var = mutable_bytes(out_var);
  a.out_inv_std = mutable_bytes(out_inv_std), a.out_count = mutable_bytes(out_count);
  if (running) {
    a.running_mean = mutable_bytes(*running_mean);
    a.running_var = mutable_bytes(*running_var);
    a.running_type = element_type("welford_parallel", running_mean->scalar_type());
    if (has_value(num_batches_tracked))
      a.batches = reinterpret_cast<const gpu::i64*>(num_batches_tracked->const_data_ptr());
  }
  a.ranks = m.size(0), a.channels = m.size(1);
  a.mean_stride = m.stride(0), a.var_stride = v.stride(0), a.count_stride = numel.stride(0);
  a.eps = eps, a.momentum = momentum;
  a.input_type = element_type("welford_parallel", mean.scalar_type());
  a.count_is_int = numel.scalar_type() == at::kInt;
  if (use_reference(apex_welford_parallel(&place, &a), name)) return false;
  if (running)
    for (const at::Tensor& r : {*running_mean, *running_var}) r.unsafeGetTensorImpl()->bump_version();
  return true;
}
}  // namespace apex
