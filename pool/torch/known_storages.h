// The storages known to live in one region: a table that is asked at every operator and walked at every eviction.
#pragma once

#include <span>
#include <unordered_map>
#include <vector>

#include "pool/torch/storage_guard.h"

namespace lowtide {

struct KnownStorage {
  WeakStorageRef storage;  // also keeps the address from being reused while the entry is there
  void* bytes;             // where they were when it was noted: saves asking the allocator again
};

/// Not synchronised.
class KnownStorages {
 public:
  bool contains(const c10::StorageImpl* storage, const void* bytes) const;
  /// Adds the storage, or notes that its bytes are elsewhere now.
  void insert(const c10::StorageImpl* storage, WeakStorageRef reference, void* bytes);
  /// Takes out the entries of dead storages and returns them, for the caller to drop.
  std::vector<KnownStorage> prune();

  /// One after the other in memory: an eviction reads them all, on several threads.
  std::span<const KnownStorage> entries() const noexcept { return entries_; }
  std::size_t size() const noexcept { return entries_.size(); }

 private:
  std::vector<KnownStorage> entries_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> index_;  // into entries_
};

}  // namespace lowtide
