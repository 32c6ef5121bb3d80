// What layers cast, by a program without torch or Python: norms, activations and their gradients, lists of matrices,
// and the scales of many at once. It says what is wrong and returns how many things are.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "fp8_values.h"
#include "host/fp8_layer_norm.h"
#include "host/fp8_multi_quantize.h"
#include "host/fp8_multi_update_scales.h"
#include "host/fp8_quantize.h"
#include "host/fp8_rms_norm.h"
#include "host/fp8_update_scales.h"

template <class T> static const uint8_t* bytes(const std::vector<T>& x) {
  return reinterpret_cast<const uint8_t*>(x.data());
}
template <class T> static uint8_t* bytes(std::vector<T>& x) { return reinterpret_cast<uint8_t*>(x.data()); }

// Codes of one sign are in the order of their numbers.
static int apart(uint8_t code, double wanted) {
  int best = 0;
  for (int other = 0; other < 256; ++other)
    if ((other & 0x7f) != 0x7f &&
        std::fabs(value_of(uint8_t(other)) - wanted) < std::fabs(value_of(uint8_t(best)) - wanted))
      best = other;
  const auto place = [](int c) { return c & 0x80 ? 0x80 - c : c; };
  return std::abs(place(code) - place(best));
}

static void check_norm(bool layer, bool centred) {
  constexpr int64_t rows = 5, hidden = 48;
  const std::vector<float> x = numbers(rows * hidden);
  std::vector<float> weight = numbers(hidden), bias(hidden, 0.25f), mean(rows), rstd(rows);
  std::vector<uint8_t> codes(rows * hidden);
  const float scale = 3.0f;
  float amax = 0.0f;
  gpu::NormForward a{};
  a.input = bytes(x), a.weight = bytes(weight), a.bias = layer ? bytes(bias) : nullptr, a.output = codes.data();
  a.mean = layer ? bytes(mean) : nullptr, a.rstd = bytes(rstd), a.rows = rows, a.hidden = hidden, a.eps = 1e-5;
  a.input_type = a.output_type = a.weight_type = APEX_F32;
  const gpu::Fp8Norm fp8{&scale, &amax, gpu::fp8_e4m3fn, centred ? 1 : 0};
  expect((layer ? apex_fp8_layer_norm : apex_fp8_rms_norm)(&cpu, &a, &fp8) == APEX_OK, "norm");
  double largest = 0;
  int worst = 0, exact = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = x.data() + r * hidden;
    double centre = 0, square = 0;
    for (int64_t i = 0; layer && i < hidden; ++i) centre += double(row[i]) / hidden;
    for (int64_t i = 0; i < hidden; ++i) square += (row[i] - centre) * (row[i] - centre) / hidden;
    const double inverse = 1 / std::sqrt(square + 1e-5);
    expect(std::fabs(rstd[size_t(r)] - inverse) < 1e-5 * inverse, "the deviation of a row");
    if (layer) expect(std::fabs(mean[size_t(r)] - centre) < 1e-5, "the mean of a row");
    for (int64_t i = 0; i < hidden; ++i) {
      const double gamma = weight[size_t(i)] + (centred ? 1.0 : 0.0);
      const double y = (row[i] - centre) * inverse * gamma + (layer ? 0.25 : 0.0);
      const int difference = apart(codes[size_t(r * hidden + i)], y * scale);
      worst = difference > worst ? difference : worst, exact += difference == 0;
      largest = std::fmax(largest, std::fabs(y));
    }
  }
  expect(worst <= 1 && exact >= rows * hidden - 4, "codes of a norm");
  expect(std::fabs(amax - largest) < 1e-5 * largest, "the largest magnitude of a norm");
  gpu::Fp8Norm wrong = fp8;
  wrong.format = 4;
  expect((layer ? apex_fp8_layer_norm : apex_fp8_rms_norm)(&cpu, &a, &wrong) == APEX_ERROR_ARGUMENT, "a format");
}

// relu: the sign alone decides, so values are exact.
static void check_activation() {
  constexpr int64_t rows = 6, columns = 20;
  const std::vector<float> u = numbers(rows * 2 * columns), gradient = numbers(rows * columns);
  const float scale = 0.5f;
  float amax = 0.0f;
  std::vector<uint8_t> codes(rows * columns), wide(rows * 2 * columns), turned(wide.size());
  std::vector<float> sums(2 * columns);
  gpu::Fp8Quantize a{};
  a.input = bytes(u), a.scale = &scale, a.amax = &amax, a.by_row = codes.data(), a.rows = rows, a.columns = columns;
  a.type = APEX_F32, a.format = gpu::fp8_e4m3fn, a.function = gpu::function_relu, a.gated = 1;
  a.source = gpu::fp8_of_activation;
  expect(apex_fp8_quantize(&cpu, &a, &workspace) == APEX_OK, "an activation");
  bool right = true;
  double largest = 0;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) {
      const float first = u[size_t(r * 2 * columns + c)], second = u[size_t(r * 2 * columns + columns + c)];
      const double y = double(first > 0 ? first : 0.0f) * second;
      right = right && value_of(codes[size_t(r * columns + c)]) == nearest(double(float(y)) * 0.5);
      largest = std::fmax(largest, std::fabs(float(y)));
    }
  expect(right && amax == float(largest), "codes of an activation");

  amax = 0.0f;
  a.input = bytes(gradient), a.before = bytes(u), a.source = gpu::fp8_of_gradient;
  a.by_row = wide.data(), a.by_column = turned.data(), a.grad_bias = bytes(sums);
  expect(apex_fp8_quantize(&cpu, &a, &workspace) == APEX_OK, "the gradient of an activation");
  right = true;
  std::vector<double> totals(2 * columns);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < 2 * columns; ++c) {
      const int64_t at = c % columns;
      const float first = u[size_t(r * 2 * columns + at)], second = u[size_t(r * 2 * columns + columns + at)];
      const float g = gradient[size_t(r * columns + at)], slope = first > 0 ? 1.0f : 0.0f;
      const float of = c < columns ? g * second * slope : g * (first > 0 ? first : 0.0f);
      const uint8_t code = wide[size_t(r * 2 * columns + c)];
      right = right && value_of(code) == nearest(double(of) * 0.5) && turned[size_t(c * rows + r)] == code;
      totals[size_t(c)] += of;
    }
  for (size_t c = 0; c < totals.size(); ++c) right = right && std::fabs(sums[c] - totals[c]) < 1e-3;
  expect(right, "codes and sums of the gradient of an activation");

  float alone = 0.0f;  // the largest magnitude, and nothing else
  a.by_row = a.by_column = nullptr, a.grad_bias = nullptr, a.amax = &alone;
  expect(apex_fp8_quantize(&cpu, &a, &workspace) == APEX_OK && alone == amax && alone > 0, "a magnitude alone");
}

static void check_list() {
  constexpr int count = 3;
  const int64_t rows[count] = {7, 1, 33}, columns[count] = {16, 5, 20};
  const float scales[count] = {2.0f, 0.5f, 1.0f};
  float amaxes[count] = {0.0f, 100.0f, 0.0f};
  std::vector<float> x[count];
  std::vector<uint8_t> by_row[count], by_column[count];
  gpu::Fp8MultiQuantize m{};
  m.scale = scales, m.amax = amaxes, m.count = count, m.type = APEX_F32, m.format = gpu::fp8_e4m3fn;
  for (int i = 0; i < count; ++i) {
    x[i] = numbers(size_t(rows[i] * columns[i])), by_row[i].resize(x[i].size()), by_column[i].resize(x[i].size());
    m.input[i] = reinterpret_cast<uint64_t>(x[i].data()), m.rows[i] = rows[i], m.columns[i] = columns[i];
    m.by_row[i] = reinterpret_cast<uint64_t>(by_row[i].data());
    if (i != 1) m.by_column[i] = reinterpret_cast<uint64_t>(by_column[i].data());
  }
  expect(apex_fp8_multi_quantize(&cpu, &m) == APEX_OK, "a list");
  for (int i = 0; i < count; ++i) {
    double largest = i == 1 ? 100.0 : 0.0;
    bool right = true;
    for (int64_t at = 0; at < rows[i] * columns[i]; ++at) {
      const uint8_t code = by_row[i][size_t(at)];
      const int64_t r = at / columns[i], c = at % columns[i];
      right = right && value_of(code) == nearest(double(x[i][size_t(at)]) * scales[i]);
      right = right && (i == 1 || by_column[i][size_t(c * rows[i] + r)] == code);
      largest = std::fmax(largest, std::fabs(x[i][size_t(at)]));
    }
    expect(right && amaxes[i] == float(largest), "a matrix of a list");
  }
}

// 300 scales in one call; of those whose magnitude is 0, infinite or NaN the old ones stay.
static void check_scales() {
  constexpr int64_t rows = 4, columns = 300;
  std::vector<float> history(rows * columns, 1.0f), scale(columns, 3.0f), inverse(columns, 7.0f);
  std::vector<float> largest(columns, 448.0f), reduced(columns);
  for (int64_t c = 0; c < columns; ++c) reduced[size_t(c)] = float(c);
  reduced[1] = INFINITY, reduced[2] = NAN;
  gpu::Fp8UpdateScales a{};
  a.amax_history = history.data(), a.scale = scale.data(), a.scale_inv = inverse.data(), a.fp8_max = largest.data();
  a.reduced = reduced.data(), a.rows = rows, a.columns = a.pitch = columns, a.column_pitch = 1, a.factor = 0.25f,
  a.most_recent = 1;
  expect(apex_fp8_update_scales(&cpu, &a) == APEX_OK, "300 scales");
  bool right = true;
  for (int64_t c = 0; c < columns; ++c) {
    const float wanted = c < 3 ? 3.0f : 448.0f / float(c) * 0.25f;
    right = right && scale[size_t(c)] == wanted && inverse[size_t(c)] == 1.0f / wanted;
    right = right && history[size_t(c)] == 0.0f;
    const float last = history[size_t((rows - 1) * columns + c)];
    right = right && (c == 2 ? std::isnan(last) : last == reduced[size_t(c)]);
  }
  expect(right, "scales, their inverses and histories");
}

// Three histories, of which the first two are one: number c of column c is the largest of its history's 3 rows.
static void check_histories() {
  constexpr int64_t rows = 3, columns = 8;
  std::vector<float> upright(5 * rows), flat(3 * rows), old(columns, 3.0f), scale(columns), inverse(columns);
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r)
      (c < 5 ? upright[size_t(c * rows + r)] : flat[size_t(r * 3 + c - 5)]) = r == 1 ? float(c) : 0.25f * float(c);
  const std::vector<float> largest(columns, 448.0f);
  std::vector<float> apart(4 * columns, 7.0f);
  const apex_fp8_history histories[] = {{upright.data(), old.data(), 2, 1, rows},
                                        {upright.data() + 2 * rows, old.data() + 2, 3, 1, rows},
                                        {flat.data(), old.data() + 5, 3, 3, 1}};
  apex_fp8_updates all{};
  all.count = 3, all.rows = rows, all.factor = 1.0f;
  all.scale = scale.data(), all.scale_inv = inverse.data(), all.fp8_max = largest.data();
  all.scale_inv_apart = apart.data();
  expect(apex_fp8_multi_update_scales(&cpu, &all, histories) == APEX_OK, "3 histories");
  bool right = true;
  for (int64_t c = 0; c < columns; ++c) {
    const float wanted = c == 0 ? 3.0f : 448.0f / float(c);
    right = right && scale[size_t(c)] == wanted && inverse[size_t(c)] == 1.0f / wanted && old[size_t(c)] == 3.0f;
    right = right && apart[size_t(4 * c)] == 1.0f / wanted && apart[size_t(4 * c + 1)] == 7.0f;
    const auto at = [&](int64_t r) { return c < 5 ? upright[size_t(c * rows + r)] : flat[size_t(r * 3 + c - 5)]; };
    right = right && at(0) == 0.0f && at(1) == 0.25f * float(c) && at(2) == 0.25f * float(c);
  }
  expect(right, "scales of histories that lie together and apart");
  all.rows = 0;
  expect(apex_fp8_multi_update_scales(&cpu, &all, histories) == APEX_ERROR_VALUE, "histories without rows");
}

int main() {
  for (const bool centred : {false, true})
    for (const bool layer : {false, true}) check_norm(layer, centred);
  check_activation();
  check_list();
  check_scales();
  check_histories();
  return faults;
}
