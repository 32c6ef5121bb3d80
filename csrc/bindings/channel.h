// What the ops of batch norm share: where a tensor's channels are, checks, the arguments of their kernels.
//
// They are no functional pairs: between the statistics of a rank and the output lies a collective, so the whole is an
// autograd function in Python (apex/parallel/optimized_sync_batchnorm_kernel.py) over these.
#pragma once
#include "checks.h"

#include <ATen/ops/empty.h>

#include "host/reduce_bn.h"

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
  TORCH_CHECK_VALUE(bitmask->dim() == 1 && bitmask->sym_size(0) == bitmask_bytes(input), op, ": bitmask must hold ",
                    bitmask_bytes(input), " bytes, a bit for each element, not ", bitmask->sym_sizes());
}

inline void check_statistic(const char* op, const char* name, const OptionalTensor& tensor, const Channels& channels) {
  check_like(op, name, tensor, c10::SymDimVector{channels.count}, channels.math);
}
inline void check_statistics(const char* op, const at::Tensor& mean, const at::Tensor& inv_std, const Channels& found) {
  check_like(op, "mean", mean, c10::SymDimVector{found.count}, found.math);
  check_like(op, "inv_std", inv_std, c10::SymDimVector{found.count}, found.math);
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
}  // namespace apex
