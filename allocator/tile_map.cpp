#include "allocator/tile_map.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace lowtide {
namespace {

constexpr unsigned kKindBits = 3;

std::uint16_t pack(TileKind kind, std::uint32_t slack) noexcept {
  return static_cast<std::uint16_t>(slack << kKindBits | static_cast<std::uint32_t>(kind));
}

constexpr std::uint64_t bit(std::size_t index) noexcept { return std::uint64_t{1} << index % 64; }
/// Bits above `index` of its word.
constexpr std::uint64_t above(std::size_t index) noexcept { return ~std::uint64_t{0} << index % 64 << 1; }
/// Bits below `index` of its word.
constexpr std::uint64_t below(std::size_t index) noexcept { return bit(index) - 1; }

constexpr std::size_t kNone = ~std::size_t{0};

/// The first bit set at `index` or after it; kNone if there is none.
std::size_t first_from(const std::vector<std::uint64_t>& words, std::size_t index) noexcept {
  std::size_t word = index / 64;
  if (word >= words.size()) return kNone;
  std::uint64_t rest = words[word] & ~below(index);
  while (rest == 0) {
    if (++word == words.size()) return kNone;
    rest = words[word];
  }
  return word * 64 + static_cast<std::size_t>(std::countr_zero(rest));
}

/// The last bit set at `index` or before it. Pre: there is one.
std::size_t last_until(const std::vector<std::uint64_t>& words, std::size_t index) noexcept {
  std::size_t word = index / 64;
  std::uint64_t rest = words[word] & ~above(index);
  while (rest == 0) rest = words[--word];
  return word * 64 + 63 - static_cast<std::size_t>(std::countl_zero(rest));
}

}  // namespace

TileMap::TileMap(Bytes capacity, TileKind kind) : capacity_(capacity) {
  prepare(0);
  start(0, kind);
}

bool TileMap::starts_at(Bytes offset) const noexcept {
  const std::size_t stretch = stretch_of(offset);
  if (offset % kBlockUnit != 0 || stretch >= stretches_.size() || !stretches_[stretch]) return false;
  const std::size_t unit = unit_of(offset);
  return (stretches_[stretch]->bits[unit / kWordBits] & bit(unit)) != 0;
}

TileMap::Tile TileMap::at(Bytes offset) const noexcept {
  const std::uint16_t word = stretches_[stretch_of(offset)]->words[unit_of(offset)];
  return {offset, next_start(offset) - offset, static_cast<TileKind>(word & ((1U << kKindBits) - 1)),
          static_cast<std::uint32_t>(word >> kKindBits)};
}

TileMap::Tile TileMap::covering(Bytes offset) const noexcept { return at(last_start(offset)); }

std::size_t TileMap::first_start(const Stretch& stretch, std::size_t unit) noexcept {
  if (unit == kStretchUnits) return kStretchUnits;
  std::size_t word = unit / kWordBits;
  std::uint64_t rest = stretch.bits[word] & ~below(unit);
  if (rest == 0) {
    const std::uint64_t later = stretch.words_used & above(word);
    if (later == 0) return kStretchUnits;
    word = static_cast<std::size_t>(std::countr_zero(later));
    rest = stretch.bits[word];
  }
  return word * kWordBits + static_cast<std::size_t>(std::countr_zero(rest));
}

std::size_t TileMap::last_start(const Stretch& stretch, std::size_t unit) noexcept {
  std::size_t word = unit / kWordBits;
  std::uint64_t rest = stretch.bits[word] & ~above(unit);
  if (rest == 0) {
    const std::uint64_t earlier = stretch.words_used & below(word);
    if (earlier == 0) return kStretchUnits;
    word = kWordBits - 1 - static_cast<std::size_t>(std::countl_zero(earlier));
    rest = stretch.bits[word];
  }
  return word * kWordBits + kWordBits - 1 - static_cast<std::size_t>(std::countl_zero(rest));
}

Bytes TileMap::next_start(Bytes offset) const noexcept {
  const std::size_t here = stretch_of(offset);
  const std::size_t unit = first_start(*stretches_[here], unit_of(offset) + 1);
  if (unit != kStretchUnits) return here * kStretch + unit * kBlockUnit;
  const std::size_t next = first_from(used_, here + 1);
  if (next == kNone) return capacity_;
  return next * kStretch + first_start(*stretches_[next], 0) * kBlockUnit;
}

Bytes TileMap::last_start(Bytes offset) const noexcept {
  std::size_t here = stretch_of(offset);
  if (here < stretches_.size() && stretches_[here]) {
    const std::size_t unit = last_start(*stretches_[here], unit_of(offset));
    if (unit != kStretchUnits) return here * kStretch + unit * kBlockUnit;
    --here;  // a tile starts at 0, so this is not the first stretch
  }
  here = last_until(used_, std::min(here, stretches_.size() - 1));
  return here * kStretch + last_start(*stretches_[here], kStretchUnits - 1) * kBlockUnit;
}

void TileMap::prepare(Bytes offset) {
  const std::size_t here = stretch_of(offset);
  if (here >= stretches_.size()) {
    used_.resize(here / kWordBits + 1);
    stretches_.resize(here + 1);
  }
  if (!stretches_[here] && !spare_) spare_ = std::make_unique_for_overwrite<Stretch>();
}

void TileMap::start(Bytes offset, TileKind kind, std::uint32_t slack) noexcept {
  const std::size_t here = stretch_of(offset);
  std::unique_ptr<Stretch>& stretch = stretches_[here];
  if (!stretch) {
    stretch = std::move(spare_);
    used_[here / kWordBits] |= bit(here);
    ++stretches_in_use_;
  }
  const std::size_t unit = unit_of(offset);
  stretch->bits[unit / kWordBits] |= bit(unit);
  stretch->words_used |= bit(unit / kWordBits);
  stretch->words[unit] = pack(kind, slack);
}

void TileMap::merge_with_previous(Bytes offset) noexcept {
  const std::size_t here = stretch_of(offset);
  Stretch& stretch = *stretches_[here];
  const std::size_t unit = unit_of(offset);
  std::uint64_t& bits = stretch.bits[unit / kWordBits];
  bits &= ~bit(unit);
  if (bits != 0) return;
  stretch.words_used &= ~bit(unit / kWordBits);
  if (stretch.words_used != 0) return;
  used_[here / kWordBits] &= ~bit(here);
  --stretches_in_use_;
  spare_ = std::move(stretches_[here]);
}

Bytes TileMap::metadata_bytes() const noexcept {
  return (stretches_in_use_ + (spare_ ? 1 : 0)) * sizeof(Stretch) + stretches_.capacity() * sizeof(stretches_[0]) +
         used_.capacity() * sizeof(used_[0]);
}

}  // namespace lowtide
