/* One interface over cublasLt and hipBLASLt: entries alike, numbers and names their own. No vendor header. */
#pragma once
#include <cstddef>
#include <cstdint>

#include "blas.h"
#include "lt_answers.h"

namespace apex {

/* Values of a vendor's enumerations; they are part of its binary interface. */
struct LtNumbers {
  const char* stem;    // of the library's file
  const char* name;    // in texts
  const char* prefix;  // of its entries
  int op_n, op_t;
  int compute_f32, compute_tf32;
  int type_f32, type_f16, type_bf16;
  int desc_trans_a, desc_trans_b, desc_epilogue, desc_bias, desc_bias_type, desc_aux, desc_aux_ld;
  int preference_workspace;
  int preference_alignment;          // of a; b, c and d follow. -1: it has none
  int epilogue[5];                   // by apex_epilogue
  int results;                       // algorithms that are asked for: the first one that works is taken
  int algorithm_id, algorithm_tile;  // attributes of an algorithm; -1: not asked for
  size_t result_bytes, state_offset;
  int oldest_version, newest_version;  // of those whose numbers are known
};
extern const LtNumbers cublaslt_numbers, hipblaslt_numbers;

using LtHandle = void*;
using LtObject = void*;

/* Entries. Statuses are ints; 0 is success. */
struct LtApi {
  int (*create)(LtHandle* handle);
  int (*desc_create)(LtObject* desc, int compute, int scale_type);
  int (*desc_destroy)(LtObject desc);
  int (*desc_set)(LtObject desc, int attribute, const void* value, size_t bytes);
  int (*layout_create)(LtObject* layout, int type, uint64_t rows, uint64_t columns, int64_t ld);
  int (*layout_destroy)(LtObject layout);
  int (*preference_create)(LtObject* preference);
  int (*preference_destroy)(LtObject preference);
  int (*preference_set)(LtObject preference, int attribute, const void* value, size_t bytes);
  int (*heuristic)(LtHandle handle, LtObject desc, LtObject a, LtObject b, LtObject c, LtObject d, LtObject preference,
                   int wanted, void* results, int* found);
  int (*matmul)(LtHandle handle, LtObject desc, const void* alpha, const void* a, LtObject layout_a, const void* b,
                LtObject layout_b, const void* beta, const void* c, LtObject layout_c, void* d, LtObject layout_d,
                const void* algorithm, void* workspace, size_t workspace_bytes, void* stream);
  int (*algorithm_get)(const void* algorithm, int attribute, void* value, size_t bytes, size_t* written);  // or null
};

struct Lt {
  const LtNumbers* numbers;
  LtApi api;
  int version;
};

/* Opens the library beside torch's. Null: `reason` says why. */
const Lt* open_lt(const LtNumbers& numbers, char* reason, size_t bytes);

/* "cublasLt 13.1" */
void write_name(const Lt& lt, char* text, size_t bytes);

/* Of a device: made once. */
struct LtDevice {
  LtHandle handle;
  LtAnswers* answers;
  bool is_hopper;  // sm_90, the one arch on which algorithms have been measured
};

/* The product, with a context of the device current. APEX_USE_REFERENCE where it refuses. */
int32_t run(const Lt& lt, const LtDevice& device, const apex_matmul& matmul, void* stream);

}  // namespace apex
