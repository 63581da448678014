// Figures of one device's allocator, with torch's meaning of current, peak, allocated and freed.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "allocator/types.h"

namespace lowtide {

/// A quantity over time. current == allocated - freed, current <= peak.
struct Stat {
  std::int64_t current = 0;
  std::int64_t peak = 0;
  std::int64_t allocated = 0;
  std::int64_t freed = 0;

  void add(std::int64_t n) noexcept {
    current += n;
    peak = std::max(peak, current);
    (n > 0 ? allocated : freed) += n > 0 ? n : -n;
  }
  void reset_peak() noexcept { peak = current; }
  void reset_accumulated() noexcept { allocated = freed = 0; }
};

/// Blocks of at most kSmallLimit bytes live apart from larger ones, so that they do not pin large pages.
enum class SizeClass : std::uint8_t { Small, Large };

/// Every Stat is kept per size class: index 0 is the sum, 1 small, 2 large.
using ClassStats = std::array<Stat, 3>;

struct AllocatorStats {
  ClassStats allocations;      // blocks handed out and not yet freed
  ClassStats allocated_bytes;  // their resident bytes: what is evicted is not counted
  ClassStats requested_bytes;  // what was asked for, before rounding; evicted blocks counted
  ClassStats active_bytes;     // allocated, plus blocks freed whose streams are not past them
  ClassStats reserved_bytes;   // device memory held: mapped in arenas; class 0 also counts pages kept in the pool
  Stat evicted_bytes;          // live bytes that are on the host
  Bytes free_page_bytes = 0;   // pages in the pool, ready for any use
  std::int64_t pages = 0;      // driver allocations alive
  std::int64_t num_alloc_retries = 0;
  std::int64_t num_ooms = 0;
  std::int64_t num_page_creations = 0;
  std::int64_t num_page_releases = 0;
  Bytes metadata_bytes = 0;  // host memory that the bookkeeping of blocks and pages occupies
};

}  // namespace lowtide
