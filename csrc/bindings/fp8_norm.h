// fp8_layer_norm and fp8_rms_norm: norms of the last dimension whose output is FP8. Each function is one of both, which
// differ in the arguments that they have (generated/shared_fp8_norm.h).
#pragma once
#include "fp8.h"
#include "generated/shared_fp8_norm.h"
#include "host/fp8_layer_norm.h"
#include "host/fp8_rms_norm.h"

#include <limits>

namespace apex::fp8_norm {
inline bool is_centered(const Arguments& in) { return in.unit[4] == 'l'; }  // fp8_layer_norm, not fp8_rms_norm

inline void check(const Arguments& in) {
  const char* op = in.unit;
  fp8::format_of(op, in.dtype);
  fp8::type_of(op, in.input.scalar_type());
  fp8::check_input(op, in.input);
  fp8::check_number(op, "scale", in.scale);
  if (has_value(in.amax)) fp8::check_number(op, "amax", *in.amax);
  for (const OptionalTensor* w : {&in.weight, &in.bias}) {
    if (!has_value(*w)) continue;
    const char* name = w == &in.weight ? "weight" : "bias";
    fp8::type_of(op, (*w)->scalar_type());
    check_like(op, name, **w, c10::SymDimVector{in.input.sym_size(-1)}, std::nullopt, "the input's last, ");
  }
  check_one_dtype(op, in.weight, in.bias);
}
inline Results outputs(const Arguments& in) {
  Results made;
  const std::vector<c10::SymInt> rows{fp8::rows_of(in.input)};
  made.output = fp8::empty_like_of(in.input, in.input.sym_sizes(), *in.dtype);
  if (is_centered(in)) made.mean = fp8::empty_like_of(in.input, rows, at::kFloat);
  made.rstd = fp8::empty_like_of(in.input, rows, at::kFloat);
  return made;
}
inline bool launch(const Arguments& in, const apex_place& place, Results& made) {
  const char* op = in.unit;
  const at::Tensor x = in.input.contiguous(), w = contiguous(in.weight), b = contiguous(in.bias);
  made = outputs(in);
  gpu::NormForward a{};
  a.input = bytes(x), a.weight = bytes(w), a.bias = bytes(b);
  a.output = mutable_bytes(made.output), a.mean = mutable_bytes(made.mean), a.rstd = mutable_bytes(made.rstd);
  a.rows = made.rstd.numel(), a.hidden = x.size(-1), a.eps = in.eps;
  a.input_type = a.output_type = fp8::type_of(op, x.scalar_type());
  a.weight_type = w.defined() || b.defined() ? fp8::type_of(op, (w.defined() ? w : b).scalar_type()) : a.input_type;
  const gpu::Fp8Norm codes{fp8::number_of(in.scale), fp8::written_number(in.amax), fp8::format_of(op, in.dtype),
                           in.zero_centered_gamma};
  if (use_reference((is_centered(in) ? &apex_fp8_layer_norm : &apex_fp8_rms_norm)(&place, &a, &codes), op))
    return false;
  if (a.hidden == 0) {
    if (made.mean.defined()) made.mean.fill_(std::numeric_limits<double>::quiet_NaN());
    made.rstd.fill_(std::numeric_limits<double>::quiet_NaN());
  }
  return true;
}
}  // namespace apex::fp8_norm
