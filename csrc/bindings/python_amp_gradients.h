// What apex.amp does between a backward pass and the optimizer's step, for all parameters of an optimizer at once.
//
// In Python a loop over 160 parameters that reads .grad, makes one and sorts them costs more than the launches. Here
// it is a few microseconds. Whatever is not a plain tensor on one device is left to Python: `unscale` says so, and has
// touched nothing.
#pragma once
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "generated/multi_tensor_axpby_entries.h"
#include "generated/multi_tensor_scale_entries.h"
#include "plain.h"

namespace apex {
class AmpGradients {
 public:
  // models[i]: half-precision parameter behind masters[i]. own: parameters that the optimizer updates themselves.
  AmpGradients(std::vector<at::Tensor> models, std::vector<at::Tensor> masters, std::vector<at::Tensor> own)
      : models_(std::move(models)), masters_(std::move(masters)), own_(std::move(own)), stash_(own_.size()) {
    TORCH_CHECK_VALUE(models_.size() == masters_.size(), "one master a model parameter: ", masters_.size(), " for ",
                      models_.size());
  }

  // Before a backward pass: models' gradients are dropped (their masters have them), own ones kept aside.
  void set_aside() {
    drop_model_gradients();
    for (size_t i = 0; i < own_.size(); ++i) {
      stash_[i] = own_[i].grad();
      if (stash_[i].defined()) own_[i].mutable_grad().reset();
    }
  }

  // What was kept aside, None for nothing; it is kept no longer.
  std::vector<std::optional<at::Tensor>> take_stash() {
    std::vector<std::optional<at::Tensor>> taken(own_.size());
    for (size_t i = 0; i < own_.size(); ++i)
      if (stash_[i].defined()) taken[i] = std::move(stash_[i]);
    stash_.assign(own_.size(), at::Tensor());
    return taken;
  }

  // Masters' gradients become their models' times the scale, own gradients are scaled in place (where `scaled`), and
  // what was there before is added. False, and nothing done, if a tensor is none of those this is made for.
  bool unscale(const at::Tensor& flag, double scale, const std::optional<at::Tensor>& scale_tensor, bool scaled) {
    if (!all_plain(flag.device())) return false;
    make_master_gradients();
    std::vector<at::Tensor> from, to, x, y, sum;
    for (size_t i = 0; i < models_.size(); ++i) {
      if (!models_[i].grad().defined()) continue;
      const bool fresh = fresh_[i];
      (fresh ? from : x).push_back(models_[i].grad());
      (fresh ? to : sum).push_back(masters_[i].grad());
      if (!fresh) y.push_back(masters_[i].grad());
    }
    for (size_t i = 0; i < own_.size(); ++i) {
      const at::Tensor& gradient = own_[i].grad();
      if (!gradient.defined()) {
        if (stash_[i].defined()) own_[i].mutable_grad() = stash_[i];
      } else if (stash_[i].defined()) {
        x.push_back(gradient);
        y.push_back(stash_[i]);
        sum.push_back(gradient);
      } else if (scaled) {
        from.push_back(gradient);
        to.push_back(gradient);
      }
    }
    try {
      pybind11::gil_scoped_release no_gil;
      multi_tensor_scale(from, to, flag, scale, scale_tensor);
      multi_tensor_axpby(x, y, sum, flag, scale, 1.0, 0, scale_tensor);
    } catch (...) {  // what was kept aside is still there, and masters hold no memory that nothing was written to
      for (size_t i = 0; i < masters_.size(); ++i)
        if (fresh_[i]) masters_[i].mutable_grad().reset();
      throw;
    }
    stash_.assign(own_.size(), at::Tensor());
    return true;
  }

  void drop_model_gradients() { drop(models_); }
  void drop_master_gradients() { drop(masters_); }

  // In place and without history, as zero_grad(set_to_none=False) does.
  void zero_model_gradients() {
    std::vector<at::Tensor> gradients, neg;
    for (at::Tensor& model : models_) {
      if (!model.grad().defined()) continue;
      if (model.grad().requires_grad()) model.mutable_grad() = model.grad().detach();
      if (model.grad().is_neg()) neg.push_back(model.grad());  // which torch takes one by one only
      else gradients.push_back(model.grad());
    }
    const at::NoGradGuard no_grad;
    for (const at::Tensor& gradient : neg) gradient.zero_();
    if (!gradients.empty()) at::_foreach_zero_(gradients);
  }

  // Model parameters become the roundings of their masters.
  void update_models() { multi_tensor_scale(masters_, models_, std::nullopt, 1.0); }

 private:
  static void drop(std::vector<at::Tensor>& parameters) {
    for (at::Tensor& parameter : parameters)
      if (parameter.grad().defined()) parameter.mutable_grad().reset();
  }

  static bool is_plain_on(const at::Tensor& tensor, c10::Device device) {
    return !tensor.defined() || (tensor.device() == device && apex::is_plain(tensor));
  }

  // Whether a kernel can write it.
  static bool is_target(const at::Tensor& tensor, c10::Device device) {
    return !tensor.defined() || (is_plain_on(tensor, device) && tensor.is_non_overlapping_and_dense());
  }

  static bool laid_out_alike(const at::Tensor& a, const at::Tensor& b) {
    return !a.defined() || !b.defined() || a.strides() == b.strides() || (a.is_contiguous() && b.is_contiguous());
  }

  bool all_plain(c10::Device device) const {
    for (size_t i = 0; i < models_.size(); ++i)
      if (!is_plain_on(models_[i].grad(), device) || !is_target(masters_[i].grad(), device) ||
          !is_target(masters_[i], device))
        return false;
    for (size_t i = 0; i < own_.size(); ++i)
      if (!is_target(own_[i].grad(), device) || !is_plain_on(stash_[i], device) ||
          !laid_out_alike(own_[i].grad(), stash_[i]))
        return false;
    return true;
  }

  // Gradients of masters that have none lie one behind the other in a few allocations, laid out as their masters.
  void make_master_gradients() {
    constexpr int64_t alignment = 256, most = int64_t(256) << 20;  // bytes
    fresh_.assign(models_.size(), false);
    size_t first = 0;
    while (first < models_.size()) {
      std::vector<std::pair<size_t, int64_t>> places;  // index, first element
      int64_t elements = 0;
      const at::ScalarType type = masters_[first].scalar_type();
      const int64_t item = int64_t(masters_[first].element_size()), step = alignment / item;
      size_t next = first;
      for (; next < models_.size() && masters_[next].scalar_type() == type && elements * item < most; ++next) {
        if (!models_[next].grad().defined() || masters_[next].grad().defined()) continue;
        places.emplace_back(next, elements);
        elements += (masters_[next].numel() + step - 1) / step * step;
      }
      if (!places.empty()) {
        const at::Tensor buffer = at::empty({elements}, masters_[first].options().requires_grad(false));
        for (const auto& [index, start] : places) {
          const at::Tensor& master = masters_[index];
          auto gradient = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(buffer.storage()), buffer.key_set(),
                                                                   buffer.dtype());
          gradient.unsafeGetTensorImpl()->set_sizes_and_strides(master.sizes(), master.strides(), start);
          masters_[index].mutable_grad() = std::move(gradient);
          fresh_[index] = true;
        }
      }
      first = next;
    }
  }

  std::vector<at::Tensor> models_, masters_, own_, stash_;
  std::vector<bool> fresh_;  // masters whose gradients were made in this call
};
}  // namespace apex
