// Memory that libapex asks for during a call: torch's, on the device's current stream, whose work it outlives.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <exception>
#include <utility>
#include <vector>

#include "status.h"

namespace apex {
class Workspace {
 public:
  // spare: memory of so many bytes that is lent first, where it suffices.
  explicit Workspace(c10::Device device, void* spare = nullptr, uint64_t spare_bytes = 0)
      : options_(at::TensorOptions().device(device).dtype(at::kByte)), spare_(spare), spare_bytes_(spare_bytes) {}
  Workspace(const Workspace&) = delete;

  const apex_workspace* lent() const { return &lent_; }
  // What torch's allocator threw, which could not pass through C.
  std::exception_ptr failure() const { return failure_; }

 private:
  static void* take(void* context, uint64_t bytes) {
    auto& own = *static_cast<Workspace*>(context);
    if (own.spare_ && bytes <= own.spare_bytes_) return std::exchange(own.spare_, nullptr);
    try {
      return own.taken_.emplace_back(at::empty({int64_t(bytes)}, own.options_)).mutable_data_ptr();
    } catch (...) { own.failure_ = std::current_exception(); }
    return nullptr;
  }

  const at::TensorOptions options_;
  void* spare_;
  const uint64_t spare_bytes_;
  std::vector<at::Tensor> taken_;
  std::exception_ptr failure_;
  const apex_workspace lent_{&take, this};
};

// What `call`, a call of libapex, answers of a workspace on the device.
template <class Call> int32_t with_workspace(c10::Device device, const Call& call) {
  Workspace workspace(device);
  const int32_t status = call(workspace.lent());
  if (workspace.failure()) std::rethrow_exception(workspace.failure());
  return status;
}
// Likewise of a function that takes the place and the struct before it. False: the reference must run.
template <class Function, class Arguments>
bool run_with_workspace(Function* function, const apex_place& place, const Arguments& a, const char* op,
                        c10::Device device) {
  const auto call = [&](const apex_workspace* lent) { return function(&place, &a, lent); };
  return !use_reference(with_workspace(device, call), op);
}
}  // namespace apex
