// What CachingAllocator and RegionMover promise together, asked on every device. Content is written and read by copies,
// so nothing here depends on where the memory is.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "allocator/caching_allocator.h"
#include "allocator/errors.h"
#include "allocator/heap.h"
#include "pool/region_mover.h"
#include "tests/support/block_content.h"
#include "tests/support/devices.h"
#include "tests/support/faulty_device.h"
#include "tests/support/latch.h"
#include "tests/support/patterns.h"
#include "tests/support/pinned_buffer.h"

namespace lowtide {
namespace {

using testing::BlockContent;
using testing::DeviceKindUnderTest;
using testing::FaultyDevice;
using testing::LiveCounts;
using testing::PinnedBuffer;
using testing::StreamLatch;

constexpr Bytes kMemory = 256_MiB;
constexpr OwnerId kAdam{1};
constexpr OwnerId kCache{2};

/// Ends with nothing alive on the device.
class AllocatorContract : public ::testing::TestWithParam<DeviceKindUnderTest> {
 protected:
  void SetUp() override {
    const std::string missing = GetParam().missing();
    if (!missing.empty()) GTEST_SKIP() << GetParam().name << ": " << missing;
    device_ = std::make_unique<FaultyDevice>(GetParam().make(kMemory));
    stream_ = device_->create_stream();
    other_ = device_->create_stream();
    content_ = std::make_unique<BlockContent>(*device_);
    allocator_ = std::make_unique<CachingAllocator>(*device_);
    allocator_->set_memory_fraction(testing::fraction_for(*device_, kMemory));
    mover_ = std::make_unique<RegionMover>(*allocator_, budget_, HostMemoryOptions{.slice = 8_MiB, .threads = 2});
  }

  void TearDown() override {
    if (device_ == nullptr) return;
    for (const Block& block : blocks_) EXPECT_TRUE(allocator_->free(block.address));
    check();
    EXPECT_EQ(allocator_->stats().allocated_bytes[0].current, 0);
    images_.clear();
    mover_.reset();
    allocator_.reset();
    content_.reset();
    device_->destroy_stream(other_);
    device_->destroy_stream(stream_);
    EXPECT_EQ(device_->live(), LiveCounts{});
    EXPECT_EQ(device_->bad_releases(), 0u);
    EXPECT_EQ(budget_.used(), 0u);
  }

  void check() {
    EXPECT_NO_THROW(allocator_->check());
    MutexLock lock(allocator_->heap().mutex);
    EXPECT_NO_THROW(allocator_->heap().check_pages());
  }

  struct Block {
    DeviceAddress address;
    Bytes size;
    std::uint64_t cookie;
    StreamHandle stream;
    OwnerId owner;
  };

  Block allocate(Bytes size, OwnerId owner = kNoOwner) { return allocate(size, owner, stream_); }
  Block allocate(Bytes size, OwnerId owner, StreamHandle stream) {
    const Block block{allocator_->allocate(size, stream, owner), size, ++last_cookie_, stream, owner};
    content_->fill(block.address, size, block.cookie, stream);
    blocks_.push_back(block);
    return block;
  }
  void free(const Block& block) {
    EXPECT_TRUE(allocator_->free(block.address));
    std::erase_if(blocks_, [&](const Block& other) { return other.address == block.address; });
  }
  bool intact(const Block& block) {
    return allocator_->is_resident(block.address) &&
           !content_->mismatch(block.address, block.size, block.cookie, block.stream).has_value();
  }
  void expect_all_intact() {
    for (const Block& block : blocks_) EXPECT_TRUE(intact(block)) << block.size << " bytes of " << block.cookie;
  }
  void evict(OwnerId owner, std::vector<StreamHandle> after = {}) { mover_->evict(owner, after, images_); }
  void restore(OwnerId owner) { mover_->restore(owner, images_); }
  Bytes evicted(OwnerId owner) { return RegionPages(*allocator_).usage(owner).evicted; }

  std::unique_ptr<FaultyDevice> device_;
  StreamHandle stream_{}, other_{};
  HostBudget budget_{1_GiB};
  std::unique_ptr<BlockContent> content_;
  std::unique_ptr<CachingAllocator> allocator_;
  std::unique_ptr<RegionMover> mover_;
  HostImages images_;
  std::vector<Block> blocks_;
  std::uint64_t last_cookie_ = 0;
};

TEST_P(AllocatorContract, BlocksHoldTheirContent) {
  for (Bytes size = 1; size < 40_MiB; size = size * 3 + 1) allocate(size);
  expect_all_intact();
  for (int i = 0; i < 5; ++i) free(blocks_[static_cast<std::size_t>(i)]);
  for (Bytes size = 3; size < 10_MiB; size = size * 5) allocate(size, kNoOwner, other_);
  expect_all_intact();
}

TEST_P(AllocatorContract, ReuseOnTheSameStreamKeepsTheOrderOfItsWork) {
  const Bytes size = 2_MiB;
  PinnedBuffer first(*device_, size), second(*device_, size), read(*device_, size);
  std::fill_n(first.data(), size, 1);
  std::fill_n(second.data(), size, 2);
  {
    StreamLatch latch(*device_, stream_);
    const auto one = allocator_->allocate(size, stream_);
    device_->copy_to_device(one, first.data(), size, stream_);
    device_->copy_to_host(read.data(), one, size, stream_);
    allocator_->free(one);
    const auto two = allocator_->allocate(size, stream_);
    EXPECT_EQ(two, one) << "at once, though its work has not begun";
    device_->copy_to_device(two, second.data(), size, stream_);
    allocator_->free(two);
  }
  device_->synchronize(stream_);
  EXPECT_TRUE(std::all_of(read.data(), read.data() + size, [](unsigned char byte) { return byte == 1; }));
}

TEST_P(AllocatorContract, ARecordedStreamReadsOldBytesThoughTheBlockWasFreed) {
  const Bytes size = 2_MiB;
  PinnedBuffer read(*device_, size);
  const Block block = allocate(size);
  allocator_->record_stream(block.address, other_);
  {
    StreamLatch latch(*device_, other_);
    device_->copy_to_host(read.data(), block.address, size, other_);
    const std::uint64_t cookie = block.cookie;
    free(block);
    allocate(size);
    allocate(size);
    latch.release();
    device_->synchronize(other_);
    EXPECT_TRUE(testing::has_pattern(read.data(), size, cookie));
  }
  expect_all_intact();
}

TEST_P(AllocatorContract, MemoryMovesBetweenStreams) {
  const Block block = allocate(200_MiB);
  free(block);
  allocate(200_MiB, kNoOwner, other_);
  expect_all_intact();
}

TEST_P(AllocatorContract, EvictAndRestoreKeepBytesAndAddresses) {
  for (const Bytes size : {Bytes{1}, Bytes{511}, Bytes{100'000}, 1_MiB, 5_MiB + 1, 33_MiB}) {
    allocate(size, kAdam);
    allocate(size, kAdam, other_);
    allocate(size, kCache);
  }
  allocate(3_MiB);
  const auto before = allocator_->live_blocks(kAdam);
  const Bytes live = RegionPages(*allocator_).usage(kAdam).allocated;
  for (int round = 0; round < 3; ++round) {
    evict(kAdam);
    EXPECT_EQ(evicted(kAdam), live);
    EXPECT_EQ(evicted(kCache), 0u);
    EXPECT_EQ(allocator_->stats().evicted_bytes.current, static_cast<std::int64_t>(live));
    check();
    for (const Block& block : blocks_) EXPECT_EQ(allocator_->is_resident(block.address), block.owner != kAdam);
    restore(kAdam);
    EXPECT_EQ(evicted(kAdam), 0u);
    EXPECT_TRUE(images_.empty());
    expect_all_intact();
    check();
  }
  const auto after = allocator_->live_blocks(kAdam);
  ASSERT_EQ(after.size(), before.size());
  for (std::size_t i = 0; i < after.size(); ++i) EXPECT_EQ(after[i].address, before[i].address);
}

TEST_P(AllocatorContract, HolesBetweenBlocksAreNotCopied) {
  std::vector<Block> blocks;
  for (int i = 0; i < 40; ++i) blocks.push_back(allocate(1_MiB + 512, kAdam));
  for (std::size_t i = 1; i < blocks.size(); i += 2) free(blocks[i]);
  const Bytes before = mover_->stats().evicted_bytes_total;
  evict(kAdam);
  EXPECT_EQ(mover_->stats().evicted_bytes_total - before, 20 * (1_MiB + 512));
  EXPECT_EQ(images_.bytes(), round_up(20 * (1_MiB + 512), 4_KiB)) << "host memory is exact to the page";
  restore(kAdam);
  expect_all_intact();
}

TEST_P(AllocatorContract, EvictedMemoryIsOthersToUse) {
  allocate(180_MiB, kAdam);
  EXPECT_THROW(allocator_->allocate(180_MiB, stream_), OutOfMemory);
  evict(kAdam);
  const Block block = allocate(180_MiB);
  EXPECT_THROW(restore(kAdam), OutOfMemory);
  check();
  EXPECT_EQ(evicted(kAdam), 180_MiB);
  EXPECT_TRUE(intact(block));
  free(block);
  restore(kAdam);
  expect_all_intact();
}

TEST_P(AllocatorContract, EvictWaitsForTheStreamsItIsTold) {
  const Block block = allocate(2_MiB, kAdam);
  PinnedBuffer late(*device_, 2_MiB);
  testing::fill_pattern(late.data(), 2_MiB, 77);
  StreamLatch latch(*device_, other_);
  device_->copy_to_device(block.address, late.data(), 2_MiB, other_);
  std::thread evicting([&] { evict(kAdam, {other_}); });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_EQ(evicted(kAdam), 0u);
  latch.release();
  evicting.join();
  EXPECT_EQ(evicted(kAdam), 2_MiB);
  restore(kAdam);
  EXPECT_FALSE(content_->mismatch(block.address, 2_MiB, 77, stream_));
  blocks_.back().cookie = 77;
}

TEST_P(AllocatorContract, BlocksComeAndGoWhileTheRegionIsAway) {
  std::vector<Block> blocks;
  for (int i = 0; i < 12; ++i) blocks.push_back(allocate(3_MiB + static_cast<Bytes>(i) * 100'000, kAdam));
  evict(kAdam);
  for (std::size_t i = 0; i < blocks.size(); i += 3) free(blocks[i]);
  allocate(3_MiB, kAdam);
  check();
  evict(kAdam);
  check();
  free(blocks[1]);
  restore(kAdam);
  expect_all_intact();
  check();
}

TEST_P(AllocatorContract, ARegionThatDiesAwayLeavesNothing) {
  const Block a = allocate(3_MiB, kAdam);
  const Block b = allocate(100, kAdam);
  evict(kAdam);
  free(a);
  free(b);
  EXPECT_EQ(evicted(kAdam), 0u);
  images_.clear();
  EXPECT_TRUE(allocator_->release_arenas(kAdam)) << "its pages are gone, so there is nothing to wait for";
  check();
}

TEST_P(AllocatorContract, RegionsMoveAtOnceOnDifferentThreads) {
  for (int i = 0; i < 8; ++i) {
    allocate(5_MiB, kAdam);
    allocate(5_MiB, kCache, other_);
  }
  HostImages cache_images;
  std::thread other([&] {
    for (int i = 0; i < 5; ++i) {
      mover_->evict(kCache, {}, cache_images);
      mover_->restore(kCache, cache_images);
    }
  });
  for (int i = 0; i < 5; ++i) {
    evict(kAdam);
    restore(kAdam);
  }
  other.join();
  expect_all_intact();
}

TEST_P(AllocatorContract, RandomTrafficWithEvictions) {
  std::mt19937 random(20240607);
  const auto below = [&](std::size_t limit) { return static_cast<std::size_t>(random() % limit); };
  const OwnerId owners[] = {kNoOwner, kAdam, kCache};
  Bytes live = 0;
  for (int step = 0; step < 300; ++step) {
    const std::size_t what = below(12);
    if (what < 6) {
      const Bytes size = 1 + below(Bytes{1} << (4 + below(19)));
      if (live + size > 120_MiB) continue;
      live += size;
      allocate(size, owners[below(3)], below(2) == 0 ? stream_ : other_);
    } else if (what < 9 && !blocks_.empty()) {
      const Block block = blocks_[below(blocks_.size())];
      live -= block.size;
      if (below(2) == 0) allocator_->record_stream(block.address, other_);
      free(block);
    } else if (what == 9) {
      evict(owners[1 + below(2)]);
    } else if (what == 10) {
      const OwnerId owner = owners[1 + below(2)];
      restore(owner);
      for (const Block& block : blocks_) {
        ASSERT_TRUE(block.owner != owner || intact(block)) << "step " << step;
      }
    } else if (below(4) == 0) {
      allocator_->trim();
    }
    if (step % 10 == 0) check();
  }
  restore(kAdam);
  restore(kCache);
  expect_all_intact();
}

INSTANTIATE_TEST_SUITE_P(Device, AllocatorContract, ::testing::ValuesIn(testing::devices_under_test()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace lowtide
