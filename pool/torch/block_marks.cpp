#include "pool/torch/block_marks.h"

#include <algorithm>
#include <atomic>

#include "allocator/device_registry.h"

namespace lowtide {

std::optional<BlockInfo> block_at(const void* bytes) {
  if (bytes == nullptr) return std::nullopt;
  CachingAllocator* allocator = owner_of(to_address(bytes));
  return allocator == nullptr ? std::nullopt : allocator->find(to_address(bytes));
}

BlockMarks::BlockMarks(const Region& region) {
  for (CachingAllocator* allocator : existing_allocators()) {
    const auto ranges = allocator->live_ranges(region.id());
    blocks_.insert(blocks_.end(), ranges.begin(), ranges.end());
  }
  if (!std::ranges::is_sorted(blocks_)) std::ranges::sort(blocks_);  // devices need not follow each other
  marked_.resize(blocks_.size(), 0);
}

bool BlockMarks::mark(const void* bytes) {
  const DeviceAddress address = to_address(bytes);
  const auto after = std::ranges::upper_bound(blocks_, address, {}, &Block::first);
  if (after == blocks_.begin()) return false;
  const auto block = std::prev(after);
  if (address >= block->first + block->second) return false;
  std::atomic_ref(marked_[static_cast<std::size_t>(block - blocks_.begin())]).store(1, std::memory_order_relaxed);
  return true;
}

std::vector<BlockInfo> BlockMarks::unmarked() const {
  std::vector<BlockInfo> result;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    if (marked_[i] != 0) continue;
    if (const auto block = block_at(to_pointer(blocks_[i].first))) result.push_back(*block);
  }
  return result;
}

}  // namespace lowtide
