// Fails the k-th device call, for every k, of each operation of the allocator and the region mover. After each failure
// contents, state and figures are as promised, a retry succeeds, and at the end nothing is alive on the device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "allocator/caching_allocator.h"
#include "allocator/errors.h"
#include "allocator/heap.h"
#include "pool/region_mover.h"
#include "tests/support/block_content.h"
#include "tests/support/devices.h"
#include "tests/support/faulty_device.h"
#include "tests/support/latch.h"

namespace lowtide {
namespace {

using testing::BlockContent;
using testing::DeviceKindUnderTest;
using testing::FaultyDevice;
using testing::LiveCounts;

constexpr Bytes kMemory = 128_MiB;
constexpr OwnerId kAdam{1};
constexpr OwnerId kCache{2};

struct Block {
  DeviceAddress address;
  Bytes size;
  std::uint64_t cookie;
  OwnerId owner;
};

/// Two regions and ordinary blocks on two streams, with content, on a device that can fail.
class World {
 public:
  explicit World(std::unique_ptr<Device> real)
      : device(std::move(real)),
        baseline(device.live()),
        stream(device.create_stream()),
        other(device.create_stream()),
        content(std::make_unique<BlockContent>(device.inner())),
        allocator(std::make_unique<CachingAllocator>(device)),
        mover(std::make_unique<RegionMover>(*allocator, budget, HostMemoryOptions{.slice = 2_MiB, .threads = 1})) {
    allocator->set_memory_fraction(testing::fraction_for(device, kMemory));
    for (const OwnerId owner : {kNoOwner, kAdam, kCache}) {
      add(300, stream, owner);
      add(1_MiB + 512, stream, owner);
      add(3_MiB, stream, owner);
      add(700'000, other, owner);
      add(2_MiB, other, owner);
    }
    // Holes, so that an image is more than one run.
    remove(kAdam, 1_MiB + 512);
    add(600'000, stream, kAdam);
  }

  ~World() {
    for (const Block& block : blocks) EXPECT_TRUE(allocator->free(block.address));
    check();
    images.clear();
    mover.reset();
    allocator.reset();
    content.reset();
    device.destroy_stream(stream);
    device.destroy_stream(other);
    EXPECT_EQ(device.live(), baseline);
    EXPECT_EQ(device.bad_releases(), 0u);
    EXPECT_EQ(budget.used(), 0u);
  }

  Block add(Bytes size, StreamHandle on, OwnerId owner) {
    return fill({allocator->allocate(size, on, owner), size, ++last_cookie, owner});
  }
  Block fill(const Block& block) {
    content->fill_samples(block.address, block.size, block.cookie, stream);
    blocks.push_back(block);
    return block;
  }
  void remove(OwnerId owner, Bytes size) {
    const auto found =
        std::ranges::find_if(blocks, [&](const Block& block) { return block.owner == owner && block.size == size; });
    ASSERT_NE(found, blocks.end());
    allocator->free(found->address);
    blocks.erase(found);
  }

  void check() {
    EXPECT_NO_THROW(allocator->check());
    MutexLock lock(allocator->heap().mutex);
    EXPECT_NO_THROW(allocator->heap().check_pages());
    EXPECT_EQ(allocator->heap().pool.pages(), static_cast<std::int64_t>(device.live().pages));
  }
  void expect_contents() {
    for (const Block& block : blocks) {
      ASSERT_TRUE(allocator->is_resident(block.address)) << block.size;
      EXPECT_FALSE(content->sample_mismatch(block.address, block.size, block.cookie, stream)) << block.size;
    }
  }
  Bytes evicted(OwnerId owner) { return RegionPages(*allocator).usage(owner).evicted; }
  bool moving(OwnerId owner) {
    const auto usage = RegionPages(*allocator).usage(owner);
    return usage.evicting || usage.restoring;
  }

  FaultyDevice device;
  const LiveCounts baseline;
  const StreamHandle stream, other;
  HostBudget budget{256_MiB};
  std::unique_ptr<BlockContent> content;
  std::unique_ptr<CachingAllocator> allocator;
  std::unique_ptr<RegionMover> mover;
  HostImages images;
  std::vector<Block> blocks;
  std::uint64_t last_cookie = 0;
};

/// One operation, run with the k-th device call failing.
struct Operation {
  std::string name;
  std::function<void(World&)> prepare;
  std::function<void(World&)> run;
  /// What must hold after `run` threw, besides what always must.
  std::function<void(World&)> after_failure;
};

std::ostream& operator<<(std::ostream& out, const Operation& operation) { return out << operation.name; }

void nothing(World&) {}

std::vector<Operation> operations() {
  std::vector<Operation> all;

  const auto allocates = [](Bytes size, OwnerId owner) {
    return [size, owner](World& w) {
      w.fill({w.allocator->allocate(size, w.stream, owner), size, ++w.last_cookie, owner});
    };
  };
  all.push_back({"AllocateSmall", nothing,
                 [=](World& w) {
                   for (int i = 0; i < 3; ++i) allocates(900'000, kNoOwner)(w);
                 },
                 nothing});
  all.push_back({"AllocateLarge", nothing, allocates(40_MiB, kNoOwner), nothing});
  all.push_back({"AllocateInANewArena", nothing, allocates(2_MiB, OwnerId{9}), nothing});
  all.push_back({"AllocateFromPagesOfAnotherStream",
                 [](World& w) {
                   const auto idle = w.allocator->allocate(60_MiB, w.other);
                   w.allocator->free(idle);
                   w.device.synchronize(w.other);
                 },
                 allocates(80_MiB, kNoOwner), nothing});
  all.push_back({"AllocateWhereEveryRemedyIsNeeded",
                 [](World& w) {
                   const auto pending = w.allocator->allocate(60_MiB, w.stream);
                   w.allocator->record_stream(pending, w.other);
                   w.allocator->free(pending);
                 },
                 allocates(90_MiB, kCache), nothing});

  all.push_back({"Free", nothing,
                 [](World& w) {
                   const Block block = w.blocks[1];
                   EXPECT_TRUE(w.allocator->free(block.address));
                   w.blocks.erase(w.blocks.begin() + 1);
                 },
                 nothing});
  all.push_back({"FreeOfARecordedBlock",
                 [](World& w) {
                   w.allocator->record_stream(w.blocks[1].address, w.other);
                   w.allocator->record_stream(w.blocks[1].address, StreamHandle{0});
                 },
                 [](World& w) {
                   // Never throws: where its events cannot be recorded the block stays, and free() works again.
                   const auto address = w.blocks[1].address;
                   EXPECT_TRUE(w.allocator->free(address));
                   if (w.allocator->find(address)) {
                     EXPECT_TRUE(w.allocator->free(address));
                   }
                   EXPECT_FALSE(w.allocator->find(address));
                   w.blocks.erase(w.blocks.begin() + 1);
                 },
                 nothing});
  all.push_back({"RecordStream", nothing,
                 [](World& w) { EXPECT_TRUE(w.allocator->record_stream(w.blocks[2].address, w.other)); }, nothing});
  all.push_back({"Trim",
                 [](World& w) {
                   const auto a = w.allocator->allocate(10_MiB, w.stream);
                   const auto b = w.allocator->allocate(10_MiB, w.other);
                   w.allocator->record_stream(a, w.other);
                   w.allocator->free(a);
                   w.allocator->free(b);
                 },
                 [](World& w) { w.allocator->trim(); }, nothing});

  const auto evicts = [](World& w) { w.mover->evict(kAdam, {w.other}, w.images); };
  const auto restores = [](World& w) { w.mover->restore(kAdam, w.images); };
  const auto still_resident = [](World& w) {
    EXPECT_EQ(w.evicted(kAdam), 0u);
    EXPECT_FALSE(w.moving(kAdam));
  };
  const auto still_evicted = [](World& w) {
    EXPECT_EQ(w.evicted(kAdam), RegionPages(*w.allocator).usage(kAdam).allocated);
    EXPECT_FALSE(w.moving(kAdam));
  };
  all.push_back({"EvictCold", nothing, evicts, still_resident});
  all.push_back({"EvictWarm",
                 [=](World& w) {
                   evicts(w);
                   restores(w);
                 },
                 evicts, still_resident});
  all.push_back({"EvictOfManyGroups", [](World& w) { w.add(36_MiB, w.stream, kAdam); }, evicts, still_resident});
  all.push_back({"EvictWithAPendingFree",
                 [](World& w) {
                   const Block block = w.add(2_MiB, w.stream, kAdam);
                   w.allocator->record_stream(block.address, w.other);
                   w.allocator->free(block.address);
                   w.blocks.pop_back();
                 },
                 evicts, still_resident});
  all.push_back({"EvictOfWhatCameSince",
                 [=](World& w) {
                   evicts(w);
                   w.add(5_MiB, w.stream, kAdam);
                 },
                 evicts, [](World& w) { EXPECT_FALSE(w.moving(kAdam)); }});
  all.push_back({"Restore", evicts, restores, still_evicted});
  all.push_back({"RestoreIntoPagesOfOthers",
                 [=](World& w) {
                   w.add(36_MiB, w.stream, kAdam);
                   evicts(w);
                   w.allocator->trim();
                   testing::StreamLatch latch(w.device, w.other);
                   w.allocator->free(w.allocator->allocate(80_MiB, w.other));
                   // Asks whether `other` is past its pages. It is not; it is at the restore, which takes them one by one.
                   w.allocator->release_arenas(kNoOwner);
                   latch.release();
                   w.device.inner().synchronize(w.other);
                 },
                 restores, still_evicted});
  return all;
}

using Case = std::tuple<DeviceKindUnderTest, Operation>;

class RegionFault : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const auto& kind = std::get<0>(GetParam());
    const std::string missing = kind.missing();
    if (!missing.empty()) GTEST_SKIP() << kind.name << ": " << missing;
  }
  std::unique_ptr<World> world() { return std::make_unique<World>(std::get<0>(GetParam()).make(kMemory)); }
};

/// Runs `operation` with its k-th device call failing; false if it made fewer than k calls.
bool fail_once(World& w, const Operation& operation, std::size_t k) {
  operation.prepare(w);
  w.device.fail_at(k);
  bool threw = false;
  try {
    operation.run(w);
  } catch (const std::exception& error) {
    threw = true;
    EXPECT_NE(dynamic_cast<const Error*>(&error), nullptr) << error.what();
  }
  const bool failed = w.device.failed();
  w.device.fail_at(0);
  EXPECT_TRUE(failed || !threw) << "threw though no call failed";
  w.check();
  if (threw) operation.after_failure(w);
  w.mover->restore(kAdam, w.images);
  w.expect_contents();

  if (!threw) return failed;
  EXPECT_NO_THROW(operation.run(w)) << "a retry";
  w.check();
  w.mover->restore(kAdam, w.images);
  w.expect_contents();
  return failed;
}

/// Every call, unless LOWTIDE_FAULT_STRIDE=n asks for each n-th only: under a checker that slows each one down.
std::size_t stride() {
  const char* text = std::getenv("LOWTIDE_FAULT_STRIDE");
  return text == nullptr ? 1 : std::max<std::size_t>(1, std::strtoul(text, nullptr, 10));
}

TEST_P(RegionFault, EveryDeviceCallMayFail) {
  const Operation& operation = std::get<1>(GetParam());
  std::size_t k = 1;
  for (;; k += stride()) {
    SCOPED_TRACE("call " + std::to_string(k));
    const auto w = world();
    if (!fail_once(*w, operation, k) || HasFailure()) break;
    ASSERT_LT(k, 1000u) << "the operation never ends";
  }
  // Which operations reach the device is part of what is tested.
  const bool host_only = operation.name == "Free" || operation.name == "RecordStream";
  if (host_only) {
    EXPECT_EQ(k, 1u);
  } else {
    EXPECT_GT(k, 1u);
  }
}

INSTANTIATE_TEST_SUITE_P(Device, RegionFault,
                         ::testing::Combine(::testing::ValuesIn(testing::devices_under_test()),
                                            ::testing::ValuesIn(operations())),
                         [](const auto& test) {
                           return std::get<0>(test.param).name + "_" + std::get<1>(test.param).name;
                         });

/// Memory that is short rather than calls that fail.
class RegionShortage : public ::testing::TestWithParam<DeviceKindUnderTest> {
 protected:
  void SetUp() override {
    const std::string missing = GetParam().missing();
    if (!missing.empty()) GTEST_SKIP() << GetParam().name << ": " << missing;
    world_ = std::make_unique<World>(GetParam().make(kMemory));
  }
  std::unique_ptr<World> world_;
};

TEST_P(RegionShortage, DeviceMemoryTakenByOthersAtRestore) {
  World& w = *world_;
  w.add(30_MiB, w.stream, kAdam);
  w.mover->evict(kAdam, {}, w.images);
  w.allocator->trim();
  const auto held = static_cast<Bytes>(w.allocator->stats().reserved_bytes[0].current);
  // As if another process, or torch's own allocator, held all but 10 MiB.
  w.allocator->set_memory_fraction(testing::fraction_for(w.device, held + 10_MiB));
  EXPECT_THROW(w.mover->restore(kAdam, w.images), OutOfMemory);
  EXPECT_EQ(static_cast<Bytes>(w.allocator->stats().reserved_bytes[0].current), held)
      << "it kept what it could not use";
  w.check();
  EXPECT_FALSE(w.moving(kAdam));
  EXPECT_EQ(w.evicted(kAdam), RegionPages(*w.allocator).usage(kAdam).allocated);
  w.allocator->set_memory_fraction(testing::fraction_for(w.device, kMemory));
  w.mover->restore(kAdam, w.images);
  w.expect_contents();
}

TEST_P(RegionShortage, ReclaimersAreAskedAtRestore) {
  World& w = *world_;
  w.add(30_MiB, w.stream, kAdam);
  w.mover->evict(kAdam, {}, w.images);
  const auto hog = w.allocator->allocate(85_MiB, w.other);
  int asked = 0;
  w.allocator->add_reclaimer([&] {
    ++asked;
    w.allocator->free(hog);
    w.device.synchronize(w.other);
    return true;
  });
  w.mover->restore(kAdam, w.images);
  EXPECT_EQ(asked, 1);
  w.expect_contents();
}

TEST_P(RegionShortage, NothingIsLostWhereRestoreFitsExactly) {
  World& w = *world_;
  for (int i = 0; i < 10; ++i) w.add(3_MiB, w.stream, kAdam);
  w.mover->evict(kAdam, {}, w.images);
  w.allocator->trim();
  // The pages that left, to the byte.
  const auto held = static_cast<Bytes>(w.allocator->stats().reserved_bytes[0].current);
  Bytes away = 0;
  for (const auto& page : RegionPages(*w.allocator).begin_restore(kAdam)) {
    away += page.size;
    RegionPages(*w.allocator).cancel_restore(page);
  }
  w.allocator->set_memory_fraction(testing::fraction_for(w.device, held + away));
  w.mover->restore(kAdam, w.images);
  w.expect_contents();
  w.allocator->set_memory_fraction(1.0);
}

TEST_P(RegionShortage, PagesOfTheOtherSizeServeARestore) {
  World& w = *world_;
  w.add(64_MiB, w.stream, kAdam);  // on large pages
  w.mover->evict(kAdam, {}, w.images);
  w.allocator->trim();
  // All that is left becomes small pages, then free again.
  std::vector<DeviceAddress> blocks;
  try {
    for (;;) blocks.push_back(w.allocator->allocate(1_MiB, w.other));
  } catch (const OutOfMemory&) {
  }
  for (const auto block : blocks) w.allocator->free(block);
  w.mover->restore(kAdam, w.images);
  w.expect_contents();
}

TEST_P(RegionShortage, HostBudgetUsedUpAtEvict) {
  World& w = *world_;
  w.add(20_MiB, w.stream, kAdam);
  w.mover->evict(kCache, {}, w.images);
  HostImages adam;
  const Bytes used = w.budget.used();
  w.budget.set_limit(used + 5_MiB);
  EXPECT_THROW(w.mover->evict(kAdam, {}, adam), HostMemoryError);
  EXPECT_TRUE(adam.empty());
  EXPECT_EQ(w.budget.used(), used);
  EXPECT_EQ(w.evicted(kAdam), 0u);
  EXPECT_FALSE(w.moving(kAdam));
  w.check();
  w.mover->restore(kCache, w.images);
  w.expect_contents();
  w.budget.set_limit(256_MiB);
  w.mover->evict(kAdam, {}, adam);
  w.mover->restore(kAdam, adam);
  w.expect_contents();
}

INSTANTIATE_TEST_SUITE_P(Device, RegionShortage, ::testing::ValuesIn(testing::devices_under_test()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace lowtide
