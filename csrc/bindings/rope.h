// Rotary embeddings. A turn's gradient is the turn back, and that one's gradient the turn: both ops take one set of
// arguments (generated/shared_rope.h), and these functions.
#pragma once
#include "checks.h"
#include "generated/shared_rope.h"
#include "host/rope.h"

#include <ATen/ops/empty.h>

namespace apex {
namespace rope {
inline bool is_image(const Arguments& t) { return has_value(t.cos_w); }
inline bool is_packed(const Arguments& t) { return has_value(t.cu_seqlens); }

inline void check_table(const char* name, const at::Tensor& table, const at::Tensor& cos) {
  TORCH_CHECK_VALUE(table.dim() == 4, "rope: ", name, " must have 4 dimensions, not ", table.dim());
  TORCH_CHECK_TYPE(table.scalar_type() == cos.scalar_type(), "rope: ", name, " is ", table.scalar_type(),
                   " but the first table is ", cos.scalar_type(), ": all must have one dtype");
}
// Looks at no element.
inline void check(const Arguments& t) {
  const at::Tensor& input = t.input;
  element_type("rope", input.scalar_type());
  element_type("rope", t.cos.scalar_type());
  const char* first = has_value(t.sin) ? "cos" : "freqs";
  check_table(first, t.cos, t.cos);
  if (has_value(t.sin)) check_table("sin", *t.sin, t.cos);
  check_like("rope", "sin", t.sin, t.cos.sym_sizes(), std::nullopt, "the cosines' ");
  const c10::SymInt rotary = t.cos.sym_size(3);
  TORCH_CHECK_VALUE(rotary % 2 == 0, "rope: the last dimension of ", first, " is ", rotary,
                    "; pairs need an even number");
  if (is_image(t)) {
    TORCH_CHECK_VALUE(has_value(t.sin) && has_value(t.sin_w) && !is_packed(t),
                      "rope: images need cos and sin of both directions, and no cu_seqlens");
    TORCH_CHECK_VALUE(input.dim() == 5, "rope: an image has 5 dimensions [batch, height, width, heads, dim], not ",
                      input.dim());
    check_table("cos_w", *t.cos_w, t.cos);
    check_table("sin_w", *t.sin_w, t.cos);
    check_like("rope", "sin_w", t.sin_w, t.cos_w->sym_sizes(), std::nullopt, "the cosines' ");
    for (int side = 0; side < 2; ++side) {
      const at::Tensor& table = side ? *t.cos_w : t.cos;
      const char* name = side ? "cos_w and sin_w" : "cos_h and sin_h";
      TORCH_CHECK_VALUE(
          table.sym_size(0) == 1 && table.sym_size(2) == 1 && table.sym_size(1) >= input.sym_size(1 + side),
          "rope: ", name, " must be [1, n, 1, dim / 2] with n at least ", input.sym_size(1 + side), ", not ",
          table.sym_sizes());
      TORCH_CHECK_VALUE(table.sym_size(3) * 2 == input.sym_size(4), "rope: the last dimension of ", name,
                        " must be half of the input's ", input.sym_size(4), ", not ", table.sym_size(3));
    }
    return;
  }
  TORCH_CHECK_VALUE(!has_value(t.sin_w), "rope: sin_w without cos_w");
  TORCH_CHECK_VALUE(t.cos.sym_size(1) == 1 && t.cos.sym_size(2) == 1, "rope: ", first,
                    " must be [places, 1, 1, dim], not ", t.cos.sym_sizes());
  TORCH_CHECK_VALUE(rotary <= input.sym_size(-1), "rope: the last dimension of ", first, ", ", rotary,
                    ", is more than the input's ", input.sym_size(-1));
  if (is_packed(t)) {
    const at::Tensor& ends = *t.cu_seqlens;
    TORCH_CHECK_VALUE(input.dim() == 3, "rope: with cu_seqlens the input has 3 dimensions [places, heads, dim], not ",
                      input.dim());
    TORCH_CHECK_TYPE(ends.scalar_type() == at::kInt, "rope: cu_seqlens must be int32, not ", ends.scalar_type());
    TORCH_CHECK_VALUE(ends.dim() == 1 && ends.sym_size(0) >= 1, "rope: cu_seqlens must be [sequences + 1], not ",
                      ends.sym_sizes());
  } else {
    TORCH_CHECK_VALUE(input.dim() == 4, "rope: the input must have 4 dimensions [places, batch, heads, dim], not ",
                      input.dim());
    TORCH_CHECK_VALUE(t.cos.sym_size(0) == input.sym_size(0), "rope: ", first, " has ", t.cos.sym_size(0),
                      " places but the input ", input.sym_size(0));
  }
}
// An output of the input's shape; transposed: the memory of one whose first two dimensions are exchanged.
inline Results outputs(const Arguments& t) {
  const at::Tensor& input = t.input;
  if (!t.transpose_output || is_image(t) || is_packed(t)) return {at::empty_symint(input.sym_sizes(), input.options())};
  const auto sizes = input.sym_sizes();
  return {at::empty_symint({sizes[1], sizes[0], sizes[2], sizes[3]}, input.options()).transpose(0, 1)};
}

inline bool launch(const Arguments& t, const apex_place& place, Results& made) {
  const at::Tensor& input = t.input;
  made = outputs(t);
  const at::Tensor& output = made.output;
  gpu::Rope a{};
  a.input = bytes(input);
  a.output = mutable_bytes(output);
  // [batch, height, width, heads, element] of both; -1: a dimension that is not there.
  const int image[] = {0, 1, 2, 3, 4}, packed[] = {-1, -1, 0, 1, 2}, plain[] = {1, -1, 0, 2, 3};
  const int* const at = is_image(t) ? image : is_packed(t) ? packed : plain;
  const auto size = [&](int i) { return at[i] < 0 ? 1 : input.size(at[i]); };
  const auto stride = [&](const at::Tensor& tensor, int i) { return at[i] < 0 ? 0 : tensor.stride(at[i]); };
  a.batch = size(0), a.height = size(1), a.width = size(2), a.heads = size(3);
  a.dim = int32_t(size(4));
  TORCH_CHECK_VALUE(size(4) <= 0x7fffffff, "rope: a head of ", size(4), " elements");
  a.in_batch = stride(input, 0), a.in_y = stride(input, 1), a.in_x = stride(input, 2), a.in_head = stride(input, 3),
  a.in_element = stride(input, 4);
  a.out_batch = stride(output, 0), a.out_y = stride(output, 1), a.out_x = stride(output, 2),
  a.out_head = stride(output, 3);

  const int rows = is_image(t) ? 1 : 0;  // the tables' dimension
  // Kernels read tables as they lie, if cos and sin lie alike.
  const auto alike = [&](const at::Tensor& cos, const OptionalTensor& sin) {
    if (!has_value(sin)) return std::pair(cos, at::Tensor());
    return sin->strides() == cos.strides() ? std::pair(cos, *sin) : std::pair(cos.contiguous(), sin->contiguous());
  };
  const auto [cos, sin] = alike(t.cos, t.sin);
  const auto [cos_x, sin_x] = is_image(t) ? alike(*t.cos_w, t.sin_w) : std::pair<at::Tensor, at::Tensor>();
  a.cos = bytes(cos), a.sin = bytes(sin), a.cos_x = bytes(cos_x), a.sin_x = bytes(sin_x);
  a.angle_stride = cos.stride(rows), a.angle_step = cos.stride(3), a.angle_rows = cos.size(rows);
  if (is_image(t)) a.angle_stride_x = cos_x.stride(rows), a.angle_step_x = cos_x.stride(3);
  at::Tensor ends;
  if (is_packed(t)) {
    ends = t.cu_seqlens->contiguous();
    a.cu_seqlens = ends.const_data_ptr<int32_t>();
    a.sequences = int32_t(ends.numel() - 1);
  }
  a.groups = is_image(t) ? 2 : 1;
  a.rotary = int32_t(cos.size(3));
  a.type = element_type("rope", input.scalar_type());
  a.angle_type = element_type("rope", cos.scalar_type());
  a.transposed = !t.is_forward;
  return !use_reference(apex_rope(&place, &a), "rope");
}
}  // namespace rope
}  // namespace apex
