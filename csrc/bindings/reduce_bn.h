#pragma once
#include "channel.h"
#include "generated/reduce_bn.h"

namespace apex {
inline Channels channels_to_reduce(const ReduceBn& call) {
  const auto find = has_value(call.bitmask) ? &nhwc_channels_of : &channels_of;
  return find("reduce_bn", call.input, call.channel_last);
}
inline void ReduceBn::check() const {
  const Channels channels = channels_to_reduce(*this);
  check_bitmask(name, bitmask, input);
  check_like(name, "grad_output", grad_output, input.sym_sizes(), input.scalar_type(), "the input's ");
  check_statistics(name, mean, inv_std, channels);
  check_affine(name, weight, std::nullopt, input, channels.count);
}
// The sums, and gradients of weight and bias, without elements where there is no weight.
inline ReduceBn::Result ReduceBn::outputs() const {
  const Channels channels = channels_to_reduce(*this);
  const auto options = input.options().memory_format(at::MemoryFormat::Contiguous).dtype(channels.math);
  const auto like = [&] { return gradient_like(weight, true, mean); };
  return {at::empty_symint({2 * channels.count}, options), like(), like()};
}
inline bool ReduceBn::launch(const apex_place& place, Result& made) const {
  const Channels channels = channels_to_reduce(*this);
  const at::Tensor x = input.contiguous(channels.format), dy = grad_output.contiguous(channels.format),
                   m = mean.contiguous(), r = inv_std.contiguous(), mask = contiguous(bitmask);
  gpu::ChannelReduce a{};
  set_shape(name, x, channels, weight, &a);
  made = outputs();
  const auto& [sums, grad_weight, grad_bias] = made;
  if (x.numel() == 0) {
    for (const at::Tensor& tensor : {sums, grad_weight, grad_bias}) tensor.zero_();
    return true;
  }
  a.input = bytes(x), a.grad_output = bytes(dy), a.mean = bytes(m), a.inv_std = bytes(r), a.bitmask = bytes(mask);
  a.sums = mutable_bytes(sums);
  if (has_value(weight)) a.grad_weight = mutable_bytes(grad_weight), a.grad_bias = mutable_bytes(grad_bias);
  return run_with_workspace(&apex_reduce_bn, place, a, name, x.device());
}
}  // namespace apex
