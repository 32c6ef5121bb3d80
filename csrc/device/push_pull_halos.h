// The exchange of halos through memory that neighbouring ranks share: each writes to its neighbours' inboxes, and reads
// its own.
//
// An inbox is cut into strips. A strip has a header, which its owner alone touches, and two buffers of slots, in which
// the neighbour alone writes. Both sides count the turns of a strip; turn k goes through buffer k % 2, and every word
// of a slot is four bytes of the halo and, in one store with them, k. So a word that bears k has arrived, no fence is
// needed, and nothing is ever cleared. A buffer is written again at turn k + 2, after turn k + 1 has come back: the
// neighbour had read turn k by then, for each of its threads reads before it sends. A launch uses the same strips and
// slots at each of its turns, whether or not there is halo left for them.
#pragma once
#include "push_pull_halos_arguments.h"
#include "system_memory.h"

namespace gpu {
struct HaloSide {
  const u8* send;
  u8* receive;
  u8* inbox;
  u8* outbox;
  i64 send_strides[4];
  i64 receive_strides[4];
  bool zero;
};
// By value: an address within a kernel's parameters would bring them all into slow memory.
GPU_FN HaloSide halo_side(const PushPullHalos& a, bool bottom) {
  HaloSide side;
  side.send = bottom ? a.bottom_send : a.top_send;
  side.receive = bottom ? a.bottom_receive : a.top_receive;
  side.inbox = bottom ? a.bottom_inbox : a.top_inbox;
  side.outbox = bottom ? a.bottom_outbox : a.top_outbox;
  GPU_UNROLL_FOR (int d = 0; d < 4; ++d) {
    side.send_strides[d] = bottom ? a.bottom_send_strides[d] : a.top_send_strides[d];
    side.receive_strides[d] = bottom ? a.bottom_receive_strides[d] : a.top_receive_strides[d];
  }
  side.zero = (bottom ? a.bottom_zero : a.top_zero) != 0;
  return side;
}

struct HaloHeader {
  u32 turn;
  u32 gone;  // the neighbour did not answer once: nobody waits for it again
};

GPU_FN u32 halo_elements(const PushPullHalos& a) { return a.sizes[0] * a.sizes[1] * a.sizes[2] * a.sizes[3]; }
GPU_FN i64 halo_offset(const u32 (&sizes)[4], const i64 (&strides)[4], u32 i) {
  i64 offset = 0;
  GPU_UNROLL_FOR (int d = 3; d > 0; --d) {
    const u32 rest = i / sizes[d];
    offset += (i64)(i - rest * sizes[d]) * strides[d];
    i = rest;
  }
  return offset + (i64)i * strides[0];
}

// Never 0, which unused slots bear; the buffers take turns also where the numbers begin anew.
GPU_FN u32 next_turn(u32 turn) { return turn == 0xffffffffu ? 2 : turn + 1; }
// The words of a slot in a strip's buffer of that turn.
GPU_FN u64* halo_slot(u8* box, const PushPullHalos& a, u32 strip, u32 slot, u32 turn) {
  return (u64*)(box + (i64)strip * a.strip_bytes + 16) + 2 * ((turn & 1) * a.slots + slot);
}
// Which eight bytes of the halo.
GPU_FN u32 halo_packet(const PushPullHalos& a, u32 strip, u32 slot, u32 round) {
  return (round * a.strips + strip) * a.slots + slot;
}

template <class T> GPU_FN void halo_push(const PushPullHalos& a, const HaloSide& side, u32 packet, u64* slot,
                                         u32 turn) {
  constexpr u32 each = 8 / sizeof(T);
  const u32 n = halo_elements(a);
  u64 payload = 0;
  GPU_UNROLL_FOR (u32 j = 0; j < each; ++j) {
    const u32 i = packet * each + j;
    if (i < n) payload |= (u64)((const T*)side.send)[halo_offset(a.sizes, side.send_strides, i)] << 8 * sizeof(T) * j;
  }
  const u64 mark = (u64)turn << 32;
  store_system(slot, (payload & 0xffffffffu) | mark, payload >> 32 | mark);
}

GPU_FN bool halo_arrived(const u64* slot, u32 turn, u64* payload) {
  u64 first, second;
  load_system(slot, first, second);
  *payload = (first & 0xffffffffu) | second << 32;
  return (u32)(first >> 32) == turn && (u32)(second >> 32) == turn;
}

template <class T> GPU_FN void halo_pull(const PushPullHalos& a, const HaloSide& side, u32 packet, u64 payload) {
  constexpr u32 each = 8 / sizeof(T);
  const u32 n = halo_elements(a);
  GPU_UNROLL_FOR (u32 j = 0; j < each; ++j) {
    const u32 i = packet * each + j;
    if (i < n) ((T*)side.receive)[halo_offset(a.sizes, side.receive_strides, i)] = (T)(payload >> 8 * sizeof(T) * j);
  }
}

// Elements first, first + step, ...
template <class T> GPU_FN void halo_zero(const PushPullHalos& a, const HaloSide& side, u64 first, u64 step) {
  const u32 n = halo_elements(a);
  for (u64 i = first; i < n; i += step) ((T*)side.receive)[halo_offset(a.sizes, side.receive_strides, (u32)i)] = 0;
}
// What is received from a neighbour that does not answer: nan in every floating-point type.
constexpr u64 halo_of_nobody = ~(u64)0;
}  // namespace gpu
