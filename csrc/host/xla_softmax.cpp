// softmax(scale * input) with a mask or a causal one, for JAX: scaled_masked_softmax.h behind XLA's interface.
#include "scaled_masked_softmax.h"
#include "xla.h"

namespace apex::xla {
namespace {
// The mask is bytes, [batch or 1][heads or 1][queries or 1][keys]: broadcast where a size is 1.
void set_mask(Call& call, const Buffer& mask, const Buffer& input, gpu::SoftmaxForward* a) {
  bool fits = mask.rank == 4 && mask.sizes[3] == input.sizes[3];
  for (int64_t i = 0; fits && i < 3; ++i) fits = mask.sizes[i] == 1 || mask.sizes[i] == input.sizes[i];
  if (!fits) return call.fail("the mask's shape must be the input's, or 1 where it is broadcast, but for the keys");
  call.expect("the mask", mask, elements(mask), {predicate, u8});
  const int64_t keys = mask.sizes[3], head = mask.sizes[2] * keys;
  a->mask = bytes(mask);
  a->mask_query = mask.sizes[2] == 1 ? 0 : keys;
  a->mask_head = mask.sizes[1] == 1 ? 0 : head;
  a->mask_batch = mask.sizes[0] == 1 ? 0 : mask.sizes[1] * head;
}

bool is_softmax(Call& call, const Buffer& input, const Buffer& same) {
  if (input.rank != 4 || element_type(input) < 0)
    call.fail("takes floating point numbers, [batch, heads, queries, keys]");
  call.expect("the output", same, elements(input), {input.type});
  return call.status() == APEX_OK;
}
}  // namespace

// input [, mask] -> output; scale, causal.
int32_t scaled_masked_softmax_forward(Call& call) {
  const Buffer &input = call.argument(0), &output = call.result(0);
  if (!is_softmax(call, input, output)) return call.status();
  gpu::SoftmaxForward a{};
  if (call.arguments() > 1) set_mask(call, call.argument(1), input, &a);
  a.input = bytes(input), a.output = bytes(output);
  a.heads = input.sizes[1], a.queries = input.sizes[2], a.keys = input.sizes[3];
  a.rows = input.sizes[0] * a.heads * a.queries;
  a.type = element_type(input);
  a.causal = call.number("causal") != 0;
  const double scale = call.number("scale");
  return call.status() == APEX_OK ? apex_scaled_masked_softmax_forward(call.place(), &a, scale) : call.status();
}

// grad_output, output -> grad_input; scale, causal.
int32_t scaled_masked_softmax_backward(Call& call) {
  const Buffer &grad = call.argument(0), &output = call.argument(1), &grad_input = call.result(0);
  if (!is_softmax(call, output, grad) || !is_softmax(call, output, grad_input)) return call.status();
  gpu::SoftmaxBackward a{};
  a.grad_output = bytes(grad), a.output = bytes(output), a.grad_input = bytes(grad_input);
  a.queries = output.sizes[2], a.keys = output.sizes[3];
  a.rows = output.sizes[0] * output.sizes[1] * a.queries;
  a.type = element_type(output);
  a.causal = call.number("causal") != 0;
  const double scale = call.number("scale");
  return call.status() == APEX_OK ? apex_scaled_masked_softmax_backward(call.place(), &a, scale) : call.status();
}
}  // namespace apex::xla

APEX_XLA_HANDLER(scaled_masked_softmax_forward, 1)
APEX_XLA_HANDLER(scaled_masked_softmax_backward, 1)
