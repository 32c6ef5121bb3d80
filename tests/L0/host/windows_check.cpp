// apex.dll as a program for Windows uses it, without torch or Python; beside it lies the fake driver, as nvcuda.dll. It
// says what is wrong and returns how many things are. The first argument says what is looked at.
#include <windows.h>

#include <cstring>
#include <string>

#include "host/layer_norm.h"
#include "host/memory.h"
#include "host/scaled_masked_softmax.h"
#include "fp8_values.h"

static std::string last_error() { return apex_last_error(); }
static bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }
static uint8_t* bytes_of(std::vector<float>& x) { return reinterpret_cast<uint8_t*>(x.data()); }

static const apex_place cuda = {APEX_CUDA, 1, nullptr};
static apex_kernel fill = {"unit", "fill", 0, 0};

static int32_t launch_with(int32_t first) {
  void* parameters[] = {&first};
  return apex_launch(&cuda, &fill, {3, 1, 1}, {64, 1, 1}, 16, parameters);
}

static void check_no_driver() {
  apex_device_info info;
  expect(apex_get_device_info(APEX_CUDA, 0, &info) == APEX_ERROR_NO_DRIVER, "no driver");
  expect(has(last_error(), "the NVIDIA driver's nvcuda.dll cannot be opened: nvcuda.dll: "), "its file");
  expect(has(last_error(), "(error 126)"), "why");
  expect(apex_get_device_info(APEX_HIP, 0, &info) == APEX_ERROR_NO_DRIVER, "no HIP");
  expect(has(last_error(), "no libamdhip64.so is mapped in this process, and torch's folder is not known"), "why");
}

static void check_old_driver() {
  apex_device_info info;
  expect(apex_get_device_info(APEX_CUDA, 0, &info) == APEX_ERROR_DRIVER, "an old driver");
  expect(has(last_error(), "it is older than CUDA 12.0 (release 525), which is needed"), "its age");
}

static int32_t to_kernel(int32_t platform, int32_t device, const char* unit) {
  const char image[] = "arch sm_80\nkernel fill\n";
  if (apex_register_code_object(platform, device, unit, image, sizeof image)) return APEX_VARIANT_UNKNOWN;
  return APEX_VARIANT_KERNEL;
}

static void check_driver() {
  apex_device_info info;
  expect(apex_get_device_info(APEX_CUDA, 1, &info) == APEX_OK, "device_info");
  expect(!std::strcmp(info.arch, "sm_80") && info.multiprocessors == 101, "the second device");
  apex_set_resolver(to_kernel);
  expect(launch_with(7) == APEX_OK && launch_with(8) == APEX_OK, "launches");
  HMODULE driver = GetModuleHandleA("nvcuda.dll");
  const auto log = reinterpret_cast<const char* (*)()>(reinterpret_cast<void*>(GetProcAddress(driver, "fake_log")));
  const std::string said = log();
  expect(has(said, "launch fill in primary 1, grid 3 1 1, block 64 1 1, shared 16, stream default, first 7"), "7");
  expect(has(said, "first 8"), "8");
  void* memory = nullptr;
  expect(apex_take_memory(&cuda, 5000, 1, &memory) == APEX_OK && memory, "memory of a device");
  apex_give_memory_back(&cuda, 5000, memory);
  apex_kernel other = {"unit", "other", 0, 0};
  expect(apex_launch(&cuda, &other, {1, 1, 1}, {32, 1, 1}, 0, nullptr) == APEX_ERROR_NO_KERNEL, "no such kernel");
}

// ---- vendors' libraries ------------------------------------------------------------------------------------

static std::string utf8(const std::wstring& text) {
  char made[2048];
  WideCharToMultiByte(CP_UTF8, 0, text.c_str(), -1, made, sizeof made, nullptr, nullptr);
  return made;
}

static std::wstring fill_folder(const wchar_t* name, const wchar_t* library) {
  wchar_t here[1024];
  GetCurrentDirectoryW(1024, here);
  const std::wstring folder = std::wstring(here) + L"\\" + name;
  CreateDirectoryW(folder.c_str(), nullptr);
  expect(CopyFileW(L"nvcuda.dll", (folder + L"\\" + library).c_str(), FALSE), "a copy");
  return folder;
}

static void expect_library(const char* stem, const std::wstring& wanted) {
  char path[2048] = "";
  expect(apex_find_vendor_library(stem, path, sizeof path) == APEX_OK, stem);
  expect(utf8(wanted) == path, path);
}

static void check_vendor() {
  const std::wstring torch = fill_folder(L"b\u00fccher \u6587", L"cublasLt64_13.dll");
  fill_folder(L"b\u00fccher \u6587", L"cublasLtX64_13.dll");
  const std::wstring other = fill_folder(L"other", L"cublasLt64_12.dll");
  char path[8];
  expect(apex_find_vendor_library("libcublasLt.so", path, 8) == APEX_ERROR_NO_DRIVER, "no folder yet");
  expect(apex_set_vendor_hint(utf8(torch).c_str()) == APEX_OK, "a folder's name");
  expect_library("libcublasLt.so", torch + L"\\cublasLt64_13.dll");
  expect(apex_find_vendor_library("libcublasLt.so", path, 8) == APEX_ERROR_ARGUMENT, "too little room");
  const std::string wanted = std::to_string(utf8(torch + L"\\cublasLt64_13.dll").size() + 1);
  expect(last_error() == "apex_find_vendor_library: the path takes " + wanted + " bytes", "how much");
  expect(apex_find_vendor_library("libcublas.so", path, 8) == APEX_ERROR_NO_DRIVER, "another library");
  // What is mapped comes first; of two copies torch's.
  expect(LoadLibraryW((other + L"\\cublasLt64_12.dll").c_str()), "a library is mapped");
  expect_library("libcublasLt.so", other + L"\\cublasLt64_12.dll");
  expect(LoadLibraryW((torch + L"\\cublasLt64_13.dll").c_str()), "torch's is mapped");
  expect_library("libcublasLt.so", torch + L"\\cublasLt64_13.dll");
}

// ---- CPU variants ------------------------------------------------------------------------------------------

static void expect_near(const std::vector<float>& found, const std::vector<double>& wanted, const char* what) {
  bool right = true;
  for (size_t i = 0; i < found.size(); ++i) right = right && std::fabs(found[i] - wanted[i]) < 2e-5;
  expect(right, what);
}

static void check_softmax(int64_t keys) {
  constexpr int64_t rows = 5;
  std::vector<float> x = numbers(size_t(rows * keys)), y(x.size());
  gpu::SoftmaxForward a{};
  a.input = bytes_of(x), a.output = bytes_of(y);
  a.rows = rows, a.keys = keys, a.heads = 1, a.queries = 1, a.type = APEX_F32;
  expect(apex_scaled_masked_softmax_forward(&cpu, &a, 0.5) == APEX_OK, "softmax");
  std::vector<double> wanted(x.size());
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t k = 0; k < keys; ++k) sum += std::exp(0.5 * x[size_t(r * keys + k)]);
    for (int64_t k = 0; k < keys; ++k) wanted[size_t(r * keys + k)] = std::exp(0.5 * x[size_t(r * keys + k)]) / sum;
  }
  expect_near(y, wanted, "softmax's output");
}

static void check_norm(int64_t hidden) {
  constexpr int64_t rows = 7;
  std::vector<float> x = numbers(size_t(rows * hidden)), grad = numbers(x.size() + 3), y(x.size()), of_x(x.size());
  std::vector<float> mean(rows), rstd(rows), of_weight(static_cast<size_t>(hidden)), weight(of_weight.size(), 2.0f);
  grad.erase(grad.begin(), grad.begin() + 3);
  gpu::NormForward f{};
  f.input = bytes_of(x), f.weight = bytes_of(weight), f.output = bytes_of(y);
  f.mean = bytes_of(mean), f.rstd = bytes_of(rstd), f.rows = rows, f.hidden = hidden, f.eps = 1e-5;
  expect(apex_layer_norm_forward(&cpu, &f) == APEX_OK, "layer_norm_forward");
  gpu::NormBackward b{};
  b.grad_output = bytes_of(grad), b.saved = bytes_of(x), b.mean = bytes_of(mean), b.rstd = bytes_of(rstd);
  b.weight = bytes_of(weight), b.grad_input = bytes_of(of_x), b.grad_weight = bytes_of(of_weight);
  b.rows = rows, b.hidden = hidden, b.eps = 1e-5;
  expect(apex_layer_norm_backward(&cpu, &b, &workspace) == APEX_OK, "layer_norm_backward");
  std::vector<double> out(x.size()), wanted(x.size()), sums(of_weight.size());
  for (int64_t r = 0; r < rows; ++r) {
    const float *row = &x[size_t(r * hidden)], *g = &grad[size_t(r * hidden)];
    double middle = 0, variance = 0, mean_g = 0, mean_gx = 0;
    for (int64_t i = 0; i < hidden; ++i) middle += row[i] / double(hidden);
    for (int64_t i = 0; i < hidden; ++i) variance += (row[i] - middle) * (row[i] - middle) / double(hidden);
    const double inverse = 1 / std::sqrt(variance + 1e-5);
    for (int64_t i = 0; i < hidden; ++i) {
      const double normed = (row[i] - middle) * inverse;
      out[size_t(r * hidden + i)] = 2 * normed, sums[size_t(i)] += g[i] * normed;
      mean_g += 2 * g[i] / double(hidden), mean_gx += 2 * g[i] * normed / double(hidden);
    }
    for (int64_t i = 0; i < hidden; ++i)
      wanted[size_t(r * hidden + i)] = inverse * (2 * g[i] - mean_g - (row[i] - middle) * inverse * mean_gx);
  }
  expect_near(y, out, "layer norm's output");
  expect_near(of_x, wanted, "its gradient");
  expect_near(of_weight, sums, "the weight's gradient");
}

static void check_cpu() {
  const int32_t most = apex_set_cpu_level(0);
  std::printf("level %d\n", most);
  for (int32_t level = 1; level <= most; ++level) {
    expect(apex_set_cpu_level(level) == level && apex_cpu_level() == level, "a level");
    for (const int64_t size : {7, 64, 133, 1024, 2051}) {
      check_norm(size);
      check_softmax(size);
    }
  }
  expect(apex_set_cpu_level(99) == most, "no level that is not here");
  void* memory = nullptr;
  expect(apex_take_memory(&cpu, 700, 1, &memory) == APEX_OK && reinterpret_cast<uintptr_t>(memory) % 512 == 0,
         "memory");
  expect(memory && !static_cast<char*>(memory)[699], "zeros");
  apex_give_memory_back(&cpu, 700, memory);
  std::printf("interface %s\n", apex_interface_digest());
}

int main(int, char** arguments) {
  const std::string what = arguments[1];
  if (what == "no driver") check_no_driver();
  if (what == "old driver") check_old_driver();
  if (what == "driver") check_driver();
  if (what == "vendor") check_vendor();
  if (what == "cpu") check_cpu();
  return faults;
}
