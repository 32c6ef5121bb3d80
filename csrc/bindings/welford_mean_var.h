#pragma once
#include "channel.h"
#include "generated/welford_mean_var.h"

namespace apex {
inline void WelfordMeanVar::check() const { channels_of(name, input, channel_last); }
inline at::Tensor WelfordMeanVar::outputs() const {
  const Channels channels = channels_of(name, input, channel_last);
  return at::empty_symint({2 * channels.count + 1},
                          input.options().dtype(channels.math).memory_format(at::MemoryFormat::Contiguous));
}
inline bool WelfordMeanVar::launch(const apex_place& place, Result& made) const {
  const Channels channels = channels_of(name, input, channel_last);
  const at::Tensor x = input.contiguous(channels.format);
  gpu::ChannelReduce a{};
  set_shape(name, x, channels, std::nullopt, &a);
  made = outputs();
  if (x.numel() == 0) return made.zero_(), true;
  a.input = bytes(x), a.sums = mutable_bytes(made);
  return run_with_workspace(&apex_welford_mean_var, place, a, name, x.device());
}
}  // namespace apex
