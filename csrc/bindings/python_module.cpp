// _C: what needs Python objects, the plans that optimizers keep and the entries of every op.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "fp8_linear_layer.h"
#include "gradients.h"
#include "group_batch_norm_layer.h"
#include "optimizer_plan.h"
#include "plain.h"
#include "python_state_watch.h"
#include "sync_batch_norm_layer.h"

namespace py = pybind11;

inline auto no_gil() { return py::call_guard<py::gil_scoped_release>(); }

#include "python_ops.inc"
#include "python_amp_gradients.h"

namespace {
// torch's exceptions as the Python exceptions they are named after, without the C++ backtrace.
PyObject* python_type_of(const c10::Error& error) {
  if (dynamic_cast<const c10::TypeError*>(&error)) return PyExc_TypeError;
  if (dynamic_cast<const c10::ValueError*>(&error)) return PyExc_ValueError;
  if (dynamic_cast<const c10::IndexError*>(&error)) return PyExc_IndexError;
  return dynamic_cast<const c10::NotImplementedError*>(&error) ? PyExc_NotImplementedError : PyExc_RuntimeError;
}
void translate(std::exception_ptr pending) {
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (python_error& error) {  // raised by a reference, in Python
    error.restore();
  } catch (const c10::Error& error) { PyErr_SetString(python_type_of(error), error.what_without_backtrace()); }
}
}  // namespace

PYBIND11_MODULE(_C, m) {
  py::register_local_exception_translator(&translate);
  py::class_<apex::OptimizerPlan>(m, "OptimizerPlan")
      .def(py::init([](std::vector<std::string> names, uint32_t written,
                       const std::vector<std::vector<std::optional<at::Tensor>>>& lists, std::vector<at::Tensor> owners,
                       std::vector<at::Tensor> watched) {
             std::vector<std::vector<at::Tensor>> tensors(lists.size());
             for (size_t k = 0; k < lists.size(); ++k)
               for (const auto& tensor : lists[k]) tensors[k].push_back(tensor.value_or(at::Tensor()));
             return apex::OptimizerPlan(std::move(names), written, std::move(tensors), std::move(owners),
                                        std::move(watched));
           }),
           py::arg("names"), py::arg("written"), py::arg("lists"), py::arg("owners"), py::arg("watched"))
      .def("watched_has_gradient", &apex::OptimizerPlan::watched_has_gradient)
      .def(
          "set_gradients",
          [](apex::OptimizerPlan& plan, const std::optional<std::vector<std::optional<at::Tensor>>>& gradients) {
            if (!gradients) return plan.set_gradients(std::nullopt);
            std::vector<at::Tensor> tensors;
            for (const auto& gradient : *gradients) tensors.push_back(gradient.value_or(at::Tensor()));
            plan.set_gradients(std::move(tensors));
          },
          "None among them: that parameter has no gradient.", py::arg("gradients"))
      .def("is_outdated", &apex::OptimizerPlan::is_outdated)
      .def_property_readonly("launches", &apex::OptimizerPlan::launches);
  py::class_<apex::StateWatch>(m, "StateWatch")
      .def(py::init<py::dict, std::vector<py::object>>(), py::arg("states"), py::arg("params"))
      .def("holds", &apex::StateWatch::holds, py::arg("states"));
  py::class_<apex::AmpGradients>(m, "AmpGradients")
      .def(py::init<std::vector<at::Tensor>, std::vector<at::Tensor>, std::vector<at::Tensor>>(), py::arg("models"),
           py::arg("masters"), py::arg("own"))
      .def("set_aside", &apex::AmpGradients::set_aside)
      .def("take_stash", &apex::AmpGradients::take_stash)
      .def("unscale", &apex::AmpGradients::unscale, py::arg("flag"), py::arg("scale"), py::arg("scale_tensor"),
           py::arg("scaled"))
      .def("drop_model_gradients", &apex::AmpGradients::drop_model_gradients)
      .def("drop_master_gradients", &apex::AmpGradients::drop_master_gradients)
      .def("zero_model_gradients", &apex::AmpGradients::zero_model_gradients)
      .def("update_models", &apex::AmpGradients::update_models, py::call_guard<py::gil_scoped_release>());
  m.def(
      "is_plain", [](const at::Tensor& t) { return apex::is_plain(t); }, "What apex._plain.is_plain says.",
      py::arg("tensor"));
  m.def(
      "is_dense", [](const at::Tensor& t) { return t.layout() == at::kStrided && t.is_non_overlapping_and_dense(); },
      "Whether the tensor fills its memory: no gaps, no element twice.", py::arg("tensor"));
  m.def(
      "separate_gradients", [](std::vector<at::Tensor> owners) { return apex::separate_gradients(owners); },
      "apex._gradients.separate_gradients; False, and nothing done, if a gradient is a wrapper.", py::arg("owners"));
  py::class_<apex::Fp8Products>(m, "Fp8Products")
      .def(py::init([](at::ScalarType forward, at::ScalarType backward, bool by_card, std::array<bool, 3> fast,
                       std::array<bool, 3> powers_of_two, std::array<double, 3> epsilons) {
             return apex::Fp8Products{forward, backward, by_card, fast, powers_of_two, epsilons};
           }),
           py::arg("forward"), py::arg("backward"), py::arg("by_card"), py::arg("fast"), py::arg("powers_of_two"),
           py::arg("epsilons"));
  m.def("fp8_linear_layer", &apex::fp8_linear_layer, no_gil());
  m.def("fp8_new_scales", &apex::fp8_new_scales, no_gil());
  m.def("group_batch_norm_layer", &apex::group_batch_norm_layer, no_gil());
  m.def("sync_batch_norm_layer", &apex::sync_batch_norm_layer, no_gil());
  add_ops(m);
}
