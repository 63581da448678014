// The text of an out-of-memory error on a GPU: torch's own wording, which people and tests match, and at its end what
// eviction could still free.
#pragma once

#include <optional>
#include <string>

#include "allocator/types.h"

namespace lowtide {

/// Requests above this are refused without a look at the device.
inline constexpr Bytes kLargestRequest = Bytes{1} << 60;

/// What a device's memory is used for when a request fails.
struct MemoryPicture {
  int device = 0;
  Bytes requested = 0;
  Bytes total = 0;                 // of the device
  Bytes free = 0;                  // of it, what no process has
  std::optional<Bytes> allowed{};  // the limit this process set itself
  Bytes allocated = 0;             // in live blocks, Lowtide's and native's
  Bytes private_pools = 0;         // of it, in native's pools
  Bytes unallocated = 0;           // held by either, in no live block
  Bytes evictable = 0;             // of allocated, what lies in offload regions
};

std::string out_of_memory_message(const MemoryPicture& picture);

}  // namespace lowtide
