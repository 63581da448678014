// The physical memory of the host device: one memfd, cut into pages at offsets.
// One file for all pages keeps file descriptors few; a hole is punched where a page was released, which really gives
// its memory back to the system.
#pragma once

#include <map>
#include <string>

#include "allocator/mutex.h"
#include "allocator/types.h"

namespace lowtide {

/// Invariants: free ranges neither overlap nor adjoin, none touches end_; every offset < end_ is free or in use.
/// The file grows where no hole is large enough: it is sparse, so only pages in use cost memory, and an offset never
/// runs out although the holes are fragmented. Safe from any thread.
class HostPages {
 public:
  /// Throws DriverError if the system refuses memfd.
  explicit HostPages(const std::string& name);
  ~HostPages();
  HostPages(const HostPages&) = delete;
  HostPages& operator=(const HostPages&) = delete;

  int descriptor() const noexcept { return descriptor_; }

  /// Offset of `size` bytes that nobody uses. They read as zero. Throws DriverError.
  Bytes allocate(Bytes size);
  /// Gives the memory back to the system. Pre: allocate(size) returned `offset`, and it is mapped nowhere.
  void free(Bytes offset, Bytes size) noexcept;

 private:
  const int descriptor_;
  Mutex mutex_;
  std::map<Bytes, Bytes> free_ LOWTIDE_GUARDED_BY(mutex_);  // offset -> size
  Bytes end_ LOWTIDE_GUARDED_BY(mutex_) = 0;
};

}  // namespace lowtide
