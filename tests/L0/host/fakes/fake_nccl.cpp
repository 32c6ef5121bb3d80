// A libnccl.so.2 (librccl.so.1) for tests: one rank that sends to itself at the end of a group, memory from the heap, a
// log of what was called, and failures on demand.
#include <cstdlib>
#include <vector>

#include "fake.h"

using fake::note;

namespace {
struct Id { char bytes[128]; };
struct Communicator {
  int rank, ranks;
  std::string id;
};
struct Message {
  const void* from;
  void* to;
  size_t bytes;
};
std::vector<Message> sent, received;
int groups = 0;

size_t size_of(int type) {
  constexpr size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return type >= 0 && type < 10 ? sizes[type] : 0;
}
}  // namespace

#define BEGIN(call) \
  if (const int code = fake::failure(call)) return code

FAKE const char* ncclGetErrorString(int code) { return code == 2 ? "unhandled system error" : "invalid usage"; }
FAKE int ncclGetUniqueId(Id* id) {
  BEGIN("ncclGetUniqueId");
  static char next = 1;
  memset(id->bytes, next++, sizeof id->bytes);
  return 0;
}
FAKE int ncclCommInitRank(Communicator** communicator, int ranks, Id id, int rank) {
  BEGIN("ncclCommInitRank");
  *communicator = new Communicator{rank, ranks, std::string(id.bytes, sizeof id.bytes)};
  note("init %d of %d by %d %d", rank, ranks, id.bytes[0], id.bytes[127]);
  return 0;
}
FAKE int ncclCommDestroy(Communicator* communicator) {
  note("destroy");
  delete communicator;
  return 0;
}
FAKE int ncclGroupStart() {
  ++groups;
  return 0;
}
FAKE int ncclSend(const void* data, size_t count, int type, int peer, Communicator* communicator, void*) {
  BEGIN("ncclSend");
  if (!groups || peer >= communicator->ranks) return 5;
  note("send %zu of %d to %d", count, type, peer);
  sent.push_back({data, nullptr, count * size_of(type)});
  return 0;
}
FAKE int ncclRecv(void* data, size_t count, int type, int peer, Communicator* communicator, void*) {
  BEGIN("ncclRecv");
  if (!groups || peer >= communicator->ranks) return 5;
  note("receive %zu of %d from %d", count, type, peer);
  received.push_back({nullptr, data, count * size_of(type)});
  return 0;
}
FAKE int ncclGroupEnd() {
  BEGIN("ncclGroupEnd");
  if (--groups == 0) {
    // In a ring of one what goes left comes from the right.
    for (size_t i = 0; i < received.size(); ++i)
      memcpy(received[i].to, sent[received.size() - 1 - i].from, received[i].bytes);
    sent.clear(), received.clear();
  }
  return 0;
}
#if !defined(FAKE_OLD)
FAKE int ncclMemAlloc(void** memory, size_t bytes) {
  BEGIN("ncclMemAlloc");
  *memory = malloc(bytes);
  note("allocate %zu", bytes);
  return 0;
}
FAKE int ncclMemFree(void* memory) {
  BEGIN("ncclMemFree");
  note("free");
  free(memory);
  return 0;
}
#endif
