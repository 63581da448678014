#include "allocator/caching_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "allocator/address_owners.h"
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

/// Ends with nothing alive on the device but the fixture's streams.
class CachingAllocatorTest : public ::testing::Test {
 protected:
  explicit CachingAllocatorTest(Bytes memory = 1_GiB, Bytes granularity = 2_MiB, AllocatorOptions options = {})
      : device_(make_host_device({.index = 0, .memory = memory, .granularity = granularity})),
        stream_(device_.create_stream()),
        other_(device_.create_stream()),
        baseline_(device_.live()),
        allocator_(std::make_unique<CachingAllocator>(device_, options)) {}

  void TearDown() override {
    check();
    allocator_.reset();
    EXPECT_EQ(device_.live(), baseline_);
    EXPECT_EQ(device_.bad_releases(), 0u);
  }

  DeviceAddress allocate(Bytes size) { return allocator_->allocate(size, stream_); }
  DeviceAddress allocate(Bytes size, StreamHandle stream) { return allocator_->allocate(size, stream); }
  void free(DeviceAddress address) { EXPECT_TRUE(allocator_->free(address)); }
  void check() {
    allocator_->check();
    Heap& heap = allocator_->heap();
    MutexLock lock(heap.mutex);
    heap.check_pages();
  }
  std::int64_t allocated() { return allocator_->stats().allocated_bytes[0].current; }
  std::int64_t reserved() { return allocator_->stats().reserved_bytes[0].current; }

  FaultyDevice device_;
  const StreamHandle stream_, other_;
  const LiveCounts baseline_;
  std::unique_ptr<CachingAllocator> allocator_;
};

std::int64_t signed_bytes(Bytes bytes) { return static_cast<std::int64_t>(bytes); }

// Sizes and places.

TEST_F(CachingAllocatorTest, NoBytesNeedNoMemory) {
  EXPECT_EQ(allocate(0), DeviceAddress{});
  EXPECT_TRUE(allocator_->free(DeviceAddress{}));
  EXPECT_EQ(device_.live().pages, 0u);
}

TEST_F(CachingAllocatorTest, EverySizeGetsAnAlignedBlockOfItsOwn) {
  std::vector<std::pair<DeviceAddress, Bytes>> blocks;
  for (const Bytes size : {Bytes{1}, Bytes{511}, Bytes{512}, Bytes{513}, Bytes{1023}, 1_MiB - 1, 1_MiB, 1_MiB + 1,
                           2_MiB, 3_MiB + 7, 32_MiB, 33_MiB}) {
    const DeviceAddress address = allocate(size);
    EXPECT_EQ(static_cast<std::uintptr_t>(address) % 512, 0u) << size;
    const auto info = allocator_->find(address);
    ASSERT_TRUE(info) << size;
    EXPECT_EQ(info->requested, size);
    EXPECT_EQ(info->size, round_up(size, 512)) << "no rounding beyond the alignment";
    EXPECT_EQ(info->stream, stream_);
    blocks.emplace_back(address, info->size);
  }
  std::ranges::sort(blocks);
  for (std::size_t i = 1; i < blocks.size(); ++i) {
    EXPECT_LE(blocks[i - 1].first + blocks[i - 1].second, blocks[i].first) << "blocks overlap";
  }
  for (const auto& [address, size] : blocks) free(address);
  EXPECT_EQ(allocated(), 0);
}

TEST_F(CachingAllocatorTest, SmallAndLargeBlocksLiveApart) {
  const auto small = allocate(1_MiB);
  const auto large = allocate(1_MiB + 1);
  const auto stats = allocator_->stats();
  EXPECT_EQ(stats.allocations[1].current, 1);
  EXPECT_EQ(stats.allocations[2].current, 1);
  EXPECT_EQ(stats.allocated_bytes[1].current, signed_bytes(1_MiB));
  EXPECT_EQ(allocator_->snapshot().size(), 2u);
  free(small);
  free(large);
}

TEST_F(CachingAllocatorTest, AnAbsurdSizeIsRefusedWithoutHarm) {
  EXPECT_THROW(allocate(~Bytes{0}), OutOfMemory);
  EXPECT_THROW(allocate(Bytes{1} << 59), OutOfMemory);
  EXPECT_EQ(allocated(), 0);
}

TEST_F(CachingAllocatorTest, OnlyTheStartOfALiveBlockIsFreed) {
  const auto block = allocate(4_KiB);
  EXPECT_FALSE(allocator_->free(block + 512));
  EXPECT_FALSE(allocator_->free(DeviceAddress{4096}));
  free(block);
  EXPECT_FALSE(allocator_->free(block)) << "freed twice";
}

TEST_F(CachingAllocatorTest, FindKnowsInnerAddresses) {
  const auto block = allocate(4_KiB);
  EXPECT_EQ(allocator_->find(block + 4095)->address, block);
  EXPECT_FALSE(allocator_->find(block + 4_KiB));
  EXPECT_FALSE(allocator_->find(DeviceAddress{4096}));
  EXPECT_TRUE(allocator_->is_resident(block));
  EXPECT_FALSE(allocator_->is_resident(block + 512));
  free(block);
  EXPECT_FALSE(allocator_->find(block));
}

TEST_F(CachingAllocatorTest, AnOwnersBlocksStayAmongThemselves) {
  const OwnerId adam{1};
  const auto mine = allocator_->allocate(2_MiB, stream_, adam);
  const auto another = allocator_->allocate(2_MiB, stream_, OwnerId{2});
  const auto ordinary = allocate(2_MiB);
  ASSERT_EQ(allocator_->live_blocks(adam).size(), 1u);
  EXPECT_EQ(allocator_->live_blocks(adam)[0].address, mine);
  EXPECT_EQ(allocator_->live_blocks(kNoOwner)[0].address, ordinary);
  free(mine);
  const auto next = allocate(2_MiB);
  EXPECT_NE(next, mine) << "an address of a region is never handed out outside it";
  free(next);
  free(another);
  free(ordinary);
}

// Order of streams.

TEST_F(CachingAllocatorTest, AFreedBlockServesItsOwnStreamAtOnce) {
  StreamLatch latch(device_, stream_);
  const auto block = allocate(8_MiB);
  free(block);
  EXPECT_EQ(allocate(8_MiB), block);
  free(block);
}

TEST_F(CachingAllocatorTest, AnotherStreamNeverGetsTheAddress) {
  const auto block = allocate(8_MiB);
  free(block);
  const auto elsewhere = allocate(8_MiB, other_);
  EXPECT_NE(elsewhere, block);
  free(elsewhere);
}

TEST_F(CachingAllocatorTest, PagesChangeStreamsOnlyAfterTheWorkThatUsedThem) {
  const auto block = allocate(2_MiB);
  StreamLatch latch(device_, stream_);
  free(block);
  const auto created = device_.calls("create");
  const auto while_held = allocate(2_MiB, other_);
  EXPECT_EQ(device_.calls("unmap"), 0u) << "work on the first stream may still use the page";
  EXPECT_EQ(device_.calls("create"), created + 1);
  latch.release();
  device_.synchronize(stream_);
  const auto after = allocate(2_MiB, other_);
  EXPECT_EQ(device_.calls("unmap"), 1u);
  EXPECT_EQ(device_.calls("create"), created + 1) << "the idle page moved instead";
  free(while_held);
  free(after);
}

TEST_F(CachingAllocatorTest, ARecordedStreamDefersTheFree) {
  const auto block = allocate(2_MiB);
  EXPECT_TRUE(allocator_->record_stream(block, other_));
  StreamLatch latch(device_, other_);
  free(block);
  EXPECT_EQ(allocated(), 0);
  EXPECT_EQ(allocator_->stats().active_bytes[0].current, signed_bytes(2_MiB));
  EXPECT_FALSE(allocator_->free(block)) << "it was freed already";
  EXPECT_FALSE(allocator_->find(block));
  const auto meanwhile = allocate(2_MiB);
  EXPECT_NE(meanwhile, block);
  latch.release();
  device_.synchronize(other_);
  EXPECT_EQ(allocate(2_MiB), block) << "the event passed";
  EXPECT_EQ(allocator_->stats().active_bytes[0].current, signed_bytes(4_MiB));
  free(block);
  free(meanwhile);
}

TEST_F(CachingAllocatorTest, EveryRecordedStreamIsWaitedFor) {
  const auto third = device_.create_stream();
  const auto block = allocate(2_MiB);
  allocator_->record_stream(block, other_);
  allocator_->record_stream(block, third);
  {
    StreamLatch latch_other(device_, other_);
    StreamLatch latch_third(device_, third);
    free(block);
    latch_other.release();
    device_.synchronize(other_);
    const auto meanwhile = allocate(2_MiB);
    EXPECT_NE(meanwhile, block);
    free(meanwhile);
  }
  device_.synchronize(third);
  // The free that one event of two has passed for is still pending when the allocator ends.
  allocator_.reset();
  device_.destroy_stream(third);
  EXPECT_EQ(device_.live(), baseline_);
  EXPECT_EQ(device_.bad_releases(), 0u);
  allocator_ = std::make_unique<CachingAllocator>(device_);
}

TEST_F(CachingAllocatorTest, RecordingTheOwnStreamChangesNothing) {
  const auto block = allocate(2_MiB);
  EXPECT_TRUE(allocator_->record_stream(block, stream_));
  StreamLatch latch(device_, stream_);
  free(block);
  EXPECT_EQ(allocate(2_MiB), block);
  free(block);
}

TEST_F(CachingAllocatorTest, RecordStreamOnForeignMemoryIsIgnored) {
  EXPECT_FALSE(allocator_->record_stream(DeviceAddress{4096}, other_));
}

TEST_F(CachingAllocatorTest, AStreamRecordedTwiceIsWaitedForOnce) {
  const auto block = allocate(2_MiB);
  allocator_->record_stream(block, other_);
  allocator_->record_stream(block, other_);
  const auto records = device_.calls("record");
  free(block);
  EXPECT_EQ(device_.calls("record"), records + 1);
}

// Steady state.

TEST_F(CachingAllocatorTest, TheSteadyStateCallsNoDriver) {
  std::vector<DeviceAddress> blocks(20);
  const auto round = [&] {
    for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i] = allocate((i + 1) * 300'000);
    for (std::size_t i = 0; i < blocks.size(); ++i) free(blocks[(i * 7) % blocks.size()]);
  };
  round();
  device_.fail_at(0);  // counts from here
  for (int i = 0; i < 50; ++i) round();
  EXPECT_EQ(device_.fallible_calls(), 0u);
}

TEST_F(CachingAllocatorTest, TheSteadyStateWithRecordedStreamsMakesNoEvents) {
  const auto round = [&] {
    const auto block = allocate(2_MiB);
    allocator_->record_stream(block, other_);
    free(block);
    device_.synchronize(other_);
  };
  for (int i = 0; i < 3; ++i) round();
  const auto events = device_.calls("create_event");
  const auto pages = device_.calls("create");
  for (int i = 0; i < 50; ++i) round();
  EXPECT_EQ(device_.calls("create_event"), events);
  EXPECT_EQ(device_.calls("create"), pages);
}

// Trim, limits.

TEST_F(CachingAllocatorTest, TrimGivesUnusedPagesToTheDriver) {
  const auto kept = allocate(2_MiB);
  const auto gone = allocate(40_MiB);
  const auto held = reserved();
  free(gone);
  EXPECT_EQ(reserved(), held) << "cached";
  const Bytes released = allocator_->trim();
  EXPECT_GE(released, 32_MiB);
  EXPECT_EQ(reserved(), held - signed_bytes(released));
  EXPECT_EQ(allocator_->stats().free_page_bytes, 0u);
  EXPECT_EQ(allocator_->trim(), 0u);
  free(kept);
  allocator_->trim();
  EXPECT_EQ(device_.live().pages, 0u);
}

TEST_F(CachingAllocatorTest, TrimWaitsForStreamsAndEndsPendingFrees) {
  const auto block = allocate(2_MiB);
  allocator_->record_stream(block, other_);
  StreamLatch latch(device_, other_);
  StreamLatch own(device_, stream_);
  free(block);
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_EQ(device_.calls("unmap"), 0u) << "not before the streams are past it";
    latch.release();
    own.release();
  });
  EXPECT_EQ(allocator_->trim(), 2_MiB);
  opener.join();
  EXPECT_EQ(device_.live().pages, 0u);
}

TEST_F(CachingAllocatorTest, TheMemoryFractionLimitsWhatIsHeld) {
  EXPECT_EQ(allocator_->memory_fraction(), 1.0);
  EXPECT_THROW(allocator_->set_memory_fraction(-0.1), Misuse);
  EXPECT_THROW(allocator_->set_memory_fraction(1.5), Misuse);
  EXPECT_THROW(allocator_->set_memory_fraction(0.0 / 0.0), Misuse);
  allocator_->set_memory_fraction(0.25);  // 256 MiB
  const auto block = allocate(200_MiB);
  try {
    allocate(100_MiB);
    FAIL() << "beyond the limit";
  } catch (const OutOfMemory& error) {
    EXPECT_NE(std::string(error.what()).find("256.00 MiB"), std::string::npos) << error.what();
  }
  EXPECT_LE(reserved(), signed_bytes(256_MiB));
  allocator_->set_memory_fraction(1.0);
  const auto more = allocate(100_MiB);
  free(block);
  free(more);
  allocator_->set_memory_fraction(0.0);
  allocator_->trim();
  EXPECT_THROW(allocate(1), OutOfMemory);
}

TEST_F(CachingAllocatorTest, ReclaimersAreAskedBeforeAnAllocationFails) {
  CachingAllocator neighbour(device_);
  DeviceAddress hog = neighbour.allocate(900_MiB, other_);
  int asked = 0;
  allocator_->add_reclaimer([&] {
    ++asked;
    if (hog == DeviceAddress{}) return false;
    neighbour.free(hog);
    hog = DeviceAddress{};
    return neighbour.trim() > 0;
  });
  const auto block = allocate(500_MiB);
  EXPECT_EQ(asked, 1);
  EXPECT_THROW(allocate(900_MiB), OutOfMemory);
  EXPECT_EQ(asked, 2);
  free(block);
}

// Captures.

TEST_F(CachingAllocatorTest, DuringACaptureNothingIsUnmappedAndNoEventAsked) {
  const auto idle = allocate(2_MiB, other_);
  free(idle);
  const auto block = allocate(2_MiB);
  allocator_->record_stream(block, other_);

  const char* const forbidden[] = {"unmap", "query", "record", "synchronize_event", "synchronize_stream"};
  std::vector<std::size_t> before;
  for (const char* call : forbidden) before.push_back(device_.calls(call));
  device_.set_capturing(stream_, true);
  allocator_->begin_capture();
  EXPECT_TRUE(allocator_->capturing());
  free(block);
  const auto during = allocate(2_MiB);
  EXPECT_NE(during, block) << "another stream may still use it";
  free(allocate(64_MiB));
  EXPECT_THROW(allocate(2_GiB), OutOfMemory);
  allocator_->trim();
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_EQ(device_.calls(forbidden[i]), before[i]) << forbidden[i];

  device_.set_capturing(stream_, false);
  allocator_->end_capture();
  EXPECT_FALSE(allocator_->capturing());
  EXPECT_EQ(allocator_->stats().active_bytes[0].current, signed_bytes(4_MiB));
  // The next call records the event that the free could not, and the one after it sees it passed.
  free(allocate(512));
  device_.synchronize(other_);
  free(allocate(512));
  EXPECT_EQ(allocator_->stats().active_bytes[0].current, signed_bytes(2_MiB));
  free(during);
}

TEST_F(CachingAllocatorTest, CapturesNest) {
  allocator_->begin_capture();
  allocator_->begin_capture();
  allocator_->end_capture();
  EXPECT_TRUE(allocator_->capturing());
  allocator_->end_capture();
  EXPECT_FALSE(allocator_->capturing());
}

// Figures.

TEST_F(CachingAllocatorTest, FiguresAddUpAndPeaksStay) {
  const auto small = allocate(1000);
  const auto large = allocate(3_MiB);
  const auto stats = allocator_->stats();
  EXPECT_EQ(stats.allocated_bytes[0].current, signed_bytes(1024 + 3_MiB));
  EXPECT_EQ(stats.requested_bytes[0].current, signed_bytes(1000 + 3_MiB));
  EXPECT_EQ(stats.allocations[0].current, 2);
  EXPECT_EQ(stats.reserved_bytes[0].current, stats.reserved_bytes[1].current + stats.reserved_bytes[2].current);
  EXPECT_EQ(stats.pages, static_cast<std::int64_t>(device_.live().pages));
  free(large);
  const auto after = allocator_->stats();
  EXPECT_EQ(after.allocated_bytes[0].current, 1024);
  EXPECT_EQ(after.allocated_bytes[0].peak, signed_bytes(1024 + 3_MiB));
  EXPECT_EQ(after.allocated_bytes[0].freed, signed_bytes(3_MiB));
  EXPECT_EQ(after.allocated_bytes[0].allocated - after.allocated_bytes[0].freed, after.allocated_bytes[0].current);
  allocator_->reset_peak_stats();
  EXPECT_EQ(allocator_->stats().allocated_bytes[0].peak, 1024);
  allocator_->reset_accumulated_stats();
  EXPECT_EQ(allocator_->stats().allocated_bytes[0].freed, 0);
  EXPECT_EQ(allocator_->stats().allocated_bytes[0].current, 1024);
  free(small);
}

TEST_F(CachingAllocatorTest, ReservedIsWhatTheDeviceLacks) {
  std::vector<DeviceAddress> blocks;
  for (Bytes size = 1; size < 100_MiB; size = size * 3 + 1) blocks.push_back(allocate(size));
  EXPECT_EQ(reserved(), signed_bytes(1_GiB - device_.inner().memory().free));
  for (std::size_t i = 0; i < blocks.size(); i += 2) free(blocks[i]);
  allocator_->trim();
  EXPECT_EQ(reserved(), signed_bytes(1_GiB - device_.inner().memory().free));
  for (std::size_t i = 1; i < blocks.size(); i += 2) free(blocks[i]);
}

TEST_F(CachingAllocatorTest, SnapshotTilesCoverWhatIsMapped) {
  const auto first = allocate(3_MiB);
  const auto hole = allocate(5_MiB);
  const auto last = allocate(7_MiB + 1);
  const auto pending = allocate(2_MiB);
  allocator_->record_stream(pending, other_);
  StreamLatch latch(device_, other_);
  free(hole);
  free(pending);
  const auto arenas = allocator_->snapshot();
  ASSERT_EQ(arenas.size(), 1u);
  EXPECT_EQ(arenas[0].stream, stream_);
  DeviceAddress next = arenas[0].base;
  Bytes covered = 0;
  std::vector<TileKind> kinds;
  for (const auto& tile : arenas[0].tiles) {
    EXPECT_EQ(tile.address, next) << "a gap, though everything is mapped";
    next = tile.address + tile.size;
    covered += tile.size;
    kinds.push_back(tile.kind);
    EXPECT_EQ(tile.pending_free, tile.address == pending);
    if (tile.address == last) {
      EXPECT_EQ(tile.requested, 7_MiB + 1);
    }
  }
  EXPECT_EQ(signed_bytes(covered), allocator_->stats().reserved_bytes[2].current);
  EXPECT_EQ(std::ranges::count(kinds, TileKind::Allocated), 2);
  EXPECT_EQ(std::ranges::count(kinds, TileKind::Retired), 1);
  latch.release();
  free(first);
  free(last);
}

TEST_F(CachingAllocatorTest, APinNeedsALiveBlock) {
  const auto block = allocate(2_MiB);
  allocator_->pin(block, "shared");
  EXPECT_THROW(allocator_->pin(block + 512, "shared"), Misuse);
  free(block);
  EXPECT_THROW(allocator_->pin(block, "shared"), Misuse);
}

TEST_F(CachingAllocatorTest, BookkeepingIsAtMostHalfAPercentAt4KiB) {
  std::vector<DeviceAddress> blocks;
  for (Bytes at = 0; at < 32_MiB; at += 4_KiB) blocks.push_back(allocate(4_KiB));
  const auto full = allocator_->stats();
  EXPECT_LE(full.metadata_bytes, static_cast<Bytes>(full.reserved_bytes[0].current) / 200);
  // Free and used ones in turn are the most tiles there can be.
  for (std::size_t i = 0; i < blocks.size(); i += 2) free(blocks[i]);
  EXPECT_LE(allocator_->stats().metadata_bytes, static_cast<Bytes>(full.reserved_bytes[0].current) / 100);
  for (std::size_t i = 1; i < blocks.size(); i += 2) free(blocks[i]);
}

TEST_F(CachingAllocatorTest, AnAllocationAsksEachStreamOnceHoweverManyFreesWaitForIt) {
  testing::StreamLatch latch(device_, other_);
  for (int i = 0; i < 50; ++i) {
    const auto block = allocate(1_KiB);
    allocator_->record_stream(block, other_);
    free(block);
  }
  const auto before = device_.calls("query");
  const auto block = allocate(1_KiB);
  EXPECT_EQ(device_.calls("query") - before, 1u);
  EXPECT_EQ(allocator_->stats().active_bytes[0].current, signed_bytes(51 * 1_KiB));
  latch.release();
  device_.inner().synchronize(other_);
  free(block);
  free(allocate(1_KiB));
  EXPECT_EQ(allocator_->stats().active_bytes[0].current, 0);
}

TEST_F(CachingAllocatorTest, AddressRangesAreClaimedWhileTheyAreReserved) {
  AddressOwners owners;
  CachingAllocator allocator(device_, {.owners = &owners, .number = 5});
  const OwnerId adam{1};
  const auto block = allocator.allocate(2_MiB, stream_, adam);
  EXPECT_EQ(owners.owner(block + 1), 5);
  EXPECT_EQ(owners.owner(block + 100_MiB), 5) << "the whole address range is ours";
  allocator.free(block);
  allocator.release_arenas(adam);  // finds the page in use or not, as the stream happens to be
  device_.synchronize(stream_);
  EXPECT_TRUE(allocator.release_arenas(adam));
  EXPECT_EQ(owners.owner(block), std::nullopt);
}

TEST_F(CachingAllocatorTest, ArenasOfAnOwnerThatEndedAreReleased) {
  const OwnerId adam{1};
  const auto reservations = device_.live().reservations;
  const auto block = allocator_->allocate(2_MiB, stream_, adam);
  EXPECT_FALSE(allocator_->release_arenas(adam)) << "a block lives there";
  free(block);
  allocator_->release_arenas(adam);  // finds the page in use or not, as the stream happens to be
  device_.synchronize(stream_);
  EXPECT_TRUE(allocator_->release_arenas(adam));
  EXPECT_EQ(device_.live().reservations, reservations);
  EXPECT_EQ(allocator_->stats().free_page_bytes, 2_MiB) << "its page serves others";
  EXPECT_TRUE(allocator_->release_arenas(OwnerId{99}));
}

TEST_F(CachingAllocatorTest, ArenasInUseByAStreamStay) {
  const OwnerId adam{1};
  StreamLatch latch(device_, stream_);
  free(allocator_->allocate(2_MiB, stream_, adam));
  EXPECT_FALSE(allocator_->release_arenas(adam));
  latch.release();
  device_.synchronize(stream_);
  EXPECT_TRUE(allocator_->release_arenas(adam));
}

TEST_F(CachingAllocatorTest, AStreamThatWasDestroyedHarmsNobodyElse) {
  const auto brief = device_.create_stream();
  free(allocate(2_MiB, brief));
  device_.destroy_stream(brief);
  const auto block = allocate(2_MiB);
  free(block);
  EXPECT_NO_THROW(allocator_->trim());
}

TEST_F(CachingAllocatorTest, ThreadsShareIt) {
  std::vector<std::thread> threads;
  for (int id = 0; id < 4; ++id) {
    threads.emplace_back([&, id] {
      const auto stream = id % 2 == 0 ? stream_ : other_;
      for (int i = 0; i < 100; ++i) {
        const auto block = allocator_->allocate(static_cast<Bytes>(1000 * (id + i)), stream);
        allocator_->record_stream(block, other_);
        allocator_->free(block);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(allocated(), 0);
}

}  // namespace
}  // namespace lowtide
