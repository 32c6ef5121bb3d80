#include "tensor_plan.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "dtype.h"
#include "place.h"
#include "plain.h"
#include "status.h"

namespace apex {
namespace {
// Elements a chunk: small enough that the last wave of blocks is short, large enough that finding a chunk
// costs nothing.
constexpr uint32_t gpu_chunk_size = 8192, cpu_chunk_size = 16384;

std::vector<int64_t> strides_unless_contiguous(const at::Tensor& tensor) {
  return tensor.is_contiguous() ? std::vector<int64_t>() : tensor.strides().vec();
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
    : names_(std::move(names)), written_(written) {
  slots_.reserve(tensors);
  for (size_t i = 0; i < tensors; ++i) add(i, source);
  for (Bucket& bucket : buckets_) {
    lay_out(bucket);
    spans_devices_ |= bucket.device != buckets_.front().device;
  }
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
    if (!has_plain_copy(tensor, written_ >> k & 1)) refuse_unless_plain(tensor, describe(k, index));
    TORCH_CHECK_VALUE(tensor.device() == model.device(), describe(k, index), " is on ", tensor.device(), " but ",
                      describe_model(index), " is on ", model.device());
    TORCH_CHECK_VALUE(tensor.numel() == model.numel(), describe(k, index), " has ", tensor.numel(), " elements but ",
                      describe_model(index), " has ", model.numel());
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
  auto bucket = std::find_if(buckets_.begin(), buckets_.end(),
                             [&](const Bucket& b) { return b.device == model.device() && b.dtypes == dtypes; });
  if (bucket == buckets_.end())
    bucket = buckets_.insert(bucket, Bucket{model.device(), std::move(dtypes), {}, {}, 0, 0, 0, {}});
  slots_.push_back({model.numel(), uint32_t(bucket - buckets_.begin()), uint32_t(bucket->members.size()),
                    strides_unless_contiguous(model)});
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
    TORCH_CHECK_VALUE(chunks < (uint64_t(1) << 32), "multi-tensor list of more than ", bucket.chunk_size,
                      " * 2^32 elements");
  }
  first_chunk[tensors] = bucket.chunks = uint32_t(chunks);
}

// Size, dtype and place alone: where its values are is asked beside it.
bool TensorPlan::fits(const Slot& slot, size_t list, const at::Tensor& tensor) const {
  const Bucket& bucket = buckets_[slot.bucket];
  return tensor.numel() == slot.numel && dtype_code(tensor.scalar_type()) == bucket.dtypes[list] &&
         tensor.device() == bucket.device;
}

// Gradients may lie otherwise than their parameters, and any tensor may be a lazy view.
bool TensorPlan::may_copy(const Call& call, size_t list, const at::Tensor& tensor) const {
  const bool gradients = list == 0 && (names_.size() > 1 || call.source.gradients_of);
  return (gradients || !has_plain_keys(tensor)) && has_plain_copy(tensor, call.writes(list));
}

// Elements are matched by position in memory, so the copy has the strides of the parameter.
const at::Tensor& TensorPlan::copy_for(Call& call, const Slot& slot, size_t list, size_t index) const {
  const at::Tensor& tensor = call.source(list, index);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor copy = slot.strides.empty() ? at::empty(tensor.sizes(), tensor.options())
                                         : at::empty_strided(tensor.sizes(), slot.strides, tensor.options());
  copy.copy_(tensor);
  return call.copies.emplace_back(Copy{list, index, std::move(copy)}).tensor;
}

const at::Tensor& TensorPlan::Call::given(size_t list, size_t index) const {
  for (const Copy& copy : copies)
    if (copy.list == list && copy.index == index) return copy.tensor;
  return source(list, index);
}

// What the op wrote into copies.
void TensorPlan::give_back(const Bucket& bucket, const Call& call) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const Copy& copy : call.copies)
    if (call.writes(copy.list) && &buckets_[slots_[copy.index].bucket] == &bucket)
      call.source(copy.list, copy.index).copy_(copy.tensor);
}

// Of what shares no memory. Gradients that are read from their parameters, as autograd makes them, are no outputs.
bool TensorPlan::is_output(const Call& call, size_t list) const {
  return (written_ >> list & 1) && !(list == 0 && call.source.gradients_of);
}

// Those of one index may be one tensor: a parameter without a rounded copy.
void TensorPlan::refuse_shared_outputs(const Call& call) const {
  std::vector<OutputRange> ranges;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Bucket& bucket = buckets_[slots_[i].bucket];
    for (size_t k = 0; k < bucket.dtypes.size(); ++k) {
      if (!is_output(call, k) || slots_[i].numel == 0) continue;
      const uint64_t begin = bucket.image[k * bucket.members.size() + slots_[i].position];
      if (begin) ranges.push_back({begin, begin + uint64_t(slots_[i].numel) * call.source(k, i).itemsize(), k, i, i});
    }
  }
  refuse_shared(std::move(ranges), [&](size_t list, size_t index) { return describe(list, index); });
}

bool TensorPlan::refresh(Call& call) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    Bucket& bucket = buckets_[slot.bucket];
    const size_t lists = bucket.dtypes.size();
    if (lists < names_.size() && call.source(lists, i).defined()) return false;
    const size_t row = bucket.members.size();
    uint64_t* const image = bucket.image.data() + slot.position;
    // Backwards, for written lists come last: one that shares memory with what is read, copy-on-write, first gets its
    // own.
    for (size_t k = lists; k-- > 0;) {
      uint64_t& kept = image[k * row];
      uint64_t address = 0;
      const at::Tensor& tensor = call.source(k, i);
      if (!tensor.defined()) {
        if (k != 0) return false;
        kept = 0;
        continue;
      }
      if (!fits(slot, k, tensor)) return false;
      const bool same_layout = slot.strides.empty() ? tensor.is_contiguous() : tensor.strides() == slot.strides;
      if ((same_layout || slot.numel <= 1) && has_plain_keys(tensor)) {
        // What lies where it lay before was found to have memory then, unless that was freed.
        if (is_freed(tensor)) refuse_unless_plain(tensor, describe(k, i));
        address = address_of(tensor, call.writes(k));
        if (address != kept && !has_memory(tensor)) refuse_unless_plain(tensor, describe(k, i));
      } else if (may_copy(call, k, tensor)) {
        if (call.writes(k)) refuse_overlap(tensor, describe(k, i));
        address = address_of(copy_for(call, slot, k, i), true);
      } else {
        return false;
      }
      if (address == kept) continue;
      kept = address;
      outputs_are_apart_ = outputs_are_apart_ && !is_output(call, k);
    }
  }
  if (!outputs_are_apart_) refuse_shared_outputs(call);
  return outputs_are_apart_ = true;
}

TensorPlan::Kept* TensorPlan::kept_for(const apex_place& place, Bucket& bucket, uint32_t reductions, size_t bytes) {
  for (Kept& kept : bucket.kept)
    if (kept.stream == place.stream && kept.reductions == reductions) return &kept;
  // Scratch must be zeroed; a table is written whole.
  StreamMemory memory(place, bytes, reductions > 0, reductions ? "multi_tensor_scratch" : "multi_tensor_table");
  if (!memory.data()) return nullptr;
  return &bucket.kept.emplace_back(Kept{place.stream, reductions, std::move(memory), {}});
}

// Brings the device's table of this stream up to date. Inside a graph capture the table is a temporary that
// the graph itself fills, so that a replay never depends on what was launched in between.
bool TensorPlan::attach_table(const apex_place& place, Bucket& bucket, bool capturing, apex_tensor_lists& lists,
                              at::Tensor& temporary) {
  const size_t words = bucket.image.size();
  Kept* const table = capturing ? nullptr : kept_for(place, bucket, 0, words * sizeof(uint64_t));
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
  const Kept* const scratch = capturing ? nullptr : kept_for(place, bucket, reductions, bytes);
  if (!scratch) temporary = at::zeros({int64_t(bytes)}, at::TensorOptions().device(bucket.device).dtype(at::kByte));
  lists.scratch = scratch ? scratch->memory.data() : temporary.mutable_data_ptr();
}

size_t TensorPlan::buckets_with_elements() const {
  return size_t(
      std::count_if(buckets_.begin(), buckets_.end(), [](const Bucket& bucket) { return bucket.chunks > 0; }));
}

TensorPlan::Launch TensorPlan::launch_on(size_t turn) const {
  const Bucket& bucket = buckets_[order_[turn]];
  Launch l{bucket.device, place_of(bucket.device), {}, turn == 0, turn + 1 == order_.size(), bucket.members,
           slots_.size()};
  l.lists.image = bucket.image.data();
  l.lists.lists = uint32_t(bucket.dtypes.size());
  l.lists.tensors = uint32_t(bucket.members.size());
  l.lists.chunk_size = bucket.chunk_size;
  l.lists.chunks = bucket.chunks;
  l.lists.tensors_with_chunks = bucket.tensors_with_chunks;
  l.lists.dtypes = bucket.dtypes.data();
  return l;
}

// What the op cannot take is said before the first bucket is written. Scalars may be wrong on one of several devices,
// at any call.
void TensorPlan::check_buckets(const Op& op) {
  for (size_t turn = 0; turn < order_.size(); ++turn) {
    Launch l = launch_on(turn);
    l.lists.check_only = 1;
    if (l.place.platform >= 0) use_reference(op.launch(l), op.unit);
  }
  checked_for_ = op.unit;
}

void TensorPlan::run_bucket(const Call& call, size_t turn) {
  const Op& op = call.op;
  Bucket& bucket = buckets_[order_[turn]];
  Launch l = launch_on(turn);
  const apex_place& place = l.place;

  int32_t status = APEX_USE_REFERENCE;  // on a device that this library does not know
  at::Tensor table, scratch;            // live until the launch is queued: the allocator is stream-ordered
  bool has_table = true;
  if (place.platform >= 0) {
    const int32_t variant = l.lists.variant = apex_resolve(place.platform, place.device, op.unit);
    if (variant == APEX_VARIANT_KERNEL || variant == APEX_VARIANT_CPU) {
      l.capturing = apex_is_capturing(&place);
      if (l.capturing < 0) use_reference(-l.capturing, op.unit);
      has_table = variant != APEX_VARIANT_KERNEL || attach_table(place, bucket, l.capturing, l.lists, table);
      if (op.reductions) attach_scratch(place, bucket, l.capturing, op.reductions, l.lists, scratch);
    }
    if (has_table) status = op.launch(l);  // also where the reference is next: arguments are checked alike everywhere
  }
  if (use_reference(status, op.unit)) run_reference(call, bucket, l);
  if (!call.copies.empty()) give_back(bucket, call);
}

void TensorPlan::run_reference(const Call& call, const Bucket& bucket, const Launch& l) {
  const size_t lists = bucket.dtypes.size();
  Tensors tensors(lists);
  std::vector<size_t> present;
  for (size_t i : bucket.members) {
    if (!call.source(0, i).defined()) continue;
    present.push_back(i);
    for (size_t k = 0; k < lists; ++k) tensors[k].push_back(call.given(k, i));
  }
  call.op.reference(tensors, {l.device, l.place, l.lists, l.first, l.last, present, l.tensors});
}

void TensorPlan::bump_versions(const Call& call) const {
  for (size_t k = 0; k < names_.size(); ++k) {
    if (!call.writes(k)) continue;
    for (size_t i = 0; i < slots_.size(); ++i) bump_version(call.source(k, i));
  }
}

bool TensorPlan::run(const Op& op, const TensorSource& source) {
  Call call{op, source, written_ | uint32_t(op.gradients_written), {}};
  if (!refresh(call)) return false;
  if (spans_devices_ || checked_for_ != op.unit) check_buckets(op);
  for (size_t turn = 0; turn < order_.size(); ++turn) run_bucket(call, turn);
  bump_versions(call);
  return true;
}
}  // namespace apex
