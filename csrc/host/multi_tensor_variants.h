// One table of variants a multi-tensor operation: which element types it takes, under which kernel name and
// by which CPU function; and the one way to run it.
#pragma once
#include <cstddef>

#include "host/multi_tensor_cpu.h"
#include "host/multi_tensor_reduce_cpu.h"
#include "host/workspace.h"

namespace apex {
struct MultiTensorVariant {
  static constexpr int most_lists = 8;
  apex_kernel kernel;
  uint32_t reductions;         // 0: elementwise
  uint32_t bytes_per_element;  // read and written
  uint32_t lists;
  int32_t dtypes[most_lists];
  void (*cpu)(const apex_tensor_lists*, const void* arguments);
};

template <class Op, class Math, class... T>
constexpr MultiTensorVariant multi_tensor_variant(const char* unit, const char* kernel) {
  static_assert(Op::lists == sizeof...(T), "the operation's lists and the variant's types differ");
  static_assert(((DtypeOf<T>::value == DtypeOf<Math>::value || tile_converts<Math, T>) && ...),
                "the CPU variant has no conversion for these elements");
  const uint32_t sizes[] = {uint32_t(sizeof(T))...};
  uint32_t bytes = 0;
  for (uint32_t k = 0; k < sizeof...(T); ++k) bytes += sizes[k] * ((Op::read >> k & 1) + (Op::written >> k & 1));
  if constexpr (Op::reductions > 0)
    return {{unit, kernel, 0}, Op::reductions,         bytes,
            sizeof...(T),      {DtypeOf<T>::value...}, &CpuReduction<Op, Math>::run};
  else return {{unit, kernel, 0}, 0, bytes, sizeof...(T), {DtypeOf<T>::value...}, &CpuOperation<Op, Math>::run};
}

// Runs the variant whose element types the lists (or their first `used`) have. `arguments` is the operation's struct.
// Returns APEX_USE_REFERENCE where the probe chose the reference, APEX_ERROR_ARGUMENT for types that no variant takes.
int32_t run_multi_tensor(MultiTensorVariant* variants, size_t count, const apex_place* place,
                         const apex_tensor_lists* lists, const void* arguments, uint32_t used);

template <size_t N>
int32_t run_multi_tensor(MultiTensorVariant (&variants)[N], const apex_place* place, const apex_tensor_lists* lists,
                         const void* arguments, uint32_t used = 0) {
  return run_multi_tensor(variants, N, place, lists, arguments, used ? used : lists->lists);
}

// Before the launch of kernels, which alone have a table, that advances the step on the device: the counter by which
// its last block knows itself.
template <class Arguments> int32_t count_blocks(const apex_place& place, const apex_tensor_lists& lists,
                                                const apex_workspace* workspace, Arguments* a) {
  uint8_t* none;
  return a->advance_step && lists.table ? take_workspace(place, workspace, 0, 1, &none, &a->blocks_done)
                                        : int32_t{APEX_OK};
}
}  // namespace apex

// One row of the table: the operation's own list of variants is expanded with this.
#define MULTI_TENSOR_VARIANT(unit, name, Op, Math, ...) \
  apex::multi_tensor_variant<gpu::Op<Math>, Math, __VA_ARGS__>(#unit, #unit "_" #name),
