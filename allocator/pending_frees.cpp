#include "allocator/pending_frees.h"

#include <algorithm>
#include <iterator>

namespace lowtide {

PendingFrees::~PendingFrees() {
  for (auto& [stream, uses] : uses_) {
    for (const Use& use : uses) {
      if (use.event != EventHandle{}) events_.give(use.event);
    }
  }
}

void PendingFrees::add(const Block& block, const std::vector<StreamHandle>& streams, bool record) {
  pending_.push_back({block, streams.size()});
  const auto added = std::prev(pending_.end());
  std::size_t recorded = 0;
  try {
    for (const StreamHandle stream : streams) {
      auto& uses = uses_[stream];
      uses.push_back({added, {}});
      if (!record) continue;
      uses.back().event = events_.record(stream);
      ++recorded;
    }
  } catch (...) {
    for (const StreamHandle stream : streams) {
      const auto found = uses_.find(stream);
      if (found == uses_.end() || found->second.empty() || found->second.back().pending != added) continue;
      if (found->second.back().event != EventHandle{}) events_.give(found->second.back().event);
      found->second.pop_back();
    }
    pending_.erase(added);
    throw;
  }
  unrecorded_ += streams.size() - recorded;
}

void PendingFrees::record() {
  if (unrecorded_ == 0) return;
  for (auto& [stream, uses] : uses_) {
    for (Use& use : uses) {
      if (use.event != EventHandle{}) continue;
      use.event = events_.record(stream);
      --unrecorded_;
    }
  }
}

std::vector<StreamHandle> PendingFrees::streams(OwnerId owner) const {
  std::vector<StreamHandle> found;
  for (const auto& [stream, uses] : uses_) {
    const bool awaited = std::ranges::any_of(
        uses, [&](const Use& use) { return owner == kNoOwner || use.pending->block.placed->key.owner == owner; });
    if (awaited) found.push_back(stream);
  }
  return found;
}

Bytes PendingFrees::bytes() const noexcept {
  Bytes sum = 0;
  for (const Pending& pending : pending_) sum += pending.block.size;
  return sum;
}

}  // namespace lowtide
