#include "allocator/torch/pool_router.h"

#include <algorithm>
#include <utility>

#include "allocator/device_registry.h"

namespace lowtide {

void PoolRouter::begin(int device, c10::MempoolId_t id, Filter filter) {
  // All of them, not only the device's: in capture mode "global" an event query on any device breaks the capture.
  auto route = std::make_shared<Route>(Route{device, id, std::move(filter), existing_allocators()});
  const MutexLock lock(mutex_);
  auto routes = std::make_shared<Routes>(*routes_);
  routes->push_back(route);
  for (CachingAllocator* allocator : route->told) allocator->begin_capture();
  routes_ = std::move(routes);
  count_.fetch_add(1, std::memory_order_release);
}

void PoolRouter::end(int device, c10::MempoolId_t id) {
  const MutexLock lock(mutex_);
  auto routes = std::make_shared<Routes>(*routes_);
  const auto found = std::find_if(routes->begin(), routes->end(),
                                  [&](const auto& route) { return route->device == device && route->id == id; });
  if (found == routes->end()) return;
  for (CachingAllocator* allocator : (*found)->told) allocator->end_capture();
  routes->erase(found);
  routes_ = std::move(routes);
  count_.fetch_sub(1, std::memory_order_release);
}

void PoolRouter::join(CachingAllocator& allocator) {
  const MutexLock lock(mutex_);
  for (const auto& route : *routes_) {
    if (std::find(route->told.begin(), route->told.end(), &allocator) != route->told.end()) continue;
    route->told.push_back(&allocator);
    allocator.begin_capture();
  }
}

bool PoolRouter::routes(int device, cudaStream_t stream) const {
  if (!any()) return false;
  std::shared_ptr<const Routes> routes;
  {
    const MutexLock lock(mutex_);
    routes = routes_;
  }
  return std::any_of(routes->begin(), routes->end(),
                     [&](const auto& route) { return route->device == device && route->filter(stream); });
}

}  // namespace lowtide
