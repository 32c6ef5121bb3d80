// What ops that multiply matrices share: whether the vendor's BLAS may be asked, and memory for it.
#pragma once
#include "functional.h"
#include "host/blas.h"
#include "workspace.h"

#include <ATen/Context.h>

#include <type_traits>

namespace apex {
namespace products {
// torch's option was a bool up to 2.8, and is an enumeration whose first word is the widest since.
template <class Option> bool is_allowed(Option option) {
  if constexpr (std::is_same_v<Option, bool>) return option;
  else return static_cast<int>(option) == 0;
}
// What the user tells torch of products holds here: on HIP hipBLASLt is asked only where it is torch's preferred BLAS;
// and who forbids sums in reduced precision gets torch's products, which know of it.
inline bool may_ask_vendor(const apex_place& place, at::ScalarType type) {
  if (place.platform == APEX_CPU) return false;
  at::Context& torch = at::globalContext();
  if (place.platform == APEX_HIP && torch.blasPreferredBackend() != at::BlasBackend::Cublaslt) return false;
  if (type == at::kHalf) return is_allowed(torch.allowFP16ReductionCuBLAS());
  if (type == at::kBFloat16) return is_allowed(torch.allowBF16ReductionCuBLAS());
  return true;
}
// Undefined where the device has no room.
inline at::Tensor workspace(int64_t bytes, const at::Tensor& like) {
  try {
    return at::empty({bytes}, like.options().dtype(at::kByte));
  } catch (const c10::OutOfMemoryError&) { return {}; }
}
// Whether the device had no room for a call's workspace: torch's own products may do with less.
inline bool ran_out(const Workspace& workspace) {
  if (!workspace.failure()) return false;
  try {
    std::rethrow_exception(workspace.failure());
  } catch (const c10::OutOfMemoryError&) { return true; }
}
// Returns whether torch's products must serve; a vendor's library that is there and refuses is named once a process.
inline bool was_refused(const apex_place& place, int32_t status, const char* op) {
  if (!use_reference(status, op)) return false;
  char name[64];
  if (apex_blas_name(place.platform, name, sizeof name) == APEX_OK) {
    TORCH_WARN_ONCE("apex ", op, " is multiplied by torch where ", apex_last_error());
  }
  return true;
}
// Whether elements of a matrix's rows lie one behind another, and rows apart.
inline bool has_dense_rows(const at::Tensor& matrix) {
  return (matrix.size(1) <= 1 || matrix.stride(1) == 1) && (matrix.size(0) <= 1 || matrix.stride(0) >= matrix.size(1));
}
// [rows, the last dimension], such a matrix, of any number of dimensions.
inline at::Tensor rows_of(const at::Tensor& tensor) {
  const at::Tensor rows = tensor.dim() > 1 ? tensor.flatten(0, -2) : tensor.unsqueeze(0);
  return has_dense_rows(rows) ? rows : rows.contiguous();
}
// Elements from a row's first to the next one's.
inline int64_t leading(const at::Tensor& rows) { return rows.size(0) > 1 ? rows.stride(0) : rows.size(1); }
}  // namespace products
}  // namespace apex
