// The physical memory of one device that this process holds: pages of two sizes, each one driver allocation.
// Pages here are mapped nowhere, so taking one needs no wait. Who borrows a page unmaps it before giving it back.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "allocator/device.h"

namespace lowtide {

/// A driver allocation. Whoever holds it must give it back to the pool.
struct Page {
  PageHandle handle{};
  Bytes size = 0;
};

/// Sizes of pages: small ones keep a small region small, large ones keep the number of driver calls down
/// (a 4 GiB remap costs 44 ms in 2 MiB pages and 2.7 ms in 32 MiB ones).
struct PageSizes {
  Bytes small = 2_MiB;
  Bytes large = 32_MiB;
};

/// Invariant: held_bytes() == free_bytes() + bytes of pages lent.
/// Not synchronised: the heap's mutex guards it.
class PagePool {
 public:
  /// Pre: sizes are multiples of the device's granularity, large a multiple of small.
  PagePool(Device& device, PageSizes sizes) : device_(device), sizes_(sizes) {}
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  const PageSizes& sizes() const noexcept { return sizes_; }

  /// A free page of exactly `size` bytes, without asking the driver.
  std::optional<Page> take(Bytes size) noexcept;
  /// A page from the driver. Throws OutOfMemory, also where the limit would be passed.
  Page create(Bytes size);
  /// Pre: nothing is mapped on `page`.
  void give(Page page) noexcept;
  /// Hands every free page to the driver; returns their bytes.
  Bytes release_free() noexcept;
  /// Hands free pages of `size` to the driver until `bytes` of them went, if there are that many; else none.
  bool release_some(Bytes size, Bytes bytes) noexcept;

  /// Hands free pages to the driver as long as the pool then still holds `held` bytes or more.
  void shrink_to(Bytes held) noexcept;

  /// Most bytes this pool may hold; pages above it stay until they are given back.
  void set_limit(Bytes limit) noexcept { limit_ = limit; }
  Bytes limit() const noexcept { return limit_; }

  Bytes held_bytes() const noexcept { return held_bytes_; }
  Bytes free_bytes() const noexcept;
  std::int64_t pages() const noexcept { return pages_; }
  std::int64_t creations() const noexcept { return creations_; }
  std::int64_t releases() const noexcept { return releases_; }

 private:
  void release_last(Bytes size) noexcept;
  std::vector<PageHandle>& free_list(Bytes size) noexcept { return size == sizes_.small ? small_ : large_; }

  Device& device_;
  const PageSizes sizes_;
  std::vector<PageHandle> small_, large_;
  Bytes limit_ = ~Bytes{0};
  Bytes held_bytes_ = 0;
  std::int64_t pages_ = 0, creations_ = 0, releases_ = 0;
};

}  // namespace lowtide
