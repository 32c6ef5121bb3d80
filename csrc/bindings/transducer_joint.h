// The transducer joint, output[b, t, u] = f[b, t] + g[b, u] with ReLU and dropout: checks, outputs, launches.
#pragma once
#include "generated/transducer_joint.h"
#include "checks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "zeroed_counters.h"

namespace apex {
namespace joint {
constexpr const char* op = "transducer_joint";

inline void check_lengths(const at::Tensor& tensor, const at::Tensor& f_len, const at::Tensor& g_len,
                          const OptionalTensor& batch_offset) {
  const auto one = [&](const char* name, const at::Tensor& lengths) {
    check_integers(op, name, lengths);
    TORCH_CHECK_VALUE(lengths.dim() == 1 && lengths.sym_size(0) == f_len.sym_size(0), op, ": ", name,
                      " has one element for each item of the batch, not the shape ", lengths.sym_sizes());
    TORCH_CHECK_VALUE(lengths.device() == tensor.device(), op, ": ", name, " is on ", lengths.device(), ", not on ",
                      tensor.device());
  };
  TORCH_CHECK_VALUE(f_len.dim() == 1, op, ": f_len has one element for each item of the batch, not the shape ",
                    f_len.sym_sizes());
  one("f_len", f_len);
  one("g_len", g_len);
  if (has_value(batch_offset)) one("batch_offset", *batch_offset);
}
// A CPU can look before it leaps; elsewhere such an item is nan.
inline void check_items(const at::Tensor& f_len, const at::Tensor& g_len, const OptionalTensor& batch_offset,
                        int64_t frames, int64_t labels, int64_t rows) {
  if (!f_len.is_cpu()) return;
  const at::Tensor f = f_len.to(at::kLong).contiguous(), g = g_len.to(at::kLong).contiguous();
  const at::Tensor ends = has_value(batch_offset) ? batch_offset->to(at::kLong).contiguous() : at::Tensor();
  for (int64_t b = 0, end = 0; b < f.numel(); ++b) {
    const int64_t t = f.const_data_ptr<int64_t>()[b], u = g.const_data_ptr<int64_t>()[b];
    TORCH_CHECK_VALUE(t >= 0 && t <= frames, op, ": f_len[", b, "] is ", t, ", but f has ", frames, " frames");
    TORCH_CHECK_VALUE(u >= 0 && u <= labels, op, ": g_len[", b, "] is ", u, ", but g has ", labels, " labels");
    if (!ends.defined()) continue;
    end += t * u;
    const int64_t given = ends.const_data_ptr<int64_t>()[b];
    TORCH_CHECK_VALUE(given == end, op, ": batch_offset[", b, "] is ", given,
                      ", but the sum of f_len * g_len up to it is ", end);
    TORCH_CHECK_VALUE(end <= rows, op, ": packed_batch is ", rows, ", less than the ", end, " rows of the items");
  }
}

// [batch, frames, labels, columns], or packed: [packed_batch, columns].
inline c10::SymDimVector output_sizes(const c10::SymInt& batch, const c10::SymInt& frames, const c10::SymInt& labels,
                                      const c10::SymInt& columns, const OptionalTensor& batch_offset,
                                      const c10::SymInt& packed_batch) {
  if (has_value(batch_offset)) return {packed_batch, columns};
  return {batch, frames, labels, columns};
}
// The lengths as the kernels take them; they must live as long as the arguments.
struct Lengths {
  at::Tensor f_len, g_len, batch_offset;
  template <class Arguments> Lengths(const at::Tensor& f, const at::Tensor& g, const OptionalTensor& offset,
                                     Arguments* a)
      : f_len(f.contiguous()), g_len(g.contiguous()) {
    if (f.scalar_type() != g.scalar_type()) f_len = f_len.to(at::kLong), g_len = g_len.to(at::kLong);
    a->f_len = bytes(f_len), a->g_len = bytes(g_len), a->wide_lengths = f_len.scalar_type() == at::kLong;
    if (!has_value(offset)) return;
    // Of no items it still says that the output is packed.
    batch_offset =
        offset->numel() ? offset->to(at::kLong).contiguous() : at::zeros({1}, offset->options().dtype(at::kLong));
    a->batch_offset = bytes(batch_offset);
  }
};
}  // namespace joint

inline void TransducerJointForward::check() const {
  constexpr const char* op = unit;
  element_type(op, f.scalar_type());
  TORCH_CHECK_TYPE(f.scalar_type() == g.scalar_type(), op, ": f and g must have one dtype, not ", f.scalar_type(),
                   " and ", g.scalar_type());
  TORCH_CHECK_VALUE(f.dim() == 3 && g.dim() == 3 && f.sym_size(0) == g.sym_size(0) && f.sym_size(2) == g.sym_size(2),
                    op, ": f [batch, frames, hidden] and g [batch, labels, hidden] do not fit: ", f.sym_sizes(), ", ",
                    g.sym_sizes());
  TORCH_CHECK_VALUE(f.device() == g.device(), op, ": f is on ", f.device(), " but g on ", g.device());
  joint::check_lengths(f, f_len, g_len, batch_offset);
  TORCH_CHECK_VALUE(f_len.sym_size(0) == f.sym_size(0), op,
                    ": f_len has one element for each item of the batch, not the shape ", f_len.sym_sizes());
  TORCH_CHECK_VALUE(packed_batch >= 0, op, ": packed_batch must not be negative");
  TORCH_CHECK_VALUE(dropout >= 0 && dropout <= 1, op, ": dropout_prob must be between 0 and 1, not ", dropout);
  TORCH_CHECK_VALUE(dropout == 0 || (has_value(seed) && seed->scalar_type() == at::kLong && seed->sym_numel() == 1 &&
                                     seed->device() == f.device()),
                    op, ": dropout needs a seed, one int64 on ", f.device());
}
inline TransducerJointForward::Result TransducerJointForward::outputs() const {
  const auto sizes = [&](const c10::SymInt& columns) {
    return joint::output_sizes(f.sym_size(0), f.sym_size(1), g.sym_size(1), columns, batch_offset, packed_batch);
  };
  const auto of_bits = f.options().dtype(at::kByte);
  return {at::empty_symint(sizes(f.sym_size(2)), f.options()),
          dropout > 0 ? at::empty_symint(sizes((f.sym_size(2) + 7) / 8), of_bits) : at::empty({0}, of_bits)};
}
inline bool TransducerJointForward::launch(const apex_place& place, Result& made) const {
  const int64_t rows =
      has_value(batch_offset) ? packed_batch.guard_int(__FILE__, __LINE__) : f.size(0) * f.size(1) * g.size(1);
  joint::check_items(f_len, g_len, batch_offset, f.size(1), g.size(1), rows);
  const at::Tensor x = f.contiguous(), y = g.contiguous();
  gpu::TransducerJointForward a{};
  const joint::Lengths lengths(f_len, g_len, batch_offset, &a);
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
  joint::check_lengths(grad_output, f_len, g_len, batch_offset);
  const c10::SymInt hidden = grad_output.sym_size(-1), batch = f_len.sym_size(0);
  const auto fits = [&](const at::Tensor& tensor, const c10::SymInt& columns) {
    const bool packed = has_value(batch_offset);
    return tensor.device() == grad_output.device() &&
           tensor.sym_sizes() ==
               c10::SymIntArrayRef(joint::output_sizes(batch, max_f_len, max_g_len, columns, batch_offset,
                                                       packed ? grad_output.sym_size(0) : 0));
  };
  TORCH_CHECK_VALUE(grad_output.dim() == (has_value(batch_offset) ? 2 : 4) && fits(grad_output, hidden), op,
                    ": the gradient's shape ", grad_output.sym_sizes(), " is not the output's: ", batch, " items, ",
                    max_f_len, " frames, ", max_g_len, " labels");
  TORCH_CHECK_VALUE(!has_value(mask) || (mask->scalar_type() == at::kByte && fits(*mask, (hidden + 7) / 8)), op,
                    ": the mask is not the forward's");
  TORCH_CHECK_VALUE(has_value(f) == has_value(g), op, ": f goes with g");
  if (has_value(f))
    for (const auto& [tensor, size] : {std::pair{*f, max_f_len}, std::pair{*g, max_g_len}})
      TORCH_CHECK_VALUE(tensor.scalar_type() == grad_output.scalar_type() && tensor.device() == grad_output.device() &&
                            tensor.dim() == 3 && tensor.sym_size(0) == batch && tensor.sym_size(1) == size &&
                            tensor.sym_size(2) == hidden,
                        op, ": f or g is not the forward's: ", tensor.scalar_type(), " of shape ", tensor.sym_sizes());
}
inline TransducerJointBackward::Result TransducerJointBackward::outputs() const {
  const auto like = [&](const c10::SymInt& size) {
    return at::empty_symint(c10::SymDimVector{f_len.sym_size(0), size, grad_output.sym_size(-1)},
                            grad_output.options());
  };
  return {like(max_f_len), like(max_g_len)};
}
inline bool TransducerJointBackward::launch(const apex_place& place, Result& made) const {
  gpu::TransducerJointBackward a{};
  a.batch = f_len.size(0), a.hidden = grad_output.size(-1);
  a.frames = max_f_len.guard_int(__FILE__, __LINE__), a.labels = max_g_len.guard_int(__FILE__, __LINE__);
  a.rows = has_value(batch_offset) ? grad_output.size(0) : a.batch * a.frames * a.labels;
  joint::check_items(f_len, g_len, batch_offset, a.frames, a.labels, a.rows);
  const joint::Lengths lengths(f_len, g_len, batch_offset, &a);
  const at::Tensor grad = grad_output.contiguous(), bits = contiguous(mask), x = contiguous(f), y = contiguous(g);
  made = outputs();
  const auto& [grad_f, grad_g] = made;
  a.grad_output = bytes(grad), a.grad_f = mutable_bytes(grad_f), a.grad_g = mutable_bytes(grad_g);
  if (bits.defined()) a.mask = bytes(bits);
  else if (x.defined()) a.f = bytes(x), a.g = bytes(y);
  a.scale = scale;
  a.type = element_type(unit, grad.scalar_type());
  int32_t variant;
  if (use_reference(apex_transducer_joint_prepare(&place, &a, &variant), unit)) return false;
  at::Tensor partials;
  ZeroedCounters counters;
  if (a.splits > 1) {
    partials = at::empty({a.splits, a.batch, a.labels, a.hidden}, grad.options().dtype(math_type(grad)));
    counters = ZeroedCounters(place, grad.device(), a.batch * a.hidden);
    a.partials = mutable_bytes(partials), a.counters = reinterpret_cast<gpu::u8*>(counters.data());
  }
  return !use_reference(apex_transducer_joint_backward(&place, &a, variant), unit);
}
}  // namespace apex
