// Cross entropy of few rows, all of them whole vectors of 16 bytes, a vector a thread (few_rows.h).
#pragma once
#include "few_rows.h"
#include "xentropy.h"

namespace gpu {
#if !defined(GPU_HOST)
// What a thread has of its row; all its loads are on their way at once.
template <i32 type> struct FewLogits {
  using Row = Packet<type>;
  static constexpr int width = Row::width;
  FewRow place;
  bool is_row, has;  // there is such a row; the vector is one of it
  i64 row;           // or the first, where there is none

  template <class Arguments> GPU_FN explicit FewLogits(const Arguments& a) : place(a.log_threads) {
    is_row = place.row < (u32)a.rows;
    has = is_row && place.rank < (u32)a.classes / width;
    row = is_row ? place.row : 0;
  }
  template <class Arguments> GPU_FN Words load(const Arguments& a) const {
    return has ? reinterpret_cast<const Words*>(a.logits + row * a.row_stride * Row::size)[place.rank] : Words{};
  }
  // The label's element of the thread's vector; `width` or more where another thread has it.
  GPU_FN u32 label_element(const RowLabel& label) const {
    return label.kind == Label::taken ? (u32)label.index - place.rank * width : ~0u;
  }
};

template <i32 type> GPU_FN void xentropy_forward_few(const XentropyForward& a) {
  using Logits = FewLogits<type>;
  constexpr int width = Logits::width;
  GPU_SHARED(float, parts, 4 * FewRow::most_warps);
  const Logits logits(a);
  await_previous_kernel();
  const Words raw = logits.load(a);
  const RowLabel label(a, logits.row);
  float x[width];
  Logits::Row::unpack_raw(x, raw);
  float largest[1] = {LogitSums<float>().largest};
  if (logits.has)
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) largest[0] = max_number(largest[0], x[i]);
  logits.place.template reduce<Larger>(largest, parts);
  float sums[3] = {};  // of powers, of logits, of the label's logit alone
  const u32 mine = logits.label_element(label);
  if (logits.has)
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
      sums[0] += power_of_e(x[i] - largest[0]);
      sums[1] += x[i];
      if (mine == (u32)i) sums[2] = x[i];
    }
  logits.place.template reduce<Sum>(sums, parts + FewRow::most_warps);
  if (!logits.is_row || logits.place.rank != 0) return;
  LogitSums<float> found;
  found.largest = largest[0], found.sum = sums[0], found.total = sums[1];
  write_loss(a, logits.row, label.kind, found, sums[2]);
}

template <i32 type> GPU_FN void xentropy_backward_few(const XentropyBackward& a) {
  using Logits = FewLogits<type>;
  constexpr int width = Logits::width;
  const Logits logits(a);
  await_previous_kernel();
  const Words raw = logits.load(a);
  const RowLabel label(a, logits.row);
  const LogitGradient<float> gradient(a, logits.row, label.kind);
  float x[width] = {};
  if (label.kind != Label::ignored) {
    Logits::Row::unpack_raw(x, raw);
    const u32 mine = logits.label_element(label);
    GPU_UNROLL_FOR (int i = 0; i < width; ++i) x[i] = gradient(x[i]) - (mine == (u32)i ? gradient.of_label : 0.0f);
  }
  if (logits.has)
    reinterpret_cast<Words*>(a.grad_logits + logits.row * a.classes * Logits::Row::size)[logits.place.rank] =
        Logits::Row::pack_raw(x);
}
#endif
}  // namespace gpu
