// te.Linear where each tensor has one scale: delayed and current scaling.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "api.h"

namespace apex {
// What the products of a recipe have in common on one device.
struct Fp8Products {
  at::ScalarType forward, backward;   // formats, of the forward pass and of gradients
  bool by_card;                       // torch._scaled_mm multiplies; else the exact emulation
  std::array<bool, 3> fast;           // sums with fewer bits: the product, the input's gradient, the weight's
  std::array<bool, 3> powers_of_two;  // of current scaling: the input, the weight, the gradient
  std::array<double, 3> epsilons;
};
// What delayed scaling knows of a layer's tensors, in one direction: scales [n], 1 / scales [n] or [n, 4] (each on 16
// bytes), and the history [steps, n], to whose row 0 magnitudes go. None: scales are made of the values.
using Fp8State = std::optional<std::array<at::Tensor, 3>>;
// A norm that rows of the input go through first: whether it is a layer norm (else an RMS norm), eps, whether weights
// are 1 + gamma, gamma, beta. Its output is cast in the same pass, and is nowhere in memory as numbers.
using Fp8NormFirst = std::optional<std::tuple<bool, double, bool, at::Tensor, std::optional<at::Tensor>>>;

// The whole layer with autograd, input weight^T + bias, or norm(input) weight^T + bias: what eager calls take instead
// of apex.transformer_engine.pytorch._linear's function, which does the same in Python. cached: the weight as FP8, 1 /
// its scale, and its transpose, of an earlier call. gemm: which of the layer's products it is. records: whether
// magnitudes of input and weight go into the history. None, and nothing done, where that function must serve.
APEX_TORCH_API std::optional<at::Tensor> fp8_linear_layer(const Fp8Products& products, const at::Tensor& input,
                                                          const at::Tensor& weight,
                                                          const std::optional<at::Tensor>& bias,
                                                          const std::array<std::optional<at::Tensor>, 3>& cached,
                                                          const Fp8State& forward, const Fp8State& backward,
                                                          int64_t gemm, bool records, const Fp8NormFirst& norm);

// New scales of histories [steps, n], which move on by a row, and whose versions stay: of each (scales [n], 1 / scales
// [n], a copy of them for products, [n, 4], each on 16 bytes). maxima: [all n]. None, and nothing done, where
// apex._fp8.multi_update_scales must serve.
using Fp8NewScales = std::vector<std::array<at::Tensor, 3>>;
APEX_TORCH_API std::optional<Fp8NewScales> fp8_new_scales(const at::Tensor& maxima,
                                                          const std::vector<at::Tensor>& histories,
                                                          const std::vector<at::Tensor>& scales, double margin,
                                                          bool most_recent);
}  // namespace apex
