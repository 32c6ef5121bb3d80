#include "relu_bw.h"

#include "channel_apply_cpu.h"

static apex::ChannelApplyOp op = {"relu_bw", APEX_CHANNEL_KERNELS("relu_bw", "relu_bw_any"),
                                  APEX_CHANNEL_KERNELS("relu_bw", "relu_bw_last"),
                                  &apex::apply_channels_of_type<gpu::ReluGradientChannel>};

extern "C" int32_t apex_relu_bw(const apex_place* place, const gpu::ChannelApply* arguments) {
  return apex::run_channel_apply(op, place, *arguments);
}
