#include "allocator/page_pool.h"

#include <gtest/gtest.h>

#include <string>

#include "allocator/errors.h"
#include "allocator/host_device.h"
#include "tests/support/faulty_device.h"

namespace lowtide {
namespace {

using testing::FaultyDevice;
using testing::LiveCounts;

constexpr PageSizes kSizes{.small = 2_MiB, .large = 8_MiB};

class PagePoolTest : public ::testing::Test {
 protected:
  FaultyDevice device_{make_host_device({.index = 5, .memory = 32_MiB, .granularity = 2_MiB})};
};

TEST_F(PagePoolTest, NothingIsFreeAtFirst) {
  PagePool pool(device_, kSizes);
  EXPECT_FALSE(pool.take(2_MiB));
  EXPECT_EQ(pool.held_bytes(), 0u);
  EXPECT_EQ(device_.live(), LiveCounts{});
}

TEST_F(PagePoolTest, APageGivenBackIsTakenAgainWithoutTheDriver) {
  PagePool pool(device_, kSizes);
  const Page page = pool.create(2_MiB);
  EXPECT_EQ(pool.free_bytes(), 0u);
  pool.give(page);
  EXPECT_EQ(pool.free_bytes(), 2_MiB);
  const auto again = pool.take(2_MiB);
  ASSERT_TRUE(again);
  EXPECT_EQ(again->handle, page.handle);
  EXPECT_EQ(device_.calls("create"), 1u);
  pool.give(*again);
}

TEST_F(PagePoolTest, SizesAreKeptApart) {
  PagePool pool(device_, kSizes);
  pool.give(pool.create(8_MiB));
  EXPECT_FALSE(pool.take(2_MiB));
  pool.give(pool.create(2_MiB));
  EXPECT_EQ(pool.free_bytes(), 10_MiB);
  EXPECT_EQ(pool.take(2_MiB)->size, 2_MiB);
  EXPECT_EQ(pool.take(8_MiB)->size, 8_MiB);
  EXPECT_EQ(pool.free_bytes(), 0u);
  EXPECT_EQ(pool.held_bytes(), 10_MiB);
  EXPECT_EQ(pool.pages(), 2);
}

TEST_F(PagePoolTest, HeldIsFreePlusLent) {
  PagePool pool(device_, kSizes);
  const Page lent = pool.create(8_MiB);
  pool.give(pool.create(2_MiB));
  EXPECT_EQ(pool.held_bytes(), pool.free_bytes() + lent.size);
  pool.give(lent);
  EXPECT_EQ(pool.held_bytes(), pool.free_bytes());
}

TEST_F(PagePoolTest, ReleaseFreeHandsOnlyFreePagesToTheDriver) {
  PagePool pool(device_, kSizes);
  const Page lent = pool.create(2_MiB);
  pool.give(pool.create(2_MiB));
  pool.give(pool.create(8_MiB));
  EXPECT_EQ(pool.release_free(), 10_MiB);
  EXPECT_EQ(pool.held_bytes(), 2_MiB);
  EXPECT_EQ(device_.live().pages, 1u);
  EXPECT_EQ(pool.creations(), 3);
  EXPECT_EQ(pool.releases(), 2);
  EXPECT_EQ(pool.release_free(), 0u);
  pool.give(lent);
}

TEST_F(PagePoolTest, ReleaseSomeIsAllOrNothing) {
  PagePool pool(device_, kSizes);
  const Page pages[] = {pool.create(2_MiB), pool.create(2_MiB), pool.create(2_MiB)};
  for (const Page& page : pages) pool.give(page);
  EXPECT_FALSE(pool.release_some(2_MiB, 8_MiB));
  EXPECT_EQ(pool.free_bytes(), 6_MiB);
  EXPECT_TRUE(pool.release_some(2_MiB, 3_MiB));
  EXPECT_EQ(pool.free_bytes(), 2_MiB) << "whole pages went";
  EXPECT_EQ(device_.live().pages, 1u);
}

TEST_F(PagePoolTest, ShrinkingStopsAboveTheMark) {
  PagePool pool(device_, kSizes);
  const Page lent = pool.create(8_MiB);
  const Page pages[] = {pool.create(8_MiB), pool.create(2_MiB), pool.create(2_MiB)};
  for (const Page& one : pages) pool.give(one);
  pool.shrink_to(20_MiB);
  EXPECT_EQ(pool.held_bytes(), 20_MiB);
  pool.shrink_to(11_MiB);
  EXPECT_EQ(pool.held_bytes(), 12_MiB) << "whole pages, and never below the mark";
  pool.shrink_to(0);
  EXPECT_EQ(pool.held_bytes(), lent.size) << "only free ones";
  pool.give(lent);
}

TEST_F(PagePoolTest, TheLimitRefusesWithoutAskingTheDriver) {
  PagePool pool(device_, kSizes);
  pool.set_limit(4_MiB);
  pool.give(pool.create(2_MiB));
  try {
    pool.create(8_MiB);
    FAIL() << "the limit was passed";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.device(), 5);
    EXPECT_EQ(error.requested(), 8_MiB);
    EXPECT_NE(std::string(error.what()).find("4.00 MiB"), std::string::npos) << error.what();
  }
  EXPECT_EQ(device_.calls("create"), 1u);
  EXPECT_EQ(pool.held_bytes(), 2_MiB);
  pool.give(pool.create(2_MiB));
  EXPECT_EQ(pool.held_bytes(), pool.limit());
}

TEST_F(PagePoolTest, PagesAboveALoweredLimitStay) {
  PagePool pool(device_, kSizes);
  const Page page = pool.create(8_MiB);
  pool.set_limit(2_MiB);
  EXPECT_EQ(pool.held_bytes(), 8_MiB);
  pool.give(page);
  EXPECT_TRUE(pool.take(8_MiB));
  pool.give(page);
}

TEST_F(PagePoolTest, AFailedCreateCountsNothing) {
  PagePool pool(device_, kSizes);
  device_.fail_at(1);
  EXPECT_THROW(pool.create(2_MiB), OutOfMemory);
  EXPECT_EQ(pool.held_bytes(), 0u);
  EXPECT_EQ(pool.pages(), 0);
  EXPECT_EQ(pool.creations(), 0);
  pool.give(pool.create(2_MiB));
}

TEST_F(PagePoolTest, TheDeviceItselfRunsOut) {
  PagePool pool(device_, kSizes);
  for (int i = 0; i < 4; ++i) pool.give(pool.create(8_MiB));
  EXPECT_THROW(pool.create(2_MiB), OutOfMemory);
  EXPECT_TRUE(pool.release_some(8_MiB, 8_MiB));
  pool.give(pool.create(2_MiB));
}

TEST_F(PagePoolTest, ItsEndGivesEverythingBack) {
  {
    PagePool pool(device_, kSizes);
    pool.give(pool.create(2_MiB));
    pool.give(pool.create(8_MiB));
  }
  EXPECT_EQ(device_.live(), LiveCounts{});
  EXPECT_EQ(device_.bad_releases(), 0u);
}

}  // namespace
}  // namespace lowtide
