// Where pages come from: the pool, unused pages of any arena, the driver; and what is tried before giving up.
// Design: docs/design.md, "Where a page comes from".
#pragma once

#include <optional>
#include <vector>

#include "allocator/heap.h"

namespace lowtide {

/// Pages taken for one purpose; those still here at its end go back to the pool.
/// The heap's mutex is held whenever pages are in it.
class PageBatch {
 public:
  explicit PageBatch(PagePool& pool) : pool_(pool) {}
  ~PageBatch() { clear(); }
  PageBatch(const PageBatch&) = delete;
  PageBatch& operator=(const PageBatch&) = delete;

  void add(Page page) {
    try {
      pages_.push_back(page);
    } catch (...) {
      pool_.give(page);
      throw;
    }
  }
  bool empty() const noexcept { return pages_.empty(); }
  const Page& next() const noexcept { return pages_.back(); }
  /// The page of next() has another owner now.
  void drop_next() noexcept { pages_.pop_back(); }
  void clear() noexcept {
    for (const Page& page : pages_) pool_.give(page);
    pages_.clear();
  }

 private:
  PagePool& pool_;
  std::vector<Page> pages_;
};

/// What is tried, in order, before an allocation fails. Each runs at most once for a request.
enum class Remedy {
  None,           // only what is at hand without waiting
  AwaitStreams,   // wait for streams that still use unused pages and freed blocks
  AskReclaimers,  // other holders of device memory: torch's native allocator, its callbacks
  Exhausted,
};

class PageSupply {
 public:
  explicit PageSupply(Heap& heap) : heap_(heap) {}

  /// For clang's analysis, which cannot see that the mutex its caller holds is this heap's.
  void assert_held() const LOWTIDE_ANNOTATE(assert_capability(heap_.mutex)) { heap_.mutex.assert_held(); }

  /// One page of `size` without waiting: from the pool; an unused page of an arena whose stream is past it; the
  /// driver; or made of free pages of the other size. Nothing if there is no memory. Throws DriverError.
  /// Leaves the pages of `growing` in `kept` where they are.
  std::optional<Page> take(Bytes size, const PlacedArena* growing = nullptr, Extent kept = {})
      LOWTIDE_REQUIRES(heap_.mutex);

  /// Pages that cover `needed` bytes and no more than `room`, in `batch`: large ones where they fit or waste little.
  /// False if there is not enough memory. Throws DriverError.
  bool take_cover(const PlacedArena& growing, const Arena::Vacancy& vacancy, PageBatch& batch)
      LOWTIDE_REQUIRES(heap_.mutex);

  /// Whether `bytes` could be had without waiting or asking others. Asks the driver, so only large requests use it.
  bool plausible(Bytes bytes) LOWTIDE_REQUIRES(heap_.mutex);

  /// Bytes that the driver and the memory fraction still grant. Asks the driver.
  Bytes obtainable() LOWTIDE_REQUIRES(heap_.mutex);

  /// Carries out the remedy after `tried` and returns it; Exhausted once there is none. May wait for the device.
  Remedy apply_next(Remedy tried) LOWTIDE_EXCLUDES(heap_.mutex);

  /// Moves unused pages of `owner`'s arenas to the pool, those whose streams are past them.
  void collect_passed(OwnerId owner) LOWTIDE_REQUIRES(heap_.mutex);

  /// Moves the unused pages of all arenas to the pool, waiting for their streams. Nothing during a capture.
  void await_unused() LOWTIDE_EXCLUDES(heap_.mutex);
  /// Ends the pending frees, of one owner or (kNoOwner) of all, waiting for their streams. Nothing during a capture.
  void await_pending_frees(OwnerId owner = kNoOwner) LOWTIDE_EXCLUDES(heap_.mutex);

 private:
  std::optional<Page> create(Bytes size) LOWTIDE_REQUIRES(heap_.mutex);
  bool has_passed(PlacedArena& placed) LOWTIDE_REQUIRES(heap_.mutex);
  /// Pre: the page is unused and the arena's stream past it.
  Page detach(PlacedArena& placed, const Extent& page) LOWTIDE_REQUIRES(heap_.mutex);
  std::optional<Page> take_unused(Bytes size, const PlacedArena* growing, Extent kept) LOWTIDE_REQUIRES(heap_.mutex);

  Heap& heap_;
};

}  // namespace lowtide
