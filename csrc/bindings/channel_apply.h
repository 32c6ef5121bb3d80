// One pass over a tensor with one factor and one shift a channel: batchnorm_forward, batchnorm_backward, relu_bw,
// groupbn_forward and groupbn_backward, which differ in the arguments that they have
// (generated/shared_channel_apply.h).
#pragma once
#include "channel.h"
#include "generated/shared_channel_apply.h"
#include "host/batchnorm.h"
#include "host/groupbn.h"
#include "host/relu_bw.h"

namespace apex {
namespace channel_apply {
inline bool has_gradient(const Arguments& p) { return !p.is_forward; }
inline bool is_groupbn(const Arguments& p) { return std::string_view(p.unit) == "groupbn"; }
inline Channels channels_of(const Arguments& p) {
  return (is_groupbn(p) ? &nhwc_channels_of : &apex::channels_of)(p.name, p.input, p.channel_last);
}
constexpr auto kernels_of(std::string_view name) {
  if (name == "batchnorm_forward") return &apex_batchnorm_forward;
  if (name == "batchnorm_backward") return &apex_batchnorm_backward;
  if (name == "groupbn_forward") return &apex_groupbn_forward;
  if (name == "groupbn_backward") return &apex_groupbn_backward;
  return &apex_relu_bw;
}

inline void check(const Arguments& p) {
  const char* op = p.name;
  const at::Tensor& input = p.input;
  const OptionalTensor &sum_dy = p.sum_dy, &sum_dy_xmu = p.sum_dy_xmu, &count = p.count;
  const Channels channels = channels_of(p);
  check_statistics(op, p.mean, p.inv_std, channels);
  check_like(op, "z", p.z, input.sym_sizes(), input.scalar_type(), "the input's ");
  check_affine(op, p.weight, p.shift, input, channels.count);
  if (has_gradient(p))
    check_like(op, "grad_output", p.grad_output, input.sym_sizes(), input.scalar_type(), "the input's ");
  check_bitmask(op, p.bitmask, input);
  check_statistic(op, "sum_dy", sum_dy, channels);
  check_statistic(op, "sum_dy_xmu", sum_dy_xmu, channels);
  TORCH_CHECK_VALUE(has_value(sum_dy) == has_value(sum_dy_xmu) && has_value(sum_dy) == has_value(count), op,
                    ": sum_dy, sum_dy_xmu and count come together, or not at all");
  if (has_value(count))
    TORCH_CHECK_TYPE(count->scalar_type() == at::kInt || count->scalar_type() == channels.math, op,
                     ": count must be int32 or ", channels.math, ", not ", count->scalar_type());
  TORCH_CHECK_VALUE(p.fuse_relu || !p.make_bitmask, op,
                    ": a bitmask says what a ReLU let through: make_bitmask needs fuse_relu");
}

inline Results outputs(const Arguments& p) {
  const Channels channels = channels_of(p);
  const auto options = p.input.options().memory_format(at::MemoryFormat::Contiguous);
  Results made;
  made.output = made.grad_input = output_like(p.input, channels);
  if (!is_groupbn(p)) return made;
  const c10::SymInt bits = p.make_bitmask ? bitmask_bytes(p.input) : c10::SymInt(0);
  if (p.is_forward) made.bitmask = at::empty_symint({bits}, options.dtype(at::kByte));
  else made.grad_z = p.of_z ? output_like(p.input, channels) : no_elements(p.input);
  return made;
}

inline bool launch(const Arguments& p, const apex_place& place, Results& made) {
  const Channels channels = channels_of(p);
  const at::Tensor x = p.input.contiguous(channels.format), z = contiguous(p.z, channels.format),
                   dy = has_gradient(p) ? p.grad_output.contiguous(channels.format) : at::Tensor(),
                   mean = p.mean.contiguous(), inv_std = p.inv_std.contiguous(), weight = contiguous(p.weight),
                   shift = contiguous(p.shift), sum_dy = contiguous(p.sum_dy), sum_dy_xmu = contiguous(p.sum_dy_xmu),
                   count = contiguous(p.count), mask = contiguous(p.bitmask);
  made = outputs(p);
  gpu::ChannelApply a{};
  set_shape(p.name, x, channels, weight.defined() ? weight : shift, &a);
  a.input = bytes(x), a.grad_output = bytes(dy), a.z = bytes(z), a.mean = bytes(mean), a.inv_std = bytes(inv_std);
  a.weight = bytes(weight), a.shift = bytes(shift), a.output = mutable_bytes(made.output);
  a.sum_dy = bytes(sum_dy), a.sum_dy_xmu = bytes(sum_dy_xmu), a.count = bytes(count);
  a.counts = count.defined() ? int32_t(count.numel()) : 0;
  a.count_is_int = count.defined() && count.scalar_type() == at::kInt;
  a.relu = p.fuse_relu;
  a.bitmask =
      p.make_bitmask ? mutable_bytes(made.bitmask) : const_cast<gpu::u8*>(bytes(mask));  // given, it is read alone
  if (p.of_z) a.grad_z = mutable_bytes(made.grad_z);
  return !use_reference(kernels_of(p.name)(&place, &a), p.name);
}
}  // namespace channel_apply
}  // namespace apex
