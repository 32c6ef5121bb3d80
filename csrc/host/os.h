/* What this library asks of the operating system. On Windows a source of windows/ takes the place of the one beside
 * this file that has its name. */
#pragma once
#include <cstddef>
#include <string>
#include <type_traits>
#include <vector>

namespace apex::os {

extern const char* const cuda_driver; /* libcuda.so.1: the library that NVIDIA's driver installs */
extern const char* const separators;  /* any of them ends the name of a folder in a path */

/* Opens a library; `mapped_alone`: only where it is mapped already. Null after a failure, which `reason` explains. */
void* open_library(const char* path, bool mapped_alone, std::string& reason);

/* The address of what a library exports, null where it has nothing of that name. */
void* find_symbol(void* library, const char* name);
template <class Function> bool find_function(void* library, const char* name, Function*& function) {
  static_assert(std::is_function_v<Function>);
  function = reinterpret_cast<Function*>(find_symbol(library, name));
  return function;
}

/* Whether a file name is that of a library, in any of its versions. Stems are Linux's names, everywhere:
 * "libamdhip64.so" is the stem of "libamdhip64.so.7" and of itself, not of "libamdhip64.so7" or "libamdhip64_x.so". */
bool has_stem(const char* name, const char* stem);

/* Paths of the libraries mapped now whose soname (file name where there is none) has this stem. */
std::vector<std::string> mapped_libraries(const char* stem);

/* Whether two paths are of one file: the same file may be mapped under another spelling. */
bool is_same_file(const std::string& one, const std::string& other);
bool is_readable(const std::string& path);
/* Names of the files in a folder, sorted; none where it cannot be read. */
std::vector<std::string> list_folder(const std::string& folder);

/* Memory that free_aligned frees. Null: there is none. `bytes` is a multiple of `alignment`, a power of two. */
void* allocate_aligned(size_t alignment, size_t bytes);
void free_aligned(void* memory);

/* Calls these around every fork() of the process, where there is such a thing. */
void watch_forks(void (*before)(), void (*after_in_parent)(), void (*after_in_child)());
int process_id();
int parent_process_id();

}  // namespace apex::os
