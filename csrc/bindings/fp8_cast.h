// fp8_quantize of a matrix from C++, with one scale: as the op, but that what is not asked for is not made.
#pragma once
#include "fp8_quantize.h"

#include <ATen/record_function.h>

namespace apex::fp8 {
// A tensor of its own that begins at an element of another one's memory, past autograd: as torch's views, in a tenth of
// the time.
inline at::Tensor view_of(const at::Tensor& whole, int64_t first, at::IntArrayRef sizes,
                          at::OptionalIntArrayRef strides = std::nullopt) {
  auto made = at::detail::make_tensor<at::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(whole.storage()),
                                                      whole.key_set(), whole.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(whole.storage_offset() + first);
  if (strides) made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, *strides);
  else made.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return made;
}

// How a matrix becomes codes: by number `index` of scales [n], whose inverses [n] or [n, 4] are known, its largest
// magnitude going to row 0 of the history [steps, n], if there is one; or, of undefined ones, by a scale of its own.
struct CastBy {
  at::Tensor scales, inverses, history;
  int64_t index;
  bool power_of_two;
  double epsilon;

  at::Tensor inverse() const {
    if (!is_plain(inverses)) return (inverses.dim() == 2 ? inverses.select(1, 0) : inverses).select(0, index);
    return view_of(inverses, index * inverses.stride(0), {});
  }
  OptionalTensor scale() const { return scales.defined() ? OptionalTensor(scales.select(0, index)) : std::nullopt; }
  OptionalTensor amax() const {
    return history.defined() ? OptionalTensor(history.select(0, 0).select(0, index)) : std::nullopt;
  }
};
// Undefined what is not asked for. inverse: what codes are multiplied with.
struct Codes { at::Tensor rows, columns, sums, inverse; };

// By torch's dispatcher: of tensors without memory of their own, where something looks on, and where the reference
// runs.
inline Codes cast_by_op(const at::Tensor& matrix, at::ScalarType format, const CastBy& by, bool rowwise,
                        bool columnwise, bool sums) {
  const auto [rows, columns, total, made] =
      dispatcher_op<Fp8Quantize>().call(matrix, by.scale(), by.amax(), format, rowwise, columnwise, sums, std::nullopt,
                                        "none", false, by.power_of_two, by.epsilon);
  return {rowwise ? rows : at::Tensor(), columnwise ? columns : at::Tensor(), sums ? total : at::Tensor(),
          by.scales.defined() ? by.inverse() : made};
}
// functorch's transforms (torch.func) wrap what is made while they last, also of tensors that are none of theirs.
constexpr c10::DispatchKeySet transforms({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                          c10::DispatchKey::FuncTorchDynamicLayerBackMode});
inline bool in_transform() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}
// Whether nothing looks on, and nothing would come between.
inline bool is_direct(const at::Tensor& matrix) {
  return is_plain(matrix) && matrix.numel() > 0 && !in_transform() &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Python);
}
// matrix: [rows, columns]. together: rows and columns are no longer needed at the same time; they are one piece of
// memory, with what the passes need.
inline Codes cast(const apex_place& place, const at::Tensor& matrix, at::ScalarType format, const CastBy& by,
                  bool rowwise, bool columnwise, bool sums, bool together = false) {
  if (place.platform < 0 || !is_direct(matrix)) return cast_by_op(matrix, format, by, rowwise, columnwise, sums);
  RECORD_FUNCTION("apex::fp8_quantize", c10::ArrayRef<const c10::IValue>{});
  const at::Tensor x = matrix.contiguous();
  gpu::Fp8Quantize a{};
  a.input = bytes(x), a.rows = x.size(0), a.columns = x.size(1);
  a.type = type_of(Fp8Quantize::name, x.scalar_type()), a.format = format_of(Fp8Quantize::name, format);
  a.epsilon = float(by.epsilon), a.power_of_two = by.power_of_two;
  Codes made;
  const auto empty = [&](at::IntArrayRef sizes, at::ScalarType type) {
    return at::empty(sizes, x.options().dtype(type));
  };
  constexpr int64_t apart = 4;  // products take scales on multiples of 16 bytes alone
  uint8_t* spare = nullptr;
  int64_t spare_bytes = apart * sizeof(float);
  if (together && rowwise && columnwise) {
    const int64_t piece = (x.numel() + 255) / 256 * 256;
    if (sums) spare_bytes += (a.rows + 127) / 128 * a.columns * sizeof(float);  // a sum for each 128 rows
    const at::Tensor memory = empty({2 * piece + spare_bytes}, format);
    made.rows = view_of(memory, 0, {a.rows, a.columns}), made.columns = view_of(memory, piece, {a.columns, a.rows});
    spare = mutable_bytes(memory) + 2 * piece;
  } else {
    if (rowwise) made.rows = empty({a.rows, a.columns}, format);
    if (columnwise) made.columns = empty({a.columns, a.rows}, format);
  }
  a.by_row = mutable_bytes(made.rows), a.by_column = mutable_bytes(made.columns);
  if (sums) a.grad_bias = mutable_bytes(made.sums = empty({a.columns}, x.scalar_type()));
  if (by.scales.defined()) {
    a.scale = number_of(by.scales) + by.index, made.inverse = by.inverse();
  } else {  // 1 / it, and behind it what the two passes share: one piece of memory
    made.inverse = empty({2 * apart}, at::kFloat);
    a.scale_inv = static_cast<float*>(made.inverse.mutable_data_ptr());
    if (!spare) spare = reinterpret_cast<uint8_t*>(a.scale_inv + apart);
    made.inverse.unsafeGetTensorImpl()->set_sizes_contiguous({});
  }
  if (by.history.defined()) {
    bump_version(by.history);
    a.amax = static_cast<float*>(by.history.mutable_data_ptr()) + by.index * by.history.stride(1);
  }
  Workspace workspace(x.device(), spare, spare_bytes);
  const int32_t status = apex_fp8_quantize(&place, &a, workspace.lent());
  if (workspace.failure()) std::rethrow_exception(workspace.failure());
  if (use_reference(status, Fp8Quantize::name)) return cast_by_op(matrix, format, by, rowwise, columnwise, sums);
  return made;
}
}  // namespace apex::fp8
