// Uses everything that csrc/host/compat is there for.
#include <dlfcn.h>

#include <cmath>
#include <exception>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

// Compiled with -fno-builtin: nothing may be computed while compiling.
EXPORT double apex_check_math(double x) { return std::pow(std::exp(std::log(x)), 2.0) + std::log2(std::exp2(x)); }

EXPORT int apex_check_text(int number) {
  std::ostringstream out;
  out << number << ' ' << 1.5;
  std::stringstream both;
  both << std::move(out).str();
  int back = 0;
  both >> back;
  return both.str().size() == out.str().size() + 4 + std::to_string(number).size() ? back : -1;
}

EXPORT int apex_check_shared(int number) {
  auto one = std::make_shared<int>(number);
  std::vector<std::shared_ptr<int>> many(static_cast<size_t>(number), one);
  return static_cast<int>(one.use_count());
}

// Copies of an exception pointer, rethrown; the count must come out even or memory leaks or is freed twice.
EXPORT int apex_check_exceptions(int rounds) {
  int caught = 0;
  for (int i = 0; i < rounds; ++i) {
    std::exception_ptr pointer;
    try {
      throw std::runtime_error(std::string(1000, 'x'));
    } catch (...) { pointer = std::current_exception(); }
    std::vector<std::exception_ptr> copies(3, pointer);
    pointer = nullptr;
    try {
      std::rethrow_exception(copies[1]);
    } catch (const std::runtime_error& error) { caught += std::string(error.what()).size() == 1000; }
  }
  return caught;
}

EXPORT int apex_check_dl() {
  void* self = dlopen(nullptr, RTLD_NOW);
  Dl_info info;
  const bool found = dlsym(self, "malloc") && dladdr(reinterpret_cast<void*>(&apex_check_dl), &info);
  dlerror();
  return found && dlclose(self) == 0;
}
