// What the ops of batch norm share: where a tensor's channels are, checks, the arguments of their kernels.
//
// They are no functional pairs: between the statistics of a rank and the output lies a collective, so the whole is an
// autograd function in Python (apex/parallel/optimized_sync_batchnorm_kernel.py) over these.
#pragma once
#include "checks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "host/reduce_bn.h"
#include "zeroed_counters.h"

namespace apex {
// The tensor's channels are its last dimension, or else the second one, whatever their order in memory.
struct Channels {
  c10::SymInt count;
  at::MemoryFormat format;  // of the input as kernels read it, and of outputs
  bool last_in_memory;
  at::ScalarType math;  // of statistics
};

inline Channels channels_of(const char* op, const at::Tensor& input, bool channel_last) {
  const int64_t dims = input.dim();
  TORCH_CHECK_VALUE(dims >= 2, op, ": the input has ", dims,
                    " dimensions; it must have at least 2, batch and channels");
  element_type(op, input.scalar_type());
  Channels found{input.sym_size(channel_last || dims == 2 ? dims - 1 : 1), at::MemoryFormat::Contiguous,
                 channel_last || dims == 2, math_type(input)};
  if (found.last_in_memory || input.is_contiguous()) return found;
  for (const auto& [wanted, format] :
       {std::pair{4, at::MemoryFormat::ChannelsLast}, std::pair{5, at::MemoryFormat::ChannelsLast3d}}) {
    if (dims != wanted || !input.is_contiguous(format)) continue;
    found.format = format;
    found.last_in_memory = true;
  }
  return found;
}

// As channels_of, but the channels shall be last in memory: NHWC, or torch.channels_last, into which others are
// brought.
inline Channels nhwc_channels_of(const char* op, const at::Tensor& input, bool channel_last) {
  Channels found = channels_of(op, input, channel_last);
  if (found.last_in_memory) return found;
  TORCH_CHECK_VALUE(input.dim() == 4, op, ": the input has ", input.dim(),
                    " dimensions; without channel_last it must have 4, [batch, channels, height, width]");
  found.format = at::MemoryFormat::ChannelsLast;
  found.last_in_memory = true;
  return found;
}
// Which outputs of a ReLU are positive, a bit each, in the order of an NHWC tensor's memory.
inline c10::SymInt bitmask_bytes(const at::Tensor& input) { return (input.sym_numel() + 7) / 8; }
inline void check_bitmask(const char* op, const OptionalTensor& bitmask, const at::Tensor& input) {
  if (!has_value(bitmask)) return;
  TORCH_CHECK_TYPE(bitmask->scalar_type() == at::kByte, op, ": bitmask must be uint8, not ", bitmask->scalar_type());
  TORCH_CHECK_VALUE(
      bitmask->dim() == 1 && bitmask->sym_size(0) == bitmask_bytes(input) && bitmask->device() == input.device(), op,
      ": bitmask must hold ", bitmask_bytes(input), " bytes on ", input.device(), ", a bit for each element, not ",
      bitmask->sym_sizes(), " on ", bitmask->device());
}

// The dispatcher passes None for a tensor that an op needs, too.
inline void check_given(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.defined(), op, ": ", name, " must be a tensor, not None");
}
inline void check_statistic(const char* op, const char* name, const OptionalTensor& tensor, const at::Tensor& input,
                            const Channels& channels) {
  if (!has_value(tensor)) return;
  check_per_channel(op, name, *tensor, input, channels.count);
  TORCH_CHECK_TYPE(tensor->scalar_type() == channels.math, op, ": ", name, " must be ", channels.math, ", not ",
                   tensor->scalar_type());
}
// Another tensor of the input's shape: a gradient, or what is added.
inline void check_like_input(const char* op, const char* name, const OptionalTensor& tensor, const at::Tensor& input) {
  if (!has_value(tensor)) return;
  TORCH_CHECK_VALUE(tensor->sym_sizes() == input.sym_sizes() && tensor->device() == input.device(), op, ": ", name,
                    " has shape ", tensor->sym_sizes(), " on ", tensor->device(), ", not the input's ",
                    input.sym_sizes(), " on ", input.device());
  TORCH_CHECK_TYPE(tensor->scalar_type() == input.scalar_type(), op, ": ", name, " has dtype ", tensor->scalar_type(),
                   ", not the input's ", input.scalar_type());
}
inline void check_gradient(const char* op, const at::Tensor& grad_output, const at::Tensor& input) {
  check_given(op, "grad_output", grad_output);
  check_like_input(op, "grad_output", grad_output, input);
}

inline at::Tensor in_format(const OptionalTensor& tensor, at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  return has_value(tensor) ? tensor->contiguous(format) : at::Tensor();
}
inline at::Tensor output_like(const at::Tensor& input, const Channels& channels) {
  return at::empty_symint(input.sym_sizes(), input.options().memory_format(channels.format));
}

// [batch][channels][spatial], or rows of channels.
template <class Arguments> void set_shape(const char* op, const at::Tensor& input, const Channels& channels,
                                          const OptionalTensor& weight, Arguments* a) {
  const int64_t count = channels.count.guard_int(__FILE__, __LINE__), elements = input.numel();
  a->channels = count;
  a->batch = input.size(0);
  a->spatial = a->batch == 0 || count == 0 ? 0 : elements / (a->batch * count);
  // One element a channel and image: the same memory either way.
  a->channels_last = channels.last_in_memory || a->spatial == 1;
  if (a->channels_last) {
    a->batch = count == 0 ? 0 : elements / count;
    a->spatial = 1;
  }
  a->input_type = element_type(op, input.scalar_type());
  a->weight_type = has_value(weight) ? element_type(op, weight->scalar_type()) : a->input_type;
}

// A reduction: its partial sums and counters, and the launch. False: the reference must run.
inline bool reduce_over_channels(const char* op, const apex_place& place, const at::Tensor& input,
                                 const Channels& channels, gpu::ChannelReduce* a,
                                 decltype(&apex_reduce_bn_prepare) prepare, decltype(&apex_reduce_bn) run) {
  int64_t count = 0;
  int32_t variant;
  if (use_reference(prepare(&place, a, &count, &variant), op)) return false;
  at::Tensor partials;
  ZeroedCounters counters;
  if (a->parts > 1 || variant == APEX_VARIANT_CPU) {  // which merges a single part too
    partials = at::empty({a->parts, 3, a->channels},
                         input.options().dtype(channels.math).memory_format(at::MemoryFormat::Contiguous));
    a->partials = mutable_bytes(partials);
  }
  if (count > 0) {
    counters = ZeroedCounters(place, input.device(), count);
    a->counters = counters.data();
  }
  return !use_reference(run(&place, a, variant), op);
}
}  // namespace apex
