// The movers and the host memory budget of this process.
#include <array>
#include <atomic>

#include "allocator/device_registry.h"
#include "allocator/mutex.h"
#include "pool/pool_stats.h"
#include "pool/region_core.h"

namespace lowtide {
namespace {

struct Movers {
  Mutex mutex;
  HostBudget budget{default_host_budget()};
  std::map<int, std::unique_ptr<RegionMover>> by_device LOWTIDE_GUARDED_BY(mutex);
};

/// Leaked: a region may be moved by a thread that outlives static objects.
Movers& movers() {
  static Movers* const instance = new Movers;
  return *instance;
}

}  // namespace

RegionMover& mover_of(int index) {
  CachingAllocator& allocator = allocator_of(index);
  Movers& all = movers();
  const MutexLock lock(all.mutex);
  auto& mover = all.by_device[index];
  if (!mover) mover = std::make_unique<RegionMover>(allocator, all.budget);
  return *mover;
}

std::map<int, RegionMover*> existing_movers() {
  refuse_forked_child();
  Movers& all = movers();
  const MutexLock lock(all.mutex);
  std::map<int, RegionMover*> found;
  for (const auto& [index, mover] : all.by_device) {
    if (mover) found.emplace(index, mover.get());
  }
  return found;
}

HostBudget& process_host_budget() { return movers().budget; }

PoolStats pool_stats(int device) {
  const auto existing = existing_movers();
  const auto found = existing.find(device);
  return found == existing.end() ? PoolStats{} : found->second->stats();
}

Bytes trim_host() {
  for (const Region& region : Region::all()) region.core().drop_images_of_freed();
  Bytes bytes = 0;
  for (const auto& [index, mover] : existing_movers()) bytes += mover->host_memory().trim();
  return bytes;
}

void set_host_budget(Bytes budget) { process_host_budget().set_limit(budget); }
Bytes host_budget() { return process_host_budget().limit(); }

}  // namespace lowtide
