// Softmax of few rows, all of them whole vectors of 16 bytes, a vector a thread (few_rows.h).
#pragma once
#include "few_rows.h"
#include "softmax_row.h"

namespace gpu {
#if !defined(GPU_HOST)
// What a thread has of its row.
template <i32 type> struct FewElements {
  static constexpr int width = type == type_f32 ? 4 : 8;
  bool there;  // the vector is one of the row's
  i32 kept;    // elements of it, and of the row past it, that are kept; none: 0 or less
  u32 offset;  // of the vector, in vectors of the tensor

  template <class Arguments> GPU_FN FewElements(const Arguments& a, const FewRow& place) {
    const u32 vectors = (u32)a.keys / width, first = place.rank * width;
    there = place.row < (u32)a.rows && place.rank < vectors;
    u32 length = (u32)a.keys;
    if (a.causal) length = (u32)softmax_length(a.keys, a.queries, place.row % (u32)a.queries, true);
    kept = there ? (i32)(length - first) : 0;
    offset = place.row * vectors + place.rank;
  }
  // Puts `by`, two halves or a float, in the place of what the vector does not keep.
  GPU_FN void replace(Words& w, u32 by) const {
    if (kept > 0 && kept < width) replace_words<width>(w, ((1u << width) - 1) & ~0u << kept, by);
  }
};

// The row's part of the mask that is a thread's.
template <int width> GPU_FN Vector<u32, width / 4> few_mask(const SoftmaxForward& a, const FewRow& place) {
  const u32 group = place.row / (u32)a.queries, query = place.row - group * (u32)a.queries;
  const u32 batch = group / (u32)a.heads, head = group - batch * (u32)a.heads;
  const u8* const mask = a.mask + batch * a.mask_batch + head * a.mask_head + query * a.mask_query;
  return *reinterpret_cast<const Vector<u32, width / 4>*>(mask + place.rank * width);
}

template <i32 type, bool masked> GPU_FN void softmax_forward_few(const SoftmaxForward& a) {
  using Elements = FewElements<type>;
  constexpr int width = Elements::width;
  constexpr bool exact = type == type_f32;
  constexpr u32 lowest = type == type_f32 ? 0xff800000u : type == type_bf16 ? 0xff80ff80u : 0xfc00fc00u;  // -inf
  GPU_SHARED(float, parts, 2 * FewRow::most_warps);
  const FewRow place(a.lanes);
  const Elements mine(a, place);
  const Exponential<float, exact> exponential(a);
  Words* const to = reinterpret_cast<Words*>(a.output) + mine.offset;
  Words words{}, out{};
  await_previous_kernel();
  if (mine.kept > 0) {
    words = reinterpret_cast<const Words*>(a.input)[mine.offset];
    if constexpr (masked) out = ones_of_mask<width>(few_mask<width>(a, place));
  }
  float top[1] = {masked ? minus_infinity(0.0f) : Least<float>::finite}, x[width] = {};
  if (mine.kept > 0) {
    const u32 signs = !a.negative ? 0u : type == type_f32 ? 0x80000000u : 0x80008000u;  // to be turned
    if (masked) mine.replace(out, ~0u);
    GPU_UNROLL_FOR (int k = 0; k < 4; ++k) words.v[k] = ((words.v[k] ^ signs) & ~out.v[k]) | (lowest & out.v[k]);
    if (masked && (out.v[0] & out.v[1] & out.v[2] & out.v[3]) != ~0u) top[0] = Least<float>::finite;
    if (!masked) mine.replace(words, lowest);
    unpack(x, words, type);
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) top[0] = max_number(top[0], x[i]);
  }
  place.reduce<Larger>(top, parts);
  const bool nothing = masked && top[0] == minus_infinity(0.0f);
  if (nothing) top[0] = 0.0f;
  float sum[1] = {};
  if (mine.kept > 0)
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) sum[0] += x[i] = exponential(x[i], top[0]);
  place.reduce<Sum>(sum, parts + FewRow::most_warps);
  const float reciprocal = nothing ? 0.0f : divide(1.0f, sum[0]);
  GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = quotient<exact>(x[i], sum[0], reciprocal);
  words = mine.kept > 0 ? pack(x, type) : Words{};
  mine.replace(words, 0);  // in rows of nan too
  if (mine.there) *to = words;
}

template <i32 type> GPU_FN void softmax_backward_few(const SoftmaxBackward& a) {
  using Elements = FewElements<type>;
  constexpr int width = Elements::width;
  GPU_SHARED(float, parts, FewRow::most_warps);
  const FewRow place(a.lanes);
  const Elements mine(a, place);
  Words* const to = reinterpret_cast<Words*>(a.grad_input) + mine.offset;
  Words output{}, grad{};
  await_previous_kernel();
  if (mine.kept > 0) {
    output = reinterpret_cast<const Words*>(a.output)[mine.offset];
    grad = reinterpret_cast<const Words*>(a.grad_output)[mine.offset];
    mine.replace(output, 0);
    mine.replace(grad, 0);
  }
  float y[width], dy[width], sum[1] = {};
  unpack(y, output, type);
  unpack(dy, grad, type);
  GPU_UNROLL_FOR (int i = 0; i < width; ++i) sum[0] = fma(y[i], dy[i], sum[0]);
  place.reduce<Sum>(sum, parts);
  const float scaled = -sum[0] * a.factor;
  GPU_UNROLL_FOR (int i = 0; i < width; ++i) y[i] *= fma(dy[i], a.factor, scaled);
  Words result = pack(y, type);
  mine.replace(result, 0);  // in rows of nan too
  if (mine.there) *to = result;
}
#endif
}  // namespace gpu
