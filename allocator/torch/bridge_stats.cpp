// Figures, caches and limits: Lowtide's blocks and native's private pools, seen as one allocator.
#include <c10/cuda/CUDAAllocatorConfig.h>

#include <algorithm>

#include "allocator/device_registry.h"
#include "allocator/torch/cuda_bridge.h"
#include "allocator/torch/reclaim.h"
#include "allocator/torch/torch_errors.h"

namespace lowtide {
namespace {

using c10::CachingAllocator::StatArray;
using c10::CachingDeviceAllocator::DeviceStats;

/// Sums are exact but for the peak: the two peaks may have been at different times, so theirs is an upper bound. It is
/// exact while native holds nothing, which is as long as there is no private pool.
void add(c10::CachingAllocator::Stat& sum, const Stat& ours) {
  sum.current += ours.current;
  sum.peak += ours.peak;
  sum.allocated += ours.allocated;
  sum.freed += ours.freed;
}

void add(StatArray& sum, const ClassStats& ours) {
  static_assert(std::tuple_size_v<ClassStats> == std::tuple_size_v<StatArray>, "all, small and large, in both");
  for (std::size_t i = 0; i < ours.size(); ++i) add(sum[i], ours[i]);
}

}  // namespace

CachingAllocator& TorchCudaAllocator::make_ready(int device) {
  return with_torch_errors([&]() -> CachingAllocator& {
    const MutexLock lock(preparing_);
    std::atomic<CachingAllocator*>& slot = ready_[static_cast<std::size_t>(device)];
    if (CachingAllocator* const done = slot.load(std::memory_order_acquire)) return *done;
    CachingAllocator& allocator = allocator_of(device);
    const double fraction = torch_cuda::CUDAAllocatorConfig::per_process_memory_fraction();
    if (fraction < 1.0) allocator.set_memory_fraction(fraction);
    reclaim_from_native(allocator, native_, pools_);
    pools_.join(allocator);
    slot.store(&allocator, std::memory_order_release);
    return allocator;
  });
}

/// Evicted blocks count as requested, not as allocated: `allocated` is what the device holds. Ours is memory that grows
/// page by page, so as with native's expandable segments it shows in the counts of device calls, not in `segment` and
/// `inactive_split`. Blocks whose streams are not past them count in active_bytes, not in the number of active blocks.
DeviceStats TorchCudaAllocator::getDeviceStats(c10::DeviceIndex device) {
  DeviceStats sum;
  if (native_.initialized()) sum = native_.getDeviceStats(device);
  CachingAllocator* const allocator = existing(device);
  if (allocator == nullptr) return sum;
  const AllocatorStats ours = allocator->stats();
  add(sum.allocation, ours.allocations);
  add(sum.active, ours.allocations);
  add(sum.allocated_bytes, ours.allocated_bytes);
  add(sum.requested_bytes, ours.requested_bytes);
  add(sum.active_bytes, ours.active_bytes);
  add(sum.reserved_bytes, ours.reserved_bytes);
  sum.num_alloc_retries += ours.num_alloc_retries;
  sum.num_ooms += ours.num_ooms;
  sum.num_device_alloc += ours.num_page_creations;
  sum.num_device_free += ours.num_page_releases;
  return sum;
}

void TorchCudaAllocator::resetAccumulatedStats(c10::DeviceIndex device) {
  if (native_.initialized()) native_.resetAccumulatedStats(device);
  if (CachingAllocator* const allocator = existing(device)) allocator->reset_accumulated_stats();
}

void TorchCudaAllocator::resetPeakStats(c10::DeviceIndex device) {
  if (native_.initialized()) native_.resetPeakStats(device);
  if (CachingAllocator* const allocator = existing(device)) allocator->reset_peak_stats();
}

std::pair<size_t, size_t> TorchCudaAllocator::getMemoryInfo(c10::DeviceIndex device) {
  return native_.getMemoryInfo(device);
}

void TorchCudaAllocator::emptyCache(c10::MempoolId_t pool) {
  if (native_.initialized()) native_.emptyCache(pool);
  if (pool != c10::MempoolId_t{0, 0}) return;  // one of native's pools is meant
  with_torch_errors([] {
    for (CachingAllocator* allocator : existing_allocators()) allocator->trim();
  });
}

void TorchCudaAllocator::cacheInfo(c10::DeviceIndex device, size_t* largest) {
  if (native_.initialized()) native_.cacheInfo(device, largest);
  CachingAllocator* const allocator = existing(device);
  if (allocator == nullptr) return;
  // Free pages go side by side wherever address space is, so all of them and what the driver has make one block.
  with_torch_errors(
      [&] { *largest = std::max(*largest, allocator->device().memory().free + allocator->stats().free_page_bytes); });
}

void TorchCudaAllocator::enable(bool value) {
  native_.enable(value);
  caching_enabled_.store(value, std::memory_order_relaxed);
}

bool TorchCudaAllocator::isEnabled() const { return native_.isEnabled(); }

double TorchCudaAllocator::getMemoryFraction(c10::DeviceIndex device) {
  CachingAllocator* const allocator = existing(device);
  return allocator != nullptr ? allocator->memory_fraction() : native_.getMemoryFraction(device);
}

/// The limit holds for each side by itself: for Lowtide's memory, and for native's private pools.
void TorchCudaAllocator::setMemoryFraction(double fraction, c10::DeviceIndex device) {
  native_.setMemoryFraction(fraction, device);
  CachingAllocator& allocator = ready(device);
  with_torch_errors([&] { allocator.set_memory_fraction(fraction); });
}

std::vector<torch_cuda::StreamSegmentSize> TorchCudaAllocator::getExpandableSegmentSizes(c10::DeviceIndex device) {
  if (!native_.initialized()) return {};
  return native_.getExpandableSegmentSizes(device);
}

}  // namespace lowtide
