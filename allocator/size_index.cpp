#include "allocator/size_index.h"

#include <algorithm>
#include <utility>

namespace lowtide {

SizeIndex::SizeIndex() {
  firsts_.push_back(0);
  chunks_.push_back(std::make_unique_for_overwrite<Chunk>());
}

std::size_t SizeIndex::chunk_for(Key key) const noexcept {
  if (firsts_.size() == 1) return 0;
  return static_cast<std::size_t>(std::ranges::upper_bound(firsts_, key) - firsts_.begin()) - 1;
}

void SizeIndex::prepare(std::size_t inserts) {
  while (spare_count_ < inserts) {
    spares_[spare_count_] = std::make_unique_for_overwrite<Chunk>();
    ++spare_count_;
  }
  const std::size_t needed = chunks_.size() + inserts;
  // Twice as much each time: reserve() alone would grow them by what is asked for.
  if (chunks_.capacity() < needed) chunks_.reserve(2 * needed);
  if (firsts_.capacity() < needed) firsts_.reserve(2 * needed);
}

void SizeIndex::insert(Extent tile) noexcept {
  const Key key = key_of(tile);
  std::size_t index = chunk_for(key);
  if (chunks_[index]->count == kKeys) {
    Chunk& full = *chunks_[index];
    std::unique_ptr<Chunk> upper = std::move(spares_[--spare_count_]);
    upper->count = kKeys / 2;
    full.count = kKeys - kKeys / 2;
    std::copy_n(full.keys.begin() + static_cast<std::ptrdiff_t>(full.count), kKeys / 2, upper->keys.begin());
    const auto at = static_cast<std::ptrdiff_t>(index) + 1;
    firsts_.insert(firsts_.begin() + at, upper->keys[0]);
    chunks_.insert(chunks_.begin() + at, std::move(upper));
    index += key >= firsts_[index + 1];
  }
  Chunk& chunk = *chunks_[index];
  Key* const end = chunk.keys.data() + chunk.count;
  Key* const place = std::lower_bound(chunk.keys.data(), end, key);
  std::move_backward(place, end, end + 1);
  *place = key;
  ++chunk.count;
  ++size_;
}

void SizeIndex::erase(Extent tile) noexcept {
  const Key key = key_of(tile);
  const std::size_t index = chunk_for(key);
  Chunk& chunk = *chunks_[index];
  Key* const end = chunk.keys.data() + chunk.count;
  Key* const place = std::lower_bound(chunk.keys.data(), end, key);
  std::move(place + 1, end, place);
  --chunk.count;
  --size_;
  if (chunk.count >= kKeys / 4 || index == 0) return;
  // Neighbours that are together half full at most become one, so that no crowd of nearly empty chunks is left.
  Chunk& previous = *chunks_[index - 1];
  if (previous.count + chunk.count > kKeys / 2) return;
  std::copy_n(chunk.keys.begin(), chunk.count, previous.keys.begin() + static_cast<std::ptrdiff_t>(previous.count));
  previous.count += chunk.count;
  drop_chunk(index);
}

void SizeIndex::drop_chunk(std::size_t index) noexcept {
  const auto at = static_cast<std::ptrdiff_t>(index);
  if (spare_count_ < spares_.size()) spares_[spare_count_++] = std::move(chunks_[index]);
  chunks_.erase(chunks_.begin() + at);
  firsts_.erase(firsts_.begin() + at);
}

std::optional<Extent> SizeIndex::best_fit(Bytes size) const noexcept {
  const Key least = key_of({0, size});
  for (std::size_t index = chunk_for(least); index < chunks_.size(); ++index) {
    const Chunk& chunk = *chunks_[index];
    const Key* const end = chunk.keys.data() + chunk.count;
    const Key* const found = std::lower_bound(chunk.keys.data(), end, least);
    if (found != end) return tile_of(*found);
  }
  return std::nullopt;
}

bool SizeIndex::contains(Extent tile) const noexcept {
  const Key key = key_of(tile);
  const Chunk& chunk = *chunks_[chunk_for(key)];
  return std::binary_search(chunk.keys.data(), chunk.keys.data() + chunk.count, key);
}

Bytes SizeIndex::metadata_bytes() const noexcept {
  return (chunks_.size() + spare_count_) * sizeof(Chunk) + chunks_.capacity() * sizeof(chunks_[0]) +
         firsts_.capacity() * sizeof(firsts_[0]);
}

}  // namespace lowtide
