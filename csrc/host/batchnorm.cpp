#include "batchnorm.h"

#include "channel_apply_cpu.h"

namespace apex {
namespace {
ChannelApplyOp forward = {"batchnorm", APEX_CHANNEL_KERNELS("batchnorm", "batchnorm_forward_any"),
                          APEX_CHANNEL_KERNELS("batchnorm", "batchnorm_forward_last"),
                          &apply_channels_of_type<gpu::NormalizeChannel>};
ChannelApplyOp backward = {"batchnorm", APEX_CHANNEL_KERNELS("batchnorm", "batchnorm_backward_any"),
                           APEX_CHANNEL_KERNELS("batchnorm", "batchnorm_backward_last"),
                           &apply_channels_of_type<gpu::GradientChannel>};
}  // namespace
}  // namespace apex

extern "C" int32_t apex_batchnorm_forward(const apex_place* place, const gpu::ChannelApply* arguments) {
  return apex::run_channel_apply(apex::forward, place, *arguments);
}
extern "C" int32_t apex_batchnorm_backward(const apex_place* place, const gpu::ChannelApply* arguments) {
  return apex::run_channel_apply(apex::backward, place, *arguments);
}
