#include "xla.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "status.h"

namespace apex::xla {
namespace {
// Places in Api::functions.
enum {
  error_create = 0,
  error_message = 1,
  error_destroy = 2,
  stream_get = 4,
  memory_allocate = 9,
  memory_free = 10,
  device_get = 17
};
enum { invalid_argument = 3, unavailable = 14, internal_error = 13 };  // of absl::StatusCode
constexpr size_t scratch_alignment = 16;                               // what a workspace has; XLA refuses more

struct ErrorCreate {
  size_t size;
  Extension* extensions;
  const char* message;
  int32_t code;
};
struct ErrorMessage {
  size_t size;
  Extension* extensions;
  Error* error;
  const char* message;
};
struct ErrorDestroy {
  size_t size;
  Extension* extensions;
  Error* error;
};
struct StreamGet {
  size_t size;
  Extension* extensions;
  Context* context;
  void* stream;
};
struct DeviceGet {
  size_t size;
  Extension* extensions;
  Context* context;
  int32_t device;
};
struct MemoryAllocate {
  size_t size;
  Extension* extensions;
  Context* context;
  size_t bytes, alignment;
  void* memory;
};
struct MemoryFree {
  size_t size;
  Extension* extensions;
  Context* context;
  size_t bytes;
  void* memory;
};

Error* make_error(const Api* api, const char* message, int32_t code) {
  ErrorCreate arguments{sizeof arguments, nullptr, message, code};
  return reinterpret_cast<Error* (*)(ErrorCreate*)>(api->functions[error_create])(&arguments);
}

int32_t code_of(int32_t status) {
  if (status == APEX_ERROR_ARGUMENT || status == APEX_ERROR_VALUE || status == APEX_ERROR_INDEX)
    return invalid_argument;
  return status == APEX_USE_REFERENCE || status == APEX_ERROR_NO_VARIANT ? unavailable : internal_error;
}

void* take_scratch(void* call, uint64_t bytes) { return static_cast<Call*>(call)->scratch(int64_t(bytes)); }

const Buffer nothing{sizeof nothing, nullptr, 0, nullptr, 0, nullptr};
}  // namespace

int64_t elements(const Buffer& buffer) {
  int64_t count = 1;
  for (int64_t i = 0; i < buffer.rank; ++i) count *= buffer.sizes[i];
  return count;
}

int32_t element_type(const Buffer& buffer) {
  switch (buffer.type) {
    case f32:
      return APEX_F32;
    case f16:
      return APEX_F16;
    case bf16:
      return APEX_BF16;
    case f64:
      return APEX_F64;
    default:
      return -1;
  }
}

Call::Call(const Frame* frame, int32_t platform, const char* op)
    : frame_(frame), op_(op), place_{platform, 0, nullptr}, workspace_{&take_scratch, this} {
  if (platform == APEX_CPU) return;
  StreamGet stream{sizeof stream, nullptr, frame->context, nullptr};
  DeviceGet device{sizeof device, nullptr, frame->context, 0};
  if (ask(stream_get, &stream)) place_.stream = stream.stream;
  if (ask(device_get, &device)) place_.device = device.device;
}

Call::~Call() {
  for (const Block& block : blocks_) {
    if (place_.platform == APEX_CPU) {
      std::free(block.memory);
      continue;
    }
    MemoryFree arguments{sizeof arguments, nullptr, frame_->context, block.bytes, block.memory};
    ask(memory_free, &arguments);
  }
}

// Calls a function of XLA's; of the error that it may answer its text is kept.
template <class Arguments> bool Call::ask(int which, Arguments* arguments) {
  const Api* api = frame_->api;
  if (offsetof(Api, functions) + (which + 1) * sizeof(void*) > api->size) {
    fail("this version of XLA does not offer what the library asks of it");
    return false;
  }
  Error* error = reinterpret_cast<Error* (*)(Arguments*)>(api->functions[which])(arguments);
  if (!error) return true;
  ErrorMessage said{sizeof said, nullptr, error, nullptr};
  reinterpret_cast<void (*)(ErrorMessage*)>(api->functions[error_message])(&said);
  if (refusal_.empty()) refusal_ = std::string("XLA refused the stream, the device or memory: ") + said.message;
  ErrorDestroy destroy{sizeof destroy, nullptr, error};
  reinterpret_cast<void (*)(ErrorDestroy*)>(api->functions[error_destroy])(&destroy);
  fail(refusal_.c_str());
  return false;
}

void Call::fail(const char* what) {
  if (status_ == APEX_OK) status_ = apex::fail(APEX_ERROR_VALUE, "%s: %s", op_, what);
}

const Buffer& Call::argument(int64_t i) {
  const Buffers& all = frame_->arguments;
  if (i < all.count && all.kinds[i] == 1) return *static_cast<const Buffer*>(all.values[i]);
  fail("an argument is missing");
  return nothing;
}

const Buffer& Call::result(int64_t i) {
  const Buffers& all = frame_->results;
  if (i < all.count && all.kinds[i] == 1) return *static_cast<const Buffer*>(all.values[i]);
  fail("a result is missing");
  return nothing;
}

double Call::number(const char* attribute) {
  const Attributes& all = frame_->attributes;
  for (int64_t i = 0; i < all.count; ++i) {
    const Text& name = *all.names[i];
    if (all.kinds[i] != 3 || name.length != std::strlen(attribute) || std::memcmp(name.begin, attribute, name.length))
      continue;
    const auto* scalar = static_cast<const Scalar*>(all.values[i]);
    switch (scalar->type) {
      case f32:
        return *static_cast<const float*>(scalar->value);
      case f64:
        return *static_cast<const double*>(scalar->value);
      case s32:
        return *static_cast<const int32_t*>(scalar->value);
      case s64:
        return double(*static_cast<const int64_t*>(scalar->value));
      case predicate:
        return *static_cast<const bool*>(scalar->value);
      default:
        break;
    }
  }
  if (status_ == APEX_OK) status_ = apex::fail(APEX_ERROR_VALUE, "%s: there is no number %s", op_, attribute);
  return 0;
}

void Call::expect(const char* name, const Buffer& buffer, int64_t count, std::initializer_list<int32_t> types) {
  if (status_ != APEX_OK) return;
  if (elements(buffer) != count) {
    status_ = apex::fail(APEX_ERROR_VALUE, "%s: %s has %lld elements, not %lld", op_, name,
                         static_cast<long long>(elements(buffer)), static_cast<long long>(count));
  } else if (types.size() && std::find(types.begin(), types.end(), buffer.type) == types.end()) {
    status_ = apex::fail(APEX_ERROR_VALUE, "%s: %s has a dtype that it cannot have (XLA's number %d)", op_, name,
                         buffer.type);
  }
}

uint8_t* Call::scratch(int64_t bytes) {
  if (bytes <= 0 || status_ != APEX_OK) return nullptr;
  blocks_.reserve(blocks_.size() + 1);
  MemoryAllocate arguments{sizeof arguments, nullptr, frame_->context, size_t(bytes), scratch_alignment, nullptr};
  if (place_.platform == APEX_CPU) arguments.memory = std::malloc(size_t(bytes));
  else if (!ask(memory_allocate, &arguments)) return nullptr;
  if (!arguments.memory) {
    if (refusal_.empty()) refusal_ = "There are no " + std::to_string(bytes) + " bytes";
    status_ = apex::fail(APEX_ERROR_MEMORY, "%s: no memory for %lld bytes", op_, static_cast<long long>(bytes));
    return nullptr;
  }
  blocks_.push_back({size_t(bytes), arguments.memory});
  return static_cast<uint8_t*>(arguments.memory);
}

Error* handle(const Frame* frame, int32_t platform, const char* op, Body* body, uint32_t traits) {
  if (frame->extensions && frame->extensions->type == 1) {
    Metadata& metadata = *reinterpret_cast<MetadataExtension*>(frame->extensions)->metadata;
    metadata.version.major = 0;
    metadata.version.minor = 1;
    metadata.traits = traits;
    return nullptr;
  }
  const int32_t status = guarded([&] {
    Call call(frame, platform, op);
    const int32_t answer = call.status() == APEX_OK ? body(call) : call.status();
    if (answer == APEX_ERROR_WORKSPACE)
      return fail(APEX_ERROR_MEMORY, "%s: no memory for what it keeps aside. %s", op, call.refusal());
    return call.status() == APEX_OK ? answer : call.status();
  });
  if (status == APEX_OK) return nullptr;
  if (status == APEX_USE_REFERENCE) {
    fail(APEX_USE_REFERENCE, "%s: no variant of this library serves this call; set APEX_VARIANT=reference", op);
  }
  return make_error(frame->api, apex_last_error(), code_of(status));
}
}  // namespace apex::xla
