#include "pool/copy_plan.h"

#include <algorithm>

namespace lowtide {
namespace {

constexpr Bytes kFirstGroup = 2_MiB;

}  // namespace

std::vector<HostPiece> HostPacker::pack(const std::vector<Extent>& live) {
  std::vector<HostPiece> pieces;
  for (Extent rest : live) {
    while (rest.size > 0) {
      if (used_ == ranges_.at(range_).size) {
        ++range_;
        used_ = 0;
        continue;
      }
      const HostRange& range = ranges_[range_];
      const Bytes size = std::min(rest.size, range.size - used_);
      pieces.push_back({rest.offset, range.data + used_, size});
      used_ += size;
      rest = {rest.offset + size, rest.size - size};
    }
  }
  return pieces;
}

std::vector<PageGroup> group_pages(const std::vector<Bytes>& page_sizes, Bytes group_bytes) {
  std::vector<PageGroup> groups;
  Bytes group_size = 0;
  Bytes limit = std::min(kFirstGroup, group_bytes);
  for (std::size_t i = 0; i < page_sizes.size(); ++i) {
    if (groups.empty() || group_size + page_sizes[i] > limit) {
      if (!groups.empty()) limit = std::min(2 * limit, group_bytes);
      groups.push_back({i, i});
      group_size = 0;
    }
    group_size += page_sizes[i];
    groups.back().end_page = i + 1;
  }
  return groups;
}

CopyPlanner::CopyPlanner(const std::vector<HostRange>& host_ranges) {
  for (const HostRange& range : host_ranges) range_starts_.insert(range.data);
}

std::vector<CopyOp> CopyPlanner::plan(std::span<const PageImage> pages) const {
  std::vector<CopyOp> copies;
  for (const PageImage& page : pages) {
    for (const HostPiece& piece : page.pieces) {
      const CopyOp next{page.address + piece.page_offset, piece.host, piece.size};
      const bool neighbours = !copies.empty() && copies.back().device + copies.back().size == next.device &&
                              copies.back().host + copies.back().size == next.host;
      if (neighbours && !range_starts_.contains(next.host)) {
        copies.back().size += next.size;
      } else {
        copies.push_back(next);
      }
    }
  }
  return copies;
}

}  // namespace lowtide
