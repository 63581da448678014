// Regions and their guards on the process's host devices. Names are unique per test: regions are process-wide.
#include "pool/offload_region.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "allocator/allocation_scope.h"
#include "allocator/device_registry.h"
#include "allocator/errors.h"
#include "allocator/heap.h"
#include "pool/pool_stats.h"
#include "pool/region_api.h"
#include "tests/support/block_content.h"
#include "tests/support/latch.h"
#include "tests/support/log_capture.h"

namespace lowtide {
namespace {

using testing::BlockContent;
using testing::StreamLatch;

class OffloadRegionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    select_devices(DeviceKind::Host, {.devices = 2, .memory = 256_MiB});
    allocator_ = &allocator_of(0);
    content_.emplace(allocator_->device());
  }

  void TearDown() override {
    EXPECT_EQ(current_owner(), kNoOwner);
    for (const Block& block : blocks_) EXPECT_TRUE(allocator_->free(block.address));
    blocks_.clear();
    allocator_->trim();
    EXPECT_TRUE(Region::all().empty()) << "the test's regions ended with their blocks and handles";
    trim_host();
    EXPECT_EQ(pool_stats(0).pinned_bytes, 0u);
    content_.reset();
    EXPECT_NO_THROW(allocator_->check());
  }

  struct Block {
    DeviceAddress address;
    Bytes size;
    std::uint64_t cookie;
  };

  /// A block in the region open here, or in none, with a pattern in it.
  Block allocate(Bytes size) {
    const Block block{allocator_->allocate(size, stream(0), current_owner()), size, ++last_cookie_};
    content_->fill(block.address, size, block.cookie, stream(0));
    blocks_.push_back(block);
    return block;
  }
  void free(const Block& block) {
    EXPECT_TRUE(allocator_->free(block.address));
    std::erase_if(blocks_, [&](const Block& other) { return other.address == block.address; });
  }
  bool intact(const Block& block) {
    return allocator_->is_resident(block.address) &&
           !content_->mismatch(block.address, block.size, block.cookie, stream(0)).has_value();
  }
  bool all_intact() {
    for (const Block& block : blocks_) {
      if (!intact(block)) return false;
    }
    return true;
  }
  OwnerId owner_of_block(const Block& block) { return allocator_->find(block.address)->owner; }

  /// Streams of device 0 that live as long as the process, as torch's do.
  static StreamHandle stream(std::size_t index) {
    static const std::array streams = [] {
      Device& device = allocator_of(0).device();
      return std::array{device.create_stream(), device.create_stream(), device.create_stream()};
    }();
    return streams.at(index);
  }

  CachingAllocator* allocator_ = nullptr;
  std::optional<BlockContent> content_;
  std::vector<Block> blocks_;
  std::uint64_t last_cookie_ = 0;
};

// Guards.

TEST_F(OffloadRegionTest, AGuardTakesTheAllocationsOfItsScope) {
  const Block before = allocate(4_KiB);
  std::optional<Block> inside;
  Region region("guard");
  {
    OffloadRegion guard(region);
    EXPECT_EQ(guard.region().id(), region.id());
    inside = allocate(4_KiB);
  }
  const Block after = allocate(4_KiB);
  EXPECT_EQ(owner_of_block(*inside), region.id());
  EXPECT_EQ(owner_of_block(before), kNoOwner);
  EXPECT_EQ(owner_of_block(after), kNoOwner);
  EXPECT_EQ(region.allocated_bytes(), 4_KiB);
}

TEST_F(OffloadRegionTest, GuardsNestAndTheInnermostWins) {
  OffloadRegion outer("outer");
  const Block a = allocate(4_KiB);
  {
    OffloadRegion inner("inner");
    const Block b = allocate(4_KiB);
    EXPECT_EQ(owner_of_block(b), inner.region().id());
    {
      NoRegion nobody;
      EXPECT_EQ(owner_of_block(allocate(4_KiB)), kNoOwner);
    }
    EXPECT_EQ(owner_of_block(allocate(4_KiB)), inner.region().id());
  }
  EXPECT_EQ(owner_of_block(allocate(4_KiB)), outer.region().id());
  EXPECT_EQ(owner_of_block(a), outer.region().id());
}

TEST_F(OffloadRegionTest, GuardsEndWhenAnExceptionPasses) {
  try {
    OffloadRegion guard("thrown through");
    throw std::runtime_error("");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(current_owner(), kNoOwner);
}

TEST_F(OffloadRegionTest, AGuardIsOfItsThreadAndAHandleGoesAnywhere) {
  OffloadRegion guard("threads");
  Region region = guard.region();
  std::thread([&] {
    EXPECT_EQ(current_owner(), kNoOwner) << "a guard does not reach other threads";
    OffloadRegion here(region);
    EXPECT_EQ(current_owner(), region.id());
  }).join();
  EXPECT_EQ(current_owner(), region.id());
}

TEST_F(OffloadRegionTest, EvictAndRestoreFromOtherThreads) {
  Region region("moved by others");
  {
    OffloadRegion guard(region);
    allocate(3_MiB);
  }
  std::thread([&] { region.evict(); }).join();
  EXPECT_EQ(region.state(), RegionState::Evicted);
  std::thread([&] { Region::find("moved by others").restore(); }).join();
  EXPECT_TRUE(all_intact());
}

// Names.

TEST_F(OffloadRegionTest, ANameIsARegion) {
  const Region one("same");
  const Region two("same");
  const Region other("other");
  EXPECT_EQ(one.id(), two.id());
  EXPECT_NE(one.id(), other.id());
  EXPECT_EQ(Region::find("same").id(), one.id());
  EXPECT_EQ(one.name(), "same");
  std::vector<std::string> names;
  for (const Region& region : Region::all()) names.push_back(region.name());
  EXPECT_EQ(names, (std::vector<std::string>{"same", "other"})) << "in order of creation";
}

TEST_F(OffloadRegionTest, AnEmptyNameIsRefused) { EXPECT_THROW(Region(""), Misuse); }

TEST_F(OffloadRegionTest, FindOfAnUnknownRegionListsThoseThereAre) {
  try {
    Region::find("nothing");
    FAIL();
  } catch (const Misuse& error) {
    EXPECT_NE(std::string(error.what()).find("none"), std::string::npos) << error.what();
  }
  const Region adam("adam");
  const Region cache("cache");
  try {
    Region::find("adamw");
    FAIL();
  } catch (const Misuse& error) {
    for (const char* part : {"'adamw'", "'adam'", "'cache'"}) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
}

TEST_F(OffloadRegionTest, ARegionLivesWhileAHandleOrABlockDoes) {
  OwnerId id{};
  std::optional<Block> block;
  {
    OffloadRegion guard("by a block");
    id = guard.region().id();
    block = allocate(4_KiB);
  }
  EXPECT_EQ(Region::find("by a block").id(), id);
  free(*block);
  allocator_->trim();
  EXPECT_THROW(Region::find("by a block"), Misuse);
  EXPECT_NE(Region("by a block").id(), id) << "a new region of an old name";
}

// Evict and restore.

TEST_F(OffloadRegionTest, BytesComeBackToTheirAddresses) {
  Region region("round trip");
  {
    OffloadRegion guard(region);
    for (const Bytes size : {Bytes{1}, Bytes{513}, 64_KiB + 3, 1_MiB, 3_MiB, 40_MiB + 12345}) allocate(size);
  }
  const Block outside = allocate(5_MiB);
  const auto before = region.live_blocks();
  const Bytes allocated = region.allocated_bytes();
  const Bytes free_before = allocator_->device().memory().free;
  for (int round = 0; round < 3; ++round) {
    region.evict();
    EXPECT_EQ(region.state(), RegionState::Evicted);
    EXPECT_EQ(region.evicted_bytes(), allocated);
    EXPECT_EQ(region.resident_bytes(), 0u);
    EXPECT_GE(region.pinned_bytes(), allocated);
    EXPECT_TRUE(intact(outside)) << "another's bytes are not touched";
    allocator_->trim();
    EXPECT_GE(allocator_->device().memory().free, free_before + allocated) << "really gone from the device";
    region.restore();
    EXPECT_EQ(region.state(), RegionState::Resident);
    EXPECT_EQ(region.allocated_bytes(), allocated);
    EXPECT_EQ(region.evicted_bytes(), 0u);
    EXPECT_EQ(region.pinned_bytes(), 0u);
    EXPECT_TRUE(all_intact());
  }
  const auto after = region.live_blocks();
  ASSERT_EQ(after.size(), before.size());
  for (std::size_t i = 0; i < after.size(); ++i) EXPECT_EQ(after[i].address, before[i].address);
}

TEST_F(OffloadRegionTest, EvictedMemoryServesOrdinaryAllocations) {
  Region region("makes room");
  {
    OffloadRegion guard(region);
    allocate(150_MiB);
  }
  EXPECT_THROW(allocator_->allocate(150_MiB, stream(0)), OutOfMemory);
  region.evict();
  const Block activations = allocate(150_MiB);
  free(activations);
  region.restore();
  EXPECT_TRUE(all_intact());
}

TEST_F(OffloadRegionTest, TheSecondEvictAllocatesNoHostMemory) {
  Region region("steady");
  {
    OffloadRegion guard(region);
    for (int i = 0; i < 200; ++i) allocate(100_KiB);
  }
  region.evict();
  region.restore();
  const PoolStats before = pool_stats(0);
  region.evict();
  region.restore();
  const PoolStats after = pool_stats(0);
  EXPECT_EQ(after.host_allocations, before.host_allocations);
  EXPECT_EQ(after.evictions, before.evictions + 1);
  EXPECT_EQ(after.restores, before.restores + 1);
  EXPECT_EQ(after.evicted_bytes_total - before.evicted_bytes_total, 200 * 100_KiB);
  EXPECT_EQ(after.restored_bytes_total - before.restored_bytes_total, 200 * 100_KiB);
  EXPECT_LE(after.copies - before.copies, 10) << "neighbours are copied together";
}

TEST_F(OffloadRegionTest, TwiceHasNoEffect) {
  Region region("twice");
  {
    OffloadRegion guard(region);
    allocate(3_MiB);
  }
  region.restore();
  region.evict();
  const PoolStats before = pool_stats(0);
  region.evict();
  EXPECT_EQ(pool_stats(0).copies, before.copies);
  EXPECT_EQ(region.evicted_bytes(), 3_MiB);
  region.restore();
  const PoolStats after = pool_stats(0);
  region.restore();
  EXPECT_EQ(pool_stats(0).copies, after.copies);
  EXPECT_TRUE(all_intact());
}

TEST_F(OffloadRegionTest, AnEmptyRegionHasNothingToMove) {
  Region region("empty");
  region.evict();
  EXPECT_EQ(region.state(), RegionState::Resident);
  region.restore();
  EXPECT_EQ(region.allocated_bytes(), 0u);
}

TEST_F(OffloadRegionTest, AllocationInsideAnEvictedRegionIsResidentAtOnce) {
  Region region("grows while away");
  OffloadRegion guard(region);
  const Block old = allocate(3_MiB);
  region.evict();
  const Block added = allocate(3_MiB);
  EXPECT_NE(added.address, old.address) << "no address of an evicted block is handed out";
  EXPECT_TRUE(intact(added));
  EXPECT_EQ(region.state(), RegionState::Evicted);
  EXPECT_EQ(region.evicted_bytes(), 3_MiB);
  EXPECT_EQ(region.resident_bytes(), 3_MiB);
  region.evict();
  EXPECT_EQ(region.evicted_bytes(), 6_MiB);
  region.restore();
  EXPECT_TRUE(all_intact());
}

TEST_F(OffloadRegionTest, BlocksFreedWhileAwayStayGone) {
  Region region("dies while away");
  std::vector<Block> blocks;
  {
    OffloadRegion guard(region);
    for (int i = 0; i < 6; ++i) blocks.push_back(allocate(3_MiB));
  }
  region.evict();
  free(blocks[0]);
  free(blocks[3]);
  EXPECT_EQ(region.evicted_bytes(), 12_MiB);
  region.restore();
  EXPECT_EQ(region.allocated_bytes(), 12_MiB);
  EXPECT_TRUE(all_intact());
}

TEST_F(OffloadRegionTest, ARegionWhoseBlocksAllDiedAwayHoldsNoHostMemoryAfterRestore) {
  Region region("dies out");
  std::optional<Block> block;
  {
    OffloadRegion guard(region);
    block = allocate(3_MiB);
  }
  region.evict();
  free(*block);
  EXPECT_EQ(region.state(), RegionState::Resident);
  region.restore();
  EXPECT_EQ(region.pinned_bytes(), 0u);
  // Its name, and its address range, serve again.
  OffloadRegion guard(region);
  allocate(3_MiB);
  region.evict();
  region.restore();
  EXPECT_TRUE(all_intact());
}

TEST_F(OffloadRegionTest, ARegionDroppedWhileEvictedKeepsItsBytesAndIsFoundAgain) {
  OwnerId id{};
  {
    OffloadRegion guard("dropped");
    id = guard.region().id();
    allocate(3_MiB);
    guard.region().evict();
  }
  EXPECT_GT(pool_stats(0).pinned_leased_bytes, 0u);
  Region again = Region::find("dropped");
  EXPECT_EQ(again.id(), id);
  EXPECT_EQ(again.state(), RegionState::Evicted);
  again.restore();
  EXPECT_TRUE(all_intact());
}

TEST_F(OffloadRegionTest, ARegionDroppedWhileEvictedEndsWithItsLastBlock) {
  std::optional<Block> block;
  {
    OffloadRegion guard("dropped for good");
    block = allocate(3_MiB);
    guard.region().evict();
  }
  free(*block);
  EXPECT_THROW(Region::find("dropped for good"), Misuse);
  EXPECT_EQ(pool_stats(0).pinned_leased_bytes, 0u);
}

TEST_F(OffloadRegionTest, CopiesOutWaitForTheStreamsThatWrote) {
  Region region("late writes");
  std::optional<Block> block;
  {
    OffloadRegion guard(region);
    block = allocate(1_MiB);
  }
  Device& device = allocator_->device();
  const StreamHandle named = stream(1);
  const StreamHandle recorded = stream(2);
  allocator_->record_stream(block->address, recorded);
  unsigned char written[3] = {1, 2, 3};
  StreamLatch latch_own(device, stream(0)), latch_named(device, named), latch_recorded(device, recorded);
  device.copy_to_device(block->address, &written[0], 1, stream(0));
  device.copy_to_device(block->address + 1, &written[1], 1, named);
  device.copy_to_device(block->address + 2, &written[2], 1, recorded);
  std::thread evicting([&] { region.evict({.after = {{0, named}}}); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_NE(region.state(), RegionState::Evicted) << "streams that write to it are held";
  for (StreamLatch* latch : {&latch_own, &latch_named, &latch_recorded}) latch->release();
  evicting.join();
  EXPECT_EQ(region.state(), RegionState::Evicted);
  region.restore();
  const auto* bytes = static_cast<const unsigned char*>(to_pointer(block->address));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(bytes[i], written[i]);
}

// What is refused.

TEST_F(OffloadRegionTest, APinnedBlockKeepsItsRegionOnTheDevice) {
  Region region("shared");
  std::optional<Block> block;
  {
    OffloadRegion guard(region);
    allocate(2_MiB);
    block = allocate(3_MiB);
  }
  allocator_->pin(block->address, "shared with another process");
  try {
    region.evict();
    FAIL() << "a pinned block left";
  } catch (const Misuse& error) {
    EXPECT_NE(std::string(error.what()).find("shared with another process"), std::string::npos) << error.what();
  }
  EXPECT_EQ(region.state(), RegionState::Resident);
  EXPECT_TRUE(all_intact());
  free(*block);
  region.evict();
  EXPECT_EQ(region.state(), RegionState::Evicted);
  region.restore();
}

TEST_F(OffloadRegionTest, AnEvictedBlockCannotBePinned) {
  OffloadRegion guard("pinned too late");
  const Block block = allocate(2_MiB);
  guard.region().evict();
  EXPECT_THROW(allocator_->pin(block.address, "shared"), Misuse);
  guard.region().restore();
}

TEST_F(OffloadRegionTest, NothingMovesDuringACapture) {
  OffloadRegion guard("captured");
  allocate(2_MiB);
  allocator_->begin_capture();
  EXPECT_THROW(guard.region().evict(), Misuse);
  EXPECT_EQ(guard.region().state(), RegionState::Resident);
  allocator_->end_capture();
  guard.region().evict();
  allocator_->begin_capture();
  EXPECT_THROW(guard.region().restore(), Misuse);
  EXPECT_EQ(guard.region().state(), RegionState::Evicted);
  allocator_->end_capture();
  guard.region().restore();
  EXPECT_TRUE(all_intact());
}

TEST_F(OffloadRegionTest, ABudgetOfZeroRefusesAndTheRegionStays) {
  OffloadRegion guard("no budget");
  allocate(2_MiB);
  const Bytes budget = host_budget();
  set_host_budget(0);
  EXPECT_THROW(guard.region().evict(), HostMemoryError);
  EXPECT_EQ(guard.region().state(), RegionState::Resident);
  EXPECT_TRUE(all_intact());
  set_host_budget(budget);
  guard.region().evict();
  guard.region().restore();
  EXPECT_TRUE(all_intact());
}

TEST_F(OffloadRegionTest, ARefusedEvictLeavesWhatIsAwayAway) {
  OffloadRegion guard("half away");
  allocate(2_MiB);
  guard.region().evict();
  allocate(40_MiB);
  const Bytes budget = host_budget();
  set_host_budget(4_MiB);
  EXPECT_THROW(guard.region().evict(), HostMemoryError);
  EXPECT_EQ(guard.region().evicted_bytes(), 2_MiB) << "as before";
  EXPECT_EQ(guard.region().resident_bytes(), 40_MiB);
  set_host_budget(budget);
  guard.region().restore();
  EXPECT_TRUE(all_intact());
}

TEST_F(OffloadRegionTest, RestoreWithoutDeviceMemoryFailsAndMayBeRetried) {
  OffloadRegion guard("no room");
  allocate(150_MiB);
  guard.region().evict();
  DeviceAddress hog{};
  {
    NoRegion nobody;
    hog = allocator_->allocate(200_MiB, stream(0), current_owner());
  }
  EXPECT_THROW(guard.region().restore(), OutOfMemory);
  EXPECT_EQ(guard.region().state(), RegionState::Evicted);
  EXPECT_EQ(guard.region().evicted_bytes(), 150_MiB);
  allocator_->free(hog);
  guard.region().restore();
  EXPECT_TRUE(all_intact());
}

TEST_F(OffloadRegionTest, TrimHostKeepsWhatIsAway) {
  OffloadRegion guard("trimmed");
  allocate(3_MiB);
  guard.region().evict();
  EXPECT_EQ(trim_host(), 0u);
  guard.region().restore();
  EXPECT_GE(pool_stats(0).pinned_bytes, 3_MiB) << "kept for the next eviction";
  EXPECT_GE(trim_host(), 3_MiB);
  EXPECT_EQ(pool_stats(0).pinned_bytes, 0u);
  guard.region().evict();
  guard.region().restore();
  EXPECT_TRUE(all_intact());
}

TEST_F(OffloadRegionTest, ARegionSpansDevices) {
  CachingAllocator& second = allocator_of(1);
  const StreamHandle there_stream = second.device().create_stream();
  BlockContent content(second.device());
  OffloadRegion guard("both devices");
  allocate(2_MiB);
  const DeviceAddress there = second.allocate(3_MiB, there_stream, current_owner());
  content.fill(there, 3_MiB, 99, there_stream);
  EXPECT_EQ(guard.region().allocated_bytes(), 5_MiB);
  guard.region().evict();
  EXPECT_EQ(guard.region().evicted_bytes(), 5_MiB);
  EXPECT_FALSE(second.is_resident(there));
  EXPECT_EQ(pool_stats(1).evicted_bytes_total, 3_MiB);
  guard.region().restore();
  EXPECT_TRUE(all_intact());
  EXPECT_FALSE(content.mismatch(there, 3_MiB, 99, there_stream));
  second.free(there);
  second.device().synchronize(there_stream);
  second.trim();
  second.check();
}

TEST_F(OffloadRegionTest, UnknownDevicesAndKindsAreRefused) {
  EXPECT_THROW(allocator_of(2), Misuse);
  EXPECT_THROW(allocator_of(-1), Misuse);
  EXPECT_EQ(device_count(), 2);
  EXPECT_THROW(select_devices(DeviceKind::Cuda), Misuse);
  EXPECT_NO_THROW(select_devices(DeviceKind::Host));
  EXPECT_EQ(pool_stats(77).evictions, 0);
  const Block block = allocate(4_KiB);
  EXPECT_EQ(owner_of(block.address + 1), allocator_);
  EXPECT_EQ(owner_of(DeviceAddress{4096}), nullptr);
}

TEST_F(OffloadRegionTest, AnEvictionWithNothingToEvictSaysSoOnce) {
  Region region("takes nothing");
  const testing::LogCapture log;
  region.evict();
  EXPECT_THAT(log.text(), ::testing::HasSubstr("offload region 'takes nothing' holds no memory"));
  region.evict();
  const std::string text = log.text();
  EXPECT_EQ(text.find("holds no memory"), text.rfind("holds no memory"));
}

TEST_F(OffloadRegionTest, HostMemoryOfBlocksFreedWhileAwayIsGivenUp) {
  Region region("freed while away");
  std::vector<Block> blocks;
  {
    OffloadRegion guard(region);
    for (int i = 0; i < 4; ++i) blocks.push_back(allocate(3_MiB));
  }
  region.evict();
  EXPECT_GE(region.pinned_bytes(), 12_MiB);
  for (const Block& block : blocks) free(block);
  EXPECT_EQ(region.pinned_bytes(), 0u);
  EXPECT_EQ(pool_stats(0).pinned_leased_bytes, 0u);
  EXPECT_GE(trim_host(), 12_MiB);
}

TEST_F(OffloadRegionTest, TrimmingTheHostFindsWhatRegionsNoLongerNeed) {
  Region region("freed and trimmed");
  std::optional<Block> block;
  {
    OffloadRegion guard(region);
    block = allocate(3_MiB);
  }
  region.evict();
  free(*block);
  EXPECT_GE(trim_host(), 3_MiB);
}

TEST_F(OffloadRegionTest, NamesAreUtf8) {
  for (const char* name : {"\xff\xfe", "\xc3", "a\xed\xa0\x80", "\xe0\x80\x80"}) {
    EXPECT_THROW(Region{std::string_view(name)}, Misuse) << name;
  }
  EXPECT_EQ(Region("Überraschung 🌊").name(), "Überraschung 🌊");
}

TEST_F(OffloadRegionTest, ARegionOpenOnThisThreadIsNotReleasedByName) {
  ASSERT_EQ(lowtide_region_enter("open by name"), 0);
  EXPECT_EQ(lowtide_region_release("open by name"), -1);
  EXPECT_EQ(lowtide_region_leave("open by name"), 0);
  EXPECT_EQ(lowtide_region_release("open by name"), 0);
}

}  // namespace
}  // namespace lowtide
