// Linux.
#include "os.h"

#include <dirent.h>
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace apex::os {
namespace {

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

const char* file_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
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

// The same file may be mapped under another spelling (a folder with "..", a link).
std::string canonical(const std::string& path) {
  char* real = realpath(path.c_str(), nullptr);
  if (!real) return path;
  std::string result = real;
  free(real);
  return result;
}

}  // namespace

const char* const cuda_driver = "libcuda.so.1";
const char* const separators = "/";

void* open_library(const char* path, bool mapped_alone, std::string& reason) {
  if (void* opened = dlopen(path, RTLD_NOW | RTLD_LOCAL | (mapped_alone ? RTLD_NOLOAD : 0))) return opened;
  const char* text = dlerror();
  reason = text ? text : std::string(path) + (mapped_alone ? " is mapped but could not be opened again" : "");
  return nullptr;
}

void* find_symbol(void* library, const char* name) { return dlsym(library, name); }

bool has_stem(const char* name, const char* stem) {
  const size_t length = strlen(stem);
  return strncmp(name, stem, length) == 0 && (name[length] == '\0' || name[length] == '.');
}

std::vector<std::string> mapped_libraries(const char* stem) {
  Walk walk{stem, {}};
  dl_iterate_phdr(visit, &walk);
  return walk.found;
}

bool is_same_file(const std::string& one, const std::string& other) { return canonical(one) == canonical(other); }

bool is_readable(const std::string& path) { return access(path.c_str(), R_OK) == 0; }

std::vector<std::string> list_folder(const std::string& folder) {
  std::vector<std::string> names;
  if (DIR* listing = opendir(folder.c_str())) {
    while (const dirent* entry = readdir(listing)) names.emplace_back(entry->d_name);
    closedir(listing);
  }
  std::sort(names.begin(), names.end());  // the folder's own order is arbitrary
  return names;
}

void* allocate_aligned(size_t alignment, size_t bytes) { return aligned_alloc(alignment, bytes); }
void free_aligned(void* memory) { free(memory); }

void watch_forks(void (*before)(), void (*after_in_parent)(), void (*after_in_child)()) {
  pthread_atfork(before, after_in_parent, after_in_child);
}
int process_id() { return static_cast<int>(getpid()); }
int parent_process_id() { return static_cast<int>(getppid()); }

}  // namespace apex::os
