// The FP8 functions of libapex's C interface as a program without torch or Python calls them. It says what is wrong and
// returns how many things are.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "host/fp8_dequantize.h"
#include "host/fp8_multi_quantize.h"
#include "host/fp8_quantize.h"
#include "host/fp8_quantize_blocks.h"
#include "host/fp8_transpose.h"
#include "host/fp8_update_scales.h"
#include "fp8_values.h"

static const apex_workspace none = {nullptr, nullptr};

static void check_quantize() {
  constexpr int64_t rows = 130, columns = 35;
  const std::vector<float> x = numbers(rows * columns);
  std::vector<uint8_t> by_row(x.size()), by_column(x.size());
  std::vector<float> sums(columns);
  float scale = 2.0f, amax = 0.0f;
  gpu::Fp8Quantize a{};
  a.input = reinterpret_cast<const uint8_t*>(x.data()), a.scale = &scale, a.amax = &amax;
  a.by_row = by_row.data(), a.by_column = by_column.data();
  a.grad_bias = reinterpret_cast<uint8_t*>(sums.data());
  a.rows = rows, a.columns = columns, a.type = APEX_F32, a.format = gpu::fp8_e4m3fn;
  expect(apex_fp8_quantize(&cpu, &a, &workspace) == APEX_OK, "quantize");
  double largest = 0, sum = 0;
  bool right = true, turned = true;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) {
      const size_t at = size_t(r * columns + c);
      right = right && value_of(by_row[at]) == nearest(x[at] * 2.0);
      turned = turned && by_column[size_t(c * rows + r)] == by_row[at];
      largest = std::fmax(largest, std::fabs(x[at]));
      sum += c == 3 ? x[at] : 0;
    }
  expect(right, "codes of the rows");
  expect(turned, "codes of the columns");
  expect(amax == float(largest), "amax");
  expect(std::fabs(sums[3] - sum) < 1e-3, "the sum of a column");

  std::vector<uint8_t> again(x.size());
  gpu::Fp8Transpose t{};
  t.input = by_row.data(), t.output = again.data(), t.rows = rows, t.columns = columns;
  expect(apex_fp8_transpose(&cpu, &t, nullptr) == APEX_OK, "transpose");
  expect(again == by_column, "the transpose of the rows");

  std::vector<float> back(x.size());
  const float inverse = 0.5f;
  gpu::Fp8Dequantize d{};
  d.input = by_row.data(), d.scale_inv = &inverse, d.output = reinterpret_cast<uint8_t*>(back.data());
  d.count = int64_t(x.size());
  expect(apex_fp8_dequantize(&cpu, &d) == APEX_OK, "dequantize");
  expect(back[7] == float(value_of(by_row[7]) * 0.5), "a number of a code");

  gpu::Fp8MultiQuantize m{};
  std::vector<uint8_t> one(x.size());
  m.input[0] = reinterpret_cast<uint64_t>(x.data()), m.by_row[0] = reinterpret_cast<uint64_t>(one.data());
  m.rows[0] = rows, m.columns[0] = columns, m.scale = &scale, m.count = 1;
  expect(apex_fp8_multi_quantize(&cpu, &m) == APEX_OK, "multi_quantize");
  expect(one == by_row, "codes of a list");
  m.count = 65;
  expect(apex_fp8_multi_quantize(&cpu, &m) == APEX_ERROR_VALUE, "65 matrices");

  a.scale = nullptr;
  float own = 0.0f;
  a.scale_inv = &own;
  expect(apex_fp8_quantize(&cpu, &a, &workspace) == APEX_OK, "its own scale");
  const float made = 448.0f / float(largest);
  expect(own == 1.0f / made && value_of(by_row[7]) == nearest(double(x[7] * made)), "the scale that is made");
  a.scale_inv = nullptr;
  expect(apex_fp8_quantize(&cpu, &a, &workspace) == APEX_ERROR_ARGUMENT, "no scale");
  expect(!std::strcmp(apex_last_error(), "fp8_quantize: there is no scale"), "its words");
  a.scale = &scale, a.format = 4;
  expect(apex_fp8_quantize(&cpu, &a, &workspace) == APEX_ERROR_ARGUMENT, "an unknown format");
  a.format = 0, a.type = APEX_F64;
  expect(apex_fp8_quantize(&cpu, &a, &workspace) == APEX_ERROR_ARGUMENT, "float64");
  a.type = APEX_F32;
  expect(apex_fp8_quantize(&cpu, &a, &none) == APEX_ERROR_ARGUMENT, "no workspace");
  expect(!std::strcmp(apex_last_error(), "a workspace is wanted"), "its words");
}

// The bias's gradient of no rows is as long as a row, and 0.
static void check_no_rows() {
  constexpr int64_t columns = 35;
  std::vector<float> sums(4096, 7.0f), wanted(sums);
  std::fill_n(wanted.begin(), columns, 0.0f);
  float scale = 2.0f;
  gpu::Fp8Quantize a{};
  a.scale = &scale, a.grad_bias = reinterpret_cast<uint8_t*>(sums.data());
  a.columns = columns, a.type = APEX_F32, a.format = gpu::fp8_e4m3fn;
  expect(apex_fp8_quantize(&cpu, &a, &workspace) == APEX_OK && sums == wanted, "quantize no rows");
}

static void check_blocks() {
  const std::vector<float> x = numbers(2 * 200);
  std::vector<uint8_t> codes(x.size());
  std::vector<float> inverse(2 * 2);
  gpu::Fp8QuantizeBlocks a{};
  a.input = reinterpret_cast<const uint8_t*>(x.data()), a.by_row = codes.data(), a.scale_inv = inverse.data();
  a.rows = 2, a.columns = 200, a.type = APEX_F32, a.format = gpu::fp8_e4m3fn, a.power_of_two = 1;
  expect(apex_fp8_quantize_blocks(&cpu, &a) == APEX_OK, "quantize_blocks");
  const double scale = 1 / double(inverse[1 * 2 + 0]);  // of the second block of row 0
  expect(value_of(codes[130]) == nearest(x[130] * scale), "a code of a block");
}

static void check_scales() {
  float history[3] = {4.0f, 8.0f, 2.0f}, scale = 1.0f, inverse = 1.0f;
  const float largest = 448.0f;
  gpu::Fp8UpdateScales a{history, &scale, &inverse, &largest, nullptr, 3, 1, 1, 1, 0.5f, 0};
  expect(apex_fp8_update_scales(&cpu, &a) == APEX_OK, "update_scales");
  expect(scale == 28.0f && inverse == 1.0f / 28.0f, "the scale");
  expect(history[0] == 0.0f && history[1] == 2.0f && history[2] == 4.0f, "the history");
  a.rows = 0;
  expect(apex_fp8_update_scales(&cpu, &a) == APEX_ERROR_VALUE, "a history without rows");
}

int main() {
  check_quantize();
  check_no_rows();
  check_blocks();
  check_scales();
  return faults;
}
