// The structs of the DLPack standard that torch's C exchange interface passes (torch.Tensor.__dlpack_c_exchange_api__,
// torch 2.10 and later): their layout is fixed by the standard, whatever version of torch runs.
#pragma once
#include <cstdint>

extern "C" {
enum DLDeviceType : int32_t { kDLCPU = 1, kDLCUDA = 2, kDLROCM = 10 };
enum DLDataTypeCode : uint8_t { kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4 };

struct DLPackVersion { uint32_t major, minor; };
struct DLDevice {
  DLDeviceType device_type;
  int32_t device_id;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: contiguous
  uint64_t byte_offset;
};
struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned* self);
  uint64_t flags;
  DLTensor dl_tensor;
};

struct DLPackExchangeAPIHeader {
  DLPackVersion version;
  DLPackExchangeAPIHeader* prev_api;
};
// Every function returns 0, or -1 with an exception of Python set.
struct DLPackExchangeAPI {
  DLPackExchangeAPIHeader header;
  int (*managed_tensor_allocator)(DLTensor* prototype, DLManagedTensorVersioned** out, void* error_context,
                                  void (*set_error)(void* error_context, const char* kind, const char* message));
  int (*managed_tensor_from_py_object_no_sync)(void* object, DLManagedTensorVersioned** out);
  int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned* tensor, void** out);
  int (*dltensor_from_py_object_no_sync)(void* object, DLTensor* out);  // valid as long as the object
  int (*current_work_stream)(DLDeviceType device_type, int32_t device_id, void** out);
};
}
