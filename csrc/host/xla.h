// Handlers for XLA's foreign function interface, through which JAX calls this library.
//
// XLA hands over C structs (xla/ffi/api/c_api.h of the OpenXLA project, interface 0.1, which later ones serve too).
// What is read of them is declared here, so that no header of XLA is needed to build this. Every struct begins with its
// size.
#pragma once
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "apex.h"

namespace apex::xla {
struct Extension {
  size_t size;
  int32_t type;  // 1: a MetadataExtension, and the call asks what the handler is instead of running it
  Extension* next;
};
struct Version {
  size_t size;
  Extension* extensions;
  int32_t major, minor;
};
struct Metadata {
  size_t size;
  Version version;
  uint32_t traits;  // 1: what is launched can be captured into a graph and replayed
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

// xla::PrimitiveType, those that this library knows.
enum Type : int32_t { predicate = 1, s32 = 4, s64 = 5, u8 = 6, f16 = 10, f32 = 11, f64 = 12, bf16 = 16 };

struct Buffer {
  size_t size;
  Extension* extensions;
  int32_t type;
  void* data;
  int64_t rank;
  int64_t* sizes;
};
struct Buffers {
  size_t size;
  Extension* extensions;
  int64_t count;
  int32_t* kinds;  // 1: a Buffer
  void** values;
};
struct Text {
  const char* begin;
  size_t length;
};
struct Scalar {
  int32_t type;
  void* value;
};
struct Attributes {
  size_t size;
  Extension* extensions;
  int64_t count;
  int32_t* kinds;  // 3: a Scalar
  Text** names;
  void** values;
};

struct Error;    // XLA's own, as is
struct Context;  // this
struct Api {
  size_t size;
  Extension* extensions;
  Version version;
  const void* internal;
  void* functions[18];
};
struct Frame {
  size_t size;
  Extension* extensions;
  const Api* api;
  Context* context;
  int32_t stage;
  Buffers arguments, results;
  Attributes attributes;
};

// One call of a handler. What does not fit is remembered (`status`), and null or 0 is returned in its place.
class Call {
 public:
  Call(const Frame* frame, int32_t platform, const char* op);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const apex_place* place() const { return &place_; }
  int32_t status() const { return status_; }
  const char* op() const { return op_; }
  // What XLA said when it refused something first; or "".
  const char* refusal() const { return refusal_.c_str(); }
  int64_t arguments() const { return frame_->arguments.count; }
  const Buffer& argument(int64_t i);
  const Buffer& result(int64_t i);
  double number(const char* attribute);
  // Remembers that `buffer` is not what the op takes unless it has so many elements, and one of these types, if any.
  void expect(const char* name, const Buffer& buffer, int64_t elements, std::initializer_list<int32_t> types = {});
  // Device memory until the work that this call launches is done.
  uint8_t* scratch(int64_t bytes);
  // The same for the C functions that take an apex_workspace.
  const apex_workspace* workspace() const { return &workspace_; }
  void fail(const char* what);

 private:
  struct Block {
    size_t bytes;
    void* memory;
  };
  template <class Arguments> bool ask(int which, Arguments* arguments);

  const Frame* frame_;
  const char* op_;
  apex_place place_;
  int32_t status_ = APEX_OK;
  std::string refusal_;
  std::vector<Block> blocks_;
  const apex_workspace workspace_;
};

int64_t elements(const Buffer& buffer);
inline uint8_t* bytes(const Buffer& buffer) { return static_cast<uint8_t*>(buffer.data); }
// enum apex_dtype; -1 for a type that kernels do not compute with.
int32_t element_type(const Buffer& buffer);
// Of the statistics that an op keeps for its backward: float64 of float64, else float32.
inline int32_t statistics_type(const Buffer& buffer) { return buffer.type == f64 ? f64 : f32; }

using Body = int32_t(Call& call);
Error* handle(const Frame* frame, int32_t platform, const char* op, Body* body, uint32_t traits);
}  // namespace apex::xla

// The handlers of an op, apex_xla_<op>_<platform>, whose body is the function <op> in this scope. `traits`: of
// Metadata.
#define APEX_XLA_HANDLER_ON(op, platform, number, traits)                                              \
  extern "C" APEX_EXPORT apex::xla::Error* apex_xla_##op##_##platform(const apex::xla::Frame* frame) { \
    return apex::xla::handle(frame, number, #op, apex::xla::op, traits);                               \
  }
#define APEX_XLA_HANDLER(op, traits)               \
  APEX_XLA_HANDLER_ON(op, cpu, APEX_CPU, traits)   \
  APEX_XLA_HANDLER_ON(op, cuda, APEX_CUDA, traits) \
  APEX_XLA_HANDLER_ON(op, hip, APEX_HIP, traits)
