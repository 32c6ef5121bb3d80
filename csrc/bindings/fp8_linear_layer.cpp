#include "fp8_linear_layer.h"

#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/matmul.h>

#include "fp8_cast.h"
#include "fp8_multi_update_scales.h"
#include "generated/fp8_layer_norm.h"
#include "generated/fp8_rms_norm.h"
#include "generated/fp8_transpose.h"
#include "generated/layer_norm.h"
#include "generated/rms_norm.h"

namespace apex {
namespace fp8 {
const c10::SymInt multiple = 16;  // of sizes, which torch._scaled_mm takes

inline at::Tensor in_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}
// [rows, columns] of [..., columns].
inline at::Tensor flat(const at::Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.reshape_symint({-1, tensor.sym_size(-1)});
}
// With the leading dimensions of a tensor. No view to autograd: what it is of is nobody's else.
inline at::Tensor shaped(const at::Tensor& matrix, const at::Tensor& like) {
  if (like.dim() == 2) return matrix;
  c10::SymDimVector sizes(like.sym_sizes().begin(), like.sym_sizes().end());
  sizes.back() = matrix.sym_size(1);
  return at::_unsafe_view_symint(matrix, sizes);
}
// With zeros up to sizes that the card takes; of_rows: their number too.
inline at::Tensor padded(const at::Tensor& codes, bool of_rows) {
  const auto missing = [&](int64_t d) { return (multiple - codes.sym_size(d) % multiple) % multiple; };
  const c10::SymInt rows = of_rows ? missing(0) : 0, columns = missing(1);
  if (rows == 0 && columns == 0) return codes;
  return at::constant_pad_nd_symint(codes.view(at::kByte), {0, columns, 0, rows}, 0).view(codes.scalar_type());
}
// cublasLt takes a scale on a multiple of 16 bytes alone; one of a layer's several may lie elsewhere.
inline at::Tensor aligned(const at::Tensor& scale) {
  return scale.sym_storage_offset() % 4 != 0 ? scale.clone() : scale;
}

inline at::Tensor transposed(const at::Tensor& matrix) {
  if (!is_direct(matrix)) return matrix.t();
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  return view_of(matrix, 0, {columns, rows}, {{1, columns}});
}

// While it lasts, nothing records, and nothing casts.
struct Plain {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

struct Operand { const at::Tensor &codes, &scale; };
// a b^T + bias.
inline at::Tensor product(bool by_card, bool fast, const Operand& a, const Operand& b, at::ScalarType dtype,
                          const OptionalTensor& bias = std::nullopt) {
  if (!by_card || a.codes.sym_numel() == 0 || b.codes.sym_size(0) == 0) {
    at::Tensor found = at::matmul(a.codes.to(at::kFloat), b.codes.to(at::kFloat).t()) * (a.scale * b.scale);
    if (has_value(bias)) found = found + *bias;
    return in_dtype(found, dtype);
  }
  const c10::SymInt outputs = b.codes.sym_size(0);
  const bool fused = has_value(bias) && dtype != at::kFloat && outputs % multiple == 0;
  const at::Tensor left = padded(a.codes, false), right = transposed(padded(b.codes, true)), of_a = aligned(a.scale),
                   of_b = aligned(b.scale);
  const OptionalTensor added = fused ? bias : std::nullopt;
  at::Tensor found;
  if (is_direct(left)) {
    found = at::empty({left.size(0), right.size(1)}, left.options().dtype(dtype));
    at::_scaled_mm_out(found, left, right, of_a, of_b, added, std::nullopt, dtype, fast);
  } else {
    found = at::_scaled_mm(left, right, of_a, of_b, added, std::nullopt, dtype, fast);
  }
  if (found.sym_size(1) != outputs) found = found.narrow_symint(1, 0, outputs).contiguous();
  return fused || !has_value(bias) ? found : in_dtype(found + *bias, dtype);
}

// The norm of rows as codes; mean (of a layer norm) and rstd, 1 / the deviation, are what its gradient needs.
inline Codes normalize(const at::Tensor& matrix, const Fp8NormFirst::value_type& norm, at::ScalarType format,
                       const CastBy& by, bool columnwise, at::Tensor& mean, at::Tensor& rstd) {
  const auto& [centered, eps, zero_centered, gamma, beta] = norm;
  const at::Tensor scale = view_of(by.scales, by.index, {});
  OptionalTensor amax;
  if (by.history.defined()) {
    amax = view_of(by.history, by.index * by.history.stride(1), {});
    bump_version(by.history);
  }
  Codes made;
  if (centered)
    std::tie(made.rows, mean, rstd) =
        dispatcher_op<Fp8LayerNorm>().call(matrix, gamma, beta, eps, scale, amax, format, zero_centered);
  else
    std::tie(made.rows, rstd) =
        dispatcher_op<Fp8RmsNorm>().call(matrix, gamma, eps, scale, amax, format, zero_centered);
  if (columnwise)
    made.columns = std::get<0>(dispatcher_op<Fp8Transpose>().call(made.rows, std::nullopt, false, std::nullopt));
  made.inverse = by.inverse();
  return made;
}
}  // namespace fp8

struct Fp8LinearNode : OpNode<Fp8LinearNode> {
  static constexpr const char* shown = "ApexFp8LinearBackward";
  // The weight is kept for who asks for a second derivative.
  SavedVariable weight, w_columns, w_inverse, x_columns, x_inverse;
  SavedVariable input, mean, rstd, gamma, beta;  // where a norm is first
  at::Tensor scales, inverses, history;  // of the gradient: later steps may write these, and no derivative changes
  int64_t index = 0, format = 0, gradient_dtype = 0, weight_dtype = 0, bias_dtype = -1;
  bool by_card = false, fast_input = false, fast_weight = false, power_of_two = false;
  bool normed = false, centered = false, zero_centered = false, has_beta = false;
  double epsilon = 0, norm_eps = 0;
  auto kept() {
    return std::tie(weight, w_columns, w_inverse, x_columns, x_inverse, input, mean, rstd, gamma, beta, scales,
                    inverses, history, index, format, gradient_dtype, weight_dtype, bias_dtype, by_card, fast_input,
                    fast_weight, power_of_two, normed, centered, zero_centered, has_beta, epsilon, norm_eps);
  }
  bool gives(size_t i, const variable_list& given) const { return given[0].defined() && (i < 4 || has_beta); }

  variable_list gradients(const variable_list& given) {
    variable_list found(normed ? 5 : 3);
    const at::Tensor& g = given[0];
    if (!g.defined()) return found;
    refuse_forward_mode("FP8 linear", g);
    const bool of_norm = normed && (wants(3) || wants(4));
    const bool of_input = wants(0) || of_norm, of_weight = wants(1), of_bias = wants(2) && bias_dtype >= 0;
    const at::Tensor w = weight.unpack(), wc = w_columns.unpack(), wi = w_inverse.unpack(), xc = x_columns.unpack(),
                     xi = x_inverse.unpack(), x = input.unpack(), gm = gamma.unpack(), bt = beta.unpack();
    {
      const fp8::Plain plain;
      const at::Tensor rows = fp8::flat(g).contiguous();
      // The bias's gradient is made by the same pass where it loses nothing there: a sum of halves is a half.
      const bool sums = of_bias && rows.scalar_type() == at::ScalarType(bias_dtype);
      fp8::Codes q;
      const fp8::CastBy by{scales, inverses, history, index, power_of_two, epsilon};
      if (of_input || of_weight)
        q = fp8::cast(place_of(rows.device()), rows, at::ScalarType(format), by, of_input, of_weight, sums, true);
      if (of_input) {
        found[0] = fp8::product(by_card, fast_input, {q.rows, q.inverse}, {wc, wi}, at::ScalarType(gradient_dtype));
        if (normed) through_norm(found, fp8::flat(x), gm, bt, of_norm);
        found[0] = fp8::shaped(found[0], g);
      }
      if (of_weight)
        found[1] = fp8::product(by_card, fast_weight, {q.columns, q.inverse}, {xc, xi}, at::ScalarType(weight_dtype));
      if (of_bias)
        found[2] =
            q.sums.defined() ? q.sums : fp8::in_dtype(rows.sum(0, false, at::kFloat), at::ScalarType(bias_dtype));
    }
    if (records(g, w, x, gm)) {
      const auto node = no_double_backward("FP8 linear", "is not implemented: it is once_differentiable", g, w, x, gm);
      for (const at::Tensor& gradient : found) set_history_of(gradient, node);
    }
    return found;
  }

 private:
  // From found[0], the gradient of the norm's output, those of its input, gamma and beta.
  void through_norm(variable_list& found, const at::Tensor& matrix, const at::Tensor& gm, const at::Tensor& bt,
                    bool of_parameters) {
    const at::Tensor deviation = rstd.unpack();
    const auto weights = [&](const at::Tensor& of, double more) {  // the norm's backward takes one dtype for both
      return !zero_centered || !of.defined() ? if_any(of) : OptionalTensor(of.to(at::kFloat) + more);
    };
    const OptionalTensor w = weights(gm, 1.0), b = weights(bt, 0.0);
    const c10::SymInt shape[] = {matrix.sym_size(1)};
    if (centered)
      std::tie(found[0], found[3], found[4]) =
          dispatcher_op<LayerNormBackward>().call(found[0], matrix, mean.unpack(), deviation, shape, w, b, norm_eps,
                                                  false, matrix.scalar_type(), of_parameters);
    else
      std::tie(found[0], found[3]) = dispatcher_op<RmsNormBackward>().call(
          found[0], matrix, deviation, shape, w, norm_eps, false, matrix.scalar_type(), of_parameters);
    found[3] = of_parameters ? fp8::in_dtype(found[3], gm.scalar_type()) : at::Tensor();
    found[4] = of_parameters && bt.defined() ? fp8::in_dtype(found[4], bt.scalar_type()) : at::Tensor();
  }
};

namespace fp8 {
inline bool is_taken(at::ScalarType type) { return type == at::kFloat || type == at::kHalf || type == at::kBFloat16; }
// Whether a tensor is numbers in memory that the layer takes, on the device, and only backward mode asks for.
inline bool fits(const at::Tensor& tensor, c10::Device device) {
  return is_taken(tensor.scalar_type()) && tensor.device() == device && tensor.numel() > 0 && is_plain(tensor) &&
         !tensor._fw_grad(0).defined();
}
inline bool fits(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias) {
  const c10::Device device = input.device();
  return fits(input, device) && fits(weight, device) && input.dim() > 0 && weight.dim() == 2 &&
         input.size(-1) == weight.size(1) &&
         (!has_value(bias) || (fits(*bias, device) && bias->dim() == 1 && bias->size(0) == weight.size(0)));
}
inline bool fits(const Fp8NormFirst& norm, const at::Tensor& input) {
  if (!norm) return true;
  const auto is_one_of_it = [&](const at::Tensor& w) {
    return fits(w, input.device()) && w.dim() == 1 && w.size(0) == input.size(-1);
  };
  const auto& gamma = std::get<3>(*norm);
  const auto& beta = std::get<4>(*norm);
  return is_one_of_it(gamma) && (!has_value(beta) || (is_one_of_it(*beta) && beta->dtype() == gamma.dtype()));
}
// Of Fp8State: where its numbers lie is known.
inline bool is_state(const std::array<at::Tensor, 3>& state, c10::Device device) {
  for (const at::Tensor& tensor : state)
    if (tensor.scalar_type() != at::kFloat || tensor.device() != device || !is_plain(tensor)) return false;
  return state[0].is_contiguous() && state[2].dim() == 2;
}
inline at::ScalarType output_dtype(const at::Tensor& input) {
  const auto kind = input.device().type();
  return at::autocast::is_autocast_enabled(kind) ? autocast_dtype(input) : input.scalar_type();
}
}  // namespace fp8

std::optional<at::Tensor> fp8_linear_layer(const Fp8Products& products, const at::Tensor& input,
                                           const at::Tensor& weight, const OptionalTensor& bias,
                                           const std::array<OptionalTensor, 3>& cached, const Fp8State& forward,
                                           const Fp8State& backward, int64_t gemm, bool recording,
                                           const Fp8NormFirst& norm) {
  const at::ScalarType dtype = fp8::output_dtype(input);
  if (fp8::in_transform() || !fp8::fits(input, weight, bias) || !fp8::is_taken(dtype)) return std::nullopt;
  if (!fp8::fits(norm, input) || (norm && !forward)) return std::nullopt;
  for (const Fp8State* state : {&forward, &backward})
    if (*state && !fp8::is_state(**state, input.device())) return std::nullopt;
  const at::Tensor gamma = norm ? std::get<3>(*norm) : at::Tensor();
  const OptionalTensor beta = norm ? std::get<4>(*norm) : std::nullopt;
  const bool recorded = records(input, weight, bias, gamma, beta);
  const bool of_input = recorded && (input.requires_grad() || requires_grad(gamma) || requires_grad(beta));
  const bool of_weight = recorded && weight.requires_grad();
  // Of the input, the weight, the gradient of the output.
  const auto by = [&](size_t i) {
    fp8::CastBy found{{}, {}, {}, 0, products.powers_of_two[i], products.epsilons[i]};
    const Fp8State& state = i == 2 ? backward : forward;
    if (!state) return found;
    std::tie(found.scales, found.inverses) = std::tie((*state)[0], (*state)[1]);
    if (i == 2 || recording) found.history = (*state)[2];
    found.index = i == 2 ? 2 * gemm : 3 * gemm + int64_t(i);
    return found;
  };
  at::Tensor output;
  fp8::Codes x, w;
  at::Tensor mean, rstd;
  {
    const fp8::Plain plain;
    const apex_place place = place_of(input.device());
    if (norm) x = fp8::normalize(fp8::flat(input), *norm, products.forward, by(0), of_weight, mean, rstd);
    else x = fp8::cast(place, fp8::flat(input), products.forward, by(0), true, of_weight, false);
    if (has_value(cached[0])) w = {*cached[0], cached[2].value_or(at::Tensor()), {}, *cached[1]};
    else w = fp8::cast(place, weight, products.forward, by(1), true, of_input, false);
    const OptionalTensor added =
        has_value(bias) ? OptionalTensor(fp8::in_dtype(*bias, dtype).contiguous()) : std::nullopt;
    output = fp8::product(products.by_card, products.fast[0], {x.rows, x.inverse}, {w.rows, w.inverse}, dtype, added);
    output = fp8::shaped(output, input);
  }
  if (!recorded) return output;
  const auto node = make_node<Fp8LinearNode>();
  node->set_next_edges(norm ? torch::autograd::collect_next_edges(input, weight, bias, gamma, beta)
                            : torch::autograd::collect_next_edges(input, weight, bias));
  node->weight = keep(weight);
  if (of_input) node->w_columns = keep(w.columns), node->w_inverse = keep(w.inverse);
  if (of_weight) node->x_columns = keep(x.columns), node->x_inverse = keep(x.inverse);
  const fp8::CastBy of_gradient = by(2);
  node->scales = of_gradient.scales, node->inverses = of_gradient.inverses, node->history = of_gradient.history;
  node->index = of_gradient.index, node->power_of_two = of_gradient.power_of_two, node->epsilon = of_gradient.epsilon;
  node->format = int64_t(products.backward), node->by_card = products.by_card;
  node->fast_input = products.fast[1], node->fast_weight = products.fast[2];
  if (norm) {
    node->normed = true, node->has_beta = has_value(beta);
    std::tie(node->centered, node->norm_eps, node->zero_centered, std::ignore, std::ignore) = *norm;
    if (of_input) {
      node->input = keep(input), node->gamma = keep(gamma), node->beta = keep(beta);
      node->mean = keep(mean), node->rstd = keep(rstd);
    }
  }
  node->gradient_dtype = int64_t(norm ? dtype : input.scalar_type());
  node->weight_dtype = int64_t(weight.scalar_type());
  if (has_value(bias)) node->bias_dtype = int64_t(bias->scalar_type());
  torch::autograd::set_history(output, node);
  return output;
}

std::optional<Fp8NewScales> fp8_new_scales(const at::Tensor& maxima, const std::vector<at::Tensor>& histories,
                                           const std::vector<at::Tensor>& olds, double margin, bool most_recent) {
  const c10::Device device = maxima.device();
  const apex_place place = place_of(device);
  const auto is_here = [&](const at::Tensor& tensor) { return is_plain(tensor) && tensor.device() == device; };
  if (place.platform < 0 || !is_here(maxima)) return std::nullopt;
  for (const auto* list : {&histories, &olds})
    if (!std::all_of(list->begin(), list->end(), is_here)) return std::nullopt;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_transform{fp8::transforms};
  const char* const op = Fp8MultiUpdateScales::name;
  const int64_t total = fp8::check_updates(op, histories, olds, maxima).expect_int();
  fp8::refuse_shared_histories(op, histories, {});
  const int64_t apart = 4, scale_at = apart * total, inverse_at = scale_at + total;
  const at::Tensor memory = at::empty({inverse_at + total}, maxima.options());
  float* const first_of_all = static_cast<float*>(memory.mutable_data_ptr());
  const fp8::NewScales made{first_of_all + scale_at, first_of_all + inverse_at, first_of_all};
  if (!fp8::update(place, histories, olds, maxima, made, margin, most_recent)) return std::nullopt;
  Fp8NewScales found;
  found.reserve(olds.size());
  int64_t first = 0;
  for (const at::Tensor& old : olds) {
    const int64_t count = old.numel();
    const at::Tensor scales = fp8::view_of(memory, scale_at + first, {count}),
                     inverses = fp8::view_of(memory, inverse_at + first, {count});
    found.push_back({scales, inverses, fp8::view_of(memory, apart * first, {count, apart})});
    first += count;
  }
  return found;
}
}  // namespace apex
