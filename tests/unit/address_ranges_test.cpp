#include "allocator/address_ranges.h"

#include <gtest/gtest.h>

namespace lowtide {
namespace {

class AddressRangesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ranges_.insert(100, 10);
    ranges_.insert(110, 20);
    ranges_.insert(200, 5);
  }
  AddressRanges ranges_;
};

TEST_F(AddressRangesTest, ErasesOnlyWhatWasInserted) {
  EXPECT_FALSE(ranges_.erase(100, 5));
  EXPECT_FALSE(ranges_.erase(105, 5));
  EXPECT_FALSE(ranges_.erase(100, 30));
  EXPECT_TRUE(ranges_.has(100, 10));
  EXPECT_TRUE(ranges_.erase(100, 10));
  EXPECT_FALSE(ranges_.has(100, 10));
  EXPECT_TRUE(ranges_.has(110, 20));
}

TEST_F(AddressRangesTest, OverlapNeedsACommonByte) {
  EXPECT_FALSE(ranges_.overlaps(0, 100));
  EXPECT_TRUE(ranges_.overlaps(0, 101));
  EXPECT_TRUE(ranges_.overlaps(129, 1));
  EXPECT_FALSE(ranges_.overlaps(130, 70));
  EXPECT_TRUE(ranges_.overlaps(130, 71));
  EXPECT_TRUE(ranges_.overlaps(50, 1000));
  EXPECT_FALSE(ranges_.overlaps(205, 1000));
}

TEST_F(AddressRangesTest, InsideOneDoesNotCrossASeam) {
  EXPECT_TRUE(ranges_.inside_one(100, 10));
  EXPECT_TRUE(ranges_.inside_one(115, 15));
  EXPECT_FALSE(ranges_.inside_one(109, 2));
  EXPECT_FALSE(ranges_.inside_one(115, 16));
  EXPECT_FALSE(ranges_.inside_one(99, 2));
}

TEST_F(AddressRangesTest, CoversCrossesSeamsButNoGaps) {
  EXPECT_TRUE(ranges_.covers(100, 30));
  EXPECT_TRUE(ranges_.covers(105, 10));
  EXPECT_FALSE(ranges_.covers(105, 26));
  EXPECT_FALSE(ranges_.covers(99, 5));
  EXPECT_TRUE(ranges_.covers(204, 1));
}

}  // namespace
}  // namespace lowtide
