#include "push_pull_halos.h"

namespace gpu {
// Waits for a word of this turn. False: nobody answered in time.
GPU_FN bool await_halo(const u64* slot, u32 turn, i64 limit, u64* payload) {
  if (halo_arrived(slot, turn, payload)) return true;
  if (limit == 0) return false;
  const i64 begin = nanoseconds();
  while (!halo_arrived(slot, turn, payload))
    if (nanoseconds() - begin > limit) return false;
  return true;
}

template <class T> GPU_FN void push_pull_strip(const PushPullHalos& a, const HaloSide& side, u32 strip, bool bottom) {
  HaloHeader* const header = (HaloHeader*)(side.inbox + (i64)strip * a.strip_bytes);
  u32 turn = header->turn;
  bool gone = header->gone != 0;
  const u32 slot = thread_x();
  for (u32 round = 0; round < a.rounds; ++round) {
    turn = next_turn(turn);
    if (slot >= a.slots) continue;
    const u32 packet = halo_packet(a, strip, slot, round);
    halo_push<T>(a, side, packet, halo_slot(side.outbox, a, strip, slot, turn), turn);
    u64 payload;
    if (!await_halo(halo_slot(side.inbox, a, strip, slot, turn), turn, gone ? 0 : a.limit, &payload)) {
      gone = true;
      payload = halo_of_nobody;
    }
    halo_pull<T>(a, side, packet, payload);
  }
  sync_threads();  // all have read the header
  if (slot == 0) header->turn = turn;
  if (gone && slot < a.slots) {
    raise_flag((i32*)&header->gone);
    raise_flag((i32*)a.fault + bottom);
  }
}

// Even blocks work on the top, odd ones on the bottom, both from the first strip on, as the neighbours' do.
template <class T> GPU_FN void push_pull_halos(const PushPullHalos& a) {
  const bool bottom = block_x() & 1;
  const HaloSide side = halo_side(a, bottom);
  const u32 blocks = grid_x() / 2;
  if (side.zero) {
    halo_zero<T>(a, side, (u64)(block_x() / 2) * block_size_x() + thread_x(), (u64)blocks * block_size_x());
    return;
  }
  for (u32 strip = block_x() / 2; strip < a.strips; strip += blocks) push_pull_strip<T>(a, side, strip, bottom);
}
}  // namespace gpu

#define PUSH_PULL_KERNEL(name, T)                                                              \
  extern "C" GPU_KERNEL(gpu::halo_threads) void push_pull_halos_##name(gpu::PushPullHalos a) { \
    gpu::push_pull_halos<gpu::T>(a);                                                           \
  }                                                                                            \
  GPU_REGISTER(push_pull_halos_##name)
PUSH_PULL_KERNEL(u8, u8)
PUSH_PULL_KERNEL(u16, u16)
PUSH_PULL_KERNEL(u32, u32)
PUSH_PULL_KERNEL(u64, u64)

// Does nothing for a while.
extern "C" GPU_KERNEL(1) void push_pull_halos_delay(gpu::Delay a) {
  const gpu::i64 begin = gpu::nanoseconds();
  while (gpu::nanoseconds() - begin < a.nanoseconds) {}
}
GPU_REGISTER(push_pull_halos_delay)
