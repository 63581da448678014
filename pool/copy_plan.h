// What to copy where: live bytes of pages on one side, packed host memory on the other, cut into few large copies.
// Arithmetic only: no device, testable alone.
#pragma once

#include <cstddef>
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

/// Copies that complete together, and the pages [first_page, end_page) that are then done.
struct CopyGroup {
  std::size_t first_page = 0;
  std::size_t end_page = 0;
  std::vector<CopyOp> copies{};
};

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

/// Groups of consecutive pages, of 2 MiB at first and up to `group_bytes` then; pieces that are neighbours on both sides become one copy, which
/// never crosses one of `host_ranges` (a driver refuses a copy across two registrations) and never exceeds group_bytes.
/// A group without copies still stands for its pages.
std::vector<CopyGroup> plan_copies(const std::vector<PageImage>& pages, const std::vector<HostRange>& host_ranges,
                                   Bytes group_bytes);

}  // namespace lowtide
