// What to copy where: live bytes of pages on one side, packed host memory on the other, cut into few large copies.
// Arithmetic only: no device, testable alone.
#pragma once

#include <cstddef>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "allocator/arena.h"

namespace lowtide {

/// A piece of host memory that one copy may fill: a registered slice.
struct HostRange {
  std::byte* data = nullptr;
  Bytes size = 0;
};

/// Live bytes of a page and where they are on the host.
struct HostPiece {
  Bytes page_offset = 0;
  std::byte* host = nullptr;
  Bytes size = 0;
};

/// One page, with the host pieces of all its live bytes, in address order.
struct PageImage {
  DeviceAddress address{};
  Bytes size = 0;
  std::vector<HostPiece> pieces{};
};

/// One driver call.
struct CopyOp {
  DeviceAddress device{};
  std::byte* host = nullptr;
  Bytes size = 0;
  friend bool operator==(const CopyOp&, const CopyOp&) = default;
};

/// Consecutive pages [first_page, end_page) whose copies are queued, and complete, together.
struct PageGroup {
  std::size_t first_page = 0;
  std::size_t end_page = 0;
  friend bool operator==(const PageGroup&, const PageGroup&) = default;
};

/// Groups for pages of these sizes: of 2 MiB at first, so that the first copies start and the first pages return early,
/// and up to `group_bytes` then. A page larger than that is a group alone.
std::vector<PageGroup> group_pages(const std::vector<Bytes>& page_sizes, Bytes group_bytes);

/// Hands out host memory in order, never across the end of a range.
class HostPacker {
 public:
  explicit HostPacker(std::vector<HostRange> ranges) : ranges_(std::move(ranges)) {}
  /// Pieces for the live bytes of a page. Pre: the ranges together hold all bytes packed so far and these.
  std::vector<HostPiece> pack(const std::vector<Extent>& live);

 private:
  std::vector<HostRange> ranges_;
  std::size_t range_ = 0;
  Bytes used_ = 0;  // of ranges_[range_]
};

/// Makes few large copies: pieces that are neighbours on both sides become one copy, which never crosses one of the host
/// ranges, because a driver refuses a copy across two registrations.
class CopyPlanner {
 public:
  explicit CopyPlanner(const std::vector<HostRange>& host_ranges);
  /// The copies of one group of pages.
  std::vector<CopyOp> plan(std::span<const PageImage> pages) const;

 private:
  std::set<const std::byte*> range_starts_;
};

}  // namespace lowtide
