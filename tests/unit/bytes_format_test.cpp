#include "allocator/bytes_format.h"

#include <gtest/gtest.h>

namespace lowtide {
namespace {

TEST(FormatBytes, SmallSizesAreWholeBytes) {
  EXPECT_EQ(format_bytes(0), "0 bytes");
  EXPECT_EQ(format_bytes(512), "512 bytes");
  EXPECT_EQ(format_bytes(1023), "1023 bytes");
}

TEST(FormatBytes, LargerOnesHaveTwoDecimals) {
  EXPECT_EQ(format_bytes(1_KiB), "1.00 KiB");
  EXPECT_EQ(format_bytes(1_MiB), "1.00 MiB");
  EXPECT_EQ(format_bytes(3_MiB + 512_KiB), "3.50 MiB");
  EXPECT_EQ(format_bytes(2_GiB), "2.00 GiB");
  EXPECT_EQ(format_bytes(139_GiB + 820_MiB), "139.80 GiB");
}

TEST(FormatBytes, NothingIsRoundedUpIntoTheNextUnit) {
  EXPECT_EQ(format_bytes(1_MiB - 1), "1024.00 KiB");
  EXPECT_EQ(format_bytes(1_GiB - 1), "1024.00 MiB");
}

TEST(FormatBytes, ThousandsOfGibibytesStayGibibytes) { EXPECT_EQ(format_bytes(16384_GiB), "16384.00 GiB"); }

}  // namespace
}  // namespace lowtide
