#include "allocator/tile_map.h"

#include <gtest/gtest.h>

#include <iterator>
#include <map>
#include <random>
#include <vector>

namespace lowtide {
namespace {

struct Value {
  TileKind kind;
  std::uint32_t slack;
  friend bool operator==(const Value&, const Value&) = default;
};
using Model = std::map<Bytes, Value>;

void start(TileMap& map, Bytes offset, TileKind kind, std::uint32_t slack = 0) {
  map.prepare(offset);
  map.start(offset, kind, slack);
}

void expect_equal(const TileMap& map, const Model& model) {
  auto expected = model.begin();
  map.for_each(0, map.capacity(), [&](const TileMap::Tile& tile) {
    ASSERT_NE(expected, model.end());
    ASSERT_EQ(tile.offset, expected->first);
    ASSERT_EQ((Value{tile.kind, tile.slack}), expected->second);
    ++expected;
    ASSERT_EQ(tile.end(), expected == model.end() ? map.capacity() : expected->first);
  });
  ASSERT_EQ(expected, model.end());
}

TEST(TileMap, BeginsAsOneTile) {
  const TileMap map(1_GiB, TileKind::Vacant);
  expect_equal(map, {{0, {TileKind::Vacant, 0}}});
  EXPECT_EQ(map.covering(1_GiB - 1).size, 1_GiB);
}

TEST(TileMap, NeighboursAreFoundAcrossEmptyStretches) {
  TileMap map(64_GiB, TileKind::Vacant);
  start(map, 48_GiB, TileKind::Allocated, 17);
  EXPECT_EQ(map.at(0).size, 48_GiB);
  EXPECT_EQ(map.covering(63_GiB).offset, 48_GiB);
  EXPECT_EQ(map.at(48_GiB).slack, 17U);
  EXPECT_EQ(map.before(48_GiB).offset, 0U);
  map.merge_with_previous(48_GiB);
  EXPECT_EQ(map.at(0).size, 64_GiB);
  EXPECT_FALSE(map.starts_at(48_GiB));
}

TEST(TileMap, NoTileStartsBesideAUnitOrBeyondTheRange) {
  TileMap map(4_MiB, TileKind::Free);
  start(map, 1024, TileKind::Allocated);
  EXPECT_TRUE(map.starts_at(1024));
  EXPECT_FALSE(map.starts_at(1025));
  EXPECT_FALSE(map.starts_at(1536));
  EXPECT_FALSE(map.starts_at(3_MiB));
  EXPECT_FALSE(map.starts_at(64_MiB));
}

TEST(TileMap, KindAndSlackKeepTheirWholeRange) {
  TileMap map(4_MiB, TileKind::Free);
  for (const TileKind kind :
       {TileKind::Allocated, TileKind::Retired, TileKind::Free, TileKind::Withheld, TileKind::Vacant}) {
    for (const std::uint32_t slack : {0U, 1U, 511U}) {
      start(map, 2_MiB, kind, slack);
      EXPECT_EQ(map.at(2_MiB).kind, kind);
      EXPECT_EQ(map.at(2_MiB).slack, slack);
    }
  }
}

TEST(TileMap, ATileThatComesAndGoesAllocatesNothing) {
  TileMap map(1_GiB, TileKind::Free);
  start(map, 64_MiB, TileKind::Free);
  map.merge_with_previous(64_MiB);
  const Bytes before = map.metadata_bytes();
  start(map, 64_MiB, TileKind::Free);
  EXPECT_EQ(map.metadata_bytes(), before);
}

TEST(TileMap, MemoryIsAtMostHalfAPercentOfWhatIsCut) {
  TileMap map(256_MiB, TileKind::Free);
  for (Bytes offset = 0; offset < 256_MiB; offset += 4_KiB) start(map, offset, TileKind::Allocated);
  EXPECT_LT(map.metadata_bytes(), 256_MiB / 200);
}

TEST(TileMap, RandomCutsAndMergesMatchAnOrderedMap) {
  std::mt19937 dice(11);
  const Bytes capacity = 12_MiB;
  TileMap map(capacity, TileKind::Vacant);
  Model model{{0, {TileKind::Vacant, 0}}};
  for (int step = 0; step < 20'000; ++step) {
    // Few offsets at times, so that stretches empty and fill again.
    const Bytes units = capacity / kBlockUnit;
    const Bytes offset = (step / 2000 % 2 == 0 ? dice() % units : dice() % 24 * (units / 24)) * kBlockUnit;
    const bool is_start = model.contains(offset);
    ASSERT_EQ(map.starts_at(offset), is_start);
    if (is_start && offset > 0 && dice() % 2 == 0) {
      map.merge_with_previous(offset);
      model.erase(offset);
    } else {
      const Value value{static_cast<TileKind>(dice() % 5), static_cast<std::uint32_t>(dice() % kBlockUnit)};
      start(map, offset, value.kind, value.slack);
      model[offset] = value;
    }
    const Bytes probe = dice() % capacity;
    const auto expected = std::prev(model.upper_bound(probe));
    const TileMap::Tile tile = map.covering(probe);
    ASSERT_EQ(tile.offset, expected->first) << "step " << step;
    const auto next = std::next(expected);
    ASSERT_EQ(tile.end(), next == model.end() ? capacity : next->first) << "step " << step;
    if (step % 1000 == 999) {
      for (auto it = std::next(model.begin()); it != model.end();) {
        if (dice() % 4 == 0) {
          ++it;
          continue;
        }
        map.merge_with_previous(it->first);
        it = model.erase(it);
      }
    }
  }
  expect_equal(map, model);
}

}  // namespace
}  // namespace lowtide
