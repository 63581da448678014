#include "tests/support/patterns.h"

#include <gtest/gtest.h>

#include <vector>

namespace lowtide::testing {
namespace {

TEST(Patterns, PiecesOfAPatternFitTogether) {
  std::vector<std::uint8_t> bytes(1000);
  fill_pattern(bytes.data(), 333, 7);
  fill_pattern(bytes.data() + 333, 667, 7, 333);
  EXPECT_TRUE(has_pattern(bytes.data(), bytes.size(), 7));
  EXPECT_TRUE(has_pattern(bytes.data() + 100, 900, 7, 100));
}

TEST(Patterns, TheFirstWrongByteIsFound) {
  std::vector<std::uint8_t> bytes(1000);
  fill_pattern(bytes.data(), bytes.size(), 7);
  bytes[617] ^= 1;
  bytes[800] ^= 1;
  EXPECT_EQ(pattern_mismatch(bytes.data(), bytes.size(), 7), 617u);
}

TEST(Patterns, ShiftedStaleAndEmptyBytesAreFound) {
  std::vector<std::uint8_t> bytes(4096);
  EXPECT_FALSE(has_pattern(bytes.data(), bytes.size(), 0)) << "zeros are no pattern";
  fill_pattern(bytes.data(), bytes.size(), 7);
  EXPECT_FALSE(has_pattern(bytes.data(), bytes.size(), 8));
  for (const Bytes shift : {1, 8, 64, 512, 2048}) {
    EXPECT_FALSE(has_pattern(bytes.data() + shift, bytes.size() - shift, 7)) << shift;
  }
}

}  // namespace
}  // namespace lowtide::testing
