// The allocator where memory is short: what it tries, what it leaves behind when it fails, and how it uses pages of
// either size.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "allocator/caching_allocator.h"
#include "allocator/errors.h"
#include "allocator/heap.h"
#include "allocator/host_device.h"
#include "tests/support/faulty_device.h"
#include "tests/support/latch.h"

namespace lowtide {
namespace {

using testing::FaultyDevice;
using testing::LiveCounts;
using testing::StreamLatch;

/// An allocator on a device of a size the test chooses.
struct Machine {
  explicit Machine(Bytes memory, AllocatorOptions options = {}, Bytes granularity = 2_MiB)
      : device(make_host_device({.index = 0, .memory = memory, .granularity = granularity})),
        stream(device.create_stream()),
        other(device.create_stream()),
        baseline(device.live()),
        allocator(std::make_unique<CachingAllocator>(device, options)) {}
  ~Machine() {
    check();
    allocator.reset();
    EXPECT_EQ(device.live(), baseline);
    EXPECT_EQ(device.bad_releases(), 0u);
  }
  void check() {
    allocator->check();
    MutexLock lock(allocator->heap().mutex);
    allocator->heap().check_pages();
  }
  DeviceAddress allocate(Bytes size) { return allocator->allocate(size, stream); }
  std::int64_t reserved() { return allocator->stats().reserved_bytes[0].current; }

  FaultyDevice device;
  const StreamHandle stream, other;
  const LiveCounts baseline;
  std::unique_ptr<CachingAllocator> allocator;
};

TEST(MemoryPressure, RunningOutLeavesEverythingAsBeforeAndARetryAfterFreeWorks) {
  Machine s(128_MiB);
  std::vector<DeviceAddress> blocks;
  for (int i = 0; i < 12; ++i) blocks.push_back(s.allocate(10_MiB));
  const auto before = s.allocator->stats();
  EXPECT_THROW(s.allocate(20_MiB), OutOfMemory);
  s.check();
  const auto after = s.allocator->stats();
  EXPECT_EQ(after.allocated_bytes[0].current, before.allocated_bytes[0].current);
  EXPECT_EQ(after.allocations[0].current, before.allocations[0].current);
  EXPECT_EQ(after.reserved_bytes[0].current, before.reserved_bytes[0].current)
      << "and gave back what it had tried with";
  EXPECT_EQ(after.num_ooms, before.num_ooms + 1);
  EXPECT_GT(after.num_alloc_retries, before.num_alloc_retries);
  for (const auto block : blocks) EXPECT_TRUE(s.allocator->is_resident(block));
  s.allocator->free(blocks[3]);
  s.allocator->free(blocks[4]);
  EXPECT_EQ(s.allocate(20_MiB), blocks[3]) << "the two neighbours merged";
}

TEST(MemoryPressure, TheMessageSaysWhatIsHeldAndWhatIsFree) {
  Machine s(64_MiB);
  s.allocate(40_MiB);
  try {
    s.allocate(50_MiB);
    FAIL() << "more than there is";
  } catch (const OutOfMemory& error) {
    const std::string message = error.what();
    for (const char* part : {"50.00 MiB", "40.00 MiB", "24.00 MiB", "host device 0"}) {
      EXPECT_NE(message.find(part), std::string::npos) << message;
    }
    EXPECT_EQ(error.requested(), 50_MiB);
  }
}

TEST(MemoryPressure, SixtyPercentThenSeventyFive) {
  // A cache that keeps the first block's pages apart from the second's would need 135 %.
  Machine s(1_GiB);
  const auto first = s.allocate(614_MiB);
  s.allocator->free(first);
  const auto second = s.allocate(768_MiB);
  EXPECT_LE(s.reserved(), static_cast<std::int64_t>(800_MiB));
  s.allocator->free(second);
}

TEST(MemoryPressure, GrowingSizesReuseWhatTheyOutgrew) {
  Machine s(1_GiB);
  for (Bytes size = 8_MiB; size < 900_MiB; size = size * 9 / 8 / 512 * 512) s.allocator->free(s.allocate(size));
  EXPECT_LE(s.reserved(), static_cast<std::int64_t>(960_MiB));
  EXPECT_EQ(s.allocator->stats().num_ooms, 0);
}

TEST(MemoryPressure, ABlockThatStaysInTheMiddleLeavesRoomForLargeOnes) {
  Machine s(512_MiB);
  const auto first = s.allocate(352_MiB);
  const auto stays = s.allocate(2_MiB);
  s.allocator->free(first);
  // Longer than the hole before the block that stays, and than what was left of the memory behind it.
  const auto second = s.allocate(400_MiB);
  s.allocator->free(second);
  s.allocator->free(s.allocate(480_MiB));
  EXPECT_TRUE(s.allocator->is_resident(stays));
}

TEST(MemoryPressure, FragmentsOfManyBlocksBecomeOneLargeBlock) {
  Machine s(256_MiB);
  CachingAllocator neighbour(s.device);
  std::vector<DeviceAddress> blocks;
  for (int i = 0; i < 20; ++i) blocks.push_back(s.allocate(4_MiB));
  neighbour.allocate(256_MiB - static_cast<Bytes>(s.reserved()), s.other);
  for (std::size_t i = 0; i < blocks.size(); i += 2) s.allocator->free(blocks[i]);
  // All free memory is in pieces of 4 MiB between blocks: its pages move to where they lie side by side.
  const auto large = s.allocate(40_MiB);
  EXPECT_TRUE(s.allocator->is_resident(large));
}

TEST(MemoryPressure, LargePagesOvershootOnlyWhereMemoryIsPlenty) {
  const auto reserved_for_64_mib = [](Bytes memory) {
    Machine s(memory);
    for (int i = 0; i < 16; ++i) s.allocate(4_MiB);
    return s.reserved();
  };
  EXPECT_GT(reserved_for_64_mib(2048_MiB), 64_MiB);
  EXPECT_EQ(reserved_for_64_mib(128_MiB), 64_MiB);
}

TEST(MemoryPressure, SmallPagesServeWhereNoLargeOneIsLeft) {
  Machine s(46_MiB);
  const auto block = s.allocate(44_MiB);
  EXPECT_TRUE(s.allocator->is_resident(block));
  EXPECT_THROW(s.allocate(4_MiB), OutOfMemory);
  s.allocator->free(block);
}

TEST(MemoryPressure, FreePagesOfOneSizeBecomeTheOther) {
  Machine s(64_MiB);
  const auto large = s.allocate(64_MiB);
  EXPECT_EQ(s.allocator->stats().pages, 2) << "two large pages";
  s.allocator->free(large);
  std::vector<DeviceAddress> small;
  for (int i = 0; i < 64; ++i) small.push_back(s.allocator->allocate(1_MiB, s.other));
  EXPECT_GT(s.allocator->stats().pages, 2);
  for (const auto block : small) s.allocator->free(block);
  s.allocator->free(s.allocate(64_MiB));
}

TEST(MemoryPressure, MemoryOfAnotherStreamIsWaitedForBeforeFailing) {
  Machine s(64_MiB);
  const auto block = s.allocate(60_MiB);
  StreamLatch latch(s.device, s.stream);
  s.allocator->free(block);
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    latch.release();
  });
  const auto elsewhere = s.allocator->allocate(60_MiB, s.other);
  opener.join();
  EXPECT_TRUE(s.allocator->is_resident(elsewhere));
  EXPECT_GE(s.allocator->stats().num_alloc_retries, 1);
}

TEST(MemoryPressure, AFreeThatIsPendingIsWaitedForBeforeFailing) {
  Machine s(64_MiB);
  const auto block = s.allocate(60_MiB);
  s.allocator->record_stream(block, s.other);
  StreamLatch latch(s.device, s.other);
  s.allocator->free(block);
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    latch.release();
  });
  EXPECT_EQ(s.allocate(60_MiB), block);
  opener.join();
}

TEST(MemoryPressure, ARefusalOfTheDriverIsOutOfMemoryNotAnEndlessLoop) {
  Machine s(64_MiB);
  CachingAllocator neighbour(s.device);
  const auto hog = neighbour.allocate(60_MiB, s.other);
  EXPECT_THROW(s.allocate(8_MiB), OutOfMemory);
  neighbour.free(hog);
  neighbour.trim();
  EXPECT_NE(s.allocate(8_MiB), DeviceAddress{});
}

TEST(MemoryPressure, PagesLargerThanTheGranularity) {
  // As on a device whose granularity is finer than the pages: room is made in whole pages all the same.
  Machine s(8_MiB, {.page_sizes = {.small = 64_KiB, .large = 512_KiB}, .small_limit = 16_KiB}, 4_KiB);
  std::vector<DeviceAddress> blocks;
  for (Bytes i = 0; i < 60; ++i) blocks.push_back(s.allocate(20_KiB + i * 1_KiB));
  for (std::size_t i = 0; i < blocks.size(); i += 2) s.allocator->free(blocks[i]);
  s.device.synchronize(s.stream);
  // The holes leave their pages to others, and blocks grow down to free memory above a hole.
  const auto elsewhere = s.allocator->allocate(1_MiB, s.other);
  for (Bytes i = 0; i < 20; ++i) s.allocator->free(s.allocate(90_KiB + i * 5_KiB));
  s.check();
  s.allocator->free(elsewhere);
  for (std::size_t i = 1; i < blocks.size(); i += 2) s.allocator->free(blocks[i]);
  s.allocator->trim();
  EXPECT_EQ(s.device.live().pages, 0u);
}

TEST(MemoryPressure, ChurnOfManySizesStaysWithinWhatIsLive) {
  // Live bytes never pass 40 MiB of 64 MiB, so pages that stay behind live blocks must not use up the rest.
  Machine s(64_MiB);
  std::vector<std::pair<DeviceAddress, Bytes>> blocks;
  Bytes live = 0;
  std::uint32_t random = 12345;
  const auto next = [&](Bytes limit) {
    random = random * 1664525u + 1013904223u;
    return (random >> 8) % limit;
  };
  for (int i = 0; i < 4000; ++i) {
    const Bytes size = Bytes{512} << next(14);
    if (live + size <= 40_MiB) {
      blocks.emplace_back(s.allocate(size), size);
      live += size;
    }
    while (!blocks.empty() && (live > 36_MiB || next(3) == 0)) {
      const std::size_t pick = next(blocks.size());
      EXPECT_TRUE(s.allocator->free(blocks[pick].first));
      live -= blocks[pick].second;
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(pick));
    }
  }
  EXPECT_EQ(s.allocator->stats().num_ooms, 0);
}

}  // namespace
}  // namespace lowtide
