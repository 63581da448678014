#include "allocator/torch/reclaim.h"

#include <c10/util/StringUtil.h>

#include <exception>
#include <memory>
#include <mutex>
#include <string>

#include "allocator/device_registry.h"
#include "allocator/log_message.h"
#include "allocator/torch/torch_errors.h"

namespace lowtide {
namespace {

using NativeAllocator = c10::cuda::CUDACachingAllocator::CUDAAllocator;

const std::string kCallbackName = "lowtide";

/// Native rounds a request up to a segment: 2 or 20 MiB, or a multiple of 2 MiB. A little above that leaves room for
/// what else happens on the device meanwhile.
constexpr Bytes kSegmentSlack = 64_MiB;

thread_local int requested_device = -1;
thread_local Bytes requested_size = 0;
/// This thread asks native to give memory back, so it does not want to be asked in turn.
thread_local bool reclaiming = false;

bool is_short_of_memory(CachingAllocator& allocator) {
  // Unknown size: someone calls native without us. Assume the worst.
  if (requested_device < 0) return true;
  return allocator.device().memory().free < requested_size + kSegmentSlack;
}

class GiveToNative final : public c10::FreeMemoryCallback {
 public:
  /// Native asks on each miss of its cache, before it asks the driver: giving pages away each time would empty our
  /// cache for nothing. So only what the device lacks is given.
  bool Execute() override {
    if (reclaiming || in_forked_child()) return false;
    bool gave = false;
    for (CachingAllocator* allocator : existing_allocators()) {
      if (requested_device >= 0 && allocator->device().index() != requested_device) continue;
      try {
        if (is_short_of_memory(*allocator)) gave = allocator->trim() > 0 || gave;
      } catch (const std::exception& error) {
        log_message(LogLevel::Warn,
                    c10::str("could not give memory back to torch's native allocator: ", reason_of(error)));
      }
    }
    return gave;
  }
};

bool run_other_callbacks() {
  auto* registry = c10::FreeCudaMemoryCallbacksRegistry();
  bool freed = false;
  for (const std::string& name : registry->Keys()) {
    if (name != kCallbackName) freed = registry->Create(name)->Execute() || freed;
  }
  return freed;
}

bool empty_native_cache(NativeAllocator& native, int device) {
  if (!native.initialized()) return false;
  const auto index = static_cast<c10::DeviceIndex>(device);
  const auto reserved = [&] { return native.getDeviceStats(index).reserved_bytes[0].current; };
  const auto before = reserved();
  native.emptyCache();
  return reserved() < before;
}

bool reclaim(NativeAllocator& native, int device, const PoolRouter& pools) {
  if (pools.any()) return false;
  reclaiming = true;
  struct Reset {
    ~Reset() { reclaiming = false; }
  } const reset;
  try {
    const bool freed = run_other_callbacks();
    return empty_native_cache(native, device) || freed;
  } catch (const std::exception& error) {
    // The allocation that asked fails with its own error; this one would hide it.
    log_message(LogLevel::Warn,
                c10::str("could not take memory back from torch's native allocator: ", reason_of(error)));
    return false;
  }
}

}  // namespace

NativeRequest::NativeRequest(int device, Bytes size) noexcept {
  requested_device = device;
  requested_size = size;
}

NativeRequest::~NativeRequest() {
  requested_device = -1;
  requested_size = 0;
}

void reclaim_from_native(CachingAllocator& allocator, NativeAllocator& native, const PoolRouter& pools) {
  const int device = allocator.device().index();
  allocator.add_reclaimer([&native, device, &pools] { return reclaim(native, device, pools); });
}

void register_free_memory_callback() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::FreeCudaMemoryCallbacksRegistry()->Register(
        kCallbackName, [] { return std::unique_ptr<c10::FreeMemoryCallback>(new GiveToNative); });
  });
}

}  // namespace lowtide
