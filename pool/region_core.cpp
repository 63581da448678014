#include "pool/region_core.h"

#include <fmt/format.h>

#include <atomic>
#include <exception>

#include "allocator/device_registry.h"
#include "allocator/errors.h"
#include "allocator/log.h"
#include "pool/region_observer.h"

namespace lowtide {
namespace {

std::atomic<RegionObserver*> observer_of_process{nullptr};

std::vector<StreamHandle> streams_of(int device, const std::vector<DeviceStream>& all) {
  std::vector<StreamHandle> streams;
  for (const DeviceStream& of : all) {
    if (of.device == device) streams.push_back(of.stream);
  }
  return streams;
}

void refuse_forked_child() {
  if (!in_forked_child()) return;
  throw Misuse("the process was forked: offload regions belong to the parent; start workers with the \"spawn\" method");
}

}  // namespace

void set_region_observer(RegionObserver* observer) noexcept { observer_of_process.store(observer); }
RegionObserver* region_observer() noexcept { return observer_of_process.load(); }

void RegionCore::evict(const Region& handle, const EvictOptions& options) {
  refuse_forked_child();
  const std::lock_guard lock(transfer_mutex_);
  const RegionPages::Usage before = usage();
  if (before.allocated == before.evicted) return;
  RegionObserver* observer = region_observer();
  std::vector<DeviceStream> after = options.after;
  if (observer != nullptr) {
    const auto current = observer->current_streams();
    after.insert(after.end(), current.begin(), current.end());
  }
  // Before any tensor is told: a capture refuses an eviction for a reason that is not the tensors'.
  for (CachingAllocator* allocator : existing_allocators()) {
    const int device = allocator->device().index();
    mover_of(device).refuse_capture(streams_of(device, after));
  }
  if (observer != nullptr) observer->before_evict(handle, options);
  try {
    evict_all(after);
  } catch (...) {
    if (observer != nullptr) observer->evict_failed(handle);
    throw;
  }
}

void RegionCore::evict_all(const std::vector<DeviceStream>& after) {
  try {
    for (CachingAllocator* allocator : existing_allocators()) {
      const int device = allocator->device().index();
      mover_of(device).evict(id_, streams_of(device, after), images_[device]);
    }
    count_pinned();
  } catch (...) {
    const std::exception_ptr failure = std::current_exception();
    try {
      restore_all();
    } catch (const std::exception& error) {
      log().error("part of region '{}' stays evicted after a failed eviction; restore it to try again: {}", name_,
                  error.what());
    }
    std::rethrow_exception(failure);
  }
}

void RegionCore::restore(const Region& handle) {
  refuse_forked_child();
  const std::lock_guard lock(transfer_mutex_);
  restore_all();
  if (RegionObserver* observer = region_observer()) observer->after_restore(handle);
}

void RegionCore::restore_all() {
  for (auto& [device, images] : images_) {
    if (!images.empty()) mover_of(device).restore(id_, images);
    // Images that are left belong to pages whose blocks were all freed while away.
    images.clear();
    count_pinned();
  }
}

RegionPages::Usage RegionCore::usage() const {
  RegionPages::Usage sum;
  for (CachingAllocator* allocator : existing_allocators()) {
    const auto on_device = RegionPages(*allocator).usage(id_);
    sum.allocated += on_device.allocated;
    sum.evicted += on_device.evicted;
    sum.evicting = sum.evicting || on_device.evicting;
    sum.restoring = sum.restoring || on_device.restoring;
  }
  return sum;
}

void RegionCore::count_pinned() noexcept {
  Bytes sum = 0;
  for (const auto& [device, images] : images_) sum += images.bytes();
  pinned_bytes_ = sum;
}

bool RegionCore::release_what_is_unused() {
  // Not while it moves: whoever moves it looks after it.
  const std::unique_lock lock(transfer_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  const RegionPages::Usage now = usage();
  if (now.evicted == 0) {
    images_.clear();
    count_pinned();
  }
  bool none_left = true;
  for (CachingAllocator* allocator : existing_allocators()) none_left = allocator->release_arenas(id_) && none_left;
  return none_left && now.allocated == 0;
}

}  // namespace lowtide
