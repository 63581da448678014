// What moving regions has cost on one device so far, and what host memory it holds.
#pragma once

#include <cstdint>

#include "allocator/types.h"

namespace lowtide {

struct PoolStats {
  Bytes pinned_bytes = 0;         // host memory held: leased and kept for reuse
  Bytes pinned_leased_bytes = 0;  // of it, what holds evicted bytes
  std::int64_t evictions = 0;
  std::int64_t restores = 0;
  std::int64_t copies = 0;  // driver calls that copied
  Bytes evicted_bytes_total = 0;
  Bytes restored_bytes_total = 0;
  double evict_seconds = 0;  // host wall time in evict and restore
  double restore_seconds = 0;
  std::int64_t host_allocations = 0;  // times host memory was mapped and registered
};

/// Figures of device `index`. Zeros before anything moved.
PoolStats pool_stats(int device);

/// Gives host memory that holds no evicted bytes back to the system, on all devices; returns its bytes.
/// Unregistering waits for the device's running kernels.
Bytes trim_host();

/// Most bytes of host memory that evicted regions may hold in this process. Default: 80 % of the memory that this
/// machine, or this process's memory cgroup, has. Memory held already stays.
void set_host_budget(Bytes budget);
Bytes host_budget();

}  // namespace lowtide
