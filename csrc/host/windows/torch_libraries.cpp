// Windows: torch lays its vendor's libraries beside its own, or maps them itself.
#include "os.h"
#include "vendor_library.h"

namespace apex {

std::string library_that_torch_needs(const std::string& folder, const char* stem) {
  if (folder.empty()) return {};
  for (const auto& file : os::list_folder(folder))
    if (os::has_stem(file.c_str(), stem)) return folder + "\\" + file;
  return {};
}

}  // namespace apex
