// One pass over a tensor with one factor and one shift a channel: batchnorm_forward, batchnorm_backward, relu_bw,
// groupbn_forward and groupbn_backward, which differ in the arguments that they have.
#pragma once
#include "channel.h"
#include "host/batchnorm.h"
#include "host/groupbn.h"
#include "host/relu_bw.h"

namespace apex {
namespace channel_apply {
// The arguments of all of them: nothing, or false, for those that an op is without.
struct Pass {
  const char* op;
  const at::Tensor &input, &mean, &inv_std;
  const at::Tensor* grad_output;
  const OptionalTensor &z, &weight, &shift, &sum_dy, &sum_dy_xmu, &count, &bitmask;
  bool channel_last, fuse_relu, make_bitmask, of_z;
};
#define APEX_IF_TRUE(call, argument)                                 \
  [&] {                                                              \
    if constexpr (requires { call.argument; }) return call.argument; \
    else return false;                                               \
  }()
template <class Call> Pass pass_of(const Call& c) {
  const at::Tensor* grad_output = nullptr;
  if constexpr (requires { c.grad_output; }) grad_output = &c.grad_output;
  return {Call::name,
          c.input,
          c.mean,
          c.inv_std,
          grad_output,
          APEX_IF_ANY(c, z),
          c.weight,
          APEX_IF_ANY(c, shift),
          APEX_IF_ANY(c, sum_dy),
          APEX_IF_ANY(c, sum_dy_xmu),
          APEX_IF_ANY(c, count),
          APEX_IF_ANY(c, bitmask),
          c.channel_last,
          APEX_IF_TRUE(c, fuse_relu),
          APEX_IF_TRUE(c, make_bitmask),
          APEX_IF_TRUE(c, of_z)};
}
inline Channels channels_of(const Pass& p) {
  const bool is_nhwc = std::string_view(p.op).starts_with("groupbn");
  return (is_nhwc ? &nhwc_channels_of : &apex::channels_of)(p.op, p.input, p.channel_last);
}
constexpr auto kernels_of(std::string_view name) {
  if (name == "batchnorm_forward") return &apex_batchnorm_forward;
  if (name == "batchnorm_backward") return &apex_batchnorm_backward;
  if (name == "groupbn_forward") return &apex_groupbn_forward;
  if (name == "groupbn_backward") return &apex_groupbn_backward;
  return &apex_relu_bw;
}

inline void check_pass(const Pass& p) {
  const char* op = p.op;
  const at::Tensor& input = p.input;
  const OptionalTensor &sum_dy = p.sum_dy, &sum_dy_xmu = p.sum_dy_xmu, &count = p.count;
  const Channels channels = channels_of(p);
  check_given(op, "mean", p.mean);
  check_given(op, "inv_std", p.inv_std);
  check_like_input(op, "z", p.z, input);
  check_statistic(op, "mean", p.mean, input, channels);
  check_statistic(op, "inv_std", p.inv_std, input, channels);
  check_affine(op, p.weight, p.shift, input, channels.count);
  if (p.grad_output) check_gradient(op, *p.grad_output, input);
  check_bitmask(op, p.bitmask, input);
  check_statistic(op, "sum_dy", sum_dy, input, channels);
  check_statistic(op, "sum_dy_xmu", sum_dy_xmu, input, channels);
  TORCH_CHECK_VALUE(has_value(sum_dy) == has_value(sum_dy_xmu) && has_value(sum_dy) == has_value(count), op,
                    ": sum_dy, sum_dy_xmu and count come together, or not at all");
  if (has_value(count)) {
    TORCH_CHECK_TYPE(count->scalar_type() == at::kInt || count->scalar_type() == channels.math, op,
                     ": count must be int32 or ", channels.math, ", not ", count->scalar_type());
    check_device(op, "count", *count, input);
  }
  TORCH_CHECK_VALUE(p.fuse_relu || !p.make_bitmask, op,
                    ": a bitmask says what a ReLU let through: make_bitmask needs fuse_relu");
}
template <class Call> void check(const Call& call) { check_pass(pass_of(call)); }

// The output, and what groupbn's ops return beside it.
using Two = std::tuple<at::Tensor, at::Tensor>;
inline Two made_of(const Pass& p) {
  const Channels channels = channels_of(p);
  const auto options = p.input.options().memory_format(at::MemoryFormat::Contiguous);
  const std::string_view op = p.op;
  at::Tensor second;
  if (op == "groupbn_forward")
    second = at::empty_symint({p.make_bitmask ? bitmask_bytes(p.input) : c10::SymInt(0)}, options.dtype(at::kByte));
  else if (op == "groupbn_backward") second = p.of_z ? output_like(p.input, channels) : at::empty({0}, options);
  return {output_like(p.input, channels), second};
}
template <class Call> typename Call::Result result_of(const Two& made) {
  if constexpr (std::is_same_v<typename Call::Result, Two>) return made;
  else return std::get<0>(made);
}
template <class Call> typename Call::Result outputs(const Call& call) {
  return result_of<Call>(made_of(pass_of(call)));
}

inline bool run(const Pass& p, const apex_place& place, Two& made) {
  const Channels channels = channels_of(p);
  const at::Tensor x = p.input.contiguous(channels.format), z = in_format(p.z, channels.format),
                   dy = p.grad_output ? p.grad_output->contiguous(channels.format) : at::Tensor(),
                   mean = p.mean.contiguous(), inv_std = p.inv_std.contiguous(), weight = contiguous(p.weight),
                   shift = contiguous(p.shift), sum_dy = contiguous(p.sum_dy), sum_dy_xmu = contiguous(p.sum_dy_xmu),
                   count = contiguous(p.count), mask = contiguous(p.bitmask);
  made = made_of(p);
  const auto& [output, second] = made;
  gpu::ChannelApply a{};
  set_shape(p.op, x, channels, weight.defined() ? weight : shift, &a);
  a.input = bytes(x), a.grad_output = bytes(dy), a.z = bytes(z), a.mean = bytes(mean), a.inv_std = bytes(inv_std);
  a.weight = bytes(weight), a.shift = bytes(shift), a.output = mutable_bytes(output);
  a.sum_dy = bytes(sum_dy), a.sum_dy_xmu = bytes(sum_dy_xmu), a.count = bytes(count);
  a.counts = count.defined() ? int32_t(count.numel()) : 0;
  a.count_is_int = count.defined() && count.scalar_type() == at::kInt;
  a.relu = p.fuse_relu;
  a.bitmask = p.make_bitmask ? mutable_bytes(second) : const_cast<gpu::u8*>(bytes(mask));  // given, it is read alone
  if (p.of_z) a.grad_z = mutable_bytes(second);
  return !use_reference(kernels_of(p.op)(&place, &a), p.op);
}
template <class Call> bool launch(const Call& call, const apex_place& place, typename Call::Result& made) {
  Two found;
  if (!run(pass_of(call), place, found)) return false;
  made = result_of<Call>(found);
  return true;
}
}  // namespace channel_apply
}  // namespace apex
