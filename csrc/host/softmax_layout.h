// How threads share the rows of the softmax kernels, and what their launches have in common: scaled_masked_softmax.cpp
// and masked_softmax_dropout.cpp.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "apex.h"
#include "device/scaled_masked_softmax.h"
#include "device_limits.h"

namespace apex {
// How threads share a row.
struct SoftmaxLayout {
  enum Kind { registers, few, fixed, odd_fixed, strip, held, whole, elements } kind;
  bool aligned;  // rows begin and end with a vector of 16 bytes
  int which;     // of the table's two
  int32_t lanes, shift;
  int32_t waiting, strip_rows;  // of `held` and `strip`
  uint32_t threads;
  int64_t blocks, shared;
};

// What a launch is asked to do. `tensors`: how many are read; `simple`: no mask; `drops`: with dropout, whose random
// numbers are those of vectors that begin with the tensor's first element.
struct SoftmaxRows {
  int64_t rows, keys;
  int32_t type;
  bool simple, causal;
  int tensors;
  bool drops = false;
};

// Everything that says which kernel serves a shape. `tensors`: all of them, the first one first.
SoftmaxLayout choose_softmax(const SoftmaxRows& rows, bool mask_fits, bool on_amd,
                             std::initializer_list<const void*> tensors, const DeviceLimits& limits);
// Whether a vector's worth of the mask can be read at once, in every row.
bool mask_fits(const gpu::SoftmaxForward& a);
// Checks the shape and the type, and answers APEX_OK with *cpu or not, or what the caller must answer.
int32_t resolve_softmax(const apex_place* place, const char* unit, int64_t rows, int64_t keys, int32_t type, bool* cpu);
void set_softmax_scale(double scale, gpu::SoftmaxForward* a);

template <class Arguments>
int32_t launch_softmax(const apex_place* place, apex_kernel& kernel, const SoftmaxLayout& layout, Arguments& a) {
  a.lanes = layout.lanes;
  a.shift = layout.shift;
  a.waiting = layout.waiting;
  a.strip_rows = layout.strip_rows;
  void* parameters[] = {&a};
  return apex_launch(place, &kernel, {uint32_t(layout.blocks), 1, 1}, {layout.threads, 1, 1}, uint32_t(layout.shared),
                     parameters);
}
}  // namespace apex
