// A libcublasLt.so.13 for tests, or with FAKE_HIP a libhipblaslt.so.1: it keeps the real ones' rules about attributes,
// layouts and epilogues, multiplies in host memory, and refuses on demand (fake_fail).
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "fake.h"

using fake::note;

#ifdef FAKE_HIP
#define ENTRY(name) hipblasLt##name
constexpr int op_t = 112, f32 = 0, bf16 = 14, compute_f32 = 2, compute_tf32 = 6;
constexpr int attributes[] = {0, 1, 2, 3, 4, 10, 11};
constexpr size_t result_bytes = 56, state_offset = 32;
constexpr bool has_alignment = false;
#else
#define ENTRY(name) cublasLt##name
#ifndef FAKE_VERSION
#define FAKE_VERSION 130100
#endif
constexpr int op_t = 1, f32 = 0, bf16 = 14, compute_f32 = 68, compute_tf32 = 77;
constexpr int attributes[] = {3, 4, 7, 8, 26, 11, 12};
constexpr size_t result_bytes = 96, state_offset = 72;
constexpr bool has_alignment = true;
FAKE size_t cublasLtGetVersion() { return FAKE_VERSION; }
#endif

namespace {

enum : int { kInvalidValue = 7, kNotSupported = 15 };
enum : int { kTransA, kTransB, kEpilogue, kBias, kBiasType, kAux, kAuxLd };

struct Handle { int number; };
struct Desc {
  int compute = 0, trans_a = 0, trans_b = 0, epilogue = 1, bias_type = -1;
  char* bias = nullptr;
  char* aux = nullptr;
  int64_t aux_ld = 0;
};
struct Layout {
  int type;
  int64_t rows, columns, ld;
};
struct Preference {
  uint64_t workspace = 0;
  uint32_t alignment[4] = {256, 256, 256, 256};
};

std::atomic<int> live{0}, handles{0};

float read(const char* at, int type, int64_t i) {
  if (type == f32) return reinterpret_cast<const float*>(at)[i];
  if (type == bf16) {
    const uint32_t bits = static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(at)[i]) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
  }
  return static_cast<float>(reinterpret_cast<const _Float16*>(at)[i]);
}

void write(char* at, int type, int64_t i, double value) {
  if (type == f32) {
    reinterpret_cast<float*>(at)[i] = static_cast<float>(value);
  } else if (type == bf16) {
    const float single = static_cast<float>(value);
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    bits += 0x7fff + (bits >> 16 & 1);
    reinterpret_cast<uint16_t*>(at)[i] = static_cast<uint16_t>(bits >> 16);
  } else {
    reinterpret_cast<_Float16*>(at)[i] = static_cast<_Float16>(value);
  }
}

constexpr double slope = 0.7978845608028654, cubic = 0.044715;
double gelu(double x) { return 0.5 * x * (1 + std::tanh(slope * (x + cubic * x * x * x))); }

// Element (i, j) of op(matrix), column by column.
double at(const char* data, const Layout& layout, int op, int64_t i, int64_t j) {
  return read(data, layout.type, op == op_t ? i * layout.ld + j : j * layout.ld + i);
}

bool fits(const Desc& desc, const Layout& a, const Layout& b, const Layout& d) {
  const int64_t m = desc.trans_a == op_t ? a.columns : a.rows, k = desc.trans_a == op_t ? a.rows : a.columns;
  const int64_t n = desc.trans_b == op_t ? b.rows : b.columns, other = desc.trans_b == op_t ? b.columns : b.rows;
  return m == d.rows && n == d.columns && k == other && a.ld >= a.rows && b.ld >= b.rows && d.ld >= d.rows;
}

}  // namespace

FAKE int fake_live_objects() { return live; }

FAKE int ENTRY(Create)(Handle** handle) {
  note("create");
  if (const int code = fake::failure("create")) return code;
  *handle = new Handle{++handles};
  return 0;
}
FAKE int ENTRY(MatmulDescCreate)(Desc** desc, int compute, int scale_type) {
  if (const int code = fake::failure("desc")) return code;
  if ((compute != compute_f32 && compute != compute_tf32) || scale_type != f32) return kInvalidValue;
  ++live;
  *desc = new Desc;
  (*desc)->compute = compute;
  return 0;
}
FAKE int ENTRY(MatmulDescDestroy)(Desc* desc) { return --live, delete desc, 0; }
FAKE int ENTRY(MatmulDescSetAttribute)(Desc* desc, int attribute, const void* value, size_t bytes) {
  const auto take = [&](auto& field) {
    if (bytes != sizeof field) return int{kInvalidValue};
    memcpy(&field, value, bytes);
    return 0;
  };
  if (attribute == attributes[kTransA]) return take(desc->trans_a);
  if (attribute == attributes[kTransB]) return take(desc->trans_b);
  if (attribute == attributes[kEpilogue]) return take(desc->epilogue);
  if (attribute == attributes[kBias]) return take(desc->bias);
  if (attribute == attributes[kBiasType]) return take(desc->bias_type);
  if (attribute == attributes[kAux]) return take(desc->aux);
  if (attribute == attributes[kAuxLd]) return take(desc->aux_ld);
  return kInvalidValue;
}
FAKE int ENTRY(MatrixLayoutCreate)(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t ld) {
  ++live;
  *layout = new Layout{type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), ld};
  return 0;
}
FAKE int ENTRY(MatrixLayoutDestroy)(Layout* layout) { return --live, delete layout, 0; }
FAKE int ENTRY(MatmulPreferenceCreate)(Preference** preference) {
  ++live;
  *preference = new Preference;
  return 0;
}
FAKE int ENTRY(MatmulPreferenceDestroy)(Preference* preference) { return --live, delete preference, 0; }
FAKE int ENTRY(MatmulPreferenceSetAttribute)(Preference* preference, int attribute, const void* value, size_t bytes) {
  if (attribute == 1 && bytes == sizeof preference->workspace) return memcpy(&preference->workspace, value, bytes), 0;
  if (has_alignment && attribute >= 5 && attribute <= 8 && bytes == sizeof(uint32_t))
    return memcpy(&preference->alignment[attribute - 5], value, bytes), 0;
  return kInvalidValue;
}
FAKE int ENTRY(MatmulAlgoGetHeuristic)(Handle* handle, Desc* desc, Layout* a, Layout* b, Layout* c, Layout* d,
                                       Preference* preference, int wanted, char* results, int* found) {
  if (const int code = fake::failure("heuristic")) return code;
  if (!handle || !fits(*desc, *a, *b, *d) || c->type != d->type) return kInvalidValue;
  const bool with_bias = desc->epilogue & 4 || desc->epilogue == 512;
  const bool with_aux = desc->epilogue == 164;
  if (with_bias && (!desc->bias || desc->bias_type != d->type)) return kInvalidValue;
  if (with_aux && (!desc->aux || desc->aux_ld < d->rows)) return kInvalidValue;
  if (with_aux && desc->aux_ld % 8) return kNotSupported;
  note("heuristic of %d, alignment %u %u %u %u, workspace %llu", wanted, preference->alignment[0],
       preference->alignment[1], preference->alignment[2], preference->alignment[3],
       static_cast<unsigned long long>(preference->workspace));
  *found = fake::failure("found") ? 0 : wanted;
  for (int i = 0; i < *found; ++i) {
    memset(results + i * result_bytes, 0, result_bytes);
    results[i * result_bytes] = static_cast<char>(i + 1);
    const int state = i < fake::failure("states") ? kNotSupported : 0;
    memcpy(results + i * result_bytes + state_offset, &state, sizeof state);
  }
  return 0;
}
#ifndef FAKE_HIP
// Kernels for Hopper, with tiles of these numbers; the first one's on demand.
FAKE int cublasLtMatmulAlgoConfigGetAttribute(const char* algorithm, int attribute, void* value, size_t bytes,
                                              size_t* written) {
  static const int tiles[] = {24, 31, 23, 24, 201, 197, 20, 19};
  const int number = algorithm[0] - 1, first = fake::failure("tile");
  const int found = attribute == 0 ? 66 : attribute == 1 ? (number || !first ? tiles[number] : first) : -1;
  if (found < 0 || bytes != sizeof found) return kInvalidValue;
  memcpy(value, &found, *written = sizeof found);
  return 0;
}
#endif
FAKE int ENTRY(Matmul)(Handle* handle, Desc* desc, const float* alpha, const char* a, Layout* layout_a, const char* b,
                       Layout* layout_b, const float* beta, const char* c, Layout* layout_c, char* d, Layout* layout_d,
                       const char* algorithm, void* workspace, size_t workspace_bytes, void* stream) {
  if (const int code = fake::failure("matmul")) return code;
  if (algorithm[0] <= fake::failure("algorithms")) return kNotSupported;
  if (workspace_bytes && !workspace) return kInvalidValue;
  if (c != d || layout_c != layout_d) return kInvalidValue;
  const int64_t depth = desc->trans_a == op_t ? layout_a->rows : layout_a->columns;
  note("matmul %lldx%lldx%lld, compute %d, epilogue %d, algorithm %d, handle %d, stream %p", (long long)layout_d->rows,
       (long long)layout_d->columns, (long long)depth, desc->compute, desc->epilogue, algorithm[0], handle->number,
       stream);
  if (layout_d->rows * layout_d->columns > int64_t{1} << 20) return 0;  // whose memory nobody has
  for (int64_t j = 0; j < layout_d->columns; ++j)
    for (int64_t i = 0; i < layout_d->rows; ++i) {
      double sum = 0;
      for (int64_t k = 0; k < depth; ++k)
        sum += at(a, *layout_a, desc->trans_a, i, k) * at(b, *layout_b, desc->trans_b, k, j);
      sum *= *alpha;
      if (*beta != 0) sum += *beta * read(c, layout_d->type, j * layout_d->ld + i);
      if (desc->epilogue & 4 && desc->epilogue < 256) sum += read(desc->bias, desc->bias_type, i);
      if (desc->epilogue == 164) write(desc->aux, layout_d->type, j * desc->aux_ld + i, sum);
      if (desc->epilogue == 6) sum = sum > 0 ? sum : 0;
      if (desc->epilogue == 164) sum = gelu(sum);
      write(d, layout_d->type, j * layout_d->ld + i, sum);
    }
  if (desc->epilogue == 512)
    for (int64_t j = 0; j < layout_d->columns; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < depth; ++k) sum += at(b, *layout_b, desc->trans_b, k, j);
      write(desc->bias, desc->bias_type, j, sum);
    }
  return 0;
}
