// Linux: what torch's libraries say of the vendor's, in their ELF files.
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "os.h"
#include "vendor_library.h"

namespace apex {
namespace {

// What an ELF file says about itself.
struct ElfNames {
  std::vector<std::string> needed;
  std::vector<std::string> search;  // RUNPATH, else RPATH, $ORIGIN put in
};

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

// Empty where it is not a 64-bit ELF file of this byte order. `folder` is the one it lies in.
ElfNames read_elf_names(const std::string& folder, const std::string& file_name) {
  ElfNames names;
  const File file(folder + "/" + file_name);
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
    if (entry.d_tag == DT_RUNPATH) runpath = text(entry.d_un.d_val);
    if (entry.d_tag == DT_RPATH) rpath = text(entry.d_un.d_val);
  }
  names.search = split_search_path(runpath.empty() ? rpath : runpath, folder);
  return names;
}

bool is_torchs_own(const std::string& file) {
  const bool named = file.rfind("libtorch", 0) == 0 || file.rfind("libc10", 0) == 0 || file.rfind("libcaffe2", 0) == 0;
  return named && file.find(".so") != std::string::npos;
}

}  // namespace

std::string library_that_torch_needs(const std::string& folder, const char* stem) {
  if (folder.empty()) return {};
  std::string versioned;
  for (const auto& file : os::list_folder(folder)) {
    if (!is_torchs_own(file)) continue;
    const ElfNames names = read_elf_names(folder, file);
    for (const auto& needed : names.needed) {
      if (!os::has_stem(needed.c_str(), stem)) continue;
      const std::string beside = folder + "/" + needed;
      if (os::is_readable(beside)) return beside;
      for (const auto& place : names.search)
        if (os::is_readable(place + "/" + needed)) return place + "/" + needed;
      if (needed.size() > strlen(stem)) versioned = needed;
    }
  }
  return versioned;
}

}  // namespace apex
