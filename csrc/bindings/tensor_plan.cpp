#include "tensor_plan.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <list>
#include <mutex>

#include "place.h"
#include "status.h"

namespace apex {
namespace {
// Elements a chunk: small enough that the last wave of blocks is short, large enough that finding a chunk
// costs nothing.
constexpr uint32_t gpu_chunk_size = 8192, cpu_chunk_size = 16384;

int32_t dtype_code(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return APEX_F32;
    case at::kHalf: return APEX_F16;
    case at::kBFloat16: return APEX_BF16;
    case at::kDouble: return APEX_F64;
    default: return -1;
  }
}

// A wrapper subclass (DTensor, FakeTensor, ...) has no storage of its own to compute on.
bool has_own_storage(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.key_set().has(c10::DispatchKey::Python) && !tensor.is_quantized();
}

std::vector<int64_t> strides_unless_contiguous(const at::Tensor& tensor) {
  return tensor.is_contiguous() ? std::vector<int64_t>() : tensor.strides().vec();
}

// A null address would mean "no gradient"; a storage is without memory after resize_(0), as FSDP frees it.
bool has_memory(const at::Tensor& tensor) {
  return tensor.numel() == 0 || tensor.storage().unsafeGetStorageImpl()->data() != nullptr;
}

uint64_t address_of(const at::Tensor& tensor, bool written) {
  return reinterpret_cast<uint64_t>(written ? tensor.mutable_data_ptr() : tensor.const_data_ptr());
}
}  // namespace

std::string TensorPlan::describe(size_t list, size_t index) const {
  return names_[list] + "[" + std::to_string(index) + "]";
}

std::string TensorPlan::describe_model(size_t index) const {
  return names_.size() > 1 ? describe(1, index) : "its parameter";
}

TensorPlan::TensorPlan(std::vector<std::string> names, uint32_t written, size_t tensors, const TensorSource& source)
    : names_(std::move(names)), written_(written), copies_(tensors) {
  slots_.reserve(tensors);
  for (size_t i = 0; i < tensors; ++i) add(i, source);
  for (Bucket& bucket : buckets_) lay_out(bucket);
  // Buckets without elements come first: the last launch does what is done once, and must take place.
  for (const bool empty : {true, false})
    for (size_t i = 0; i < buckets_.size(); ++i)
      if ((buckets_[i].chunks == 0) == empty) order_.push_back(i);
}

// Checks the tensors of one index against each other and files them in a bucket.
void TensorPlan::add(size_t index, const TensorSource& source) {
  const at::Tensor& model = source.model(index);
  TORCH_CHECK_VALUE(model.defined(), describe(0, index), " is undefined");
  std::vector<int32_t> dtypes;
  for (size_t k = 0; k < names_.size(); ++k) {
    const at::Tensor& tensor = source(k, index);
    if (!tensor.defined()) {
      if (k > 1 && k + 1 == names_.size()) break;
      TORCH_CHECK_VALUE(k == 0, describe(k, index), " is undefined");
      dtypes.push_back(dtype_code(model.scalar_type()));
      continue;
    }
    TORCH_CHECK_TYPE(tensor.layout() != at::kSparse, describe(k, index), " is sparse: fused ops take dense tensors");
    TORCH_CHECK_VALUE(!tensor.is_meta(), describe(k, index), " is on the meta device: it has no data");
    TORCH_CHECK_TYPE(has_own_storage(tensor), describe(k, index),
                     " is a wrapper whose data is elsewhere (", tensor.toString(), "); pass its local tensor");
    TORCH_CHECK_VALUE(tensor.device() == model.device(), describe(k, index), " is on ", tensor.device(), " but ",
                      describe_model(index), " is on ", model.device());
    TORCH_CHECK_VALUE(tensor.numel() == model.numel(), describe(k, index), " has ", tensor.numel(),
                      " elements but ", describe_model(index), " has ", model.numel());
    TORCH_CHECK_TYPE(dtype_code(tensor.scalar_type()) >= 0, describe(k, index), " is ", tensor.scalar_type(),
                     "; float32, float16, bfloat16 or float64 is required");
    if (k > 0 || (names_.size() == 1 && !source.gradients_of)) {
      TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), describe(k, index),
                        " overlaps itself or has gaps (sizes ", tensor.sizes(), ", strides ", tensor.strides(),
                        "); pass a contiguous tensor");
      TORCH_CHECK_VALUE(tensor.numel() <= 1 || tensor.strides() == model.strides() ||
                            (tensor.is_contiguous() && model.is_contiguous()),
                        describe(k, index), " has strides ", tensor.strides(), " but ", describe_model(index), " has ",
                        model.strides());
    }
    dtypes.push_back(dtype_code(tensor.scalar_type()));
  }
  auto bucket = std::find_if(buckets_.begin(), buckets_.end(), [&](const Bucket& b) {
    return b.device == model.device() && b.dtypes == dtypes;
  });
  if (bucket == buckets_.end())
    bucket = buckets_.insert(bucket, Bucket{model.device(), std::move(dtypes), {}, {}, 0, 0, 0, {}, {}});
  slots_.push_back({model.numel(), uint32_t(bucket - buckets_.begin()), uint32_t(bucket->members.size()),
                    strides_unless_contiguous(model), std::vector<uint64_t>(names_.size(), 0)});
  bucket->members.push_back(index);
}

// Sizes and chunks of a bucket; addresses come with refresh().
void TensorPlan::lay_out(Bucket& bucket) {
  const uint32_t lists = uint32_t(bucket.dtypes.size()), tensors = uint32_t(bucket.members.size());
  bucket.chunk_size = bucket.device.is_cpu() ? cpu_chunk_size : gpu_chunk_size;
  bucket.image.assign(apex_tensor_table_words(lists, tensors), 0);
  uint64_t* sizes = bucket.image.data() + size_t(lists) * tensors;
  uint32_t* first_chunk = reinterpret_cast<uint32_t*>(sizes + tensors);
  uint64_t chunks = 0;
  bucket.tensors_with_chunks = 0;
  for (uint32_t i = 0; i < tensors; ++i) {
    const int64_t numel = slots_[bucket.members[i]].numel;
    sizes[i] = uint64_t(numel);
    first_chunk[i] = uint32_t(chunks);
    bucket.tensors_with_chunks += numel > 0;
    chunks += uint64_t(numel + bucket.chunk_size - 1) / bucket.chunk_size;
    TORCH_CHECK_VALUE(chunks < (uint64_t(1) << 32), "multi-tensor list of more than ", bucket.chunk_size, " * 2^32 elements");
  }
  first_chunk[tensors] = bucket.chunks = uint32_t(chunks);
}

bool TensorPlan::fits(Slot& slot, size_t list, const at::Tensor& tensor) const {
  const Bucket& bucket = buckets_[slot.bucket];
  if (tensor.numel() != slot.numel || dtype_code(tensor.scalar_type()) != bucket.dtypes[list]) return false;
  if (tensor.device() != bucket.device) return false;
  // Layout, quantization and wrappers all show in the keys: looked at again only when those change.
  const uint64_t keys = tensor.key_set().raw_repr();
  if (keys == slot.keys[list]) return true;
  if (!has_own_storage(tensor)) return false;
  slot.keys[list] = keys;
  return true;
}

// Elements are matched by position in memory, so a gradient with other strides is copied into its parameter's.
const at::Tensor& TensorPlan::with_layout_of(const Slot& slot, size_t index, const at::Tensor& gradient) {
  at::Tensor& copy = copies_[index];
  const auto options = gradient.options();
  copy = slot.strides.empty() ? at::empty_like(gradient, options, at::MemoryFormat::Contiguous)
                              : gradient.new_empty_strided(gradient.sizes(), slot.strides);
  copy.copy_(gradient);
  has_copies_ = true;
  return copy;
}

// What the op wrote into copies of gradients.
void TensorPlan::give_back_copies(const Bucket& bucket, const TensorSource& source) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (size_t i : bucket.members)
    if (copies_[i].defined()) source(0, i).copy_(copies_[i]);
}

bool TensorPlan::refresh(const TensorSource& source, bool gradients_written) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    Bucket& bucket = buckets_[slot.bucket];
    const size_t lists = bucket.dtypes.size();
    if (lists < names_.size() && source(lists, i).defined()) return false;
    uint64_t* address = bucket.image.data() + slot.position;
    const size_t row = bucket.members.size();
    for (size_t k = 0; k < lists; ++k, address += row) {
      const at::Tensor& tensor = source(k, i);
      if (!tensor.defined()) {
        if (k != 0) return false;
        *address = 0;
        continue;
      }
      if (!fits(slot, k, tensor)) return false;
      TORCH_CHECK_VALUE(has_memory(tensor), describe(k, i), " has no memory: its storage was freed");
      const bool same_layout = slot.strides.empty() ? tensor.is_contiguous() : tensor.strides() == slot.strides;
      if (same_layout || slot.numel <= 1) {
        *address = address_of(tensor, (written_ >> k & 1) || (k == 0 && gradients_written));
      } else if (k == 0 && (source.gradients_of || (lists > 1 && !(written_ & 1)))) {
        *address = address_of(with_layout_of(slot, i, tensor), false);
      } else {
        return false;
      }
    }
  }
  return true;
}

TensorPlan::Table* TensorPlan::table_of(const apex_place& place, Bucket& bucket) {
  for (Table& table : bucket.tables)
    if (table.stream == place.stream) return &table;
  StreamMemory memory(place, bucket.image.size() * sizeof(uint64_t), false, "multi_tensor_table");
  if (!memory.data()) return nullptr;
  return &bucket.tables.emplace_back(Table{place.stream, std::move(memory), {}});
}

TensorPlan::Scratch* TensorPlan::scratch_of(const apex_place& place, Bucket& bucket, uint32_t reductions, size_t bytes) {
  for (Scratch& scratch : bucket.scratches)
    if (scratch.stream == place.stream && scratch.reductions == reductions) return &scratch;
  StreamMemory memory(place, bytes, true, "multi_tensor_scratch");
  if (!memory.data()) return nullptr;
  return &bucket.scratches.emplace_back(Scratch{place.stream, reductions, std::move(memory)});
}

// Brings the device's table of this stream up to date. Inside a graph capture the table is a temporary that
// the graph itself fills, so that a replay never depends on what was launched in between.
bool TensorPlan::attach_table(const apex_place& place, Bucket& bucket, bool capturing, apex_tensor_lists& lists,
                              at::Tensor& temporary) {
  const size_t words = bucket.image.size();
  Table* const table = capturing ? nullptr : table_of(place, bucket);
  if (!table) {
    temporary = at::empty({int64_t(words)}, at::TensorOptions().device(bucket.device).dtype(at::kLong));
    lists.table = temporary.mutable_data_ptr();
    return !use_reference(apex_tensor_table_write(&place, &lists, 0, words), "multi_tensor_table");
  }
  const bool fresh = table->image.size() != words;
  lists.table = table->memory.data();
  const auto first = fresh ? bucket.image.begin()
                           : std::mismatch(bucket.image.begin(), bucket.image.end(), table->image.begin()).first;
  if (first == bucket.image.end()) return true;
  const auto last = fresh ? bucket.image.rend()
                          : std::mismatch(bucket.image.rbegin(), bucket.image.rend(), table->image.rbegin()).first;
  const size_t begin = size_t(first - bucket.image.begin());
  const size_t end = fresh ? words : size_t(bucket.image.rend() - last);
  table->image.clear();  // until the write is queued, the table is not to be trusted
  if (use_reference(apex_tensor_table_write(&place, &lists, begin, end - begin), "multi_tensor_table")) return false;
  table->image = bucket.image;
  return true;
}

// Kernels leave the scratch as they found it, zeroed where it must be, so it is zeroed once; inside a capture the
// graph does that itself, at every replay.
void TensorPlan::attach_scratch(const apex_place& place, Bucket& bucket, bool capturing, uint32_t reductions,
                                apex_tensor_lists& lists, at::Tensor& temporary) {
  const size_t bytes = apex_reduction_scratch_bytes(&lists, reductions);
  const Scratch* const scratch = capturing ? nullptr : scratch_of(place, bucket, reductions, bytes);
  if (!scratch) temporary = at::zeros({int64_t(bytes)}, at::TensorOptions().device(bucket.device).dtype(at::kByte));
  lists.scratch = scratch ? scratch->memory.data() : temporary.mutable_data_ptr();
}

size_t TensorPlan::buckets_with_elements() const {
  return size_t(std::count_if(buckets_.begin(), buckets_.end(), [](const Bucket& bucket) { return bucket.chunks > 0; }));
}

TensorPlan::Launch TensorPlan::launch_on(size_t turn) const {
  const Bucket& bucket = buckets_[order_[turn]];
  Launch l{bucket.device, place_of(bucket.device), {}, turn == 0, turn + 1 == order_.size(), bucket.members, slots_.size()};
  l.lists.image = bucket.image.data();
  l.lists.lists = uint32_t(bucket.dtypes.size());
  l.lists.tensors = uint32_t(bucket.members.size());
  l.lists.chunk_size = bucket.chunk_size;
  l.lists.chunks = bucket.chunks;
  l.lists.tensors_with_chunks = bucket.tensors_with_chunks;
  l.lists.dtypes = bucket.dtypes.data();
  return l;
}

// What the op cannot take is said before the first bucket is written.
void TensorPlan::check_buckets(const Op& op) {
  for (size_t turn = 0; turn < order_.size(); ++turn) {
    Launch l = launch_on(turn);
    l.lists.check_only = 1;
    if (l.place.platform >= 0) use_reference(op.launch(l), op.unit);
  }
  checked_for_ = op.unit;
}

void TensorPlan::run_bucket(const Op& op, const TensorSource& source, size_t turn) {
  Bucket& bucket = buckets_[order_[turn]];
  const size_t lists = bucket.dtypes.size();
  Launch l = launch_on(turn);
  const apex_place& place = l.place;

  int32_t status = APEX_USE_REFERENCE;  // on a device that this library does not know
  at::Tensor table, scratch;            // live until the launch is queued: the allocator is stream-ordered
  bool has_table = true;
  if (place.platform >= 0) {
    const int32_t variant = apex_resolve(place.platform, place.device, op.unit);
    if (variant == APEX_VARIANT_KERNEL || variant == APEX_VARIANT_CPU) {
      l.capturing = apex_is_capturing(&place);
      if (l.capturing < 0) use_reference(-l.capturing, op.unit);
      has_table = variant != APEX_VARIANT_KERNEL || attach_table(place, bucket, l.capturing, l.lists, table);
      if (op.reductions) attach_scratch(place, bucket, l.capturing, op.reductions, l.lists, scratch);
    }
    if (has_table) status = op.launch(l);  // also where the reference is next: arguments are checked alike everywhere
  }
  if (!use_reference(status, op.unit)) {
    if (op.gradients_written && has_copies_) give_back_copies(bucket, source);
    return;
  }
  Tensors tensors(lists);
  std::vector<size_t> present;
  for (size_t i : bucket.members) {
    if (!source(0, i).defined()) continue;
    present.push_back(i);
    for (size_t k = 0; k < lists; ++k) tensors[k].push_back(source(k, i));
  }
  op.reference(tensors, {l.device, l.place, l.lists, l.first, l.last, present, l.tensors});
}

void TensorPlan::run(const Op& op, const TensorSource& source) {
  if (checked_for_ != op.unit) check_buckets(op);
  for (size_t turn = 0; turn < order_.size(); ++turn) run_bucket(op, source, turn);
  // In-place kernels are invisible to autograd: without this a stale saved tensor would go unnoticed.
  const uint32_t written = written_ | uint32_t(op.gradients_written);
  for (size_t k = 0; k < names_.size(); ++k)
    for (size_t i = 0; (written >> k & 1) && i < slots_.size(); ++i)
      if (const at::Tensor& tensor = source(k, i); tensor.defined() && !tensor.is_inference())
        tensor.unsafeGetTensorImpl()->bump_version();
  if (has_copies_)
    for (at::Tensor& copy : copies_) copy.reset();
  has_copies_ = false;
}

// ---- plans of lists that are passed anew at every call ----------------------------------------------------
namespace {
struct RememberedPlans {
  static constexpr size_t most = 64;
  std::mutex mutex;
  std::list<std::pair<uint64_t, std::unique_ptr<TensorPlan>>> plans;  // most recently used first

  // Taken out while in use: two threads never share one plan.
  std::unique_ptr<TensorPlan> take(uint64_t key) {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto plan = plans.begin(); plan != plans.end(); ++plan)
      if (plan->first == key) {
        auto found = std::move(plan->second);
        plans.erase(plan);
        return found;
      }
    return nullptr;
  }
  void give(uint64_t key, std::unique_ptr<TensorPlan> plan) {
    std::lock_guard<std::mutex> lock(mutex);
    plans.emplace_front(key, std::move(plan));
    if (plans.size() > most) plans.pop_back();
  }
};

RememberedPlans& remembered() {
  // Never destroyed: at exit torch's allocator may be gone before this library.
  static auto* plans = new RememberedPlans;
  return *plans;
}

uint64_t mix(uint64_t hash, uint64_t value) { return (hash ^ value) * 0x9e3779b97f4a7c15ull + (hash >> 29); }

uint64_t shape_key(const char* unit, uint32_t written, const std::vector<at::TensorList>& lists) {
  uint64_t hash = mix(reinterpret_cast<uint64_t>(unit), written);
  for (const at::TensorList& list : lists) {
    hash = mix(hash, list.size());
    for (const at::Tensor& tensor : list) {
      if (!tensor.defined()) continue;
      hash = mix(hash, uint64_t(tensor.numel()));
      hash = mix(hash, uint64_t(tensor.scalar_type()) << 16 | uint64_t(uint8_t(tensor.device().index())) << 8 |
                           uint64_t(uint8_t(tensor.device().type())));
    }
  }
  return hash;
}
}  // namespace

void run_once(const TensorPlan::Op& op, const std::vector<std::string>& names, uint32_t written,
              const std::vector<at::TensorList>& lists) {
  for (size_t k = 1; k < lists.size(); ++k)
    TORCH_CHECK_VALUE(lists[k].size() == lists[0].size(), op.unit, ": ", names[k], " holds ", lists[k].size(),
                      " tensors but ", names[0], " holds ", lists[0].size());
  if (lists.empty() || lists[0].empty()) return;
  const TensorSource source{lists, std::nullopt};
  const uint64_t key = shape_key(op.unit, written, lists);
  std::unique_ptr<TensorPlan> plan = remembered().take(key);
  if (!plan || plan->tensors() != lists[0].size() || !plan->refresh(source, op.gradients_written)) {
    plan = std::make_unique<TensorPlan>(names, written, lists[0].size(), source);
    TORCH_CHECK_VALUE(plan->refresh(source, op.gradients_written), op.unit, ": a tensor's layout cannot be used; pass contiguous tensors");
  }
  plan->run(op, source);
  remembered().give(key, std::move(plan));
}
}  // namespace apex
