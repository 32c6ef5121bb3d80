/* Delayed scaling's update of many histories. csrc/device/fp8_update_scales.h says what is computed of each. */
#pragma once
#include "apex.h"

#if defined(__cplusplus)
extern "C" {
#endif

/* One of them: float [rows][columns], element (i, j) at amax_history[i * pitch + j * column_pitch], one of which is 1.
 */
typedef struct apex_fp8_history {
  float* amax_history;
  const float* scale; /* [columns], what the scales were */
  int64_t columns;
  uint32_t pitch, column_pitch;
} apex_fp8_history;

typedef struct apex_fp8_updates {
  int64_t count, rows;  /* histories; rows of each */
  float* scale;         /* [all columns], new */
  float* scale_inv;     /* [all columns] */
  const float* fp8_max; /* [all columns] */
  float factor;         /* 2^-margin */
  int32_t most_recent;
  float* scale_inv_apart; /* [all columns][4], whose first ones are scale_inv again, each on 16 bytes as matrix products
                             of a GPU take it; or null */
} apex_fp8_updates;

/* One launch where the histories lie one behind the other in memory, upright (pitch 1), as their scales do, or in up to
 * 120 such runs; a launch for each 120 runs. */
APEX_EXPORT int32_t apex_fp8_multi_update_scales(const apex_place* place, const apex_fp8_updates* updates,
                                                 const apex_fp8_history* histories);

#if defined(__cplusplus)
}
#endif
