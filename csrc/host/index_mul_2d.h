// Launching index_mul_2d's two kernels, and their CPU variant: csrc/device/index_mul_2d.h says what they compute.
#pragma once
#include "apex.h"
#include "device/index_mul_2d_arguments.h"

/* Gathers: the product itself, and the gradient of its second factor. */
extern "C" APEX_EXPORT int32_t apex_index_mul_2d_forward(const apex_place* place, const gpu::IndexMul2d* arguments);
/* Scatters: the gradient of the factor that is picked from. */
extern "C" APEX_EXPORT int32_t apex_index_mul_2d_scatter(const apex_place* place, const gpu::IndexMul2d* arguments);

namespace apex {
void index_mul_2d_gather_cpu(const gpu::IndexMul2d& a);
void index_mul_2d_scatter_cpu(const gpu::IndexMul2d& a);
}  // namespace apex
