#include "pool/torch/adopt.h"

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/StringUtil.h>

#include <cstring>
#include <utility>

#include "allocator/allocation_scope.h"
#include "allocator/device_registry.h"
#include "allocator/errors.h"
#include "pool/torch/region_tensors.h"
#include "pool/torch/storage_guard.h"

namespace lowtide {
namespace {

// The scope alone, without telling the observer: nothing dispatches here.
class Scope {
 public:
  explicit Scope(OwnerId owner) : owner_(owner) { enter_scope(owner); }
  ~Scope() { leave_scope(owner_); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  OwnerId owner_;
};

class ScopedEvent {
 public:
  explicit ScopedEvent(Device& device) : device_(device), event_(device.create_event()) {}
  ~ScopedEvent() { device_.destroy_event(event_); }
  ScopedEvent(const ScopedEvent&) = delete;
  ScopedEvent& operator=(const ScopedEvent&) = delete;

  /// Work queued on `after` from here on starts when all work queued on `before` so far is done.
  void order(StreamHandle before, StreamHandle after) {
    device_.record(event_, before);
    device_.wait(after, event_);
  }

 private:
  Device& device_;
  EventHandle event_;
};

DeviceKind kind_of(const c10::StorageImpl& storage) {
  switch (storage.device_type()) {
    case c10::DeviceType::CUDA:
      return DeviceKind::Cuda;
    case c10::DeviceType::CPU:
      return DeviceKind::Host;
    default:
      return DeviceKind::None;
  }
}

// A block of the region for the storage, under the deleter of the allocator that torch uses now.
c10::DataPtr allocate_in(const Region& region, c10::Allocator& allocator, Bytes size) {
  const Scope scope(region.id());
  c10::DataPtr block = allocator.allocate(size);
  CachingAllocator* owner = owner_of(to_address(block.get()));
  const auto info = owner == nullptr ? std::nullopt : owner->find(to_address(block.get()));
  if (!info || info->owner != region.id()) {
    throw Misuse(c10::str(
        "cannot move a tensor into offload region '", region.name(),
        "' here: torch's allocations go to a private pool now (torch.cuda.use_mem_pool, or a graph being captured)"));
  }
  return block;
}

void exchange(c10::StorageImpl& storage, c10::Allocator& allocator, c10::DataPtr&& block) {
  c10::DataPtr old = storage.set_data_ptr(std::move(block));
  storage.set_allocator(&allocator);
}

void adopt_on_host(const Region& region, c10::StorageImpl& storage, Bytes size) {
  c10::Allocator& allocator = *c10::GetAllocator(c10::DeviceType::CPU);
  c10::DataPtr block = allocate_in(region, allocator, size);
  std::memcpy(block.mutable_get(), bytes_of(storage), size);
  exchange(storage, allocator, std::move(block));
}

// Everything happens on the old block's own stream, joined on both sides with the current one: the old block is then
// freed in stream order, and the new one belongs to the same stream.
void adopt_on_cuda(const Region& region, c10::StorageImpl& storage, Bytes size) {
  const auto index = storage.device().index();
  CachingAllocator& memory = allocator_of(index);
  if (memory.capturing()) {
    throw Misuse(c10::str("cannot move a tensor into offload region '", region.name(),
                          "' while a CUDA graph is being captured"));
  }
  const auto block = memory.find(to_address(bytes_of(storage)));
  if (!block) throw Misuse("cannot move a tensor into an offload region: its memory was freed under it");
  const StreamHandle current{reinterpret_cast<std::uintptr_t>(c10::cuda::getCurrentCUDAStream(index).stream())};
  const auto own = c10::cuda::getStreamFromExternal(reinterpret_cast<cudaStream_t>(block->stream), index);

  const c10::cuda::CUDAStreamGuard on_own_stream(own);
  c10::Allocator& allocator = *c10::cuda::CUDACachingAllocator::get();
  c10::DataPtr fresh = allocate_in(region, allocator, size);
  ScopedEvent event(memory.device());
  if (current != block->stream) event.order(current, block->stream);
  memory.device().copy_on_device(to_address(fresh.get()), to_address(bytes_of(storage)), size, block->stream);
  if (current != block->stream) event.order(block->stream, current);
  exchange(storage, allocator, std::move(fresh));
}

}  // namespace

std::string adoption_obstacle(const c10::Storage& handle) {
  c10::StorageImpl& storage = *handle.unsafeGetStorageImpl();
  const DeviceKind kind = kind_of(storage);
  if (device_kind() == DeviceKind::None) return "Lowtide serves no device yet; call lowtide.install() first";
  if (kind != device_kind()) {
    return c10::str("it is on ", storage.device().str(), ", and Lowtide serves ",
                    device_kind() == DeviceKind::Cuda ? "CUDA" : "CPU", " tensors in this process");
  }
  const c10::DataPtr& held = storage._mutable_data_ptr_no_checks();
  if (held.get() == nullptr || size_of(storage) == 0) return "it has no bytes";
  if (!storage.resizable() || storage.allocator() == nullptr) {
    return "torch does not own its memory (from_blob, numpy, DLPack, a file, or received from another process); clone "
           "it first";
  }
  if (held.get() != held.get_context()) {
    return "its memory is shared (with another process, by CUDA IPC or share_memory_, or as a lazy copy) or pinned; "
           "clone it first";
  }
  if (kind == DeviceKind::Cuda && owner_of(to_address(held.get())) == nullptr) {
    return "it is in memory that Lowtide did not allocate: a CUDA graph's or MemPool's private pool, whose addresses "
           "are recorded";
  }
  return {};
}

void adopt(const Region& region, const c10::Storage& handle) {
  c10::StorageImpl& storage = *handle.unsafeGetStorageImpl();
  const OwnerId home = region_of(storage);
  if (home == region.id()) return;
  std::string obstacle = home == kNoOwner ? adoption_obstacle(handle) : "it is in another region";
  if (obstacle.empty() && region.state() != RegionState::Resident) {
    obstacle = c10::str("the region is ", to_string(region.state()), "; restore it first");
  }
  const Bytes size = size_of(storage);
  if (!obstacle.empty()) {
    throw Misuse(
        c10::str("cannot move a tensor of ", size, " bytes into offload region '", region.name(), "': ", obstacle));
  }
  if (kind_of(storage) == DeviceKind::Cuda) {
    adopt_on_cuda(region, storage, size);
  } else {
    adopt_on_host(region, storage, size);
  }
  track(region, handle);
}

}  // namespace lowtide
