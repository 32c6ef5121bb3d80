/* Finding the copy of a vendor's library that this process uses, for any vendor library.
 *
 * A second copy of a GPU runtime does not know the first one's streams and contexts. So the copy that is
 * already mapped wins; next the one that torch's own libraries will map; an unversioned name is never
 * searched for.
 */
#pragma once
#include <string>

namespace apex {

/* The folder of the torch libraries: apex_set_vendor_hint's, else that of a mapped libc10.so, else "". */
std::string torch_folder();
void set_torch_folder(const char* folder);

/* Where torch's libraries in `folder` (libtorch*.so, libc10*.so, libcaffe2*.so) will find what they need of
 * this stem: a file beside them, or on the path they carry. Where neither has it, the bare name if it has a
 * version (the system's loader will be asked, as torch would ask it), else "". */
std::string library_that_torch_needs(const std::string& folder, const char* stem);

/* The process's copy: a mapped one (of several, torch's), else the one that torch needs. */
struct VendorLibrary {
  std::string path; /* empty: there is none, and `reason` says what was looked at */
  bool mapped = false;
  std::string reason;
};
VendorLibrary find_vendor_library(const char* stem);

/* Opens it. Null after a failure, which `reason` explains. */
void* open_vendor_library(const char* stem, std::string& reason);

}  // namespace apex
