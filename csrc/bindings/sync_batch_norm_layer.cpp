#include "sync_batch_norm_layer.h"

#include "batch_statistics.h"
#include "generated/batchnorm.h"
#include "generated/reduce_bn.h"
#include "generated/relu_bw.h"

namespace apex {
struct SyncBatchNormNode : OpNode<SyncBatchNormNode> {
  static constexpr const char* shown = "ApexSyncBatchNormBackward";
  SavedVariable input, z, weight, bias, mean, inv_std, count;
  bool fuse_relu = false, use_batch = false, channel_last = false;
  auto kept() { return std::tie(input, z, weight, bias, mean, inv_std, count, fuse_relu, use_batch, channel_last); }
  bool gives(size_t, const variable_list& given) const { return given[0].defined(); }

  variable_list gradients(const variable_list& gradients) {
    variable_list found(4);
    if (!gradients[0].defined()) return found;
    const bool of_input = wants(0), of_z = wants(1), of_weight = wants(2), of_bias = wants(3);
    const at::Tensor given = input.unpack(), m = mean.unpack(), r = inv_std.unpack();
    const OptionalTensor w = if_any(weight.unpack()), b = if_any(bias.unpack()), added = if_any(z.unpack());
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      const at::Tensor x = given.contiguous(channels_of("SyncBatchNorm", given, channel_last).format);
      const at::Tensor dy =
          fuse_relu ? dispatcher_op<ReluBw>().call(gradients[0], x, added, m, r, w, b, channel_last) : gradients[0];
      OptionalTensor of_dy, of_dy_xmu, n;
      if (of_weight || of_bias || (of_input && use_batch)) {
        const auto [sums, grad_weight, grad_bias] =
            dispatcher_op<ReduceBn>().call(dy, x, m, r, has_value(w) ? w : b, channel_last, std::nullopt);
        if (of_weight) found[2] = grad_weight;
        if (of_bias) found[3] = grad_bias;
        if (use_batch) {
          const c10::SymInt channels = m.sym_numel();
          of_dy = sums.narrow_symint(0, 0, channels);
          of_dy_xmu = sums.narrow_symint(0, channels, channels);
          n = count.unpack();
        }
      }
      if (of_input)
        found[0] = dispatcher_op<BatchnormBackward>().call(dy, x, m, r, w, of_dy, of_dy_xmu, n, channel_last);
      if (of_z) found[1] = dy;
    }
    // Whatever asks for a gradient of these hears that there is none.
    if (at::GradMode::is_enabled()) {
      const auto node = no_double_backward("SyncBatchNorm", "is not implemented", gradients[0], given, added, w, b);
      for (at::Tensor& gradient : found)
        if (gradient.defined() && !gradient.is_same(gradients[0])) torch::autograd::set_history(gradient, node);
    }
    return found;
  }
};

at::Tensor sync_batch_norm_layer(const at::Tensor& input, const OptionalTensor& z, const OptionalTensor& weight,
                                 const OptionalTensor& bias, const OptionalTensor& running_mean,
                                 const OptionalTensor& running_var, const OptionalTensor& batches, double momentum,
                                 double eps, bool fuse_relu, bool use_batch, bool channel_last) {
  const char* op = "SyncBatchNorm";
  // Before anything is counted, and before a copy reads memory that is not there.
  TORCH_CHECK_VALUE(!input.has_storage() || input.is_meta() || has_memory(input), op,
                    ": the input has no memory: it was freed");
  const Channels channels = channels_of(op, input, channel_last);
  check_like(op, "z", z, input.sym_sizes(), input.scalar_type(), "the input's ");
  check_affine(op, weight, bias, input, channels.count);
  for (const OptionalTensor* tensor : {&z, &weight, &bias})
    TORCH_CHECK_VALUE(!has_value(*tensor) || (*tensor)->device() == input.device(), op, ": the input is on ",
                      input.device(), " but what goes with it on ", (*tensor)->device());
  refuse_forward_mode_of(op, input, z, weight, bias);
  NodePointer<SyncBatchNormNode> node;
  if (records(input, z, weight, bias)) {
    node = make_node<SyncBatchNormNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(input, z, weight, bias));
    node->fuse_relu = fuse_relu, node->use_batch = use_batch, node->channel_last = channel_last;
    node->input = keep(input), node->weight = keep(weight), node->bias = keep(bias);
    if (fuse_relu) node->z = keep(z);
  }
  BatchStatistics statistics;
  at::Tensor output;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    const at::Tensor x = input.contiguous(channels.format);  // here, not in each of the passes
    statistics =
        batch_statistics(op, x, channels, channel_last, use_batch, eps, running_mean, running_var, momentum, batches);
    output = dispatcher_op<BatchnormForward>().call(x, z, statistics.mean, statistics.inv_std, weight, bias, fuse_relu,
                                                    channel_last);
  }
  if (node) {
    node->mean = keep(statistics.mean), node->inv_std = keep(statistics.inv_std);
    if (use_batch) node->count = keep(statistics.count);
    torch::autograd::set_history(output, node);
  }
  return output;
}
}  // namespace apex
