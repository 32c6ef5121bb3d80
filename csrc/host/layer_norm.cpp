#include "layer_norm.h"

#include "device/norm_layout.h"
#include "norm.h"

#define TEAMS(part, hidden, vectors, teams, stages)             \
  {hidden,                                                      \
   hidden / (vectors * 8) * teams,                              \
   teams,                                                       \
   stages,                                                      \
   {APEX_NORM_KERNEL(layer_norm, part##_teams_, bf16_##hidden), \
    APEX_NORM_KERNEL(layer_norm, part##_teams_, f16_##hidden)}},
#define FORWARD_TEAMS(...) TEAMS(forward, __VA_ARGS__)
#define BACKWARD_TEAMS(...) TEAMS(backward, __VA_ARGS__)

APEX_NORM_OP(layer_norm, true, {NORM_FORWARD_TEAMS(FORWARD_TEAMS)}, {NORM_BACKWARD_TEAMS(BACKWARD_TEAMS)})
