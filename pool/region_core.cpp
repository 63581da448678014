#include "pool/region_core.h"

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <utility>

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

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

void set_region_observer(RegionObserver* observer) noexcept { observer_of_process.store(observer); }
RegionObserver* region_observer() noexcept { return observer_of_process.load(); }

void RegionCore::evict(const Region& handle, const EvictOptions& options) {
  refuse_forked_child();
  const std::lock_guard lock(transfer_mutex_);
  const RegionPages::Usage before = usage();
  warn_if_empty(before);
  drop_images_of_freed_locked();
  if (before.allocated == before.evicted) return;
  const auto begin = std::chrono::steady_clock::now();
  RegionObserver* observer = region_observer();
  std::vector<DeviceStream> after = options.after;
  if (observer != nullptr) {
    const auto current = observer->current_streams();
    after.insert(after.end(), current.begin(), current.end());
  }
  Departures departures;
  for (CachingAllocator* allocator : existing_allocators()) {
    const int device = allocator->device().index();
    departures.emplace(device, mover_of(device).depart(id_, streams_of(device, after)));
  }
  // The tensors are told while the copies run; nothing has left yet, so a refusal calls everything off.
  if (observer != nullptr) observer->before_evict(handle, options);
  try {
    for (auto& [device, departure] : departures) departure->commit(images_[device]);
  } catch (...) {
    const std::exception_ptr failure = std::current_exception();
    bring_back(departures);
    if (observer != nullptr) observer->evict_failed(handle);
    std::rethrow_exception(failure);
  }
  for (auto& [device, departure] : departures) mover_of(device).count(*departure, seconds_since(begin));
  count_pinned();
}

void RegionCore::bring_back(Departures& departures) noexcept {
  for (auto& [device, departure] : departures) {
    const bool some_left = departure->any_left();
    departure.reset();
    try {
      if (some_left) mover_of(device).restore(id_, images_[device]);
    } catch (const std::exception& error) {
      log(LogLevel::Error, "part of region '{}' stays evicted after a failed eviction; restore it to try again: {}",
          name_, error.what());
    }
  }
  count_pinned();
}

void RegionCore::restore(const Region& handle) {
  refuse_forked_child();
  const std::lock_guard lock(transfer_mutex_);
  const auto begin = std::chrono::steady_clock::now();
  std::map<int, std::unique_ptr<Arrival>> arrivals;
  for (const auto& [device, images] : images_) {
    if (images.empty()) continue;
    try {
      arrivals.emplace(device, mover_of(device).arrive(id_, images));
    } catch (const OutOfMemory& error) {
      throw OutOfMemory(error.device(), error.requested(),
                        fmt::format("offload region '{}' cannot be restored: {}", name_, error.what()));
    }
  }
  RegionObserver* observer = region_observer();
  if (observer != nullptr && !arrivals.empty()) observer->while_restoring(handle);
  try {
    for (auto& [device, arrival] : arrivals) {
      HostImages& images = images_[device];
      arrival->commit(images);
      // Images that are left belong to pages whose blocks were all freed while away.
      images.clear();
      mover_of(device).count(*arrival, seconds_since(begin));
    }
  } catch (...) {
    if (observer != nullptr) observer->restore_failed(handle);
    count_pinned();
    throw;
  }
  count_pinned();
  if (observer != nullptr) observer->after_restore(handle);
}

RegionPages::Usage RegionCore::usage() const {
  refuse_forked_child();
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

void RegionCore::warn_if_empty(const RegionPages::Usage& usage) {
  if (usage.allocated > 0 || existing_allocators().empty() || std::exchange(warned_empty_, true)) return;
  log(LogLevel::Warn,
      "offload region '{}' holds no memory, so there is nothing to evict; it takes what is allocated while it is open, "
      "and "
      "existing tensors through a CPUOffloadPool (said once a region)",
      name_);
}

Bytes RegionCore::pinned_bytes() {
  drop_images_of_freed();
  return pinned_bytes_.load();
}

void RegionCore::drop_images_of_freed() {
  refuse_forked_child();
  const std::unique_lock lock(transfer_mutex_, std::try_to_lock);
  if (lock.owns_lock()) drop_images_of_freed_locked();
}

void RegionCore::drop_images_of_freed_locked() {
  for (auto& [device, images] : images_) {
    if (!images.empty()) images.keep_only(RegionPages(mover_of(device).allocator()).pages_away(id_));
  }
  count_pinned();
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
