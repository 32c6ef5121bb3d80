// Calling an op's reference: the Python implementation in the library apex_reference, by the dispatcher.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace apex {
// `Function` is the op's C++ signature, the same as that of apex::<op>.
template <class Function, class... Arguments> auto call_reference(const char* op, Arguments&&... arguments) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow((std::string("apex_reference::") + op).c_str(), "")
      .template typed<Function>()
      .call(std::forward<Arguments>(arguments)...);
}
}  // namespace apex
