#include "groupbn.h"

#include "channel_apply_cpu.h"

namespace apex {
namespace {
ChannelApplyOp forward = {"groupbn", APEX_CHANNEL_KERNELS("groupbn", "groupbn_forward_any"),
                          APEX_CHANNEL_KERNELS("groupbn", "groupbn_forward_last"),
                          &apply_channels_of_type<gpu::MaskedNormalizeChannel>, gpu::elements_of_mask};
ChannelApplyOp backward = {"groupbn", APEX_CHANNEL_KERNELS("groupbn", "groupbn_backward_any"),
                           APEX_CHANNEL_KERNELS("groupbn", "groupbn_backward_last"),
                           &apply_channels_of_type<gpu::MaskedGradientChannel>, gpu::elements_of_mask};
}  // namespace
}  // namespace apex

extern "C" int32_t apex_groupbn_forward(const apex_place* place, const gpu::ChannelApply* arguments) {
  return apex::run_channel_apply(apex::forward, place, *arguments);
}
extern "C" int32_t apex_groupbn_backward(const apex_place* place, const gpu::ChannelApply* arguments) {
  return apex::run_channel_apply(apex::backward, place, *arguments);
}
