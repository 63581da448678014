#include <gtest/gtest.h>

#include "allocator/host_device.h"
#include "tests/support/block_content.h"
#include "tests/support/devices.h"

namespace lowtide::testing {
namespace {

TEST(BlockContent, SeesOneWrongByteAnywhere) {
  const auto device = make_host_device({.index = 0, .memory = 8_MiB});
  const auto address = device->reserve(4_MiB);
  const auto page = device->create(4_MiB);
  device->map(address, 4_MiB, page);
  {
    BlockContent content(*device);
    const Bytes size = 3_MiB + 5;
    content.fill(address, size, 42, StreamHandle{0});
    EXPECT_EQ(content.mismatch(address, size, 42, StreamHandle{0}), std::nullopt);
    EXPECT_EQ(content.mismatch(address, size, 43, StreamHandle{0}), Bytes{0});
    for (const Bytes at : {Bytes{0}, 1_MiB - 1, 1_MiB, 2_MiB + 77, size - 1}) {
      auto* byte = static_cast<unsigned char*>(to_pointer(address + at));
      *byte ^= 1;
      EXPECT_EQ(content.mismatch(address, size, 42, StreamHandle{0}), at);
      *byte ^= 1;
    }
  }
  device->unmap(address, 4_MiB);
  device->release(page, 4_MiB);
  device->release_address(address, 4_MiB);
}

TEST(BlockContent, SamplesSeeBothEndsAndEveryPage) {
  const auto device = make_host_device({.index = 0, .memory = 8_MiB});
  const auto address = device->reserve(4_MiB);
  const auto page = device->create(4_MiB);
  device->map(address, 4_MiB, page);
  {
    BlockContent content(*device);
    for (const Bytes size : {Bytes{1}, Bytes{512}, Bytes{700}, 2_MiB + 7}) {
      content.fill_samples(address, size, size, StreamHandle{0});
      EXPECT_EQ(content.sample_mismatch(address, size, size, StreamHandle{0}), std::nullopt) << size;
      for (const Bytes at : {Bytes{0}, size / 256_KiB * 256_KiB, size - 1}) {
        auto* byte = static_cast<unsigned char*>(to_pointer(address + at));
        *byte ^= 1;
        EXPECT_EQ(content.sample_mismatch(address, size, size, StreamHandle{0}), at) << size;
        *byte ^= 1;
      }
    }
  }
  device->unmap(address, 4_MiB);
  device->release(page, 4_MiB);
  device->release_address(address, 4_MiB);
}

TEST(DevicesUnderTest, TheHostIsAlwaysOne) {
  const auto kinds = devices_under_test();
  ASSERT_FALSE(kinds.empty());
  EXPECT_EQ(kinds[0].name, "Host");
  EXPECT_TRUE(kinds[0].missing().empty());
  const auto device = kinds[0].make(64_MiB);
  EXPECT_DOUBLE_EQ(fraction_for(*device, 16_MiB), 0.25);
  EXPECT_DOUBLE_EQ(fraction_for(*device, 1_GiB), 1.0);
}

}  // namespace
}  // namespace lowtide::testing
