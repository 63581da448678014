// The two allocators of a device help each other out: Lowtide's asks torch's native one for memory before an
// allocation fails, and the other way round.
//
// Locks: native calls our callback holding its own lock, and we never call native holding one of ours, so the order is
// native, then Lowtide.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include "allocator/caching_allocator.h"
#include "allocator/torch/pool_router.h"

namespace lowtide {

/// Marks what this thread asks native for, while it lives: the callback that native then calls learns the size.
class NativeRequest {
 public:
  NativeRequest(int device, Bytes size) noexcept;
  ~NativeRequest();
  NativeRequest(const NativeRequest&) = delete;
  NativeRequest& operator=(const NativeRequest&) = delete;
};

/// Lets `allocator` take memory back from `native` and from what registered as a FreeCudaMemoryCallback before it
/// gives up. Nothing is taken while a pool of `pools` is being allocated to: native would free memory, which no capture
/// survives.
void reclaim_from_native(CachingAllocator& allocator, c10::cuda::CUDACachingAllocator::CUDAAllocator& native,
                         const PoolRouter& pools);

/// Registers the callback that gives native our unused pages where the device has too little for native's request.
/// Once per process; again it does nothing.
void register_free_memory_callback();

}  // namespace lowtide
