// Tensors as the portable module reads them through DLPack, the place of their work, memory for the time of a call.
#pragma once
#include "dlpack.h"
#include "host/apex.h"
#include "device/gpu.h"
#include "python_abi3.h"

namespace {
// Of torch; set once, at load.
const DLPackExchangeAPI* api;
PyObject *tensor_type, *parameter_type, *is_negative;

struct View : DLTensor {
  bool given = false;

  // False: an exception is set. None is no tensor.
  bool read(PyObject* object) {
    given = object != &_Py_NoneStruct;
    if (!given) return true;
    return api->dltensor_from_py_object_no_sync(object, this) == 0;
  }
  gpu::u8* bytes() const { return given ? static_cast<gpu::u8*>(data) + byte_offset : nullptr; }
  int64_t numel() const {
    int64_t count = 1;
    for (int32_t d = 0; d < ndim; ++d) count *= shape[d];
    return count;
  }
  bool is_contiguous() const {
    if (!strides) return true;
    int64_t expected = 1;
    for (int32_t d = ndim; d-- > 0;) {
      if (shape[d] == 0) return true;
      if (shape[d] != 1 && strides[d] != expected) return false;
      expected *= shape[d];
    }
    return true;
  }
  // apex_dtype, or -1.
  int32_t code() const {
    if (dtype.lanes != 1) return -1;
    if (dtype.code == kDLBfloat) return dtype.bits == 16 ? APEX_BF16 : -1;
    if (dtype.code != kDLFloat) return -1;
    return dtype.bits == 32 ? APEX_F32 : dtype.bits == 16 ? APEX_F16 : dtype.bits == 64 ? APEX_F64 : -1;
  }
  bool is_usable() const { return code() >= 0 && data && is_contiguous(); }
  bool is_on(const DLDevice& other) const {
    return device.device_type == other.device_type && device.device_id == other.device_id;
  }
  bool has_shape_of(const View& other) const {
    if (ndim != other.ndim) return false;
    for (int32_t d = 0; d < ndim; ++d)
      if (shape[d] != other.shape[d]) return false;
    return true;
  }
};

// Whether the object is of torch's own types and no negative view. What else may keep bytes from being values, DLPack
// finds: wrappers have no address there, conjugate views no dtype that is known here.
bool may_be_plain(PyObject* object) {
  PyObject* const type = PyObject_Type(object);
  Py_DecRef(type);  // the object holds it
  if (type != tensor_type && type != parameter_type) return false;
  PyObject* const negative = PyObject_CallFunctionObjArgs(is_negative, object, nullptr);
  if (!negative) return false;
  Py_DecRef(negative);  // True and False are for ever
  return negative == &_Py_FalseStruct;
}

// Where the tensor's work runs, on torch's current stream. 0; 1: no place of ours; -1: an exception is set.
int place_of(const View& tensor, apex_place* place) {
  const DLDevice device = tensor.device;
  if (device.device_type == kDLCPU) {
    *place = {APEX_CPU, 0, nullptr};
    return 0;
  }
  const bool hip = device.device_type == kDLROCM;
  if (!hip && device.device_type != kDLCUDA) return 1;
  *place = {hip ? APEX_HIP : APEX_CUDA, device.device_id, nullptr};
  return api->current_work_stream(device.device_type, device.device_id, &place->stream);
}

// The tensors of an entry, its last arguments: inputs, some of which may be None, then outputs that Python has made.
template <int inputs, int outputs> struct Given {
  View views[inputs + outputs];
  apex_place place;

  // `at`: of the input whose device it is. 0; 1: Python must do it; -1: an exception is set.
  int read(PyObject* const* arguments, int at) {
    for (int i = 0; i < inputs + outputs; ++i) {
      const bool plain = i >= inputs || arguments[i] == &_Py_NoneStruct || may_be_plain(arguments[i]);
      if (!plain || !views[i].read(arguments[i])) {
        PyErr_Clear();
        return 1;
      }
      if (views[i].given && !views[i].is_usable()) return 1;
    }
    if (!views[at].given) return 1;
    for (const View& view : views)
      if (view.given && !view.is_on(views[at].device)) return 1;
    return place_of(views[at], &place);
  }
};

PyObject* wrong_count(const char* message) {
  PyErr_SetString(PyExc_TypeError, message);
  return nullptr;
}
PyObject* leave(int answer) { return answer < 0 ? nullptr : none(); }
PyObject* leave_to_python() {
  PyErr_Clear();  // of a shape that holds no numbers
  return none();
}

void set_error(void*, const char*, const char* message) { PyErr_SetString(PyExc_RuntimeError, message); }

// Memory of torch's allocator for the time of one call, which asks for it once at the most; its order on the stream
// makes giving it back safe.
class Workspace {
 public:
  explicit Workspace(const View& like) : prototype_(like) {
    prototype_.ndim = 1;
    prototype_.strides = nullptr;
    prototype_.dtype = {kDLUInt, 8, 1};
  }
  Workspace(const Workspace&) = delete;
  ~Workspace() {
    if (taken_ && taken_->deleter) taken_->deleter(taken_);
  }
  // Calls libapex while other threads of Python run. An exception may be set afterwards.
  template <class Call> int32_t lend(const Call& call) {
    state_ = PyEval_SaveThread();
    const int32_t status = call(&lent_);
    PyEval_RestoreThread(state_);
    return status;
  }

 private:
  static void* take(void* context, uint64_t bytes) {
    auto& own = *static_cast<Workspace*>(context);
    PyEval_RestoreThread(own.state_);
    void* const memory = own.allocate(int64_t(bytes));
    own.state_ = PyEval_SaveThread();
    return memory;
  }
  void* allocate(int64_t bytes) {
    prototype_.shape = &bytes;
    if (taken_ || api->managed_tensor_allocator(&prototype_, &taken_, nullptr, &set_error)) return nullptr;
    return static_cast<uint8_t*>(taken_->dl_tensor.data) + taken_->dl_tensor.byte_offset;
  }

  DLTensor prototype_;
  DLManagedTensorVersioned* taken_ = nullptr;
  void* state_ = nullptr;
  const apex_workspace lent_{&take, this};
};

// Likewise, of calls that need none: a first launch asks the probe, CPU variants compute for long.
template <class Call> int32_t unlocked(const Call& call) {
  void* const state = PyEval_SaveThread();
  const int32_t status = call();
  PyEval_RestoreThread(state);
  return status;
}
}  // namespace
