// The transducer joint, output[b, t, u] = f[b, t] + g[b, u] with ReLU and dropout: checks, outputs, launches.
#pragma once
#include "generated/transducer_joint.h"
#include "transducer_lengths.h"

#include <ATen/ops/empty.h>

#include <cmath>

namespace apex {
namespace joint {
// [batch, frames, labels, columns], or packed: [packed_batch, columns].
inline c10::SymDimVector output_sizes(const c10::SymInt& batch, const c10::SymInt& frames, const c10::SymInt& labels,
                                      const c10::SymInt& columns, const OptionalTensor& batch_offset,
                                      const c10::SymInt& packed_batch) {
  if (has_value(batch_offset)) return {packed_batch, columns};
  return {batch, frames, labels, columns};
}
}  // namespace joint

inline void TransducerJointForward::check() const {
  constexpr const char* op = unit;
  element_type(op, f.scalar_type());
  TORCH_CHECK_TYPE(f.scalar_type() == g.scalar_type(), op, ": f and g must have one dtype, not ", f.scalar_type(),
                   " and ", g.scalar_type());
  TORCH_CHECK_VALUE(f.dim() == 3 && g.dim() == 3 && f.sym_size(0) == g.sym_size(0) && f.sym_size(2) == g.sym_size(2),
                    op, ": f [batch, frames, hidden] and g [batch, labels, hidden] do not fit: ", f.sym_sizes(), ", ",
                    g.sym_sizes());
  check_lengths(op, f_len, "g_len", g_len, batch_offset, f.sym_size(0));
  TORCH_CHECK_VALUE(packed_batch >= 0, op, ": packed_batch must not be negative");
  TORCH_CHECK_VALUE(dropout >= 0 && dropout <= 1, op, ": dropout_prob must be between 0 and 1, not ", dropout);
  check_seed(op, dropout, seed, f);
}
inline TransducerJointForward::Result TransducerJointForward::outputs() const {
  const auto sizes = [&](const c10::SymInt& columns) {
    return joint::output_sizes(f.sym_size(0), f.sym_size(1), g.sym_size(1), columns, batch_offset, packed_batch);
  };
  const auto of_bits = f.options().dtype(at::kByte);
  return {at::empty_symint(sizes(f.sym_size(2)), f.options()),
          dropout > 0 ? at::empty_symint(sizes((f.sym_size(2) + 7) / 8), of_bits) : no_elements(f, at::kByte)};
}
inline bool TransducerJointForward::launch(const apex_place& place, Result& made) const {
  const int64_t rows =
      has_value(batch_offset) ? packed_batch.guard_int(__FILE__, __LINE__) : f.size(0) * f.size(1) * g.size(1);
  const at::Tensor x = f.contiguous(), y = g.contiguous();
  gpu::TransducerJointForward a{};
  const Lengths lengths(f_len, g_len, batch_offset, &a);
  made = outputs();
  const auto& [output, mask] = made;
  a.f = bytes(x), a.g = bytes(y), a.output = mutable_bytes(output);
  if (dropout > 0) a.seed = bytes(*seed), a.mask = mutable_bytes(mask);
  a.batch = f.size(0), a.frames = f.size(1), a.labels = g.size(1), a.hidden = f.size(2), a.rows = rows;
  a.scale = dropout < 1 ? 1 / (1 - dropout) : 0;
  a.keep = gpu::u32(std::lround((1 - dropout) * 65536));
  a.type = element_type(unit, f.scalar_type());
  a.relu = relu;
  return !use_reference(apex_transducer_joint_forward(&place, &a), unit);
}

inline void TransducerJointBackward::check() const {
  constexpr const char* op = unit;
  element_type(op, grad_output.scalar_type());
  const at::ScalarType type = grad_output.scalar_type();
  check_lengths(op, f_len, "g_len", g_len, batch_offset, f_len.sym_numel());
  TORCH_CHECK_VALUE(grad_output.dim() == (has_value(batch_offset) ? 2 : 4), op, ": the gradient has ",
                    grad_output.dim(), " dimensions; packed it has 2, else 4");
  const c10::SymInt hidden = grad_output.sym_size(-1), batch = f_len.sym_size(0), rows = grad_output.sym_size(0);
  const auto sizes = [&](const c10::SymInt& columns) {
    return joint::output_sizes(batch, max_f_len, max_g_len, columns, batch_offset, rows);
  };
  check_like(op, "the gradient", grad_output, sizes(hidden), type, "the output's ");
  check_like(op, "the mask", mask, sizes((hidden + 7) / 8), at::kByte, "the forward's ");
  TORCH_CHECK_VALUE(has_value(f) == has_value(g), op, ": f goes with g");
  check_like(op, "f", f, c10::SymDimVector{batch, max_f_len, hidden}, type, "the forward's ");
  check_like(op, "g", g, c10::SymDimVector{batch, max_g_len, hidden}, type, "the forward's ");
}
inline TransducerJointBackward::Result TransducerJointBackward::outputs() const {
  const c10::SymInt batch = f_len.sym_size(0), hidden = grad_output.sym_size(-1);
  const auto options = grad_output.options();
  return {at::empty_symint({batch, max_f_len, hidden}, options), at::empty_symint({batch, max_g_len, hidden}, options)};
}
inline bool TransducerJointBackward::launch(const apex_place& place, Result& made) const {
  gpu::TransducerJointBackward a{};
  a.batch = f_len.size(0), a.hidden = grad_output.size(-1);
  a.frames = max_f_len.guard_int(__FILE__, __LINE__), a.labels = max_g_len.guard_int(__FILE__, __LINE__);
  a.rows = has_value(batch_offset) ? grad_output.size(0) : a.batch * a.frames * a.labels;
  const Lengths lengths(f_len, g_len, batch_offset, &a);
  const at::Tensor grad = grad_output.contiguous(), bits = contiguous(mask), x = contiguous(f), y = contiguous(g);
  made = outputs();
  const auto& [grad_f, grad_g] = made;
  a.grad_output = bytes(grad), a.grad_f = mutable_bytes(grad_f), a.grad_g = mutable_bytes(grad_g);
  if (bits.defined()) a.mask = bytes(bits);
  else if (x.defined()) a.f = bytes(x), a.g = bytes(y);
  a.scale = scale;
  a.type = element_type(unit, grad.scalar_type());
  return run_with_workspace(&apex_transducer_joint_backward, place, a, unit, grad.device());
}
}  // namespace apex
