// Windows.
#include "os.h"

#define PSAPI_VERSION 2  // its functions are kernel32's
#include <windows.h>
// After windows.h, whose types it uses.
#include <psapi.h>

#include <malloc.h>

#include <algorithm>
#include <cctype>
#include <cstring>

namespace apex::os {
namespace {

// Texts of the C interface are UTF-8; those of the system are UTF-16.
std::wstring wide(const std::string& text) {
  const int length = static_cast<int>(text.size());
  std::wstring found(static_cast<size_t>(length), L'\0');  // never longer than UTF-8
  found.resize(static_cast<size_t>(MultiByteToWideChar(CP_UTF8, 0, text.c_str(), length, found.data(), length)));
  return found;
}

std::string narrow(const std::wstring& text) {
  const int length = static_cast<int>(text.size());
  std::string found(text.size() * 3, '\0');  // a unit of UTF-16 takes at most so many bytes
  const int bytes = static_cast<int>(found.size());
  const int made = WideCharToMultiByte(CP_UTF8, 0, text.c_str(), length, found.data(), bytes, nullptr, nullptr);
  found.resize(static_cast<size_t>(made));
  return found;
}

std::string path_of(HMODULE module) {
  std::wstring path(260, L'\0');
  for (;;) {
    const DWORD length = GetModuleFileNameW(module, path.data(), static_cast<DWORD>(path.size()));
    if (length < path.size()) return narrow(path.substr(0, length));
    path.resize(path.size() * 2);  // it was cut off
  }
}

const char* file_name(const std::string& path) {
  const auto end = path.find_last_of(separators);
  return path.c_str() + (end == std::string::npos ? 0 : end + 1);
}

char lower(char c) { return static_cast<char>(tolower(static_cast<unsigned char>(c))); }

std::string lower(std::string text) {
  for (char& c : text) c = lower(c);
  return text;
}

std::string absolute(const std::string& path) {
  const std::wstring given = wide(path);
  std::wstring whole(GetFullPathNameW(given.c_str(), 0, nullptr, nullptr), L'\0');
  whole.resize(GetFullPathNameW(given.c_str(), static_cast<DWORD>(whole.size()), whole.data(), nullptr));
  return lower(narrow(whole));
}

std::string words_of(DWORD code) {
  wchar_t text[512];
  constexpr DWORD flags = FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS;
  DWORD length = FormatMessageW(flags, nullptr, code, 0, text, 512, nullptr);
  while (length && (text[length - 1] == L'\r' || text[length - 1] == L'\n')) --length;
  return narrow(std::wstring(text, length)) + " (error " + std::to_string(code) + ")";
}

}  // namespace

const char* const cuda_driver = "nvcuda.dll";
const char* const separators = "/\\";

void* open_library(const char* path, bool mapped_alone, std::string& reason) {
  const std::wstring name = wide(path);
  HMODULE opened = nullptr;
  if (mapped_alone) {
    GetModuleHandleExW(0, name.c_str(), &opened);
  } else {
    // What a library given by its path needs is looked for beside it; a bare name never in the current folder.
    const bool bare = !strpbrk(path, separators);
    const DWORD flags = bare ? LOAD_LIBRARY_SEARCH_DEFAULT_DIRS : LOAD_WITH_ALTERED_SEARCH_PATH;
    opened = LoadLibraryExW(name.c_str(), nullptr, flags);
  }
  if (!opened) reason = std::string(path) + ": " + words_of(GetLastError());
  return reinterpret_cast<void*>(opened);
}

void* find_symbol(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name));
}

// libcublasLt.so is called cublasLt64_13.dll here, libamdhip64.so amdhip64_7.dll, libc10.so c10.dll: without "lib",
// with the word size if it is not in the name, and a version after "_".
bool has_stem(const char* name, const char* stem) {
  const size_t length = strlen(stem);
  if (length < 7 || strncmp(stem, "lib", 3) != 0 || strcmp(stem + length - 3, ".so") != 0) return false;
  const std::string wanted = lower(std::string(stem + 3, length - 6)), have = lower(std::string(name));
  if (have.compare(0, wanted.size(), wanted) != 0) return false;
  size_t at = wanted.size();
  if (have.compare(at, 2, "64") == 0) at += 2;
  if (have[at] == '_') do
      ++at;
    while (isdigit(static_cast<unsigned char>(have[at])) || have[at] == '_');
  return have.compare(at, std::string::npos, ".dll") == 0;
}

std::vector<std::string> mapped_libraries(const char* stem) {
  const HANDLE process = GetCurrentProcess();
  std::vector<HMODULE> modules(256);
  DWORD bytes = 0;
  for (;;) {
    const DWORD room = static_cast<DWORD>(modules.size() * sizeof(HMODULE));
    if (!EnumProcessModules(process, modules.data(), room, &bytes)) return {};
    if (bytes <= room) break;
    modules.resize(bytes / sizeof(HMODULE) + 16);  // others may be mapped meanwhile
  }
  std::vector<std::string> found;
  for (size_t i = 0; i < bytes / sizeof(HMODULE); ++i) {
    const std::string path = path_of(modules[i]);
    if (has_stem(file_name(path), stem)) found.push_back(path);
  }
  return found;
}

bool is_same_file(const std::string& one, const std::string& other) { return absolute(one) == absolute(other); }

bool is_readable(const std::string& path) {
  const DWORD attributes = GetFileAttributesW(wide(path).c_str());
  return attributes != INVALID_FILE_ATTRIBUTES && !(attributes & FILE_ATTRIBUTE_DIRECTORY);
}

std::vector<std::string> list_folder(const std::string& folder) {
  std::vector<std::string> names;
  WIN32_FIND_DATAW entry;
  const HANDLE listing = FindFirstFileW(wide(folder + "\\*").c_str(), &entry);
  if (listing == INVALID_HANDLE_VALUE) return names;
  do names.push_back(narrow(entry.cFileName));
  while (FindNextFileW(listing, &entry));
  FindClose(listing);
  std::sort(names.begin(), names.end());
  return names;
}

void* allocate_aligned(size_t alignment, size_t bytes) { return _aligned_malloc(bytes, alignment); }
void free_aligned(void* memory) { _aligned_free(memory); }

void watch_forks(void (*)(), void (*)(), void (*)()) {}  // there is no fork()
int process_id() { return static_cast<int>(GetCurrentProcessId()); }
int parent_process_id() { return 0; }

}  // namespace apex::os
