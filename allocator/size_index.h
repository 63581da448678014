// Extents by size: the smallest that holds a request, the lowest of equals.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "allocator/types.h"

namespace lowtide {

/// An ordered set of (size, offset), 8 bytes each, in sorted chunks: a search touches a few lines, a change moves half a KiB at
/// most. Sizes and offsets are multiples of kBlockUnit and below 2 TiB.
/// Not synchronised.
class SizeIndex {
 public:
  /// Offsets and sizes lie below this.
  static constexpr Bytes kLimit = kBlockUnit << 32;
  static constexpr std::size_t kMostPrepared = 2;

  SizeIndex();

  /// So many calls of insert() do not fail afterwards. Throws std::bad_alloc. Pre: inserts <= kMostPrepared.
  void prepare(std::size_t inserts);
  /// Pre: prepare(), and `tile` is not in the set.
  void insert(Extent tile) noexcept;
  /// Pre: `tile` is in the set.
  void erase(Extent tile) noexcept;

  /// The smallest tile of `size` bytes or more, the one at the lowest offset of equals.
  std::optional<Extent> best_fit(Bytes size) const noexcept;
  bool contains(Extent tile) const noexcept;
  std::size_t size() const noexcept { return size_; }

  /// Calls `visit` with every tile of `size` bytes or more, in order. The set may not change meanwhile.
  template <class Visit>
  void for_each_from(Bytes size, Visit&& visit) const {
    const Key least = key_of({0, size});
    for (std::size_t i = chunk_for(least); i < chunks_.size(); ++i) {
      const Chunk& chunk = *chunks_[i];
      for (std::size_t k = 0; k < chunk.count; ++k) {
        if (chunk.keys[k] >= least) visit(tile_of(chunk.keys[k]));
      }
    }
  }

  /// Bytes of memory that this index occupies beside itself.
  Bytes metadata_bytes() const noexcept;

 private:
  using Key = std::uint64_t;  // size in units above, offset in units below
  static constexpr std::size_t kKeys = 62;
  struct Chunk {
    std::uint64_t count = 0;
    std::array<Key, kKeys> keys;
  };

  static Key key_of(Extent tile) noexcept { return tile.size / kBlockUnit << 32 | tile.offset / kBlockUnit; }
  static Extent tile_of(Key key) noexcept { return {(key & 0xffffffff) * kBlockUnit, (key >> 32) * kBlockUnit}; }
  /// The chunk that `key` belongs into: the last one that does not start beyond it.
  std::size_t chunk_for(Key key) const noexcept;
  void drop_chunk(std::size_t index) noexcept;

  std::vector<Key> firsts_;  // the first key of each chunk; 0 for the first one, which takes whatever is smaller
  std::vector<std::unique_ptr<Chunk>> chunks_;                // at least one
  std::array<std::unique_ptr<Chunk>, kMostPrepared> spares_;  // [0, spare_count_) are there
  std::size_t spare_count_ = 0;
  std::size_t size_ = 0;
};

}  // namespace lowtide
