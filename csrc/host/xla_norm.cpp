// Layer norm and RMS norm for JAX: layer_norm.h and rms_norm.h behind XLA's interface.
#include "layer_norm.h"
#include "rms_norm.h"
#include "xla.h"

namespace apex::xla {
namespace {
struct Rows { int64_t rows, hidden; };

// Rows of `input`, as long as the weight; remembered in the call where they do not come out even.
Rows rows_of(Call& call, const Buffer& input, const Buffer& weight) {
  const int64_t hidden = elements(weight), count = elements(input);
  if (element_type(input) < 0 || element_type(weight) < 0) call.fail("input and weight must be floating point");
  if (hidden == 0 || count % hidden) call.fail("the input's last dimensions must be the weight's, and not empty");
  return call.status() == APEX_OK ? Rows{count / hidden, hidden} : Rows{};
}

// input, weight [, bias] -> output [, mean], rstd; eps.
int32_t forward(Call& call, bool centered, decltype(apex_layer_norm_forward)* run) {
  const Buffer &input = call.argument(0), &weight = call.argument(1), &output = call.result(0);
  const Rows r = rows_of(call, input, weight);
  const int32_t statistics = statistics_type(input);
  gpu::NormForward a{};
  a.input = bytes(input), a.weight = bytes(weight), a.output = bytes(output);
  call.expect("the output", output, r.rows * r.hidden, {f16, bf16, f32, f64});
  if (centered) {
    const Buffer &bias = call.argument(2), &mean = call.result(1);
    call.expect("the bias", bias, r.hidden, {weight.type});
    call.expect("mean", mean, r.rows, {statistics});
    a.bias = bytes(bias), a.mean = bytes(mean);
  }
  const Buffer& rstd = call.result(centered ? 2 : 1);
  call.expect("rstd", rstd, r.rows, {statistics});
  a.rstd = bytes(rstd), a.rows = r.rows, a.hidden = r.hidden;
  a.eps = call.number("eps");
  a.input_type = element_type(input), a.output_type = element_type(output), a.weight_type = element_type(weight);
  return call.status() == APEX_OK ? run(call.place(), &a) : call.status();
}

// grad_output, input [, mean], rstd, weight -> grad_input, grad_weight [, grad_bias].
int32_t backward(Call& call, bool centered, decltype(apex_layer_norm_backward)* run) {
  const Buffer &grad = call.argument(0), &input = call.argument(1), &rstd = call.argument(centered ? 3 : 2),
               &weight = call.argument(centered ? 4 : 3), &grad_input = call.result(0), &grad_weight = call.result(1);
  const Rows r = rows_of(call, input, weight);
  const int32_t statistics = statistics_type(input);
  gpu::NormBackward a{};
  call.expect("the gradient", grad, r.rows * r.hidden, {f16, bf16, f32, f64});
  call.expect("rstd", rstd, r.rows, {statistics});
  call.expect("the input's gradient", grad_input, r.rows * r.hidden, {input.type});
  call.expect("the weight's gradient", grad_weight, r.hidden, {weight.type});
  if (centered) {
    const Buffer &mean = call.argument(2), &grad_bias = call.result(2);
    call.expect("mean", mean, r.rows, {statistics});
    call.expect("the bias's gradient", grad_bias, r.hidden, {weight.type});
    a.mean = bytes(mean), a.grad_bias = bytes(grad_bias);
  }
  if (call.status() != APEX_OK) return call.status();
  a.grad_output = bytes(grad), a.saved = bytes(input), a.rstd = bytes(rstd), a.weight = bytes(weight);
  a.grad_input = bytes(grad_input), a.grad_weight = bytes(grad_weight);
  a.rows = r.rows, a.hidden = r.hidden;
  a.input_type = element_type(input), a.output_type = element_type(grad), a.weight_type = element_type(weight);
  return run(call.place(), &a, call.workspace());
}
}  // namespace

int32_t layer_norm_forward(Call& call) { return forward(call, true, &apex_layer_norm_forward); }
int32_t layer_norm_backward(Call& call) { return backward(call, true, &apex_layer_norm_backward); }
int32_t rms_norm_forward(Call& call) { return forward(call, false, &apex_rms_norm_forward); }
int32_t rms_norm_backward(Call& call) { return backward(call, false, &apex_rms_norm_backward); }
}  // namespace apex::xla

APEX_XLA_HANDLER(layer_norm_forward, 1)
APEX_XLA_HANDLER(layer_norm_backward, 0)  // 0: its scratch memory may be another one at every replay
APEX_XLA_HANDLER(rms_norm_forward, 1)
APEX_XLA_HANDLER(rms_norm_backward, 0)
