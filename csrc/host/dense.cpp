// A layer of a perceptron. Which product takes which epilogue is decided here, by what was measured on H200 with
// cublasLt 13.1. The product's own bias, ReLU and GELU cost less than a pass over memory. Gradients of activations do
// not: of GELU, with rows x outputs of 8192 x 16384, 2048 x 4096 and 512 x 3072, the product's epilogue takes 137, 20
// and 17 us more than the plain product, and the bias's gradient beside the next product 100, 7 and 3; one pass for
// both 206, 20 and 9. (ReLU's gradient in a product: 1,667 us become 2,483.) Without an activation, the bias's gradient
// goes beside the weight's product.
#include "dense.h"

#include "bias_activation.h"
#include "blas.h"
#include "status.h"
#include "workspace.h"

namespace apex {
namespace {

constexpr int64_t element_bytes = 2;

class Layer {
 public:
  Layer(const apex_place& place, const apex_dense& dense, const apex_workspace* workspace)
      : place_(place), d_(dense), workspace_(workspace) {}

  int32_t forward() {
    if (const int32_t status = begin(0)) return status;
    const bool before = d_.activation == APEX_ACTIVATION_GELU || d_.activation == APEX_ACTIVATION_SIGMOID;
    apex_matmul m = product(d_.input, d_.weight, before ? d_.before : d_.output, d_.rows, d_.outputs, d_.inputs);
    m.transpose_b = 1;
    m.ld_b = d_.inputs;
    m.bias = const_cast<void*>(d_.bias);
    m.epilogue = d_.bias ? APEX_EPILOGUE_BIAS : APEX_EPILOGUE_NONE;
    if (d_.bias && d_.activation == APEX_ACTIVATION_RELU) return multiply(m, APEX_EPILOGUE_RELU_BIAS);
    if (d_.bias && d_.activation == APEX_ACTIVATION_GELU) {
      m.d = d_.output;
      m.aux = d_.before;
      m.ld_aux = d_.outputs;
      return multiply(m, APEX_EPILOGUE_GELU_BIAS);
    }
    if (const int32_t status = multiply(m, m.epilogue)) return status;
    if (d_.activation == APEX_ACTIVATION_NONE) return APEX_OK;
    gpu::BiasActivation pass = activation(m.d);
    pass.output = static_cast<uint8_t*>(d_.output);
    return apex_bias_activation_forward(&place_, &pass);
  }

  int32_t backward() {
    const bool pass_first = d_.activation != APEX_ACTIVATION_NONE;
    if (const int32_t status = begin(pass_first ? d_.rows * d_.outputs * element_bytes : 0)) return status;
    const void* gradient = d_.grad_output;
    if (pass_first) {
      gpu::BiasActivation pass = gradient_pass();
      pass.output = vendors_ + APEX_MATMUL_WORKSPACE_BYTES;
      if (const int32_t status = apex_bias_activation_backward(&place_, &pass, workspace_)) return status;
      gradient = pass.output;
    }
    if (d_.grad_weight)
      if (const int32_t status = weight_gradient(gradient)) return status;
    return d_.grad_input ? input_gradient(gradient) : int32_t{APEX_OK};
  }

 private:
  // Before any product: the vendor's workspace, and `bytes` behind it.
  int32_t begin(int64_t bytes) {
    if (const int32_t status = check()) return status;
    return take_workspace(workspace_, APEX_MATMUL_WORKSPACE_BYTES + bytes, &vendors_);
  }
  int32_t check() const {
    if (d_.type != APEX_F16 && d_.type != APEX_BF16)
      return fail(APEX_USE_REFERENCE, "torch multiplies float32 and float64");
    if (d_.rows < 1 || d_.inputs < 1 || d_.outputs < 1)
      return fail(APEX_USE_REFERENCE, "torch knows what a layer without elements is");
    if (d_.activation < APEX_ACTIVATION_NONE || d_.activation > APEX_ACTIVATION_GELU)
      return fail(APEX_ERROR_ARGUMENT, "apex_dense: there is no activation %d", d_.activation);
    if (d_.activation == APEX_ACTIVATION_NONE && d_.grad_bias && !d_.grad_weight)
      return fail(APEX_USE_REFERENCE, "torch sums the gradient of a bias alone");
    return blas_serves(place_.platform);
  }

  // d[m, n] = a[m, k] b[k, n], all dense.
  apex_matmul product(const void* a, const void* b, void* d, int64_t m, int64_t n, int64_t k) const {
    apex_matmul made = {};
    made.a = a, made.b = b, made.d = d;
    made.m = m, made.n = n, made.k = k;
    made.ld_a = k, made.ld_b = n, made.ld_d = n;
    made.type = made.type_d = d_.type;
    made.workspace = vendors_;
    made.workspace_bytes = APEX_MATMUL_WORKSPACE_BYTES;
    return made;
  }
  int32_t multiply(apex_matmul& m, int32_t epilogue) const {
    m.epilogue = epilogue;
    return apex_matmul_run(&place_, &m);
  }

  int32_t weight_gradient(const void* gradient) const {
    apex_matmul m = product(gradient, d_.input, d_.grad_weight, d_.outputs, d_.inputs, d_.rows);
    m.transpose_a = 1;
    m.ld_a = d_.outputs;
    const bool sums = d_.activation == APEX_ACTIVATION_NONE && d_.grad_bias;
    m.bias = sums ? d_.grad_bias : nullptr;
    return multiply(m, sums ? APEX_EPILOGUE_BIAS_GRADIENT : APEX_EPILOGUE_NONE);
  }
  int32_t input_gradient(const void* gradient) const {
    apex_matmul m = product(gradient, d_.weight, d_.grad_input, d_.rows, d_.inputs, d_.outputs);
    return multiply(m, APEX_EPILOGUE_NONE);
  }

  // f of `input`, with f as csrc/device/bias_activation.h has it.
  gpu::BiasActivation activation(const void* input) const {
    gpu::BiasActivation made = {};
    made.input = static_cast<const uint8_t*>(input);
    made.rows = d_.rows, made.hidden = d_.outputs;
    made.type = made.bias_type = d_.type;
    made.function = d_.activation == APEX_ACTIVATION_RELU      ? gpu::function_relu
                    : d_.activation == APEX_ACTIVATION_SIGMOID ? gpu::function_sigmoid
                                                               : gpu::function_x_sigmoid;
    made.slope = d_.activation == APEX_ACTIVATION_GELU ? gpu::gelu_slope : 1;
    made.cubic = d_.activation == APEX_ACTIVATION_GELU ? gpu::gelu_cubic : 0;
    return made;
  }
  // ReLU's slope is the same of its result.
  gpu::BiasActivation gradient_pass() const {
    gpu::BiasActivation made = activation(d_.activation == APEX_ACTIVATION_RELU ? d_.output : d_.before);
    made.grad_output = static_cast<const uint8_t*>(d_.grad_output);
    made.grad_bias = static_cast<uint8_t*>(d_.grad_bias);
    return made;
  }

  const apex_place& place_;
  const apex_dense& d_;
  const apex_workspace* const workspace_;
  uint8_t* vendors_ = nullptr;
};

}  // namespace
}  // namespace apex

extern "C" int32_t apex_dense_forward(const apex_place* place, const apex_dense* dense,
                                      const apex_workspace* workspace) {
  return apex::guarded([&] { return apex::Layer(*place, *dense, workspace).forward(); });
}
extern "C" int32_t apex_dense_backward(const apex_place* place, const apex_dense* dense,
                                       const apex_workspace* workspace) {
  return apex::guarded([&] { return apex::Layer(*place, *dense, workspace).backward(); });
}
