// Arguments of push_pull_halos.h's kernels, by value.
#pragma once
#include "gpu.h"

namespace gpu {
constexpr u32 halo_threads = 128;     // of a block, which works on one strip at a time
constexpr u32 most_halo_slots = 127;  // packets of 8 bytes of halo, each in a slot of 16, that a strip carries at once
constexpr u32 halo_strip_bytes = 4096;  // a header of 16 bytes, and twice the slots

// Top is the neighbour before this rank, bottom the one behind it.
struct PushPullHalos {
  const u8* top_send;  // what this rank's image has at its top
  const u8* bottom_send;
  u8* top_receive;  // where the neighbour's rows go
  u8* bottom_receive;
  u8* top_inbox;  // this rank's memory, in which the neighbour above writes
  u8* bottom_inbox;
  u8* top_outbox;  // the inbox that the neighbour above has for this rank
  u8* bottom_outbox;
  u8* fault;                // two i32, top's and bottom's: set to 1 where nobody answered in time
  i64 limit;                // nanoseconds until then
  i64 top_send_strides[4];  // of the halo's dimensions, in elements, the last one is the fastest
  i64 top_receive_strides[4];
  i64 bottom_send_strides[4];
  i64 bottom_receive_strides[4];
  u32 sizes[4];
  i32 top_zero;  // there is no neighbour: zeros are received
  i32 bottom_zero;
  i64 box_bytes;   // of each inbox
  i32 unit_bytes;  // of an element: 1, 2, 4 or 8
  u32 slots;       // the next four are the launch's own
  u32 strips;
  u32 strip_bytes;
  u32 rounds;  // how often each strip is used
};

struct Delay { i64 nanoseconds; };
}  // namespace gpu
