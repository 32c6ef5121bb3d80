// Batch norm of NHWC tensors with an addition and a ReLU in the same pass, whose mask is kept as bits.
#pragma once
#include "api.h"
#include "batchnorm.h"
#include "host/groupbn.h"
#include "reduce_bn.h"
#include "welford_mean_var.h"
#include "welford_parallel.h"

namespace apex {
// The whole layer of one rank, with autograd: what eager calls take instead of apex.parallel._group_batch_norm's
// function, which does the same in Python. Returns the output, the mean and 1 / standard deviation.
APEX_TORCH_API std::tuple<at::Tensor, at::Tensor, at::Tensor> group_batch_norm_layer(
    const at::Tensor& input, const std::optional<at::Tensor>& z, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var, const std::optional<at::Tensor>& batches, double momentum, double eps,
    bool fuse_relu, bool use_batch, bool channel_last);
}  // namespace apex

#if defined(APEX_TORCH_LIBRARY_UNIT)
namespace apex {
namespace group_batch_norm {
inline at::Tensor mask_of(const at::Tensor& input, bool wanted) {
  return at::empty_symint({wanted ? bitmask_bytes(input) : c10::SymInt(0)},
                          input.options().dtype(at::kByte).memory_format(at::MemoryFormat::Contiguous));
}
inline Channels check_forward(const at::Tensor& input, const OptionalTensor& z, const at::Tensor& mean,
                              const at::Tensor& inv_std, const OptionalTensor& weight, const OptionalTensor& shift,
                              bool fuse_relu, bool make_bitmask, bool channel_last) {
  const Channels channels = nhwc_channels_of("groupbn_forward", input, channel_last);
  check_normalization("groupbn_forward", input, channels, z, mean, inv_std, weight, shift);
  TORCH_CHECK_VALUE(fuse_relu || !make_bitmask,
                    "groupbn_forward: a bitmask says what a ReLU let through: make_bitmask needs fuse_relu");
  return channels;
}
inline Channels check_backward(const at::Tensor& grad_output, const at::Tensor& input, const OptionalTensor& bitmask,
                               const at::Tensor& mean, const at::Tensor& inv_std, const OptionalTensor& weight,
                               const OptionalTensor& sum_dy, const OptionalTensor& sum_dy_xmu,
                               const OptionalTensor& count, bool channel_last) {
  const char* op = "groupbn_backward";
  const Channels channels = nhwc_channels_of(op, input, channel_last);
  check_normalization(op, input, channels, std::nullopt, mean, inv_std, weight, std::nullopt);
  check_gradient(op, grad_output, input);
  check_bitmask(op, bitmask, input);
  check_gradient_sums(op, input, channels, sum_dy, sum_dy_xmu, count);
  return channels;
}
inline at::Tensor gradient_of_z(const at::Tensor& input, const Channels& channels, bool wanted) {
  return wanted ? output_like(input, channels)
                : at::empty({0}, input.options().memory_format(at::MemoryFormat::Contiguous));
}
}  // namespace group_batch_norm

inline std::tuple<at::Tensor, at::Tensor> groupbn_forward(const at::Tensor& input, const OptionalTensor& z,
                                                          const at::Tensor& mean, const at::Tensor& inv_std,
                                                          const OptionalTensor& weight, const OptionalTensor& shift,
                                                          bool fuse_relu, bool make_bitmask, bool channel_last) {
  namespace gbn = group_batch_norm;
  const Channels channels =
      gbn::check_forward(input, z, mean, inv_std, weight, shift, fuse_relu, make_bitmask, channel_last);
  const apex_place place = place_of(input.device());
  if (place.platform >= 0) {
    const ChannelApplyTensors tensors(channels, input, std::nullopt, z, mean, inv_std, weight, shift);
    const at::Tensor bitmask = gbn::mask_of(input, make_bitmask);
    gpu::ChannelApply a = tensors.arguments("groupbn_forward", channels);
    a.relu = fuse_relu;
    if (make_bitmask) a.bitmask = bytes_to_write(bitmask);
    if (!use_reference(apex_groupbn_forward(&place, &a), "groupbn_forward")) return {tensors.output, bitmask};
  }
  return call_reference<decltype(groupbn_forward)>("groupbn_forward", input, z, mean, inv_std, weight, shift, fuse_relu,
                                                   make_bitmask, channel_last);
}
inline std::tuple<at::Tensor, at::Tensor> groupbn_forward_meta(const at::Tensor& input, const OptionalTensor& z,
                                                               const at::Tensor& mean, const at::Tensor& inv_std,
                                                               const OptionalTensor& weight,
                                                               const OptionalTensor& shift, bool fuse_relu,
                                                               bool make_bitmask, bool channel_last) {
  namespace gbn = group_batch_norm;
  const Channels channels =
      gbn::check_forward(input, z, mean, inv_std, weight, shift, fuse_relu, make_bitmask, channel_last);
  return {output_like(input, channels), gbn::mask_of(input, make_bitmask)};
}

inline std::tuple<at::Tensor, at::Tensor> groupbn_backward(const at::Tensor& grad_output, const at::Tensor& input,
                                                           const OptionalTensor& bitmask, const at::Tensor& mean,
                                                           const at::Tensor& inv_std, const OptionalTensor& weight,
                                                           const OptionalTensor& sum_dy,
                                                           const OptionalTensor& sum_dy_xmu,
                                                           const OptionalTensor& count, bool of_z, bool channel_last) {
  namespace gbn = group_batch_norm;
  const Channels channels =
      gbn::check_backward(grad_output, input, bitmask, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, channel_last);
  const apex_place place = place_of(input.device());
  if (place.platform >= 0) {
    const ChannelApplyTensors tensors(channels, input, grad_output, std::nullopt, mean, inv_std, weight, std::nullopt);
    const GradientSums sums(sum_dy, sum_dy_xmu, count);
    const at::Tensor mask = in_format(bitmask, at::MemoryFormat::Contiguous),
                     grad_z = gbn::gradient_of_z(input, channels, of_z);
    gpu::ChannelApply a = tensors.arguments("groupbn_backward", channels);
    sums.set(&a);
    a.bitmask = const_cast<gpu::u8*>(const_bytes(mask));  // read alone
    if (of_z) a.grad_z = bytes_to_write(grad_z);
    if (!use_reference(apex_groupbn_backward(&place, &a), "groupbn_backward")) return {tensors.output, grad_z};
  }
  return call_reference<decltype(groupbn_backward)>("groupbn_backward", grad_output, input, bitmask, mean, inv_std,
                                                    weight, sum_dy, sum_dy_xmu, count, of_z, channel_last);
}
inline std::tuple<at::Tensor, at::Tensor> groupbn_backward_meta(
    const at::Tensor& grad_output, const at::Tensor& input, const OptionalTensor& bitmask, const at::Tensor& mean,
    const at::Tensor& inv_std, const OptionalTensor& weight, const OptionalTensor& sum_dy,
    const OptionalTensor& sum_dy_xmu, const OptionalTensor& count, bool of_z, bool channel_last) {
  namespace gbn = group_batch_norm;
  const Channels channels =
      gbn::check_backward(grad_output, input, bitmask, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, channel_last);
  return {output_like(input, channels), gbn::gradient_of_z(input, channels, of_z)};
}

// ---- the layer ----
struct GroupBatchNormNode : Node {
  SavedVariable input, bitmask, weight, bias, mean, inv_std, count;
  bool has_mask = false, use_batch = false, channel_last = false;

  variable_list apply(variable_list&& gradients) override {
    std::lock_guard<std::mutex> lock(mutex_);
    static const auto reduce = dispatcher_op<decltype(reduce_bn)>("apex::reduce_bn");
    static const auto backward = dispatcher_op<decltype(groupbn_backward)>("apex::groupbn_backward");
    variable_list found(4);
    const at::Tensor& dy = gradients[0];
    if (!dy.defined()) return found;
    const bool of_input = task_should_compute_output(0), of_z = task_should_compute_output(1),
               of_weight = task_should_compute_output(2), of_bias = task_should_compute_output(3);
    const at::Tensor x = input.unpack(), m = mean.unpack(), r = inv_std.unpack();
    const OptionalTensor w = weight.unpack(), b = bias.unpack(),
                         mask = has_mask ? OptionalTensor(bitmask.unpack()) : std::nullopt;
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      OptionalTensor of_dy, of_dy_xmu, n;
      if (of_weight || of_bias || (of_input && use_batch)) {
        const auto [sums, grad_weight, grad_bias] = reduce.call(dy, x, m, r, has_value(w) ? w : b, channel_last, mask);
        if (of_weight) found[2] = grad_weight;
        if (of_bias) found[3] = grad_bias;
        if (use_batch) {
          const c10::SymInt channels = m.sym_numel();
          of_dy = sums.narrow_symint(0, 0, channels);
          of_dy_xmu = sums.narrow_symint(0, channels, channels);
          n = count.unpack();
        }
      }
      if (of_input || (of_z && has_mask)) {
        const auto [grad_input, grad_z] =
            backward.call(dy, x, mask, m, r, w, of_dy, of_dy_xmu, n, of_z && has_mask, channel_last);
        if (of_input) found[0] = grad_input;
        if (of_z && has_mask) found[1] = grad_z;
      }
      if (of_z && !has_mask) found[1] = dy;
    }
    // Whatever asks for a gradient of these hears that there is none.
    if (at::GradMode::is_enabled()) {
      const auto node = no_double_backward("batch norm", "is not implemented", dy, x, w);
      for (at::Tensor& gradient : found) {
        if (gradient.defined() && !gradient.is_same(dy)) torch::autograd::set_history(gradient, node);
      }
    }
    return found;
  }
  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* s : {&input, &bitmask, &weight, &bias, &mean, &inv_std, &count}) s->reset_data();
  }
  std::string name() const override { return "ApexGroupBatchNormBackward"; }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> group_batch_norm_layer(
    const at::Tensor& input, const OptionalTensor& z, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& running_mean, const OptionalTensor& running_var, const OptionalTensor& batches,
    double momentum, double eps, bool fuse_relu, bool use_batch, bool channel_last) {
  const char* op = "batch norm";
  static const auto moments = dispatcher_op<decltype(welford_mean_var)>("apex::welford_mean_var");
  static const auto merge = dispatcher_op<decltype(welford_parallel)>("apex::welford_parallel");
  static const auto forward = dispatcher_op<decltype(groupbn_forward)>("apex::groupbn_forward");
  // Before anything is counted.
  const Channels channels = nhwc_channels_of(op, input, channel_last);
  check_like_input(op, "z", z, input);
  check_affine(op, weight, bias, input, channels);
  refuse_forward_mode_of(op, input, z, weight, bias);
  NodePointer<GroupBatchNormNode> node;
  if (records(input, z, weight, bias)) {
    node = make_node<GroupBatchNormNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(input, z, weight, bias));
    node->use_batch = use_batch;
    node->has_mask = fuse_relu;
    node->channel_last = channel_last;
    if (has_value(weight)) node->weight = SavedVariable(*weight, false);
    if (has_value(bias)) node->bias = SavedVariable(*bias, false);
  }
  at::Tensor x, mean, inv_std, count, output, bitmask;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    x = input.contiguous(channels.format);  // here, not in each of the passes
    if (use_batch) {
      const c10::SymInt& each = channels.count;
      TORCH_CHECK_VALUE(x.sym_numel() != each, "Expected more than 1 value per channel when training, got input size ",
                        input.sym_sizes());
      const at::Tensor statistics = moments.call(x, channel_last), rows = statistics.unsqueeze(0);
      std::tie(mean, std::ignore, inv_std, count) =
          merge.call(rows.narrow_symint(1, 0, each), rows.narrow_symint(1, each, each),
                     statistics.narrow_symint(0, 2 * each, 1), eps, running_mean, running_var, momentum, batches);
    } else {
      TORCH_CHECK_VALUE(has_value(running_mean) && has_value(running_var), op,
                        ": there are no running statistics to normalize by");
      mean = running_mean->to(channels.math);
      inv_std = running_var->to(channels.math).add(eps).rsqrt();
    }
    std::tie(output, bitmask) =
        forward.call(x, z, mean, inv_std, weight, bias, fuse_relu, fuse_relu && node, channel_last);
  }
  if (node) {
    node->input = SavedVariable(x, false);
    if (fuse_relu) node->bitmask = SavedVariable(bitmask, false);
    node->mean = SavedVariable(mean, false);
    node->inv_std = SavedVariable(inv_std, false);
    if (use_batch) node->count = SavedVariable(count, false);
    torch::autograd::set_history(output, node);
  }
  return {output, mean, inv_std};
}
}  // namespace apex

APEX_CHANNEL_OP(groupbn_forward)
APEX_CHANNEL_OP(groupbn_backward)
#endif

#if defined(APEX_PYTHON_MODULE_UNIT)
APEX_PYTHON_OP(groupbn, m) {
  using Optional = std::optional<at::Tensor>;
  using Two = std::tuple<at::Tensor, at::Tensor>;
  m.def("group_batch_norm_layer", &apex::group_batch_norm_layer, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def(
      "groupbn_forward",
      [](const at::Tensor& input, const Optional& z, const at::Tensor& mean, const at::Tensor& inv_std,
         const Optional& weight, const Optional& shift, bool fuse_relu, bool make_bitmask, bool channel_last) {
        static const auto op =
            apex::dispatcher_op<Two(const at::Tensor&, const Optional&, const at::Tensor&, const at::Tensor&,
                                    const Optional&, const Optional&, bool, bool, bool)>("apex::groupbn_forward");
        return op.call(input, z, mean, inv_std, weight, shift, fuse_relu, make_bitmask, channel_last);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def(
      "groupbn_backward",
      [](const at::Tensor& grad_output, const at::Tensor& input, const Optional& bitmask, const at::Tensor& mean,
         const at::Tensor& inv_std, const Optional& weight, const Optional& sum_dy, const Optional& sum_dy_xmu,
         const Optional& count, bool of_z, bool channel_last) {
        static const auto op = apex::dispatcher_op<Two(
            const at::Tensor&, const at::Tensor&, const Optional&, const at::Tensor&, const at::Tensor&,
            const Optional&, const Optional&, const Optional&, const Optional&, bool, bool)>("apex::groupbn_backward");
        return op.call(grad_output, input, bitmask, mean, inv_std, weight, sum_dy, sum_dy_xmu, count, of_z,
                       channel_last);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>());
}
#endif
