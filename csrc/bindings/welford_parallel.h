#pragma once
#include "channel.h"
#include "host/welford_parallel.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
namespace apex {
inline void check_welford_parallel(const at::Tensor& mean, const at::Tensor& var_biased, const at::Tensor& numel,
                                   const OptionalTensor& running_mean, const OptionalTensor& running_var,
                                   const OptionalTensor& num_batches_tracked) {
  const char* op = "welford_parallel";
  const at::ScalarType type = mean.scalar_type();
  TORCH_CHECK_VALUE(mean.dim() == 2 && var_biased.sym_sizes() == mean.sym_sizes(), op,
                    ": mean and var_biased must both be [ranks, channels], not ", mean.sym_sizes(), " and ",
                    var_biased.sym_sizes());
  TORCH_CHECK_VALUE(numel.dim() == 1 && numel.sym_size(0) == mean.sym_size(0), op,
                    ": numel must hold one count for each of ", mean.sym_size(0), " ranks; its shape is ",
                    numel.sym_sizes());
  TORCH_CHECK_TYPE((type == at::kFloat || type == at::kDouble) && var_biased.scalar_type() == type, op,
                   ": mean and var_biased must both be float32 or both float64, not ", type, " and ",
                   var_biased.scalar_type());
  TORCH_CHECK_TYPE(numel.scalar_type() == at::kInt || numel.scalar_type() == type, op, ": numel must be int32 or ",
                   type, ", not ", numel.scalar_type());
  TORCH_CHECK_VALUE(var_biased.device() == mean.device() && numel.device() == mean.device(), op,
                    ": all arguments must be on one device");
  TORCH_CHECK_VALUE(has_value(running_mean) == has_value(running_var), op,
                    ": running_mean and running_var come together, or not at all");
  if (!has_value(running_mean)) return;
  for (const OptionalTensor* r : {&running_mean, &running_var}) {
    check_per_channel(op, r == &running_mean ? "running_mean" : "running_var", **r, mean, mean.sym_size(1));
    element_type(op, (*r)->scalar_type());
    TORCH_CHECK_TYPE((*r)->scalar_type() == running_mean->scalar_type() &&
                         ((*r)->scalar_type() == at::kDouble) == (type == at::kDouble),
                     op, ": running statistics must have one dtype, and be float64 beside float64 alone, not ",
                     (*r)->scalar_type());
  }
  if (has_value(num_batches_tracked)) {
    TORCH_CHECK_TYPE(num_batches_tracked->scalar_type() == at::kLong, op, ": num_batches_tracked must be int64, not ",
                     num_batches_tracked->scalar_type());
    TORCH_CHECK_VALUE(num_batches_tracked->device() == mean.device() && num_batches_tracked->sym_numel() == 1, op,
                      ": num_batches_tracked must be one number on ", mean.device());
  }
}

using MergedStatistics = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
inline MergedStatistics merged_statistics(const at::Tensor& mean) {
  const auto options = mean.options().memory_format(at::MemoryFormat::Contiguous);
  const auto per_channel = [&] { return at::empty_symint({mean.sym_size(1)}, options); };
  return {per_channel(), per_channel(), per_channel(), at::empty({1}, options)};
}

inline MergedStatistics welford_parallel(const at::Tensor& mean, const at::Tensor& var_biased, const at::Tensor& numel,
                                         double eps, const OptionalTensor& running_mean,
                                         const OptionalTensor& running_var, double momentum,
                                         const OptionalTensor& num_batches_tracked) {
  check_welford_parallel(mean, var_biased, numel, running_mean, running_var, num_batches_tracked);
  const apex_place place = place_of(mean.device());
  const bool running = has_value(running_mean);
  if (running) {
    refuse_overlap(*running_mean, "welford_parallel: running_mean");
    refuse_overlap(*running_var, "welford_parallel: running_var");
  }
  // Kernels write running statistics where they are.
  const bool dense = !running || (running_mean->is_contiguous() && running_var->is_contiguous());
  if (place.platform >= 0 && dense) {
    const auto rows = [](const at::Tensor& t) { return t.size(1) <= 1 || t.stride(1) == 1 ? t : t.contiguous(); };
    const at::Tensor m = rows(mean), v = rows(var_biased);
    const MergedStatistics made = merged_statistics(mean);
    gpu::WelfordParallel a{};
    a.mean = const_bytes(m);
    a.var = const_bytes(v);
    a.count = const_bytes(numel);
    a.out_mean = bytes_to_write(std::get<0>(made));
    a.out_var = bytes_to_write(std::get<1>(made));
    a.out_inv_std = bytes_to_write(std::get<2>(made));
    a.out_count = bytes_to_write(std::get<3>(made));
    if (running) {
      a.running_mean = bytes_to_write(*running_mean);
      a.running_var = bytes_to_write(*running_var);
      a.running_type = element_type("welford_parallel", running_mean->scalar_type());
      if (has_value(num_batches_tracked))
        a.batches = reinterpret_cast<const gpu::i64*>(num_batches_tracked->const_data_ptr());
    }
    a.ranks = m.size(0);
    a.channels = m.size(1);
    a.mean_stride = m.stride(0);
    a.var_stride = v.stride(0);
    a.count_stride = numel.stride(0);
    a.eps = eps;
    a.momentum = momentum;
    a.input_type = element_type("welford_parallel", mean.scalar_type());
    a.count_is_int = numel.scalar_type() == at::kInt;
    if (!use_reference(apex_welford_parallel(&place, &a), "welford_parallel")) {
      if (running)
        for (const at::Tensor& r : {*running_mean, *running_var}) r.unsafeGetTensorImpl()->bump_version();
      return made;
    }
  }
  return call_reference<decltype(welford_parallel)>("welford_parallel", mean, var_biased, numel, eps, running_mean,
                                                    running_var, momentum, num_batches_tracked);
}
inline MergedStatistics welford_parallel_meta(const at::Tensor& mean, const at::Tensor& var_biased,
                                              const at::Tensor& numel, double, const OptionalTensor& running_mean,
                                              const OptionalTensor& running_var, double,
                                              const OptionalTensor& num_batches_tracked) {
  check_welford_parallel(mean, var_biased, numel, running_mean, running_var, num_batches_tracked);
  return merged_statistics(mean);
}
}  // namespace apex

APEX_CHANNEL_OP(welford_parallel)
APEX_RESOLVES_BITS(welford_parallel)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(welford_parallel, m) {
  using Optional = std::optional<at::Tensor>;
  m.def(
      "welford_parallel",
      [](const at::Tensor& mean, const at::Tensor& var_biased, const at::Tensor& numel, double eps,
         const Optional& running_mean, const Optional& running_var, double momentum,
         const Optional& num_batches_tracked) {
        static const auto op = apex::dispatcher_op<std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
            const at::Tensor&, const at::Tensor&, const at::Tensor&, double, const Optional&, const Optional&, double,
            const Optional&)>("apex::welford_parallel");
        return op.call(mean, var_biased, numel, eps, running_mean, running_var, momentum, num_batches_tracked);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
