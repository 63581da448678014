#include "allocator/size_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace lowtide {
namespace {

using Model = std::set<std::pair<Bytes, Bytes>>;  // (size, offset)

std::vector<Extent> all_from(const SizeIndex& index, Bytes size) {
  std::vector<Extent> found;
  index.for_each_from(size, [&](const Extent& tile) { found.push_back(tile); });
  return found;
}

void insert(SizeIndex& index, Extent tile) {
  index.prepare(1);
  index.insert(tile);
}

TEST(SizeIndex, AnEmptyOneFitsNothing) {
  const SizeIndex index;
  EXPECT_EQ(index.best_fit(kBlockUnit), std::nullopt);
  EXPECT_TRUE(all_from(index, 0).empty());
}

TEST(SizeIndex, TheSmallestThatHoldsTheRequestFitsBestAndTheLowestOfEquals) {
  SizeIndex index;
  insert(index, {8192, 4096});
  insert(index, {1024, 4096});
  insert(index, {0, 512});
  insert(index, {32768, 8192});
  EXPECT_EQ(index.best_fit(512), (Extent{0, 512}));
  EXPECT_EQ(index.best_fit(1024), (Extent{1024, 4096}));
  EXPECT_EQ(index.best_fit(4608), (Extent{32768, 8192}));
  EXPECT_EQ(index.best_fit(8704), std::nullopt);
}

TEST(SizeIndex, TheLargestSizesAndOffsetsKeepTheirOrder) {
  SizeIndex index;
  const Bytes most = SizeIndex::kLimit - kBlockUnit;
  insert(index, {most, kBlockUnit});
  insert(index, {0, most});
  EXPECT_EQ(index.best_fit(2 * kBlockUnit), (Extent{0, most}));
  EXPECT_EQ(index.best_fit(kBlockUnit), (Extent{most, kBlockUnit}));
}

TEST(SizeIndex, TwoPreparedInsertionsIntoFullChunksNeedNothingMore) {
  SizeIndex index;
  for (Bytes i = 0; i < 1000; ++i) insert(index, {i * 2 * kBlockUnit, kBlockUnit});
  index.prepare(2);
  const Bytes before = index.metadata_bytes();
  index.insert({1 * kBlockUnit, kBlockUnit});
  index.insert({1999 * kBlockUnit, kBlockUnit});
  EXPECT_EQ(index.metadata_bytes(), before);
  EXPECT_EQ(index.size(), 1002U);
}

TEST(SizeIndex, RandomChangesMatchAnOrderedSet) {
  std::mt19937 dice(7);
  SizeIndex index;
  Model model;
  std::vector<std::pair<Bytes, Bytes>> present;
  for (int step = 0; step < 60'000; ++step) {
    // Grows to thousands, then shrinks to nothing, twice.
    const bool growing = step / 15'000 % 2 == 0;
    if (present.empty() || dice() % 10 < (growing ? 7U : 3U)) {
      const std::pair entry{(1 + dice() % 40) * kBlockUnit, dice() % 100'000 * kBlockUnit};
      if (!model.insert(entry).second) continue;
      insert(index, {entry.second, entry.first});
      present.push_back(entry);
    } else {
      std::swap(present[dice() % present.size()], present.back());
      const auto [size, offset] = present.back();
      present.pop_back();
      model.erase({size, offset});
      index.erase({offset, size});
    }
    const Bytes wanted = (1 + dice() % 45) * kBlockUnit;
    const auto expected = model.lower_bound({wanted, 0});
    const auto found = index.best_fit(wanted);
    ASSERT_EQ(found.has_value(), expected != model.end()) << "step " << step;
    if (found) {
      ASSERT_EQ(std::pair(found->size, found->offset), *expected) << "step " << step;
    }
    ASSERT_EQ(index.size(), model.size());
  }
  for (const auto& [size, offset] : model) EXPECT_TRUE(index.contains({offset, size}));
  const auto rest = all_from(index, 0);
  ASSERT_EQ(rest.size(), model.size());
  EXPECT_TRUE(
      std::ranges::equal(rest, model, {}, [](const Extent& tile) { return std::pair(tile.size, tile.offset); }));
}

TEST(SizeIndex, ShrinkingGivesItsMemoryBack) {
  SizeIndex index;
  for (Bytes i = 0; i < 10'000; ++i) insert(index, {i * 2 * kBlockUnit, kBlockUnit});
  const Bytes full = index.metadata_bytes();
  EXPECT_LT(full, Bytes{10'000} * 20);
  for (Bytes i = 0; i < 10'000; ++i) {
    if (i % 100 != 0) index.erase({i * 2 * kBlockUnit, kBlockUnit});
  }
  EXPECT_EQ(index.size(), 100U);
  EXPECT_LT(index.metadata_bytes(), full / 4);
}

}  // namespace
}  // namespace lowtide
