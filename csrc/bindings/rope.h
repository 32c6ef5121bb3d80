#pragma once
#include "functional.h"
#include "host/rope.h"

#if defined(APEX_TORCH_LIBRARY_UNIT)
#include <ATen/ops/empty.h>

#include "place.h"
#include "reference.h"
#include "status.h"

namespace apex {
namespace rope {
using OptionalTensor = std::optional<at::Tensor>;

// What both ops are given beside the tensor that is turned.
struct Angles {
  const at::Tensor& cos;  // without sin: the angles themselves
  const OptionalTensor &sin, &cos_x, &sin_x, &cu_seqlens;
  bool is_image() const { return has_value(cos_x); }
  bool is_packed() const { return has_value(cu_seqlens); }
};

inline void check_table(const char* name, const at::Tensor& table, const at::Tensor& input, const at::Tensor& cos) {
  TORCH_CHECK_VALUE(table.dim() == 4, "rope: ", name, " must have 4 dimensions, not ", table.dim());
  TORCH_CHECK_VALUE(table.device() == input.device(), "rope: ", name, " is on ", table.device(),
                    " but the input is on ", input.device());
  TORCH_CHECK_TYPE(table.scalar_type() == cos.scalar_type(), "rope: ", name, " is ", table.scalar_type(),
                   " but the first table is ", cos.scalar_type(), ": all must have one dtype");
}
// Throws unless shapes, dtypes and devices fit. Works with symbolic sizes; looks at no element.
inline void check(const at::Tensor& input, const Angles& t) {
  element_type("rope", input.scalar_type());
  element_type("rope", t.cos.scalar_type());
  const char* first = has_value(t.sin) ? "cos" : "freqs";
  check_table(first, t.cos, input, t.cos);
  if (has_value(t.sin)) {
    check_table("sin", *t.sin, input, t.cos);
    TORCH_CHECK_VALUE(t.sin->sym_sizes() == t.cos.sym_sizes(), "rope: sin has shape ", t.sin->sym_sizes(), " but cos ",
                      t.cos.sym_sizes());
  }
  const c10::SymInt rotary = t.cos.sym_size(3);
  TORCH_CHECK_VALUE(rotary % 2 == 0, "rope: the last dimension of ", first, " is ", rotary,
                    "; pairs need an even number");
  if (t.is_image()) {
    TORCH_CHECK_VALUE(has_value(t.sin) && has_value(t.sin_x) && !t.is_packed(),
                      "rope: images need cos and sin of both directions, and no cu_seqlens");
    TORCH_CHECK_VALUE(input.dim() == 5, "rope: an image has 5 dimensions [batch, height, width, heads, dim], not ",
                      input.dim());
    check_table("cos_w", *t.cos_x, input, t.cos);
    check_table("sin_w", *t.sin_x, input, t.cos);
    TORCH_CHECK_VALUE(t.sin_x->sym_sizes() == t.cos_x->sym_sizes(), "rope: sin_w has shape ", t.sin_x->sym_sizes(),
                      " but cos_w ", t.cos_x->sym_sizes());
    for (int side = 0; side < 2; ++side) {
      const at::Tensor& table = side ? *t.cos_x : t.cos;
      const char* name = side ? "cos_w and sin_w" : "cos_h and sin_h";
      TORCH_CHECK_VALUE(
          table.sym_size(0) == 1 && table.sym_size(2) == 1 && table.sym_size(1) >= input.sym_size(1 + side),
          "rope: ", name, " must be [1, n, 1, dim / 2] with n at least ", input.sym_size(1 + side), ", not ",
          table.sym_sizes());
      TORCH_CHECK_VALUE(table.sym_size(3) * 2 == input.sym_size(4), "rope: the last dimension of ", name,
                        " must be half of the input's ", input.sym_size(4), ", not ", table.sym_size(3));
    }
    return;
  }
  TORCH_CHECK_VALUE(!has_value(t.sin_x), "rope: sin_w without cos_w");
  TORCH_CHECK_VALUE(t.cos.sym_size(1) == 1 && t.cos.sym_size(2) == 1, "rope: ", first,
                    " must be [places, 1, 1, dim], not ", t.cos.sym_sizes());
  TORCH_CHECK_VALUE(rotary <= input.sym_size(-1), "rope: the last dimension of ", first, ", ", rotary,
                    ", is more than the input's ", input.sym_size(-1));
  if (t.is_packed()) {
    const at::Tensor& ends = *t.cu_seqlens;
    TORCH_CHECK_VALUE(input.dim() == 3, "rope: with cu_seqlens the input has 3 dimensions [places, heads, dim], not ",
                      input.dim());
    TORCH_CHECK_TYPE(ends.scalar_type() == at::kInt, "rope: cu_seqlens must be int32, not ", ends.scalar_type());
    TORCH_CHECK_VALUE(ends.dim() == 1 && ends.sym_size(0) >= 1, "rope: cu_seqlens must be [sequences + 1], not ",
                      ends.sym_sizes());
    TORCH_CHECK_VALUE(ends.device() == input.device(), "rope: cu_seqlens is on ", ends.device(),
                      " but the input is on ", input.device());
  } else {
    TORCH_CHECK_VALUE(input.dim() == 4, "rope: the input must have 4 dimensions [places, batch, heads, dim], not ",
                      input.dim());
    TORCH_CHECK_VALUE(t.cos.sym_size(0) == input.sym_size(0), "rope: ", first, " has ", t.cos.sym_size(0),
                      " places but the input ", input.sym_size(0));
  }
}
// What a GPU answers with nan, because looking would make it wait, is refused where looking costs nothing.
inline void check_cu_seqlens(const at::Tensor& input, const Angles& t) {
  if (!t.is_packed() || !t.cu_seqlens->device().is_cpu()) return;
  const at::Tensor ends = t.cu_seqlens->contiguous();
  const int32_t* at = ends.const_data_ptr<int32_t>();
  const int64_t n = ends.numel();
  TORCH_CHECK_VALUE(at[0] == 0 && at[n - 1] <= input.size(0),
                    "rope: cu_seqlens must begin at 0 and end within the input's ", input.size(0),
                    " places, not go from ", at[0], " to ", at[n - 1]);
  for (int64_t k = 1; k < n; ++k) {
    TORCH_CHECK_VALUE(at[k - 1] <= at[k], "rope: cu_seqlens falls from ", at[k - 1], " to ", at[k], " at index ", k);
    TORCH_CHECK_VALUE(at[k] - at[k - 1] <= t.cos.size(0), "rope: sequence ", k - 1, " has ", at[k] - at[k - 1],
                      " places but freqs only ", t.cos.size(0));
  }
}

// An output of the input's shape; transposed: the memory of one whose first two dimensions are exchanged.
inline at::Tensor output_of(const at::Tensor& input, const Angles& t, bool transpose_output) {
  if (!transpose_output || t.is_image() || t.is_packed()) return at::empty_symint(input.sym_sizes(), input.options());
  const auto sizes = input.sym_sizes();
  return at::empty_symint({sizes[1], sizes[0], sizes[2], sizes[3]}, input.options()).transpose(0, 1);
}

// False: the reference must run.
inline bool run(const at::Tensor& input, const Angles& t, bool transpose_output, bool transposed, at::Tensor* output) {
  const apex_place place = place_of(input.device());
  if (place.platform < 0) return false;
  check_cu_seqlens(input, t);
  const auto bytes = [](const at::Tensor& tensor) { return static_cast<const gpu::u8*>(tensor.const_data_ptr()); };
  *output = output_of(input, t, transpose_output);
  gpu::Rope a{};
  a.input = bytes(input);
  a.output = static_cast<gpu::u8*>(output->mutable_data_ptr());
  // [batch, height, width, heads, element] of both; -1: a dimension that is not there.
  const int image[] = {0, 1, 2, 3, 4}, packed[] = {-1, -1, 0, 1, 2}, plain[] = {1, -1, 0, 2, 3};
  const int* const at = t.is_image() ? image : t.is_packed() ? packed : plain;
  const auto size = [&](int i) { return at[i] < 0 ? 1 : input.size(at[i]); };
  const auto stride = [&](const at::Tensor& tensor, int i) { return at[i] < 0 ? 0 : tensor.stride(at[i]); };
  a.batch = size(0), a.height = size(1), a.width = size(2), a.heads = size(3);
  a.dim = int32_t(size(4));
  TORCH_CHECK_VALUE(size(4) <= 0x7fffffff, "rope: a head of ", size(4), " elements");
  a.in_batch = stride(input, 0), a.in_y = stride(input, 1), a.in_x = stride(input, 2), a.in_head = stride(input, 3),
  a.in_element = stride(input, 4);
  a.out_batch = stride(*output, 0), a.out_y = stride(*output, 1), a.out_x = stride(*output, 2),
  a.out_head = stride(*output, 3);

  const int rows = t.is_image() ? 1 : 0;  // the tables' dimension
  // Kernels read tables as they lie, if cos and sin lie alike.
  const auto alike = [&](const at::Tensor& cos, const OptionalTensor& sin) {
    return !has_value(sin) || sin->strides() == cos.strides();
  };
  const bool as_they_are = alike(t.cos, t.sin), x_as_they_are = !t.is_image() || alike(*t.cos_x, t.sin_x);
  const at::Tensor cos = as_they_are ? t.cos : t.cos.contiguous(), sin = !has_value(t.sin) ? at::Tensor()
                                                                         : as_they_are     ? *t.sin
                                                                                           : t.sin->contiguous();
  a.cos = bytes(cos);
  a.sin = sin.defined() ? bytes(sin) : nullptr;
  a.angle_stride = cos.stride(rows), a.angle_step = cos.stride(3), a.angle_rows = cos.size(rows);
  at::Tensor cos_x, sin_x, ends;
  if (t.is_image()) {
    cos_x = x_as_they_are ? *t.cos_x : t.cos_x->contiguous(), sin_x = x_as_they_are ? *t.sin_x : t.sin_x->contiguous();
    a.cos_x = bytes(cos_x), a.sin_x = bytes(sin_x);
    a.angle_stride_x = cos_x.stride(rows), a.angle_step_x = cos_x.stride(3);
  }
  if (t.is_packed()) {
    ends = t.cu_seqlens->contiguous();
    a.cu_seqlens = ends.const_data_ptr<int32_t>();
    a.sequences = int32_t(ends.numel() - 1);
  }
  a.groups = t.is_image() ? 2 : 1;
  a.rotary = int32_t(cos.size(3));
  a.type = element_type("rope", input.scalar_type());
  a.angle_type = element_type("rope", cos.scalar_type());
  a.transposed = transposed;
  return !use_reference(apex_rope(&place, &a), "rope");
}

using Op = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                      const OptionalTensor&, const OptionalTensor&, bool);

// A turn's gradient is the turn back, and that one's gradient the turn: each op's Node calls the other.
struct Turn : Node {
  bool back = false;  // this Node's own op was rope_backward
  bool transpose_output = false;
  SavedVariable cos, sin, cos_x, sin_x, cu_seqlens;

  variable_list apply(variable_list&& gradients) override {
    static const auto forward = dispatcher_op<Op>("apex::rope_forward"),
                      backward = dispatcher_op<Op>("apex::rope_backward");
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list found(1);
    if (gradients[0].defined() && task_should_compute_output(0)) {
      const OptionalTensor s = sin.unpack(), c_x = cos_x.unpack(), s_x = sin_x.unpack(), ends = cu_seqlens.unpack();
      found[0] = (back ? forward : backward).call(gradients[0], cos.unpack(), s, c_x, s_x, ends, transpose_output);
    }
    return found;
  }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* s : {&cos, &sin, &cos_x, &sin_x, &cu_seqlens}) s->reset_data();
  }
  std::string name() const override { return "ApexRopeBackward"; }
};

template <class Below> at::Tensor record(const at::Tensor& input, const Angles& t, bool transpose_output, bool back,
                                         Below&& below) {
  refuse_forward_mode_of("rope", input, t.cos, t.sin, t.cos_x, t.sin_x);
  NodePointer<Turn> node;
  if (records(input)) {
    node = make_node<Turn>();
    node->set_next_edges(torch::autograd::collect_next_edges(input));
    node->back = back;
    node->transpose_output = transpose_output;
    node->cos = SavedVariable(t.cos, false);
    const auto save = [](SavedVariable& to, const OptionalTensor& from) {
      if (has_value(from)) to = SavedVariable(*from, false);
    };
    save(node->sin, t.sin), save(node->cos_x, t.cos_x), save(node->sin_x, t.sin_x),
        save(node->cu_seqlens, t.cu_seqlens);
  }
  at::Tensor output = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return below();
  }();
  if (node) torch::autograd::set_history(output, node);
  return output;
}
}  // namespace rope

#define APEX_ROPE(end, is_back)                                                                                        \
  inline at::Tensor rope_##end(const at::Tensor& input, const at::Tensor& cos, const rope::OptionalTensor& sin,        \
                               const rope::OptionalTensor& cos_w, const rope::OptionalTensor& sin_w,                   \
                               const rope::OptionalTensor& cu_seqlens, bool transpose_output) {                        \
    const rope::Angles angles{cos, sin, cos_w, sin_w, cu_seqlens};                                                     \
    rope::check(input, angles);                                                                                        \
    at::Tensor output;                                                                                                 \
    if (rope::run(input, angles, transpose_output, is_back, &output)) return output;                                   \
    return call_reference<rope::Op>("rope_" #end, input, cos, sin, cos_w, sin_w, cu_seqlens, transpose_output);        \
  }                                                                                                                    \
  inline at::Tensor rope_##end##_meta(const at::Tensor& input, const at::Tensor& cos, const rope::OptionalTensor& sin, \
                                      const rope::OptionalTensor& cos_w, const rope::OptionalTensor& sin_w,            \
                                      const rope::OptionalTensor& cu_seqlens, bool transpose_output) {                 \
    const rope::Angles angles{cos, sin, cos_w, sin_w, cu_seqlens};                                                     \
    rope::check(input, angles);                                                                                        \
    return rope::output_of(input, angles, transpose_output);                                                           \
  }                                                                                                                    \
  inline at::Tensor rope_##end##_autograd(c10::DispatchKeySet keys, const at::Tensor& input, const at::Tensor& cos,    \
                                          const rope::OptionalTensor& sin, const rope::OptionalTensor& cos_w,          \
                                          const rope::OptionalTensor& sin_w, const rope::OptionalTensor& cu_seqlens,   \
                                          bool transpose_output) {                                                     \
    static const auto op = dispatcher_op<rope::Op>("apex::rope_" #end);                                                \
    return rope::record(input, {cos, sin, cos_w, sin_w, cu_seqlens}, transpose_output, is_back, [&] {                  \
      return op.redispatch(keys & c10::after_autograd_keyset, input, cos, sin, cos_w, sin_w, cu_seqlens,               \
                           transpose_output);                                                                          \
    });                                                                                                                \
  }
APEX_ROPE(forward, false)
APEX_ROPE(backward, true)
#undef APEX_ROPE
}  // namespace apex
// No autocast rule: the output has the input's dtype.
APEX_FUNCTIONAL_OP(rope_forward)
APEX_FUNCTIONAL_OP(rope_backward)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(rope, m) {
  m.def(
      "rope",
      [](const at::Tensor& input, const at::Tensor& cos, const std::optional<at::Tensor>& sin,
         const std::optional<at::Tensor>& cos_w, const std::optional<at::Tensor>& sin_w,
         const std::optional<at::Tensor>& cu_seqlens, bool transpose_output) {
        using Optional = std::optional<at::Tensor>;
        static const auto forward =
            apex::dispatcher_op<at::Tensor(const at::Tensor&, const at::Tensor&, const Optional&, const Optional&,
                                           const Optional&, const Optional&, bool)>("apex::rope_forward");
        return forward.call(input, cos, sin, cos_w, sin_w, cu_seqlens, transpose_output);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
