// softmax(scale * input) over the last dimension, where masked elements are zero: what kernels, launches and CPU
// variants agree on.
//
// Masked are elements whose byte of the mask is not 0 and, if causal, those past the diagonal that ends in the last
// row's last element: query q keeps the first keys - queries + q + 1 keys. A row that keeps nothing is zeros.
#pragma once
#include "gpu.h"

namespace gpu {
constexpr u32 softmax_threads = 512;        // of a block, at most
constexpr u32 softmax_fixed_threads = 128;  // likewise of kernels that give each row one warp, or two
constexpr u32 softmax_held_threads = 1024;  // of a block of those that give each row a block and hold the next one too
constexpr int softmax_held_warps = softmax_held_threads / warp_size;

struct SoftmaxForward {
  const u8* input;  // [rows][keys]; rows = batch * heads * queries
  const u8* mask;   // bytes, or as `additive` says; or null
  u8* output;       // [rows][keys]; with dropout, after it
  i64 rows, keys, heads, queries;
  i64 mask_batch, mask_head, mask_query;  // the mask's strides, in bytes; its keys lie side by side
  double magnitude;                       // of the scale, and never 0: -inf times it is -inf
  float factor, factor_rest;              // magnitude / ln 2, and what rounding took from it
  i32 negative;                           // the scale is below 0
  i32 type;                               // of input and output
  i32 causal;
  i32 lanes;       // 2^lanes share a row, up to a warp, or of the `few` kernels a block; -1: the block does
  i32 shift;       // elements between the last multiple of 16 bytes and the tensors' first element, the same for all
  i32 waiting;     // of the `held` kernels: vectors of the next row that a thread has on their way
  i32 strip_rows;  // of the `strip` kernels; so many rows are whole vectors
  // Of the kernels with dropout:
  i32 additive;      // the mask has numbers of the input's type, which are added; -inf takes an element out
  const u8* seed;    // one i64, the key of the random numbers; null: nothing is dropped
  u8* softmax;       // [rows][keys]: what dropout takes from; with a seed
  u8* kept;          // [rows][keys]: bytes, 1 where it keeps; or null; likewise
  double kept_by;    // what it multiplies by what it keeps
  float kept_scale;  // the same
  u32 keep;          // how many it keeps, of 2^32
};

struct SoftmaxBackward {
  const u8* grad_output;  // [rows][keys]
  const u8* output;       // likewise, of the forward
  u8* grad_input;         // likewise: scale * output * (grad_output - sum(output * grad_output))
  i64 rows, keys, queries;
  double scale;
  float factor;                    // the scale
  i32 type, causal, lanes, shift;  // as above
  i32 waiting;                     // likewise: of the gradient; all of the output's are
  i32 strip_rows;
  u32 keep;        // as above, where dropout gave the gradient; the scale is its own
  const u8* seed;  // likewise; or
  const u8* kept;  // its bytes; or null
};

// How many keys a row keeps, the mask aside.
GPU_FN i64 softmax_length(i64 keys, i64 queries, i64 query, bool causal) {
  const i64 length = keys - queries + query + 1;
  return !causal || length > keys ? keys : length < 0 ? 0 : length;
}

// The least finite number: where maxima begin of rows that keep something, so that a row of -inf alone differs from
// one that keeps nothing, which has minus_infinity.
template <class Math> struct Least;
template <> struct Least<float> { static constexpr float finite = -3.4028234663852886e+38f; };
template <> struct Least<double> { static constexpr double finite = -1.7976931348623157e+308; };
GPU_FN float minus_infinity(float) { return bit_cast<float>(0xff800000u); }
GPU_FN double minus_infinity(double) { return bit_cast<double>(0xfff0000000000000ull); }
}  // namespace gpu
