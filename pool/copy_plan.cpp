#include "pool/copy_plan.h"

#include <algorithm>
#include <set>

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

std::vector<CopyGroup> plan_copies(const std::vector<PageImage>& pages, const std::vector<HostRange>& host_ranges,
                                   Bytes group_bytes) {
  std::set<const std::byte*> range_starts;
  for (const HostRange& range : host_ranges) range_starts.insert(range.data);

  // The first groups are small, so that the first copies start, and the first pages return, early.
  std::vector<CopyGroup> groups;
  Bytes group_size = 0;
  Bytes limit = std::min(kFirstGroup, group_bytes);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const PageImage& page = pages[i];
    if (groups.empty() || group_size + page.size > limit) {
      if (!groups.empty()) limit = std::min(2 * limit, group_bytes);
      groups.push_back({i, i, {}});
      group_size = 0;
    }
    group_size += page.size;
    CopyGroup& group = groups.back();
    group.end_page = i + 1;
    for (const HostPiece& piece : page.pieces) {
      const DeviceAddress device = page.address + piece.page_offset;
      if (!group.copies.empty()) {
        CopyOp& last = group.copies.back();
        const bool neighbours = last.device + last.size == device && last.host + last.size == piece.host;
        if (neighbours && !range_starts.contains(piece.host)) {
          last.size += piece.size;
          continue;
        }
      }
      group.copies.push_back({device, piece.host, piece.size});
    }
  }
  return groups;
}

}  // namespace lowtide
