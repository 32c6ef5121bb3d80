#include "vendor_library.h"

#include <dirent.h>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "apex.h"
#include "status.h"

namespace apex {
namespace {

std::mutex hint_mutex;
char* hint = nullptr;  // a plain pointer: nothing to destroy while other threads still run at exit

std::string folder_of(const std::string& path) {
  const auto slash = path.rfind('/');
  return slash == std::string::npos ? std::string(".") : path.substr(0, slash);
}

const char* file_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

// The same file may be mapped under another spelling (a folder with "..", a link).
std::string canonical(const std::string& path) {
  char* real = realpath(path.c_str(), nullptr);
  if (!real) return path;
  std::string result = real;
  free(real);
  return result;
}

bool readable(const std::string& path) { return access(path.c_str(), R_OK) == 0; }

// The soname of a mapped library, null if it has none.
const char* mapped_soname(const dl_phdr_info* info) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    const auto* entry = reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    uintptr_t strings = 0;
    uintptr_t offset = 0;
    bool named = false;
    for (; entry->d_tag != DT_NULL; ++entry) {
      if (entry->d_tag == DT_STRTAB) strings = entry->d_un.d_ptr;
      if (entry->d_tag == DT_SONAME) offset = entry->d_un.d_val, named = true;
    }
    if (!named || !strings) return nullptr;
    // glibc has added the load address already; musl has not.
    if (strings < info->dlpi_addr) strings += info->dlpi_addr;
    return reinterpret_cast<const char*>(strings + offset);
  }
  return nullptr;
}

struct Walk {
  const char* stem;
  std::vector<std::string> found;
};

int visit(dl_phdr_info* info, size_t, void* context) {
  auto* walk = static_cast<Walk*>(context);
  if (!info->dlpi_name || !*info->dlpi_name) return 0;  // the program itself, the vdso
  const char* soname = mapped_soname(info);
  if (has_stem(soname ? soname : file_name(info->dlpi_name), walk->stem)) walk->found.emplace_back(info->dlpi_name);
  return 0;
}

class File {
 public:
  explicit File(const std::string& path) : descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  bool read(uint64_t offset, void* to, size_t bytes) const {
    return descriptor_ >= 0 && pread(descriptor_, to, bytes, static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes);
  }

 private:
  int descriptor_;
};

constexpr uint64_t sane_bytes = 1u << 24;  // of a dynamic section or a string table

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
}

std::vector<std::string> split_search_path(const std::string& paths, const std::string& origin) {
  std::vector<std::string> result;
  for (size_t begin = 0; begin <= paths.size();) {
    const size_t end = std::min(paths.find(':', begin), paths.size());
    std::string one = paths.substr(begin, end - begin);
    replace_all(one, "${ORIGIN}", origin);
    replace_all(one, "$ORIGIN", origin);
    if (!one.empty()) result.push_back(one);
    begin = end + 1;
  }
  return result;
}

}  // namespace

bool has_stem(const char* name, const char* stem) {
  const size_t length = strlen(stem);
  return strncmp(name, stem, length) == 0 && (name[length] == '\0' || name[length] == '.');
}

std::vector<std::string> mapped_libraries(const char* stem) {
  Walk walk{stem, {}};
  dl_iterate_phdr(visit, &walk);
  return walk.found;
}

std::string torch_folder() {
  {
    std::lock_guard<std::mutex> lock(hint_mutex);
    if (hint) return hint;
  }
  const auto c10 = mapped_libraries("libc10.so");
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

ElfNames read_elf_names(const std::string& path) {
  ElfNames names;
  const File file(path);
  Elf64_Ehdr header;
  if (!file.read(0, &header, sizeof header)) return names;
  constexpr unsigned char order = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? ELFDATA2LSB : ELFDATA2MSB;
  if (memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64 ||
      header.e_ident[EI_DATA] != order || header.e_phentsize != sizeof(Elf64_Phdr))
    return names;

  std::vector<Elf64_Phdr> segments(header.e_phnum);
  if (!file.read(header.e_phoff, segments.data(), segments.size() * sizeof(Elf64_Phdr))) return names;
  const auto dynamic = std::find_if(segments.begin(), segments.end(), [](auto& s) { return s.p_type == PT_DYNAMIC; });
  if (dynamic == segments.end() || dynamic->p_filesz > sane_bytes) return names;
  std::vector<Elf64_Dyn> entries(dynamic->p_filesz / sizeof(Elf64_Dyn));
  if (!file.read(dynamic->p_offset, entries.data(), entries.size() * sizeof(Elf64_Dyn))) return names;

  uint64_t address = 0, bytes = 0;
  for (const auto& entry : entries) {
    if (entry.d_tag == DT_NULL) break;
    if (entry.d_tag == DT_STRTAB) address = entry.d_un.d_ptr;
    if (entry.d_tag == DT_STRSZ) bytes = entry.d_un.d_val;
  }
  // The string table is given by address; the segment that holds it says where it is in the file.
  const auto holder = std::find_if(segments.begin(), segments.end(), [&](auto& s) {
    return s.p_type == PT_LOAD && address >= s.p_vaddr && address - s.p_vaddr < s.p_filesz;
  });
  if (holder == segments.end() || bytes == 0 || bytes > sane_bytes) return names;
  std::string strings(bytes, '\0');
  if (!file.read(holder->p_offset + (address - holder->p_vaddr), strings.data(), bytes)) return names;

  const auto text = [&](uint64_t offset) {
    return offset < bytes ? std::string(strings.c_str() + offset) : std::string();
  };
  std::string runpath, rpath;
  for (const auto& entry : entries) {
    if (entry.d_tag == DT_NULL) break;
    if (entry.d_tag == DT_NEEDED) names.needed.push_back(text(entry.d_un.d_val));
    if (entry.d_tag == DT_SONAME) names.soname = text(entry.d_un.d_val);
    if (entry.d_tag == DT_RUNPATH) runpath = text(entry.d_un.d_val);
    if (entry.d_tag == DT_RPATH) rpath = text(entry.d_un.d_val);
  }
  names.search = split_search_path(runpath.empty() ? rpath : runpath, folder_of(path));
  return names;
}

std::string library_that_torch_needs(const std::string& folder, const char* stem) {
  if (folder.empty()) return {};
  std::vector<std::string> files;
  if (DIR* listing = opendir(folder.c_str())) {
    while (const dirent* entry = readdir(listing)) {
      const char* name = entry->d_name;
      const bool ours =
          strncmp(name, "libtorch", 8) == 0 || strncmp(name, "libc10", 6) == 0 || strncmp(name, "libcaffe2", 9) == 0;
      if (ours && strstr(name, ".so")) files.emplace_back(name);
    }
    closedir(listing);
  }
  std::sort(files.begin(), files.end());  // the folder's own order is arbitrary
  std::string versioned;
  for (const auto& file : files) {
    const ElfNames names = read_elf_names(folder + "/" + file);
    for (const auto& needed : names.needed) {
      if (!has_stem(needed.c_str(), stem)) continue;
      const std::string beside = folder + "/" + needed;
      if (readable(beside)) return beside;
      for (const auto& place : names.search)
        if (readable(place + "/" + needed)) return place + "/" + needed;
      if (needed.size() > strlen(stem)) versioned = needed;
    }
  }
  return versioned;
}

VendorLibrary find_vendor_library(const char* stem) {
  VendorLibrary library;
  const std::string folder = torch_folder();
  const std::string torchs = library_that_torch_needs(folder, stem);
  const auto mapped = mapped_libraries(stem);
  if (!mapped.empty()) {
    // Two copies: torch's is the one whose streams we are given.
    const auto same =
        std::find_if(mapped.begin(), mapped.end(), [&](auto& path) { return canonical(path) == canonical(torchs); });
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
  const int flags = RTLD_NOW | RTLD_LOCAL | (library.mapped ? RTLD_NOLOAD : 0);
  if (void* opened = dlopen(library.path.c_str(), flags)) return opened;
  const char* text = dlerror();
  reason = text ? text : library.path + " is mapped but could not be opened again";
  return nullptr;
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
