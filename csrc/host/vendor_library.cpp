#include "vendor_library.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "apex.h"
#include "os.h"
#include "status.h"

namespace apex {
namespace {

std::mutex hint_mutex;
char* hint = nullptr;  // a plain pointer: nothing to destroy while other threads still run at exit

std::string folder_of(const std::string& path) {
  const auto end = path.find_last_of(os::separators);
  return end == std::string::npos ? std::string(".") : path.substr(0, end);
}

}  // namespace

std::string torch_folder() {
  {
    std::lock_guard<std::mutex> lock(hint_mutex);
    if (hint) return hint;
  }
  const auto c10 = os::mapped_libraries("libc10.so");
  return c10.empty() ? std::string() : folder_of(c10.front());
}

void set_torch_folder(const char* folder) {
  std::lock_guard<std::mutex> lock(hint_mutex);
  char* copy = nullptr;
  if (folder && *folder) {
    copy = strdup(folder);
    if (!copy) throw std::bad_alloc();
  }
  free(hint);
  hint = copy;
}

VendorLibrary find_vendor_library(const char* stem) {
  VendorLibrary library;
  const std::string folder = torch_folder();
  const std::string torchs = library_that_torch_needs(folder, stem);
  const auto mapped = os::mapped_libraries(stem);
  if (!mapped.empty()) {
    // Two copies: torch's is the one whose streams we are given.
    const auto same =
        std::find_if(mapped.begin(), mapped.end(), [&](auto& path) { return os::is_same_file(path, torchs); });
    library.path = same == mapped.end() ? mapped.front() : *same;
    library.mapped = true;
  } else if (!torchs.empty()) {
    library.path = torchs;
  } else {
    library.reason = std::string("no ") + stem + " is mapped in this process, and " +
                     (folder.empty() ? std::string("torch's folder is not known")
                                     : "the torch libraries in " + folder + " need none");
  }
  return library;
}

void* open_vendor_library(const char* stem, std::string& reason) {
  const VendorLibrary library = find_vendor_library(stem);
  if (library.path.empty()) {
    reason = library.reason;
    return nullptr;
  }
  return os::open_library(library.path.c_str(), library.mapped, reason);
}

}  // namespace apex

extern "C" {

int32_t apex_set_vendor_hint(const char* folder) {
  return apex::guarded([&] {
    apex::set_torch_folder(folder);
    return int32_t{APEX_OK};
  });
}

int32_t apex_find_vendor_library(const char* stem, char* path, size_t bytes) {
  using apex::fail;
  if (!stem || !*stem || !path)
    return fail(APEX_ERROR_ARGUMENT, "apex_find_vendor_library: stem and path must not be empty");
  return apex::guarded([&]() -> int32_t {
    const apex::VendorLibrary library = apex::find_vendor_library(stem);
    if (library.path.empty()) return fail(APEX_ERROR_NO_DRIVER, "%s", library.reason.c_str());
    if (library.path.size() >= bytes)
      return fail(APEX_ERROR_ARGUMENT, "apex_find_vendor_library: the path takes %zu bytes", library.path.size() + 1);
    memcpy(path, library.path.c_str(), library.path.size() + 1);
    return APEX_OK;
  });
}
}
