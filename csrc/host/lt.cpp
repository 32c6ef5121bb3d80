// A product by cublasLt or hipBLASLt: descriptions, an algorithm, the call.
#include "lt.h"

#include <algorithm>
#include <cstdio>
#include <string>

#include "os.h"
#include "status.h"
#include "vendor_library.h"

namespace apex {

// As in the headers of cublasLt 12.6, 12.9, 13.0 and 13.1, which agree.
const LtNumbers cublaslt_numbers = {
    .stem = "libcublasLt.so",
    .name = "cublasLt",
    .prefix = "cublasLt",
    .op_n = 0,
    .op_t = 1,
    .compute_f32 = 68,
    .compute_tf32 = 77,
    .type_f32 = 0,
    .type_f16 = 2,
    .type_bf16 = 14,
    .desc_trans_a = 3,
    .desc_trans_b = 4,
    .desc_epilogue = 7,
    .desc_bias = 8,
    .desc_bias_type = 26,
    .desc_aux = 11,
    .desc_aux_ld = 12,
    .preference_workspace = 1,
    .preference_alignment = 5,
    .epilogue = {1, 4, 6, 164, 512},
    .results = 1,
    .algorithm_id = 0,
    .algorithm_tile = 1,
    .result_bytes = 96,
    .state_offset = 72,
    .oldest_version = 120000,
    .newest_version = 139999,
};

// As in the headers of hipBLASLt and hipblas-common of ROCm 6.2 to 7.2.
const LtNumbers hipblaslt_numbers = {
    .stem = "libhipblaslt.so",
    .name = "hipBLASLt",
    .prefix = "hipblasLt",
    .op_n = 111,
    .op_t = 112,
    .compute_f32 = 2,
    .compute_tf32 = 6,
    .type_f32 = 0,
    .type_f16 = 2,
    .type_bf16 = 14,
    .desc_trans_a = 0,
    .desc_trans_b = 1,
    .desc_epilogue = 2,
    .desc_bias = 3,
    .desc_bias_type = 4,
    .desc_aux = 10,
    .desc_aux_ld = 11,
    .preference_workspace = 1,
    .preference_alignment = -1,
    .epilogue = {1, 4, 6, 164, 512},
    .results = 8,
    .algorithm_id = -1,
    .algorithm_tile = -1,
    .result_bytes = 56,
    .state_offset = 32,
    .oldest_version = 0,
    .newest_version = 0,
};

namespace {

constexpr int most_results = 8;

// Finds an entry by its name behind the prefix.
template <class Function>
bool find(void* library, const LtNumbers& numbers, const char* entry, Function*& function, std::string& missing) {
  const std::string name = std::string(numbers.prefix) + entry;
  if (os::find_function(library, name.c_str(), function)) return true;
  if (missing.empty()) missing = name;
  return false;
}

bool find_api(void* library, const LtNumbers& numbers, LtApi& api, std::string& missing) {
  find(library, numbers, "Create", api.create, missing);
  find(library, numbers, "MatmulDescCreate", api.desc_create, missing);
  find(library, numbers, "MatmulDescDestroy", api.desc_destroy, missing);
  find(library, numbers, "MatmulDescSetAttribute", api.desc_set, missing);
  find(library, numbers, "MatrixLayoutCreate", api.layout_create, missing);
  find(library, numbers, "MatrixLayoutDestroy", api.layout_destroy, missing);
  find(library, numbers, "MatmulPreferenceCreate", api.preference_create, missing);
  find(library, numbers, "MatmulPreferenceDestroy", api.preference_destroy, missing);
  find(library, numbers, "MatmulPreferenceSetAttribute", api.preference_set, missing);
  find(library, numbers, "MatmulAlgoGetHeuristic", api.heuristic, missing);
  find(library, numbers, "Matmul", api.matmul, missing);
  std::string may_be_missing;
  if (numbers.algorithm_tile >= 0)
    find(library, numbers, "MatmulAlgoConfigGetAttribute", api.algorithm_get, may_be_missing);
  return missing.empty();
}

// cublasLt tells its version without a handle; hipBLASLt does not.
int version_of(void* library, const LtNumbers& numbers) {
  if (!numbers.newest_version) return 0;
  size_t (*version)() = nullptr;
  std::string missing;
  return find(library, numbers, "GetVersion", version, missing) ? static_cast<int>(version()) : 0;
}

// Tiles of cublasLt's kernels for Hopper. Of large products, the heuristic puts some first that are slower than others
// of its answers. Measured on H200 with cublasLt 13.1 in bf16, microseconds rested (first; with the tile taken):
// [8192, 4096] x [4096, 16384] 1,453; 1,389. The same with a weight of [16384, 4096] 1,455; 1,418. [16384, 2048] x
// [2048, 8192] 753; 702. 8192 cubed 1,445; 1,405. [8192, 5120] x [5120, 13824] 1,498; 1,469. Where another tile comes
// first, nothing was faster by more than 2 %.
constexpr int hopper_kernels = 66;
constexpr int slow_tiles[] = {209, 248}, fast_tiles[] = {201, 197, 24, 23};  // in this order
// Multiply-adds from which it pays to ask for more answers, which takes 80 us on the host.
constexpr int64_t large = int64_t{1} << 37;

// A vendor's object for the time of a call.
class Object {
 public:
  explicit Object(int (*destroy)(LtObject)) : destroy_(destroy) {}
  ~Object() {
    if (made) destroy_(made);
  }
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  LtObject made = nullptr;

 private:
  int (*destroy_)(LtObject);
};

// One product. Every step answers whether it was allowed; `call` and `status` are those of the one that was not.
class Product {
 public:
  Product(const Lt& lt, const apex_matmul& matmul)
      : lt_(lt), n_(*lt.numbers), m_(matmul), desc_(lt.api.desc_destroy), a_(lt.api.layout_destroy),
        b_(lt.api.layout_destroy), d_(lt.api.layout_destroy), preference_(lt.api.preference_destroy) {}

  int32_t run(const LtDevice& device, void* stream) {
    const LtQuestion asked = question_of(m_);
    if (describe() && lay_out()) {
      if (device.answers->find(asked, results_)) {
        if (multiply(device.handle, stream, 0)) return APEX_OK;
        device.answers->forget(asked);
      }
      if (prefer() && choose(device) && multiply(device.handle, stream)) {
        device.answers->keep(asked, result(served_));
        return APEX_OK;
      }
    }
    return fail(APEX_USE_REFERENCE, "%s%s refused [%lld, %lld] x [%lld, %lld], epilogue %d, with status %d", n_.prefix,
                call_, (long long)m_.m, (long long)m_.k, (long long)m_.k, (long long)m_.n, m_.epilogue, status_);
  }

 private:
  bool ok(const char* call, int status) {
    call_ = call;
    status_ = status;
    return status == 0;
  }

  int type(int32_t dtype) const {
    return dtype == APEX_F16 ? n_.type_f16 : dtype == APEX_BF16 ? n_.type_bf16 : n_.type_f32;
  }

  template <class Value> bool set(int attribute, const Value& value) {
    return ok("MatmulDescSetAttribute", lt_.api.desc_set(desc_.made, attribute, &value, sizeof value));
  }

  // The vendor's matrices are column by column, so ours are their transposes: d^T = op(b)^T op(a)^T. Their first
  // operand is our b. Pointers of epilogues are set before an algorithm is asked for, which depends on them.
  bool describe() {
    const int compute = m_.type == APEX_F32 && m_.tf32 ? n_.compute_tf32 : n_.compute_f32;
    if (!ok("MatmulDescCreate", lt_.api.desc_create(&desc_.made, compute, n_.type_f32))) return false;
    if (!set(n_.desc_trans_a, m_.transpose_b ? n_.op_t : n_.op_n)) return false;
    if (!set(n_.desc_trans_b, m_.transpose_a ? n_.op_t : n_.op_n)) return false;
    if (m_.epilogue == APEX_EPILOGUE_NONE) return true;
    if (!set(n_.desc_epilogue, n_.epilogue[m_.epilogue])) return false;
    if (!set(n_.desc_bias, m_.bias) || !set(n_.desc_bias_type, type(m_.type_d))) return false;
    if (m_.epilogue == APEX_EPILOGUE_GELU_BIAS)
      if (!set(n_.desc_aux, m_.aux) || !set(n_.desc_aux_ld, m_.ld_aux)) return false;
    return true;
  }

  bool layout(Object& made, int32_t dtype, int64_t rows, int64_t columns, int64_t ld) {
    return ok("MatrixLayoutCreate", lt_.api.layout_create(&made.made, type(dtype), static_cast<uint64_t>(columns),
                                                          static_cast<uint64_t>(rows), ld));
  }

  bool lay_out() {
    const apex_matmul& m = m_;
    return layout(b_, m.type, m.transpose_b ? m.n : m.k, m.transpose_b ? m.k : m.n, m.ld_b) &&
           layout(a_, m.type, m.transpose_a ? m.k : m.m, m.transpose_a ? m.m : m.k, m.ld_a) &&
           layout(d_, m.type_d, m.m, m.n, m.ld_d);
  }

  bool prefer() {
    const auto set = [this](int attribute, const void* value, size_t bytes) {
      return ok("MatmulPreferenceSetAttribute", lt_.api.preference_set(preference_.made, attribute, value, bytes));
    };
    if (!ok("MatmulPreferenceCreate", lt_.api.preference_create(&preference_.made))) return false;
    const uint64_t room = static_cast<uint64_t>(m_.workspace_bytes);
    if (!set(n_.preference_workspace, &room, sizeof room)) return false;
    if (n_.preference_alignment < 0) return true;
    const void* const pointers[] = {m_.b, m_.a, m_.d, m_.d};
    for (int i = 0; i < 4; ++i) {
      const uint32_t alignment = alignment_of(pointers[i]);
      if (!set(n_.preference_alignment + i, &alignment, sizeof alignment)) return false;
    }
    return true;
  }

  bool ask(LtHandle handle, int wanted) {
    if (!ok("MatmulAlgoGetHeuristic", lt_.api.heuristic(handle, desc_.made, b_.made, a_.made, d_.made, d_.made,
                                                        preference_.made, wanted, results_, &found_)))
      return false;
    found_ = std::min(found_, wanted);
    return true;
  }
  // What to try first: the heuristic's first answer, or on Hopper a faster one.
  bool choose(const LtDevice& device) {
    if (!ask(device.handle, n_.results)) return false;
    const bool is_large = m_.m * m_.n >= large / m_.k;
    if (!device.is_hopper || !is_large || !contains(slow_tiles, tile_of(0))) return true;
    if (!ask(device.handle, most_results)) return false;
    for (const int tile : fast_tiles)
      for (int i = 1; i < found_ && !first_; ++i)
        if (tile_of(i) == tile) first_ = i;
    return true;
  }
  const char* result(int i) const { return results_ + static_cast<size_t>(i) * n_.result_bytes; }
  // -1: it is none of Hopper's kernels.
  int tile_of(int i) const {
    const auto get = [&](int attribute) {
      int value = -1;
      size_t written;
      return lt_.api.algorithm_get(result(i), attribute, &value, sizeof value, &written) ? -1 : value;
    };
    if (!lt_.api.algorithm_get || i >= found_ || get(n_.algorithm_id) != hopper_kernels) return -1;
    return get(n_.algorithm_tile);
  }
  static bool contains(const int (&tiles)[2], int tile) { return tile == tiles[0] || tile == tiles[1]; }

  bool multiply(LtHandle handle, void* stream) {
    status_ = no_algorithm;
    if (first_ && multiply(handle, stream, first_)) return true;
    for (int i = 0; i < found_; ++i)
      if (multiply(handle, stream, i)) return true;
    return false;
  }
  bool multiply(LtHandle handle, void* stream, int algorithm) {
    const float one = 1, beta = m_.accumulate ? 1.0f : 0.0f;
    served_ = algorithm;
    int state;
    __builtin_memcpy(&state, result(algorithm) + n_.state_offset, sizeof state);
    return state == 0 && ok("Matmul", lt_.api.matmul(handle, desc_.made, &one, m_.b, b_.made, m_.a, a_.made, &beta,
                                                     m_.d, d_.made, m_.d, d_.made, result(algorithm), m_.workspace,
                                                     static_cast<size_t>(m_.workspace_bytes), stream));
  }

  static constexpr int no_algorithm = -1;
  const Lt& lt_;
  const LtNumbers& n_;
  const apex_matmul& m_;
  Object desc_, a_, b_, d_, preference_;
  alignas(16) char results_[most_results * LtAnswers::bytes];
  int found_ = 0, first_ = 0, served_ = 0;
  const char* call_ = "";
  int status_ = 0;
};

}  // namespace

const Lt* open_lt(const LtNumbers& numbers, char* reason, size_t bytes) {
  std::string why;
  void* const library = open_vendor_library(numbers.stem, why);
  Lt lt = {&numbers, {}, 0};
  if (library) {
    std::string missing;
    lt.version = version_of(library, numbers);
    if (numbers.newest_version && (lt.version < numbers.oldest_version || lt.version > numbers.newest_version))
      why = std::string(numbers.name) + " of version " + std::to_string(lt.version) + " is none of " +
            std::to_string(numbers.oldest_version) + " to " + std::to_string(numbers.newest_version);
    else if (!find_api(library, numbers, lt.api, missing)) why = std::string(numbers.name) + " has no " + missing;
    else return new Lt(lt);
  }
  snprintf(reason, bytes, "%s", why.c_str());
  return nullptr;
}

void write_name(const Lt& lt, char* text, size_t bytes) {
  if (lt.version) snprintf(text, bytes, "%s %d.%d", lt.numbers->name, lt.version / 10000, lt.version / 100 % 100);
  else snprintf(text, bytes, "%s", lt.numbers->name);
}

int32_t run(const Lt& lt, const LtDevice& device, const apex_matmul& matmul, void* stream) {
  return Product(lt, matmul).run(device, stream);
}

}  // namespace apex
