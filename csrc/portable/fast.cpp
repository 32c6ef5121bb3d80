// The hot parts of the portable binding (apex/_portable) in C: a module of Python's stable ABI that reaches torch's
// tensors through DLPack's C exchange interface. No header and no library of torch: one file serves every CPython from
// 3.10 on and every torch from 2.10 on.
//
// It says nothing about what is wrong: what it does not take (tensors that do not fit, are not contiguous, have other
// types than torch's own, or are negative views) it answers with None, and Python, which has made the outputs, looks
// closely and does the same by ctypes. Else the answer is libapex's status.
#include "host/layer_norm.h"
#include "host/rms_norm.h"
#include "host/scaled_masked_softmax.h"
#include "view.h"

namespace {
// set_api(capsule, torch.Tensor, torch.nn.Parameter, torch.Tensor.is_neg): False where this DLPack is another than is
// known here.
PyObject* set_api(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 4) return wrong_count("4 arguments are required");
  api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(arguments[0], "dlpack_exchange_api"));
  if (!api) return nullptr;
  Py_IncRef(tensor_type = arguments[1]);  // for ever: types of torch
  Py_IncRef(parameter_type = arguments[2]);
  Py_IncRef(is_negative = arguments[3]);
  const bool usable = api->header.version.major == 1 && api->dltensor_from_py_object_no_sync &&
                      api->current_work_stream && api->managed_tensor_allocator;
  return PyBool_FromLong(usable);
}

// addresses(list, may lack, dtype, device type, device index, address of numels, address of a row of the image, address
// of as many words): reads the addresses of a list of contiguous tensors, or None where some may lack, into the words.
// True: some differ from the row, False: none does, None: one of the tensors needs a closer look.
PyObject* addresses(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 8) return wrong_count("8 arguments are required");
  const bool may_lack = arguments[1] == &_Py_TrueStruct;
  const long code = PyLong_AsLong(arguments[2]), type = PyLong_AsLong(arguments[3]);
  const long index = PyLong_AsLong(arguments[4]);
  const auto* const numels = static_cast<const uint64_t*>(PyLong_AsVoidPtr(arguments[5]));
  const auto* const row = static_cast<const uint64_t*>(PyLong_AsVoidPtr(arguments[6]));
  auto* const found = static_cast<uint64_t*>(PyLong_AsVoidPtr(arguments[7]));
  const Py_ssize_t tensors = PyList_Size(arguments[0]);
  if (tensors < 0 || PyErr_Occurred()) return nullptr;
  bool differ = false;
  for (Py_ssize_t i = 0; i < tensors; ++i) {
    PyObject* const object = PyList_GetItem(arguments[0], i);
    uint64_t address = 0;
    if (object != &_Py_NoneStruct) {
      View t;
      if (!may_be_plain(object) || !t.read(object)) {
        PyErr_Clear();  // a sparse tensor, a wrapper: Python says what is wrong
        return none();
      }
      if (t.code() != code || t.device.device_type != type || t.device.device_id != index || !t.data ||
          uint64_t(t.numel()) != numels[i] || !t.is_contiguous())
        return none();
      address = reinterpret_cast<uint64_t>(t.bytes());
    } else if (!may_lack) {
      return none();
    }
    differ |= row[i] != address;
    found[i] = address;
  }
  return PyBool_FromLong(differ);
}

// same_values(dicts, list): whether the dicts' values, one dict after another, are the objects of the list.
PyObject* same_values(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return wrong_count("2 arguments are required");
  const Py_ssize_t dicts = PyList_Size(arguments[0]), values = PyList_Size(arguments[1]);
  if (dicts < 0 || values < 0) return nullptr;
  Py_ssize_t seen = 0;
  for (Py_ssize_t i = 0; i < dicts; ++i) {
    PyObject* const dict = PyList_GetItem(arguments[0], i);
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value); ++seen)
      if (seen == values || value != PyList_GetItem(arguments[1], seen)) return PyBool_FromLong(0);
  }
  return PyBool_FromLong(seen == values);
}

// The elements that are normalized together; 0: Python must look at it. shape: normalized_shape, a sequence, which is
// how the input's ends, and that of the weights.
int64_t hidden_size(PyObject* shape, const View& input, const View& weight, const View& bias) {
  const Py_ssize_t n = PySequence_Size(shape);
  if (n < 1 || n > input.ndim) return 0;
  View ending = input;
  ending.ndim = int32_t(n);
  ending.shape += input.ndim - n;
  for (Py_ssize_t d = 0; d < n; ++d) {
    PyObject* const size = PySequence_GetItem(shape, d);
    if (!size) return 0;
    const bool fits = PyLong_AsLongLong(size) == ending.shape[d];
    Py_DecRef(size);
    if (!fits) return 0;
  }
  const bool fit = (!weight.given || weight.has_shape_of(ending)) && (!bias.given || bias.has_shape_of(ending));
  return fit && (!weight.given || !bias.given || weight.code() == bias.code()) ? ending.numel() : 0;
}

// What both directions of a norm are given alike.
template <class Arguments> void set_norm(Arguments* a, int64_t hidden, PyObject* eps, const View& weight,
                                         const View& bias, const View& mean, const View& rstd) {
  a->hidden = hidden;
  a->eps = PyFloat_AsDouble(eps);
  a->weight = weight.bytes();
  a->bias = bias.bytes();
  a->mean = mean.bytes();
  a->rstd = rstd.bytes();
  a->rows = rstd.numel();
}

// norm_forward(centered, shape, eps, input, residual, weight, bias, output, sum, mean, rstd): a status.
PyObject* norm_forward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 11) return wrong_count("11 arguments are required");
  Given<4, 4> given;
  if (const int answer = given.read(arguments + 3, 0)) return leave(answer);
  const auto& [input, residual, weight, bias, output, sum, mean, rstd] = given.views;
  const int64_t hidden = hidden_size(arguments[1], input, weight, bias);
  const bool alike = !residual.given || (residual.has_shape_of(input) && residual.code() == input.code());
  if (!hidden || !alike || rstd.numel() * hidden != input.numel()) return leave_to_python();
  gpu::NormForward a{};
  set_norm(&a, hidden, arguments[2], weight, bias, mean, rstd);
  a.input = input.bytes();
  a.residual = residual.bytes();
  a.sum = sum.bytes();
  a.output = output.bytes();
  a.input_type = input.code();
  a.output_type = output.code();
  a.weight_type = weight.given ? weight.code() : bias.given ? bias.code() : a.input_type;
  if (PyErr_Occurred()) return nullptr;
  const auto run = arguments[0] == &_Py_TrueStruct ? &apex_layer_norm_forward : &apex_rms_norm_forward;
  return PyLong_FromLong(unlocked([&] { return run(&given.place, &a); }));
}

// norm_backward(centered, from_output, shape, eps, grad_output, saved, grad_sum, mean, rstd, weight, bias, grad_input,
// grad_weight, grad_bias): a status.
PyObject* norm_backward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 14) return wrong_count("14 arguments are required");
  Given<7, 3> given;
  if (const int answer = given.read(arguments + 4, 1)) return leave(answer);
  const auto& [grad_output, saved, grad_sum, mean, rstd, weight, bias, grad_input, grad_weight, grad_bias] =
      given.views;
  const apex_place& place = given.place;
  const bool centered = arguments[0] == &_Py_TrueStruct, from_output = arguments[1] == &_Py_TrueStruct;
  const int64_t hidden = hidden_size(arguments[2], saved, weight, bias);
  const int32_t type = grad_input.code(), statistics = type == APEX_F64 ? APEX_F64 : APEX_F32;
  const auto is_of_rows = [&](const View& view) {
    return view.given && view.code() == statistics && view.numel() * hidden == saved.numel();
  };
  if (!hidden || !grad_output.given || !grad_output.has_shape_of(saved) || !is_of_rows(rstd) ||
      saved.code() != (from_output ? grad_output.code() : type) || (centered && !from_output && !is_of_rows(mean)) ||
      (grad_sum.given && (!grad_sum.has_shape_of(saved) || grad_sum.code() != type)))
    return leave_to_python();
  gpu::NormBackward a{};
  set_norm(&a, hidden, arguments[3], weight, bias, mean, rstd);
  a.grad_output = grad_output.bytes();
  a.saved = saved.bytes();
  a.grad_sum = grad_sum.bytes();
  a.grad_input = grad_input.bytes();
  a.grad_weight = grad_weight.bytes();
  a.grad_bias = grad_bias.bytes();
  a.input_type = type;
  a.output_type = grad_output.code();
  a.weight_type = weight.given ? weight.code() : a.input_type;
  a.from_output = from_output;
  if (PyErr_Occurred()) return nullptr;
  const auto run = centered ? &apex_layer_norm_backward : &apex_rms_norm_backward;
  Workspace workspace(rstd);
  const int32_t status = workspace.lend([&](const apex_workspace* lent) { return run(&place, &a, lent); });
  return PyErr_Occurred() ? nullptr : PyLong_FromLong(status);
}

// Of a contiguous tensor as batches of heads of queries of keys.
template <class Arguments> void set_softmax_shape(const View& tensor, Arguments* a) {
  a->keys = tensor.shape[tensor.ndim - 1];
  a->rows = 1;
  for (int32_t d = 0; d + 1 < tensor.ndim; ++d) a->rows *= tensor.shape[d];
  a->queries = tensor.ndim > 1 ? tensor.shape[tensor.ndim - 2] : 1;
  a->type = tensor.code();
}

// softmax_forward(causal, scale, input, output): a status. Without a mask.
PyObject* softmax_forward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 4) return wrong_count("4 arguments are required");
  Given<1, 1> given;
  if (const int answer = given.read(arguments + 2, 0)) return leave(answer);
  const auto& [input, output] = given.views;
  const bool causal = arguments[0] == &_Py_TrueStruct;
  if (input.ndim < (causal ? 2 : 1)) return leave_to_python();
  gpu::SoftmaxForward a{};
  set_softmax_shape(input, &a);
  a.input = input.bytes();
  a.output = output.bytes();
  a.heads = input.ndim > 2 ? input.shape[input.ndim - 3] : 1;
  a.causal = causal;
  const double scale = PyFloat_AsDouble(arguments[1]);
  if (PyErr_Occurred()) return nullptr;
  return PyLong_FromLong(unlocked([&] { return apex_scaled_masked_softmax_forward(&given.place, &a, scale); }));
}

// softmax_backward(causal, scale, grad_output, output, grad_input): a status.
PyObject* softmax_backward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 5) return wrong_count("5 arguments are required");
  Given<2, 1> given;
  if (const int answer = given.read(arguments + 2, 1)) return leave(answer);
  const auto& [grad_output, output, grad_input] = given.views;
  const bool causal = arguments[0] == &_Py_TrueStruct;
  if (output.ndim < (causal ? 2 : 1) || !grad_output.given || !grad_output.has_shape_of(output) ||
      grad_output.code() != output.code())
    return leave_to_python();
  gpu::SoftmaxBackward a{};
  set_softmax_shape(output, &a);
  a.grad_output = grad_output.bytes();
  a.output = output.bytes();
  a.grad_input = grad_input.bytes();
  a.causal = causal;
  const double scale = PyFloat_AsDouble(arguments[1]);
  if (PyErr_Occurred()) return nullptr;
  return PyLong_FromLong(unlocked([&] { return apex_scaled_masked_softmax_backward(&given.place, &a, scale); }));
}

using Fast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
PyMethodDef method(const char* name, Fast function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL, nullptr};
}
PyMethodDef methods[] = {method("set_api", &set_api),
                         method("addresses", &addresses),
                         method("same_values", &same_values),
                         method("norm_forward", &norm_forward),
                         method("norm_backward", &norm_backward),
                         method("softmax_forward", &softmax_forward),
                         method("softmax_backward", &softmax_backward),
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {
    {{1, nullptr}, nullptr, 0, nullptr}, "apex_portable", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};
}  // namespace

extern "C" APEX_EXPORT PyObject* PyInit_apex_portable() {
  PyObject* const module = PyModule_Create2(&definition, python_abi);
  // Of the headers that this was compiled against: apex/_portable compares it with the library's own.
  if (module && PyModule_AddStringConstant(module, "interface_digest", APEX_INTERFACE_DIGEST)) return nullptr;
  return module;
}
