// What happens when Lowtide cannot serve a request: the allocator has tried everything by then, native's cache and
// torch's callbacks included (reclaim.h).
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

#include "allocator/allocation_scope.h"
#include "allocator/log_message.h"
#include "allocator/torch/cuda_bridge.h"
#include "allocator/torch/reclaim.h"
#include "allocator/torch/torch_errors.h"

namespace lowtide {
namespace {

/// Live bytes of offload regions that the device holds.
Bytes evictable_bytes(const CachingAllocator& allocator) {
  Bytes sum = 0;
  for (const ArenaSnapshot& arena : allocator.snapshot()) {
    if (arena.owner == kNoOwner) continue;
    for (const ArenaSnapshot::Tile& tile : arena.tiles) {
      if (tile.kind == TileKind::Allocated && !tile.evicted && !tile.pending_free) sum += tile.size;
    }
  }
  return sum;
}

}  // namespace

MemoryPicture TorchCudaAllocator::memory_picture(CachingAllocator& allocator, size_t size) {
  MemoryPicture picture;
  picture.device = allocator.device().index();
  picture.requested = size;
  if (size > kLargestRequest) return picture;
  const DeviceMemory memory = allocator.device().memory();
  picture.total = memory.total;
  picture.free = memory.free;
  if (const double fraction = allocator.memory_fraction(); fraction < 1.0) {
    picture.allowed = static_cast<Bytes>(fraction * static_cast<double>(memory.total));
  }
  const auto index = static_cast<c10::DeviceIndex>(picture.device);
  if (native_.initialized()) {
    const auto native = native_.getDeviceStats(index);
    picture.private_pools = static_cast<Bytes>(native.allocated_bytes[0].current);
  }
  const auto sum = getDeviceStats(index);
  picture.allocated = static_cast<Bytes>(sum.allocated_bytes[0].current);
  picture.unallocated =
      static_cast<Bytes>(std::max<std::int64_t>(sum.reserved_bytes[0].current - sum.allocated_bytes[0].current, 0));
  picture.evictable = evictable_bytes(allocator);
  return picture;
}

void* TorchCudaAllocator::out_of_memory(CachingAllocator& allocator, size_t size, cudaStream_t stream) {
  const int device = allocator.device().index();
  bool spare_pool = false;
  std::vector<torch_cuda::OutOfMemoryObserver> observers;
  {
    const MutexLock lock(mutex_);
    spare_pool =
        std::any_of(spare_pools_.begin(), spare_pools_.end(), [&](const auto& pool) { return pool.first == device; });
    observers = oom_observers_;
  }
  if (spare_pool && current_owner() == kNoOwner && size <= kLargestRequest) {
    // MemPool(use_on_oom=True): native looks there before it gives up. Observers are its own as well.
    try {
      const NativeRequest request(device, size);
      return native_.raw_alloc_with_stream(size, stream);
    } catch (const c10::OutOfMemoryError& error) {
      log_message(LogLevel::Debug, c10::str("native has no room for it either: ", reason_of(error)));
      observers.clear();
    }
  }
  const MemoryPicture picture = with_torch_errors([&] { return memory_picture(allocator, size); });
  if (history_.listening()) {
    history_.out_of_memory({device, reinterpret_cast<void*>(picture.free), size,
                            StreamHandle{reinterpret_cast<std::uintptr_t>(stream)}, native_.getUserMetadata()});
  }
  for (const auto& observer : observers) observer(device, size, picture.allowed.value_or(picture.total), picture.free);
  c10::reportOutOfMemoryToProfiler(static_cast<std::int64_t>(size), picture.allocated,
                                   picture.allocated + picture.unallocated,
                                   {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)});
  TORCH_CHECK_WITH(OutOfMemoryError, false, out_of_memory_message(picture));
}

}  // namespace lowtide
