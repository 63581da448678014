#include "pool/torch/known_storages.h"

#include <utility>

namespace lowtide {

bool KnownStorages::contains(const c10::StorageImpl* storage, const void* bytes) const {
  const auto found = index_.find(storage);
  return found != index_.end() && entries_[found->second].bytes == bytes;
}

void KnownStorages::insert(const c10::StorageImpl* storage, WeakStorageRef reference, void* bytes) {
  const auto found = index_.find(storage);
  if (found != index_.end()) {
    entries_[found->second].bytes = bytes;
    return;
  }
  entries_.push_back({std::move(reference), bytes});
  try {
    index_.emplace(storage, entries_.size() - 1);
  } catch (...) {
    entries_.pop_back();
    throw;
  }
}

std::vector<KnownStorage> KnownStorages::prune() {
  std::vector<KnownStorage> dead;
  dead.reserve(entries_.size());
  std::size_t kept = 0;
  for (KnownStorage& entry : entries_) {
    const c10::StorageImpl* storage = entry.storage._unsafe_get_target();
    if (entry.storage.expired()) {
      index_.erase(storage);
      dead.push_back(std::move(entry));
    } else {
      index_.find(storage)->second = kept;
      std::swap(entries_[kept++], entry);
    }
  }
  entries_.resize(kept, KnownStorage{WeakStorageRef(StorageRef()), nullptr});
  return dead;
}

}  // namespace lowtide
