// Live blocks of a region, and which of them a tensor is known for.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "allocator/caching_allocator.h"
#include "pool/offload_region.h"

namespace lowtide {

/// The live block, of any device, that contains `bytes`.
std::optional<BlockInfo> block_at(const void* bytes);

/// Blocks of a region in address order, with a mark for each that a storage is known for.
class BlockMarks {
 public:
  /// Blocks of `region` on all devices.
  explicit BlockMarks(const Region& region);

  /// False if `bytes` lies in none of the blocks. May be called on several threads at once.
  bool mark(const void* bytes);

  std::vector<BlockInfo> unmarked() const;

 private:
  using Block = std::pair<DeviceAddress, Bytes>;
  std::vector<Block> blocks_;
  std::vector<char> marked_;
};

}  // namespace lowtide
