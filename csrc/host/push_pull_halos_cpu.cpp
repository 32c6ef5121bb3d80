// The exchange of halos between processes of a CPU: one thread does what the kernel's threads do.
#include <chrono>
#include <thread>

#include "device/push_pull_halos.h"
#include "push_pull_halos.h"

namespace apex {
namespace {

int64_t now() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Whoever is waited for may need this processor: polls give it away, and soon sleep.
void pause(int polls) {
  if (polls < 64) std::this_thread::yield();
  else std::this_thread::sleep_for(std::chrono::microseconds(50));
}

bool await_halo(const uint64_t* slot, uint32_t turn, int64_t limit, uint64_t* payload) {
  auto* const word = reinterpret_cast<const gpu::u64*>(slot);
  gpu::u64 found;
  bool arrived = gpu::halo_arrived(word, turn, &found);
  const int64_t begin = arrived ? 0 : now();
  for (int polls = 0; !arrived && limit && now() - begin <= limit; ++polls) {
    pause(polls);
    arrived = gpu::halo_arrived(word, turn, &found);
  }
  *payload = arrived ? found : gpu::halo_of_nobody;
  return arrived;
}

template <class T> class Exchange {
 public:
  explicit Exchange(const gpu::PushPullHalos& a) : a_(a), sides_{gpu::halo_side(a, false), gpu::halo_side(a, true)} {}

  void run() {
    for (const gpu::HaloSide& side : sides_)
      if (side.zero) gpu::halo_zero<T>(a_, side, 0, 1);
    for (uint32_t strip = 0; strip < a_.strips; ++strip)
      for (uint32_t round = 0; round < a_.rounds; ++round) {
        // Both sides send before one waits: in a ring everybody would wait for everybody.
        for (const gpu::HaloSide& side : sides_)
          if (!side.zero) push(side, strip, round);
        for (int32_t i = 0; i < 2; ++i)
          if (!sides_[i].zero) pull(sides_[i], strip, round, i);
      }
  }

 private:
  gpu::HaloHeader& header(const gpu::HaloSide& side, uint32_t strip) {
    return *reinterpret_cast<gpu::HaloHeader*>(side.inbox + int64_t(strip) * a_.strip_bytes);
  }

  void push(const gpu::HaloSide& side, uint32_t strip, uint32_t round) {
    const uint32_t turn = gpu::next_turn(header(side, strip).turn);
    for (uint32_t slot = 0; slot < a_.slots; ++slot)
      gpu::halo_push<T>(a_, side, gpu::halo_packet(a_, strip, slot, round),
                        gpu::halo_slot(side.outbox, a_, strip, slot, turn), turn);
  }

  void pull(const gpu::HaloSide& side, uint32_t strip, uint32_t round, int32_t bottom) {
    gpu::HaloHeader& own = header(side, strip);
    own.turn = gpu::next_turn(own.turn);
    for (uint32_t slot = 0; slot < a_.slots; ++slot) {
      uint64_t payload;
      auto* const words = reinterpret_cast<uint64_t*>(gpu::halo_slot(side.inbox, a_, strip, slot, own.turn));
      if (!await_halo(words, own.turn, own.gone ? 0 : a_.limit, &payload)) {
        own.gone = 1;
        gpu::raise_flag(reinterpret_cast<gpu::i32*>(a_.fault) + bottom);
      }
      gpu::halo_pull<T>(a_, side, gpu::halo_packet(a_, strip, slot, round), payload);
    }
  }

  const gpu::PushPullHalos& a_;
  const gpu::HaloSide sides_[2];
};

}  // namespace

void push_pull_halos_cpu(const gpu::PushPullHalos& a) {
  switch (a.unit_bytes) {
    case 1:
      return Exchange<gpu::u8>(a).run();
    case 2:
      return Exchange<gpu::u16>(a).run();
    case 4:
      return Exchange<gpu::u32>(a).run();
    default:
      return Exchange<gpu::u64>(a).run();
  }
}
}  // namespace apex
