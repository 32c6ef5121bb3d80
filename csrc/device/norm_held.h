// Rows of halves that a block holds in registers, packed: the row that is worked on, the next one, and weights of the
// same type. Against the stages in shared memory of row_stream.h nothing is copied twice and no barrier comes before
// the first row, which shows where a row is written as a byte an element: 8192 rows of 4096 take an H200 26 us in place
// of 32.
#pragma once
#include "norm_rows.h"

namespace gpu {
#if !defined(GPU_HOST)
// As RowStream, one row ahead.
template <int width, int vectors> struct HeldRows {
  const RowPart<width, vectors>& part;
  const u8* from;
  Words now[vectors], ahead[vectors];

  template <int tensors>
  GPU_FN HeldRows(const RowTensor (&from_)[tensors], const RowTeam&, const RowPart<width, vectors>& part_, u8*, i32)
      : part(part_), from(from_[0].memory) {}
  GPU_FN u32 depth() const { return 1; }
  GPU_FN void start(u32, bool there, i64 at) { fetch(there, at); }
  GPU_FN void next(bool there, i64 at) {
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) now[v] = ahead[v];
    fetch(there, at);
  }
  GPU_FN Words read(int, int v) const { return now[v]; }

 private:
  GPU_FN void fetch(bool there, i64 at) {
    const Words* const row = reinterpret_cast<const Words*>(from + at * 2);
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v)
      ahead[v] = there && part.has(v) ? load_once(row + part.offset(v) / width) : Words{};
  }
};
// As RowConstants.
template <i32 type, int width, int vectors> struct HeldConstants {
  Words kept[vectors];

  GPU_FN HeldConstants(const u8* from, i32, float otherwise, const RowTeam&, const RowPart<width, vectors>& part,
                       const Vector<float, 4>*) {
    float same[width];
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) same[i] = otherwise;
    GPU_UNROLL_FOR (int v = 0; v < vectors; ++v) {
      kept[v] = pack(same, type);
      if (from && part.has(v)) kept[v] = load_words<width>(from + (part.begin + part.offset(v)) * 2, type);
    }
  }
  GPU_FN void read(float (&x)[width], int v) const { unpack(x, kept[v], type); }
};
struct Held {
  static constexpr bool staged = false;
  template <i32, int width, int vectors> using Rows = HeldRows<width, vectors>;
  template <i32 type, int width, int vectors> using Constants = HeldConstants<type, width, vectors>;
};

// An RMS norm: mean and bias of a layer norm would leave too few registers.
template <i32 type, class Output> GPU_FN float norm_forward_held(const NormForward& a, Output out) {
  return norm_forward_rows<false, type, 8, norm_held_vectors, Output, Held>(a, out);
}
#endif
}  // namespace gpu
