// What programs of the FP8 functions share: what is expected, e4m3fn by its definition, and numbers.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "host/apex.h"

static int faults = 0;
static void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s: %s\n", what, apex_last_error());
  ++faults;
}

static const apex_place cpu = {APEX_CPU, 0, nullptr};
// e4m3fn by its definition.
static double value_of(uint8_t code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const double magnitude = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
  return code & 0x80 ? -magnitude : magnitude;
}
static double nearest(double x) {
  double best = 0;
  for (int code = 0; code < 256; ++code)
    if ((code & 0x7f) != 0x7f && std::fabs(value_of(uint8_t(code)) - x) < std::fabs(best - x))
      best = value_of(uint8_t(code));
  return best;
}
static std::vector<float> numbers(size_t count) {
  std::vector<float> made(count);
  uint32_t state = 1;
  for (float& x : made) {
    state = state * 1664525u + 1013904223u;
    x = float(int32_t(state >> 8) - (1 << 23)) * 0x1p-20f;  // within 8, never in the middle of two codes
  }
  return made;
}

// Memory for one call after the other, as long as the program runs.
static void* take(void*, uint64_t bytes) { return std::malloc(bytes); }
static const apex_workspace workspace = {take, nullptr};
