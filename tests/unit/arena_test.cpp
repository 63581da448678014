#include "allocator/arena.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace lowtide {
namespace {

constexpr Bytes kUnit = kBlockUnit;
constexpr Bytes kPage = 4_KiB;

/// An arena of eight small pages, its page handles counted from 1.
class ArenaTest : public ::testing::Test {
 protected:
  Page new_page(Bytes size = kPage) { return {PageHandle{++last_handle_}, size}; }
  void attach(Bytes offset, Bytes size = kPage) { arena_.attach(offset, new_page(size)); }
  void evict(Bytes offset) {
    arena_.begin_evict({offset});
    arena_.finish_evict(offset);
  }
  void TearDown() override { EXPECT_NO_THROW(arena_.check()); }

  std::uint64_t last_handle_ = 0;
  Arena arena_{8 * kPage, kPage};
};

TEST_F(ArenaTest, BeginsVacant) {
  EXPECT_TRUE(arena_.empty());
  EXPECT_FALSE(arena_.allocate(kUnit));
  ASSERT_EQ(arena_.tiles().size(), 1u);
  EXPECT_EQ(arena_.tiles()[0].kind, TileKind::Vacant);
  EXPECT_EQ(arena_.mapped_bytes(), 0u);
}

TEST_F(ArenaTest, AttachedPagesMakeOneFreeTile) {
  attach(0);
  attach(kPage);
  EXPECT_EQ(arena_.mapped_bytes(), 2 * kPage);
  ASSERT_EQ(arena_.tiles().size(), 2u);
  EXPECT_EQ(arena_.tiles()[0].size, 2 * kPage);
  EXPECT_EQ(arena_.tiles()[0].kind, TileKind::Free);
  EXPECT_EQ(arena_.allocate(2 * kPage), 0u) << "a block may lie across pages";
}

TEST_F(ArenaTest, AttachNeedsVacantRange) {
  attach(0);
  EXPECT_THROW(arena_.attach(0, new_page()), std::logic_error);
  EXPECT_THROW(arena_.attach(7 * kPage, new_page(2 * kPage)), std::logic_error);
}

TEST_F(ArenaTest, AllocateSplitsAndFreeMerges) {
  attach(0);
  EXPECT_EQ(arena_.allocate(kUnit), 0u);
  EXPECT_EQ(arena_.allocate(2 * kUnit), kUnit);
  EXPECT_EQ(arena_.allocate(kUnit), 3 * kUnit);
  EXPECT_EQ(arena_.allocated_bytes(), 4 * kUnit);
  EXPECT_FALSE(arena_.find_block(2 * kUnit)) << "inside a block";
  EXPECT_EQ(arena_.find_block(kUnit)->size, 2 * kUnit);
  arena_.free(0);
  arena_.free(3 * kUnit);
  EXPECT_EQ(arena_.allocated_bytes(), 2 * kUnit);
  EXPECT_FALSE(arena_.allocate(kPage));
  arena_.free(kUnit);
  EXPECT_EQ(arena_.allocate(kPage), 0u) << "everything merged again";
}

TEST_F(ArenaTest, TheSmallestTileThatFitsIsTaken) {
  attach(0);
  const Bytes sizes[] = {3 * kUnit, kUnit, 2 * kUnit, kUnit};  // then one unit is left
  for (const Bytes size : sizes) ASSERT_TRUE(arena_.allocate(size));
  arena_.free(0);          // hole of 3
  arena_.free(4 * kUnit);  // hole of 2
  EXPECT_EQ(arena_.allocate(2 * kUnit), 4 * kUnit);
  EXPECT_EQ(arena_.allocate(kUnit), 7 * kUnit) << "the last unit of the page fits exactly";
  EXPECT_EQ(arena_.allocate(kUnit), 0u) << "only the hole of 3 is left";
}

TEST_F(ArenaTest, OfEqualTilesTheLowestIsTaken) {
  attach(0);
  std::vector<Bytes> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(*arena_.allocate(kUnit));
  arena_.free(blocks[5]);
  arena_.free(blocks[1]);
  arena_.free(blocks[3]);
  EXPECT_EQ(arena_.allocate(kUnit), blocks[1]);
  EXPECT_EQ(arena_.allocate(kUnit), blocks[3]);
  EXPECT_EQ(arena_.allocate(kUnit), blocks[5]);
}

TEST_F(ArenaTest, FreeOfWhatIsNoBlockThrows) {
  attach(0);
  const Bytes block = *arena_.allocate(2 * kUnit);
  EXPECT_THROW(arena_.free(block + kUnit), std::logic_error);
  arena_.free(block);
  EXPECT_THROW(arena_.free(block), std::logic_error);
  EXPECT_THROW(arena_.free(7 * kPage), std::logic_error);
}

TEST_F(ArenaTest, BlockContainingFindsInnerOffsets) {
  attach(0);
  arena_.allocate(kUnit);
  const Bytes block = *arena_.allocate(3 * kUnit);
  EXPECT_EQ(arena_.block_containing(block)->offset, block);
  EXPECT_EQ(arena_.block_containing(block + 3 * kUnit - 1)->offset, block);
  EXPECT_FALSE(arena_.block_containing(block + 3 * kUnit));
  EXPECT_FALSE(arena_.block_containing(5 * kPage));
}

// Retired blocks.

TEST_F(ArenaTest, ARetiredBlockIsUsableByNobodyUntilItIsFreed) {
  attach(0);
  const Bytes block = *arena_.allocate(kPage);
  arena_.retire(block);
  EXPECT_EQ(arena_.allocated_bytes(), 0u);
  EXPECT_EQ(arena_.retired_bytes(), kPage);
  EXPECT_FALSE(arena_.block_containing(block));
  EXPECT_FALSE(arena_.allocate(kUnit));
  EXPECT_TRUE(arena_.evictable_pages().empty());
  EXPECT_THROW(arena_.begin_evict({0}), std::logic_error);
  EXPECT_THROW(arena_.retire(block), std::logic_error);
  arena_.free(block);
  EXPECT_EQ(arena_.retired_bytes(), 0u);
  EXPECT_EQ(arena_.allocate(kUnit), 0u);
}

TEST_F(ArenaTest, ABlockThatIsAwayCannotBeRetired) {
  attach(0);
  const Bytes block = *arena_.allocate(kPage);
  arena_.begin_evict({0});
  EXPECT_THROW(arena_.retire(block), std::logic_error);
  arena_.finish_evict(0);
  EXPECT_THROW(arena_.retire(block), std::logic_error);
}

// Growth.

TEST_F(ArenaTest, AVacancyAfterFreeMemoryNeedsOnlyTheRest) {
  attach(0);
  arena_.allocate(kPage - kUnit);  // one free unit before the vacant range
  const auto vacancy = arena_.find_vacancy(kPage + kUnit);
  ASSERT_TRUE(vacancy);
  EXPECT_EQ(vacancy->offset, kPage);
  EXPECT_EQ(vacancy->needed, kPage);
  EXPECT_EQ(vacancy->room, 7 * kPage);
  EXPECT_EQ(vacancy->kept, (Extent{kPage - kUnit, 7 * kPage + kUnit}));
  attach(vacancy->offset);
  EXPECT_EQ(arena_.allocate(kPage + kUnit), kPage - kUnit);
}

TEST_F(ArenaTest, AVacancyBeforeFreeMemoryGrowsDownToIt) {
  attach(4 * kPage, 4 * kPage);
  ASSERT_EQ(arena_.allocate(2 * kPage), 4 * kPage);
  ASSERT_EQ(arena_.allocate(2 * kPage), 6 * kPage);
  arena_.free(4 * kPage);  // vacant [0, 4), free [4, 6), block [6, 8)
  const auto vacancy = arena_.find_vacancy(3 * kPage);
  ASSERT_TRUE(vacancy);
  EXPECT_EQ(vacancy->offset, 3 * kPage);
  EXPECT_EQ(vacancy->needed, kPage);
  EXPECT_EQ(vacancy->room, kPage) << "more would not lie beside the free memory";
  attach(vacancy->offset);
  EXPECT_EQ(arena_.allocate(3 * kPage), 3 * kPage);
}

TEST_F(ArenaTest, AVacancyBetweenFreeMemoryIsBridged) {
  for (Bytes offset = 0; offset < 8 * kPage; offset += kPage) attach(offset);
  ASSERT_EQ(arena_.allocate(kPage), 0u);
  arena_.withdraw(3 * kPage);
  arena_.detach(3 * kPage);
  // Free [1, 3), vacant [3, 4), free [4, 8).
  const auto vacancy = arena_.find_vacancy(7 * kPage);
  ASSERT_TRUE(vacancy);
  EXPECT_EQ(vacancy->offset, 3 * kPage);
  EXPECT_EQ(vacancy->needed, kPage);
  EXPECT_EQ(vacancy->room, kPage);
  EXPECT_EQ(vacancy->kept, (Extent{kPage, 7 * kPage}));
  attach(vacancy->offset);
  EXPECT_EQ(arena_.allocate(7 * kPage), kPage);
}

TEST_F(ArenaTest, TheVacancyThatNeedsFewestBytesWins) {
  attach(0);
  attach(4 * kPage, 2 * kPage);
  ASSERT_EQ(arena_.allocate(kPage), 0u);
  // After [0, 1) nothing is free; after [4, 6) two pages are.
  const auto vacancy = arena_.find_vacancy(3 * kPage);
  ASSERT_TRUE(vacancy);
  EXPECT_EQ(vacancy->needed, kPage);
  EXPECT_TRUE(vacancy->offset == 3 * kPage || vacancy->offset == 6 * kPage);
}

TEST_F(ArenaTest, NoVacancyWhereTheAddressRangeIsUsedUp) {
  EXPECT_FALSE(arena_.find_vacancy(9 * kPage));
  attach(2 * kPage);
  ASSERT_TRUE(arena_.allocate(kPage));
  EXPECT_FALSE(arena_.find_vacancy(6 * kPage));
  EXPECT_TRUE(arena_.find_vacancy(5 * kPage));
}

// Unused pages that leave.

TEST_F(ArenaTest, AWithdrawnPageIsHandedOutToNobodyAndThenGone) {
  attach(0);
  attach(kPage);
  arena_.withdraw(0);
  EXPECT_EQ(arena_.pages(PageState::Draining), (std::vector<Extent>{{0, kPage}}));
  EXPECT_EQ(arena_.unused_pages(), (std::vector<Extent>{{kPage, kPage}}));
  EXPECT_FALSE(arena_.allocate(2 * kPage));
  EXPECT_EQ(arena_.allocate(kUnit), kPage);
  arena_.check();
  const Page page = arena_.detach(0);
  EXPECT_EQ(page.handle, PageHandle{1});
  EXPECT_EQ(arena_.mapped_bytes(), kPage);
  EXPECT_EQ(arena_.tiles()[0].kind, TileKind::Vacant);
}

TEST_F(ArenaTest, AWithdrawalCanBeCancelled) {
  attach(0);
  arena_.withdraw(0);
  arena_.cancel(0);
  EXPECT_EQ(arena_.allocate(kPage), 0u);
}

TEST_F(ArenaTest, OnlyAnUnusedPageIsWithdrawn) {
  attach(0);
  arena_.allocate(kUnit);
  EXPECT_TRUE(arena_.unused_pages().empty());
  EXPECT_THROW(arena_.withdraw(0), std::logic_error);
}

TEST_F(ArenaTest, APageUnderAStraddlingBlockIsInUse) {
  attach(0);
  attach(kPage);
  attach(2 * kPage);
  ASSERT_EQ(arena_.allocate(kPage / 2), 0u);
  ASSERT_EQ(arena_.allocate(kPage), kPage / 2);
  arena_.free(0);
  EXPECT_EQ(arena_.unused_pages(), (std::vector<Extent>{{2 * kPage, kPage}}));
}

// Pages that leave with their content and come back.

TEST_F(ArenaTest, AnEvictedBlockKeepsItsAddress) {
  attach(0);
  const Bytes block = *arena_.allocate(2 * kUnit);
  arena_.begin_evict({0});
  EXPECT_EQ(arena_.evicted_bytes(), 0u) << "until it has left";
  EXPECT_FALSE(arena_.is_resident(block));
  EXPECT_FALSE(arena_.allocate(kUnit)) << "what is free on the page leaves with it";
  arena_.check();
  EXPECT_EQ(arena_.finish_evict(0).handle, PageHandle{1});
  EXPECT_EQ(arena_.evicted_bytes(), 2 * kUnit);
  EXPECT_EQ(arena_.mapped_bytes(), 0u);
  EXPECT_EQ(arena_.allocated_bytes(), 2 * kUnit);
  EXPECT_FALSE(arena_.allocate(kUnit));
  arena_.check();
  arena_.begin_restore(0);
  EXPECT_EQ(arena_.evicted_bytes(), 2 * kUnit);
  arena_.check();
  arena_.finish_restore(0, new_page());
  EXPECT_EQ(arena_.evicted_bytes(), 0u);
  EXPECT_TRUE(arena_.is_resident(block));
  EXPECT_EQ(arena_.find_block(block)->size, 2 * kUnit);
  EXPECT_EQ(arena_.allocate(6 * kUnit), 2 * kUnit);
}

TEST_F(ArenaTest, UnfinishedMovesGoBack) {
  attach(0);
  const Bytes block = *arena_.allocate(kUnit);
  arena_.begin_evict({0});
  arena_.cancel(0);
  EXPECT_TRUE(arena_.is_resident(block));
  EXPECT_EQ(arena_.allocate(7 * kUnit), kUnit) << "the free part may be handed out again";
  evict(0);
  arena_.begin_restore(0);
  arena_.cancel(0);
  EXPECT_EQ(arena_.pages(PageState::Evicted), (std::vector<Extent>{{0, kPage}}));
  EXPECT_EQ(arena_.evicted_bytes(), kPage);
}

TEST_F(ArenaTest, AnUnusedPageEvictedIsGone) {
  attach(0);
  evict(0);
  EXPECT_TRUE(arena_.empty());
  EXPECT_EQ(arena_.tiles()[0].kind, TileKind::Vacant);
}

TEST_F(ArenaTest, AnEvictedPageIsForgottenWithItsLastBlock) {
  attach(0);
  const Bytes first = *arena_.allocate(kUnit);
  const Bytes second = *arena_.allocate(kUnit);
  evict(0);
  arena_.free(first);
  EXPECT_EQ(arena_.evicted_bytes(), kUnit);
  EXPECT_FALSE(arena_.empty());
  arena_.check();
  arena_.free(second);
  EXPECT_EQ(arena_.evicted_bytes(), 0u);
  EXPECT_TRUE(arena_.empty());
}

TEST_F(ArenaTest, ABlockFreedOnItsWayOutLeavesNothingBehind) {
  attach(0);
  const Bytes block = *arena_.allocate(kUnit);
  arena_.begin_evict({0});
  arena_.free(block);
  EXPECT_FALSE(arena_.allocate(kUnit)) << "the page is still leaving";
  arena_.check();
  arena_.finish_evict(0);
  EXPECT_TRUE(arena_.empty());
}

TEST_F(ArenaTest, ABlockFreedOnItsWayBackIsFreeAfterwards) {
  attach(0);
  const Bytes block = *arena_.allocate(kUnit);
  evict(0);
  arena_.begin_restore(0);
  arena_.free(block);
  EXPECT_FALSE(arena_.allocate(kUnit)) << "bytes are still being copied in";
  EXPECT_EQ(arena_.evicted_bytes(), 0u);
  arena_.check();
  arena_.finish_restore(0, new_page());
  EXPECT_EQ(arena_.allocate(kPage), 0u);
}

TEST_F(ArenaTest, ARestoreCancelledAfterTheLastBlockDiedForgetsThePage) {
  attach(0);
  const Bytes block = *arena_.allocate(kUnit);
  evict(0);
  arena_.begin_restore(0);
  arena_.free(block);
  arena_.cancel(0);
  EXPECT_TRUE(arena_.empty());
}

TEST_F(ArenaTest, FreeOfABlockAcrossResidentAndEvictedPages) {
  for (Bytes offset = 0; offset < 4 * kPage; offset += kPage) attach(offset);
  ASSERT_EQ(arena_.allocate(kUnit), 0u);
  const Bytes block = *arena_.allocate(3 * kPage);  // on pages 0 to 3
  ASSERT_EQ(block, kUnit);
  evict(kPage);
  evict(3 * kPage);
  EXPECT_FALSE(arena_.is_resident(block));
  EXPECT_EQ(arena_.evicted_bytes(), kPage + kUnit);
  arena_.check();
  arena_.free(block);
  EXPECT_EQ(arena_.evicted_bytes(), 0u);
  // Pages 1 and 3 held nothing else: gone. The parts on pages 0 and 2 are free.
  EXPECT_EQ(arena_.pages(PageState::Resident), (std::vector<Extent>{{0, kPage}, {2 * kPage, kPage}}));
  EXPECT_TRUE(arena_.pages(PageState::Evicted).empty());
  EXPECT_EQ(arena_.allocate(kPage), 2 * kPage);
  EXPECT_EQ(arena_.allocate(kPage - kUnit), kUnit);
}

TEST_F(ArenaTest, ABlockAcrossPagesKeepsAnEvictedPageWithAnotherBlock) {
  attach(0);
  attach(kPage);
  const Bytes across = *arena_.allocate(kPage + kUnit);
  const Bytes other = *arena_.allocate(kUnit);
  evict(kPage);
  arena_.free(across);
  EXPECT_EQ(arena_.evicted_bytes(), kUnit);
  EXPECT_EQ(arena_.pages(PageState::Evicted), (std::vector<Extent>{{kPage, kPage}}));
  EXPECT_EQ(arena_.allocate(kPage), 0u);
  arena_.check();
  arena_.begin_restore(kPage);
  arena_.finish_restore(kPage, new_page());
  EXPECT_TRUE(arena_.is_resident(other));
  EXPECT_EQ(arena_.allocate(kUnit), kPage) << "the freed part on that page came back as free memory";
}

TEST_F(ArenaTest, LiveRunsJoinNeighboursAndStopAtThePage) {
  attach(0);
  attach(kPage);
  ASSERT_EQ(arena_.allocate(kUnit), 0u);
  ASSERT_EQ(arena_.allocate(kUnit), kUnit);
  const Bytes hole = *arena_.allocate(kUnit);
  ASSERT_EQ(arena_.allocate(kPage), 3 * kUnit);
  arena_.free(hole);
  EXPECT_EQ(arena_.live_runs(0), (std::vector<Extent>{{0, 2 * kUnit}, {3 * kUnit, kPage - 3 * kUnit}}));
  EXPECT_EQ(arena_.live_runs(kPage), (std::vector<Extent>{{kPage, 3 * kUnit}}));
  for (const Bytes offset : {Bytes{0}, kPage}) {
    const auto live = arena_.live_runs(offset);
    arena_.begin_evict({offset});
    EXPECT_EQ(arena_.live_runs(offset), live);
  }
}

TEST_F(ArenaTest, EvictCountsAndWithholdsOnlyThePagesThatLeave) {
  for (Bytes offset = 0; offset < 3 * kPage; offset += kPage) attach(offset);
  ASSERT_EQ(arena_.allocate(kPage / 2), 0u);
  ASSERT_EQ(arena_.allocate(kPage), kPage / 2);
  // The rest of page 1 and page 2 are one free tile, of which the first part leaves.
  EXPECT_EQ(arena_.begin_evict({0, kPage}), 3 * kPage / 2);
  EXPECT_EQ(arena_.unused_pages(), (std::vector<Extent>{{2 * kPage, kPage}}));
  EXPECT_EQ(arena_.allocate(kUnit), 2 * kPage);
  EXPECT_EQ(arena_.begin_evict({2 * kPage}), kUnit);
  EXPECT_FALSE(arena_.allocate(kUnit));
}

TEST_F(ArenaTest, RetiredBytesAreNotLive) {
  attach(0);
  arena_.allocate(kUnit);
  arena_.retire(*arena_.allocate(kUnit));
  EXPECT_EQ(arena_.live_runs(0), (std::vector<Extent>{{0, kUnit}}));
}

TEST_F(ArenaTest, MappedPagesAreThoseWithMemory) {
  for (Bytes offset = 0; offset < 4 * kPage; offset += kPage) attach(offset);
  ASSERT_EQ(arena_.allocate(3 * kPage), 0u);
  evict(0);
  arena_.begin_evict({kPage});
  arena_.withdraw(3 * kPage);
  std::vector<Bytes> offsets;
  for (const auto& [offset, page] : arena_.mapped_pages()) offsets.push_back(offset);
  EXPECT_EQ(offsets, (std::vector<Bytes>{kPage, 2 * kPage, 3 * kPage}));
  EXPECT_EQ(arena_.mapped_bytes(), 3 * kPage);
  EXPECT_EQ(arena_.evictable_pages(), (std::vector<Extent>{{2 * kPage, kPage}}));
}

TEST_F(ArenaTest, APageOfAnotherSizeCannotComeBack) {
  attach(0);
  arena_.allocate(kUnit);
  evict(0);
  arena_.begin_restore(0);
  EXPECT_THROW(arena_.finish_restore(0, new_page(2 * kPage)), std::logic_error);
}

TEST_F(ArenaTest, MovesFromAWrongStateThrow) {
  // One page per state: 0 resident, 1 draining, 2 evicting, 3 evicted, 4 restoring; none at 5.
  for (Bytes offset = 0; offset < 5 * kPage; offset += kPage) attach(offset);
  for (int page = 0; page < 5; ++page) ASSERT_EQ(arena_.allocate(kPage), page * kPage);
  arena_.free(kPage);
  arena_.withdraw(kPage);
  arena_.begin_evict({2 * kPage});
  evict(3 * kPage);
  evict(4 * kPage);
  arena_.begin_restore(4 * kPage);

  const PageState states[] = {PageState::Resident, PageState::Draining, PageState::Evicting, PageState::Evicted,
                              PageState::Restoring};
  const auto refused = [&](PageState legal, auto move) {
    for (Bytes page = 0; page < 6; ++page) {
      if (page < 5 && states[page] == legal) continue;
      EXPECT_THROW(move(page * kPage), std::logic_error) << "page " << page << " for " << to_string(legal);
    }
  };
  refused(PageState::Resident, [&](Bytes at) { arena_.begin_evict({at}); });
  refused(PageState::Resident, [&](Bytes at) { arena_.withdraw(at); });
  refused(PageState::Draining, [&](Bytes at) { arena_.detach(at); });
  refused(PageState::Evicting, [&](Bytes at) { arena_.finish_evict(at); });
  refused(PageState::Evicted, [&](Bytes at) { arena_.begin_restore(at); });
  refused(PageState::Restoring, [&](Bytes at) { arena_.finish_restore(at, new_page()); });
  for (const Bytes page : {0, 3, 5}) EXPECT_THROW(arena_.cancel(page * kPage), std::logic_error) << page;
}

}  // namespace
}  // namespace lowtide
