// Softmax cross entropy for JAX: xentropy.h behind XLA's interface.
#include "xentropy.h"
#include "xla.h"

namespace apex::xla {
namespace {
// Sets what both directions have in common.
template <class Arguments> void set_rows(Call& call, const Buffer& logits, const Buffer& labels, Arguments* a) {
  if (logits.rank < 1 || element_type(logits) < 0) call.fail("logits must be floating point, [..., classes]");
  if (call.status() != APEX_OK) return;
  a->classes = a->row_stride = logits.sizes[logits.rank - 1];
  a->rows = elements(labels);
  call.expect("logits", logits, a->rows * a->classes);
  call.expect("labels", labels, a->rows, {s32, s64});
  if (a->classes == 0 && a->rows) call.fail("logits have no classes");
  a->logits = bytes(logits), a->labels = bytes(labels);
  a->logits_type = element_type(logits), a->wide_labels = labels.type == s64;
  a->smoothing = call.number("smoothing");
}
}  // namespace

// logits, labels -> losses, normalizers; smoothing. A label outside [0, classes) gives nan, -100 gives 0.
int32_t xentropy_forward(Call& call) {
  const Buffer &logits = call.argument(0), &labels = call.argument(1), &losses = call.result(0),
               &normalizers = call.result(1);
  gpu::XentropyForward a{};
  set_rows(call, logits, labels, &a);
  call.expect("losses", losses, a.rows, {f16, bf16, f32, f64});
  call.expect("normalizers", normalizers, 2 * a.rows, {statistics_type(logits)});
  if (call.status() != APEX_OK) return call.status();
  a.losses = bytes(losses), a.normalizers = bytes(normalizers), a.loss_type = element_type(losses);
  return run_xentropy_forward(*call.place(), a, call.workspace());
}

// grad_losses, logits, labels, normalizers -> grad_logits; smoothing.
int32_t xentropy_backward(Call& call) {
  const Buffer &grad = call.argument(0), &logits = call.argument(1), &labels = call.argument(2),
               &normalizers = call.argument(3), &grad_logits = call.result(0);
  gpu::XentropyBackward a{};
  set_rows(call, logits, labels, &a);
  call.expect("the losses' gradient", grad, a.rows, {f16, bf16, f32, f64});
  call.expect("normalizers", normalizers, 2 * a.rows, {statistics_type(logits)});
  call.expect("the logits' gradient", grad_logits, a.rows * a.classes, {logits.type});
  if (call.status() != APEX_OK) return call.status();
  a.grad_losses = bytes(grad), a.grad_stride = 1, a.grad_type = element_type(grad);
  a.normalizers = bytes(normalizers), a.grad_logits = bytes(grad_logits);
  return run_xentropy_backward(*call.place(), a);
}
}  // namespace apex::xla

APEX_XLA_HANDLER(xentropy_forward, 0)  // 0: its scratch memory may be another one at every replay
APEX_XLA_HANDLER(xentropy_backward, 1)
