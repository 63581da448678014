// Which allocations belong to a private pool (CUDA graphs, MemPool, cudagraph trees). Those go to torch's native
// allocator, which knows pools; this only keeps the filters that torch hands over and asks them.
#pragma once

#include <c10/core/Allocator.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "allocator/caching_allocator.h"
#include "allocator/mutex.h"

namespace lowtide {

/// Safe from any thread. Costs one atomic load while no pool is being allocated to.
class PoolRouter {
 public:
  using Filter = std::function<bool(cudaStream_t)>;

  /// From here on allocations of `device` on streams that `filter` accepts go to pool `id`. torch does not say whether
  /// a stream capture is about to begin, so it is taken to: every allocator of this process is told.
  void begin(int device, c10::MempoolId_t id, Filter filter);
  /// Ends what begin() began; nothing if that is not so.
  void end(int device, c10::MempoolId_t id);
  /// Tells `allocator`, which was made just now, of the captures under way. Those it was told of are left out.
  void join(CachingAllocator& allocator);

  /// Whether an allocation on `stream` belongs to a pool. Which one is native's business: it asks the same filters,
  /// the last one first. Throws what a filter throws.
  bool routes(int device, cudaStream_t stream) const;
  bool any() const noexcept { return count_.load(std::memory_order_acquire) != 0; }

 private:
  struct Route {
    int device;
    c10::MempoolId_t id;
    Filter filter;
    std::vector<CachingAllocator*> told;  // of the capture, and to be told of its end; guarded by the router's mutex
  };
  using Routes = std::vector<std::shared_ptr<Route>>;

  std::atomic<int> count_{0};
  mutable Mutex mutex_;
  // Replaced, never changed: filters are called on a copy, without the lock, because they are torch's code.
  std::shared_ptr<const Routes> routes_ LOWTIDE_GUARDED_BY(mutex_) = std::make_shared<const Routes>();
};

}  // namespace lowtide
