// The gradient of a weight, added to what is there: one product of the vendor's BLAS or of torch, or the reference.
#pragma once
#include "generated/wgrad_gemm_accum.h"
#include "checks.h"
#include "products.h"

namespace apex {
namespace wgrad {
inline c10::SymInt row_count(const at::Tensor& tensor) {
  c10::SymInt count = 1;
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d) count = count * tensor.sym_size(d);
  return count;
}
inline bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// Whether several elements of a matrix may be one in memory.
inline bool overlaps_itself(const at::Tensor& matrix) {
  if (matrix.numel() == 0) return false;
  const int64_t inner = matrix.stride(0) < matrix.stride(1) ? 0 : 1;
  int64_t reach = 1;
  for (const int64_t d : {inner, 1 - inner}) {
    if (matrix.size(d) == 1) continue;
    if (matrix.stride(d) < reach) return true;
    reach += (matrix.size(d) - 1) * matrix.stride(d);
  }
  return false;
}
// Of memory that is there.
inline void check_memory(const char* op, const at::Tensor& main_grad, const at::Tensor& input,
                         const at::Tensor& grad_output) {
  TORCH_CHECK_VALUE(!overlaps_itself(main_grad), op, ": main_grad overlaps itself (sizes ", main_grad.sizes(),
                    ", strides ", main_grad.strides(), "): it cannot be written; pass a contiguous tensor");
  for (const at::Tensor* read : {&input, &grad_output})
    TORCH_CHECK_VALUE(!share_memory(main_grad, *read), op, ": main_grad shares memory with ",
                      read == &input ? "the input" : "grad_output", ", which is read while main_grad is written");
}
}  // namespace wgrad

inline void WgradGemmAccum::check() const {
  const at::ScalarType type = input.scalar_type(), of_main = main_grad.scalar_type();
  element_type(name, type);
  TORCH_CHECK_TYPE(grad_output.scalar_type() == type, name, ": grad_output is ", grad_output.scalar_type(),
                   " but the input ", type);
  TORCH_CHECK_TYPE(of_main == type || (of_main == at::kFloat && wgrad::is_half(type)), name, ": main_grad is ", of_main,
                   ", not ", type, wgrad::is_half(type) ? " or Float" : "");
  TORCH_CHECK_VALUE(input.dim() >= 1 && grad_output.dim() >= 1, name,
                    ": input and grad_output must have at least one dimension");
  const c10::SymInt rows = wgrad::row_count(input), others = wgrad::row_count(grad_output);
  TORCH_CHECK_VALUE(rows == others, name, ": the input has ", rows, " rows but grad_output ", others);
  TORCH_CHECK_VALUE(main_grad.dim() == 2 && main_grad.sym_size(0) == grad_output.sym_size(-1) &&
                        main_grad.sym_size(1) == input.sym_size(-1),
                    name, ": main_grad has shape ", main_grad.sym_sizes(), ", not [", grad_output.sym_size(-1), ", ",
                    input.sym_size(-1), "]");
  TORCH_CHECK_VALUE(!main_grad.requires_grad(), name,
                    ": main_grad requires a gradient itself, which would be lost; detach it");
  if (!main_grad.is_meta()) wgrad::check_memory(name, main_grad, input, grad_output);
}
inline bool WgradGemmAccum::launch(const apex_place& place) const {
  if (input.numel() == 0 || grad_output.numel() == 0) return true;
  const at::Tensor x = products::rows_of(input), g = products::rows_of(grad_output);
  // float32 and float64 are torch's, which knows whether TF32 is allowed; nothing is recorded.
  if (!wgrad::is_half(input.scalar_type())) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto no_autocast = without_autocast();
    at::Tensor(main_grad).addmm_(g.t(), x);
    return bump_version(main_grad), true;
  }
  if (!products::may_ask_vendor(place, input.scalar_type()) || !products::has_dense_rows(main_grad)) return false;
  const at::Tensor workspace = products::workspace(APEX_MATMUL_WORKSPACE_BYTES, input);
  apex_matmul m{};
  m.a = bytes(g), m.b = bytes(x), m.d = mutable_bytes(main_grad);
  m.m = g.size(1), m.n = x.size(1), m.k = x.size(0);
  m.ld_a = products::leading(g), m.ld_b = products::leading(x), m.ld_d = products::leading(main_grad);
  m.transpose_a = m.accumulate = 1;
  m.type = element_type(name, x.scalar_type()), m.type_d = element_type(name, main_grad.scalar_type());
  m.workspace = mutable_bytes(workspace), m.workspace_bytes = workspace.defined() ? APEX_MATMUL_WORKSPACE_BYTES : 0;
  if (products::was_refused(place, apex_matmul_run(&place, &m), name)) return false;
  bump_version(main_grad);
  return true;
}
}  // namespace apex
