/* Lists of tensors, as the multi-tensor operations of this library take them. */
#pragma once
#include "apex.h"

#if defined(__cplusplus)
extern "C" {
#endif

/* The image of a table is one block of 64-bit words:
 *   addresses   [lists][tensors]     0 in list 0: the tensor is left out of this call
 *   sizes       [tensors]            elements
 *   first_chunk [tensors + 1]        32-bit: chunks of all tensors before this one, the last the total
 * On a GPU a copy of it lies in device memory; apex_tensor_table_write brings that up to date. */
typedef struct apex_tensor_lists {
  const uint64_t* image;
  void* table;   /* the device's copy; NULL where a CPU variant runs */
  void* scratch; /* for reductions: apex_reduction_scratch_bytes, zeroed when made; else NULL */
  uint32_t lists;
  uint32_t tensors;
  uint32_t chunk_size;          /* elements */
  uint32_t chunks;              /* first_chunk[tensors] */
  uint32_t tensors_with_chunks; /* tensors of more than 0 elements */
  const int32_t* dtypes;        /* [lists], apex_dtype: all tensors of a list agree */
  uint32_t check_only;          /* 1: nothing runs; the status says whether these lists could be taken */
  int32_t variant;              /* apex_variant that table and scratch were made for; UNKNOWN: it is looked up */
} apex_tensor_lists;

/* Device memory that an operation with that many reductions needs between its blocks. */
APEX_EXPORT size_t apex_reduction_scratch_bytes(const apex_tensor_lists* lists, uint32_t reductions);
/* Words of an image, first_chunk rounded up to whole words. */
APEX_EXPORT size_t apex_tensor_table_words(uint32_t lists, uint32_t tensors);
/* Copies words [first, first + words) of the image to the table, on the place's stream, by kernel
 * parameters: nothing is left to be read later, so a captured graph repeats exactly these words. */
APEX_EXPORT int32_t apex_tensor_table_write(const apex_place* place, const apex_tensor_lists* lists, size_t first,
                                            size_t words);

#if defined(__cplusplus)
}
#endif
