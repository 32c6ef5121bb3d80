// Internal headers of the host library under test: linked with its objects, called from Python.
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "host/cpu_level.h"
#include "host/multi_tensor_tiles.h"
#include "host/parallel.h"
#include "host/status.h"
#include "host/workspace.h"
#include "host/xla.h"

namespace {
// Of n elements: how many bytes a level's conversions of T leave other than one element's conversion does, or change
// beside them. Numbers are of any bits (nans, subnormal numbers, infinities among them), or normal ones.
template <class T> int64_t wrong_bytes(int level, int64_t n, bool any_bits, std::mt19937& random) {
  constexpr int64_t before = 3, after = 70;
  const auto& convert = apex::tile_conversions(level, float());
  const int32_t type = apex::DtypeOf<T>::value;
  std::vector<float> x(n), made(n + after, 7.0f), wanted = made;
  std::vector<T> stored(before + n + after, T{0x1234}), right = stored;
  std::uniform_real_distribution<float> normal(0.5f, 2.0f);
  for (int64_t i = 0; i < n; ++i) {
    x[i] = any_bits ? gpu::bit_cast<float>(uint32_t(random())) : normal(random) * (random() & 1 ? 1.0f : -1.0f);
    gpu::from_float(right[before + i], x[i]);
  }
  convert.store[type](stored.data(), before, x.data(), n);
  int64_t wrong = std::memcmp(stored.data(), right.data(), right.size() * sizeof(T)) != 0;
  for (int64_t i = 0; i < n; ++i) {
    if (any_bits) right[before + i].bits = uint16_t(random());
    wanted[i] = gpu::to_float(right[before + i]);
    if (wanted[i] != wanted[i]) gpu::from_float(right[before + i], wanted[i]);  // the instruction quiets nans of halves
    wanted[i] = gpu::to_float(right[before + i]);
  }
  convert.load[type](made.data(), right.data(), before, n);
  for (int64_t i = 0; i < n + after; ++i) wrong += std::memcmp(&made[i], &wanted[i], sizeof(float)) != 0;
  return wrong;
}
}  // namespace

extern "C" {

APEX_EXPORT int64_t check_tile_conversions(int32_t level, int32_t type) {
  std::mt19937 random(1);
  int64_t wrong = 0;
  for (int64_t n = 0; n < 200; ++n)
    for (const bool any_bits : {true, false})
      wrong += type == APEX_F16 ? wrong_bytes<gpu::half>(level, n, any_bits, random)
                                : wrong_bytes<gpu::bfloat16>(level, n, any_bits, random);
  return wrong;
}

// Sums begin..end-1 by parallel_for; also how many pieces there were.
APEX_EXPORT int64_t check_parallel_sum(int64_t begin, int64_t end, int64_t grain, int64_t* pieces) {
  int64_t sum = 0;
  *pieces = 0;
  apex::parallel_for(begin, end, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) sum += i;
    ++*pieces;
  });
  return sum;
}

APEX_EXPORT int32_t check_guarded(int32_t kind) {
  return apex::guarded([&]() -> int32_t {
    if (kind == 1) throw std::bad_alloc();
    if (kind == 2) throw std::runtime_error("why");
    if (kind == 3) std::vector<char>().reserve(static_cast<size_t>(-1) / 2 + 1);
    return APEX_OK;
  });
}

APEX_EXPORT int32_t check_take_workspace(const apex_place* place, const apex_workspace* workspace, int64_t bytes,
                                         int64_t count, uint8_t** memory, uint32_t** counters) {
  return apex::take_workspace(*place, workspace, bytes, count, memory, counters);
}

APEX_EXPORT int32_t check_machine_level() { return apex::machine_cpu_level(); }
}

namespace apex::xla {
// Takes 100 and then 0 bytes of scratch memory.
int32_t check_scratch(Call& call) {
  const auto* memory = call.scratch(100);
  return memory && !call.scratch(0) ? APEX_OK : APEX_ERROR_WORKSPACE;
}
}  // namespace apex::xla

APEX_XLA_HANDLER(check_scratch, 0)
