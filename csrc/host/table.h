/* Units, their choices, code objects and kernels. Append-only: what a reader found stays valid for ever. */
#pragma once
#include <atomic>
#include <cstddef>
#include <mutex>
#include <vector>

#include "apex.h"
#include "driver.h"

namespace apex {

constexpr int platforms = 3;

struct CodeObject {
  char* image;  // our copy, with a zero byte after it (PTX is text); HIP may go on reading it after the load
  size_t bytes;
  std::mutex loading;  // held by the thread that works on `module`; never together with the table's mutex
  void* module = nullptr;
};

struct Unit;

struct Kernel {
  Unit* unit;
  char* name;
  uint32_t slot;
  /* What to launch, [platform][device]; null: not loaded, or a newer code object was registered. */
  std::atomic<void*> function[platforms][max_devices];
};

struct Unit {
  char* name;
  std::atomic<int32_t> choice[platforms][max_devices];
  /* Below: guarded by the table's mutex. The last one of a place is in force; none is ever freed. */
  struct Placed {
    int32_t platform, device;
    CodeObject* object;
  };
  std::vector<Placed> objects;
  std::vector<Kernel*> kernels;
};

bool is_place(int32_t platform, int32_t device);

/* The unit of this name, made if new. Lock-free for one that exists. Null: the table is full. */
Unit* find_unit(const char* name);

/* The kernel of a handle; fills in its slot. Lock-free once it is. Null: the table is full. */
Kernel* find_kernel(apex_kernel* handle);

/* The code object in force, or null. */
CodeObject* current_object(const Unit* unit, int32_t platform, int32_t device);

/* Makes `function` what launches use, unless another object has come into force meanwhile. */
void publish(Kernel* kernel, int32_t platform, int32_t device, const CodeObject* object, void* function);

/* For fork(): the table must be whole in the child. */
void lock_table();
void unlock_table();

}  // namespace apex
