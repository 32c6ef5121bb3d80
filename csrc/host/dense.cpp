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

namespace apex {
namespace {

constexpr int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }
constexpr int64_t element_bytes = 2;

class Layer {
 public:
  Layer(const apex_place& place, const apex_dense& dense) : place_(place), d_(dense) {}

  // The workspace: the vendor's, the gradient before the activation, partial sums of the bias's gradient.
  int32_t prepare(int64_t* workspace_bytes, int32_t* variant) const {
    if (const int32_t status = check()) return status;
    *workspace_bytes = APEX_MATMUL_WORKSPACE_BYTES;
    *variant = APEX_VARIANT_UNKNOWN;
    if (!d_.grad_output || d_.activation == APEX_ACTIVATION_NONE) return APEX_OK;
    gpu::BiasActivation pass = gradient_pass();
    if (const int32_t status = apex_bias_activation_prepare(&place_, &pass, variant)) return status;
    *workspace_bytes += gradient_bytes();
    if (d_.grad_bias) *workspace_bytes += aligned(pass.parts * d_.outputs * int64_t(sizeof(float)));
    return APEX_OK;
  }

  int32_t forward() const {
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

  int32_t backward() const {
    const void* gradient = d_.grad_output;
    if (d_.activation != APEX_ACTIVATION_NONE) {
      gpu::BiasActivation pass = gradient_pass();
      pass.output = static_cast<uint8_t*>(d_.workspace) + APEX_MATMUL_WORKSPACE_BYTES;
      pass.partials = pass.output + gradient_bytes();
      if (const int32_t status = apex_bias_activation_backward(&place_, &pass, d_.variant)) return status;
      gradient = pass.output;
    }
    if (d_.grad_weight)
      if (const int32_t status = weight_gradient(gradient)) return status;
    return d_.grad_input ? input_gradient(gradient) : int32_t{APEX_OK};
  }

 private:
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
  int64_t gradient_bytes() const { return aligned(d_.rows * d_.outputs * element_bytes); }

  // d[m, n] = a[m, k] b[k, n], all dense.
  apex_matmul product(const void* a, const void* b, void* d, int64_t m, int64_t n, int64_t k) const {
    apex_matmul made = {};
    made.a = a, made.b = b, made.d = d;
    made.m = m, made.n = n, made.k = k;
    made.ld_a = k, made.ld_b = n, made.ld_d = n;
    made.type = made.type_d = d_.type;
    made.workspace = d_.workspace;
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
};

template <class Step> int32_t run(const apex_place* place, const apex_dense* dense, Step&& step) {
  return guarded([&]() -> int32_t {
    if (!dense->workspace || dense->workspace_bytes < APEX_MATMUL_WORKSPACE_BYTES)
      return fail(APEX_ERROR_ARGUMENT, "apex_dense: the workspace of apex_dense_prepare is wanted");
    if (reinterpret_cast<uintptr_t>(dense->workspace) % 16)  // how the pass is laid out depends on it
      return fail(APEX_ERROR_ARGUMENT, "apex_dense: the workspace must be aligned to 16 bytes");
    return step(Layer(*place, *dense));
  });
}

}  // namespace
}  // namespace apex

extern "C" int32_t apex_dense_prepare(const apex_place* place, apex_dense* dense) {
  return apex::guarded([&] { return apex::Layer(*place, *dense).prepare(&dense->workspace_bytes, &dense->variant); });
}
extern "C" int32_t apex_dense_forward(const apex_place* place, const apex_dense* dense) {
  return apex::run(place, dense, [](const apex::Layer& layer) { return layer.forward(); });
}
extern "C" int32_t apex_dense_backward(const apex_place* place, const apex_dense* dense) {
  return apex::run(place, dense, [](const apex::Layer& layer) { return layer.backward(); });
}
