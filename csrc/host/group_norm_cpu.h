// What the CPU variants of group norm's forward and backward share: which groups a task takes, and its channels.
#pragma once
#include "channel_tiles.h"
#include "device/group_norm.h"
#include "group_norm.h"

namespace apex {
// Channels last, side by side: several rows of so many stay in the first-level cache.
constexpr int64_t strip = 1024;
constexpr int64_t run_rows = 32;  // rows of a channel that are added up by themselves

// How an image is parted. A task takes whole groups of one image: channels first one, channels last as many as a strip
// holds, or one. Sums are those of channels, so that they stay the same whatever groups a task has.
struct Shares {
  int64_t of_group, of_task, of_image;  // channels, groups, tasks

  explicit Shares(const gpu::GroupNorm& a) : of_group(a.channels / a.groups), of_task(groups_of_task(a, of_group)) {
    of_image = (a.groups + of_task - 1) / of_task;
  }

 private:
  static int64_t groups_of_task(const gpu::GroupNorm& a, int64_t of_group) {
    const int64_t most = a.channels_last ? std::min<int64_t>(strip / of_group, a.groups) : 1;
    if (most <= 1 || most == a.groups) return std::max<int64_t>(1, most);
    for (int64_t groups = most; groups > most / 2; --groups)
      if (groups * of_group % lanes == 0) return groups;  // loops over its channels leave no rest
    return most;
  }
};

template <class Math> struct Share {
  const gpu::GroupNorm& a;
  int64_t image, group_channels, first_group, groups;

  Share(const gpu::GroupNorm& arguments, const Shares& shares, int64_t task)
      : a(arguments), image(task / shares.of_image), group_channels(shares.of_group),
        first_group((task - image * shares.of_image) * shares.of_task),
        groups(std::min<int64_t>(shares.of_task, a.groups - first_group)) {}
  int64_t first_channel() const { return first_group * group_channels; }
  int64_t channels() const { return groups * group_channels; }
  int64_t row_of_statistics() const { return image * a.groups + first_group; }
  // Channels first: where a channel of the image begins.
  int64_t start_of(int64_t channel) const { return (image * a.channels + channel) * a.spatial; }
  // each(first element of the tensor, channel, count): channels last, channels [channel, channel + count) of the share,
  // whose elements lie side by side, in a.spatial rows, every a.channels elements.
  template <class Each> APEX_INLINE void each_strip(const Each& each) const {
    for (int64_t c = 0; c < channels(); c += strip) {
      const int64_t channel = first_channel() + c;
      each(image * a.spatial * a.channels + channel, channel, std::min<int64_t>(strip, channels() - c));
    }
  }
  // each(j, n, group): channels [channel + j, channel + j + n) of `count` are of that group of the share.
  template <class Each> APEX_INLINE void each_group(int64_t channel, int64_t count, const Each& each) const {
    int64_t group = (channel - first_channel()) / group_channels;
    for (int64_t j = 0; j < count; ++group) {
      const int64_t end = std::min<int64_t>(first_channel() + (group + 1) * group_channels - channel, count);
      each(j, end - j, group);
      j = end;
    }
  }
};

template <class Math> APEX_INLINE void fill(Math* x, int64_t n, Math value) {
  for (int64_t j = 0; j < n; ++j) x[j] = value;
}

// Weights and biases of some adjacent channels.
template <class Math, int64_t most> struct Affine {
  alignas(64) Math weight[most], bias[most];

  APEX_INLINE void load(const TileConversions<Math>& convert, const gpu::GroupNorm& a, int64_t channel, int64_t n) {
    load_numbers(convert, a.weight, a.weight_type, channel, n, Math(1), weight);
    load_numbers(convert, a.bias, a.weight_type, channel, n, Math(0), bias);
  }

 private:
  static APEX_INLINE void load_numbers(const TileConversions<Math>& convert, const void* from, int32_t type,
                                       int64_t channel, int64_t n, Math otherwise, Math* to) {
    if (!from) return fill(to, n, otherwise);
    const Math* x = load_tile(convert, from, type, channel, n, to);
    if (x != to) copy_bytes(to, x, n * int64_t(sizeof(Math)));
  }
};

template <class Work> void run_tasks(const gpu::GroupNorm& a) {
  const int64_t of_image = Shares(a).of_image, elements = a.channels * a.spatial / of_image;
  run_at_level(Work{a}, 0, a.batch * of_image,
               std::max<int64_t>(1, elements_per_task / std::max<int64_t>(1, elements)));
}
}  // namespace apex
