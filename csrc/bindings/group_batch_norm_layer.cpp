#include "group_batch_norm_layer.h"

#include "batch_statistics.h"
#include "generated/groupbn.h"
#include "generated/reduce_bn.h"

namespace apex {
struct GroupBatchNormNode : OpNode<GroupBatchNormNode> {
  static constexpr const char* shown = "ApexGroupBatchNormBackward";
  SavedVariable input, bitmask, weight, bias, mean, inv_std, count;
  bool has_mask = false, use_batch = false, channel_last = false;
  auto kept() {
    return std::tie(input, bitmask, weight, bias, mean, inv_std, count, has_mask, use_batch, channel_last);
  }
  bool gives(size_t, const variable_list& given) const { return given[0].defined(); }

  variable_list gradients(const variable_list& gradients) {
    const auto& reduce = dispatcher_op<ReduceBn>();
    const auto& backward = dispatcher_op<GroupbnBackward>();
    variable_list found(4);
    const at::Tensor& dy = gradients[0];
    if (!dy.defined()) return found;
    const bool of_input = wants(0), of_z = wants(1), of_weight = wants(2), of_bias = wants(3);
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
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> group_batch_norm_layer(
    const at::Tensor& input, const OptionalTensor& z, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& running_mean, const OptionalTensor& running_var, const OptionalTensor& batches,
    double momentum, double eps, bool fuse_relu, bool use_batch, bool channel_last) {
  const char* op = "batch norm";
  const auto& forward = dispatcher_op<GroupbnForward>();
  // Before anything is counted, and before a copy reads memory that is not there.
  TORCH_CHECK_VALUE(!input.has_storage() || input.is_meta() || has_memory(input), op,
                    ": the input has no memory: it was freed");
  const Channels channels = nhwc_channels_of(op, input, channel_last);
  check_like(op, "z", z, input.sym_sizes(), input.scalar_type(), "the input's ");
  check_affine(op, weight, bias, input, channels.count);
  for (const OptionalTensor* tensor : {&z, &weight, &bias})
    TORCH_CHECK_VALUE(!has_value(*tensor) || (*tensor)->device() == input.device(), op, ": the input is on ",
                      input.device(), " but what goes with it on ", (*tensor)->device());
  refuse_forward_mode_of(op, input, z, weight, bias);
  NodePointer<GroupBatchNormNode> node;
  if (records(input, z, weight, bias)) {
    node = make_node<GroupBatchNormNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(input, z, weight, bias));
    node->use_batch = use_batch, node->has_mask = fuse_relu, node->channel_last = channel_last;
    node->weight = keep(weight), node->bias = keep(bias);
  }
  at::Tensor x, mean, inv_std, count, output, bitmask;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    x = input.contiguous(channels.format);  // here, not in each of the passes
    const BatchStatistics found =
        batch_statistics(op, x, channels, channel_last, use_batch, eps, running_mean, running_var, momentum, batches);
    mean = found.mean, inv_std = found.inv_std, count = found.count;
    std::tie(output, bitmask) =
        forward.call(x, z, mean, inv_std, weight, bias, fuse_relu, fuse_relu && node, channel_last);
  }
  if (node) {
    node->input = keep(x), node->mean = keep(mean), node->inv_std = keep(inv_std);
    if (fuse_relu) node->bitmask = keep(bitmask);
    if (use_batch) node->count = keep(count);
    torch::autograd::set_history(output, node);
  }
  return {output, mean, inv_std};
}
}  // namespace apex
