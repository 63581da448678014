// The CUDA bridge over the host device, with a double of torch's native allocator: who serves which call, and what
// torch is told. Runs without a GPU; it shares the process with the tests of the host route, on the same device.
#include "allocator/torch/cuda_bridge.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "allocator/allocation_scope.h"
#include "allocator/device_registry.h"
#include "allocator/torch/install.h"
#include "tests/torch/native_double.h"

namespace lowtide {
namespace {

using test::NativeDouble;
using ::testing::HasSubstr;

constexpr Bytes kMemory = 256_MiB;
constexpr c10::MempoolId_t kDefaultPool{0, 0};
constexpr c10::MempoolId_t kPool{0, 1};
constexpr OwnerId kRegion{77};

class Scope {
 public:
  Scope() { enter_scope(kRegion); }
  ~Scope() { leave_scope(kRegion); }
};

class BridgeTest : public ::testing::Test {
 protected:
  BridgeTest() {
    select_devices(DeviceKind::Host, {.devices = 1, .memory = kMemory});
    native.calls.clear();
    native.stats = {};
    native.segments.clear();
    native.full = false;
    native.on_empty_cache = native.on_cache_miss = [] {};
  }

  NativeDouble& native = NativeDouble::instance();
  TorchCudaAllocator& bridge = TorchCudaAllocator::make(native);

  static bool is_ours(const void* pointer) { return owner_of(to_address(pointer)) != nullptr; }
  static std::string failure(const std::function<void()>& call) {
    try {
      call();
    } catch (const c10::OutOfMemoryError& error) {
      return error.what_without_backtrace();
    }
    return "no error";
  }
  std::int64_t allocated() { return bridge.getDeviceStats(0).allocated_bytes[0].current; }
};

TEST_F(BridgeTest, OrdinaryBlocksAreOurs) {
  const auto before = allocated();
  {
    const c10::DataPtr block = bridge.allocate(1000);
    EXPECT_TRUE(is_ours(block.get()));
    EXPECT_EQ(block.get(), block.get_context());
    EXPECT_EQ(block.get_deleter(), bridge.raw_deleter());
    EXPECT_EQ(block.device(), c10::Device(c10::DeviceType::CUDA, 0));
    EXPECT_TRUE(bridge.is_simple_data_ptr(block));
    std::memset(block.get(), 1, 1000);
    EXPECT_EQ(allocated(), before + 1024);
  }
  EXPECT_EQ(allocated(), before);
  EXPECT_TRUE(native.calls.empty());
}

TEST_F(BridgeTest, NoBytesAreNoBlock) {
  const c10::DataPtr none = bridge.allocate(0);
  EXPECT_EQ(none.get(), nullptr);
  EXPECT_EQ(none.device().type(), c10::DeviceType::CUDA);
  EXPECT_EQ(bridge.raw_alloc(0), nullptr);
  bridge.raw_delete(nullptr);
}

TEST_F(BridgeTest, RawBlocksComeAndGo) {
  const auto before = allocated();
  void* const block = bridge.raw_alloc_with_stream(5000, nullptr);
  EXPECT_TRUE(is_ours(block));
  size_t size = 0;
  EXPECT_EQ(bridge.getBaseAllocation(static_cast<char*>(block) + 100, &size), block);
  EXPECT_GE(size, 5000U);
  bridge.raw_deallocate(block);
  EXPECT_EQ(allocated(), before);
}

TEST_F(BridgeTest, PrivatePoolsAreNativesUnderOurDeleter) {
  CachingAllocator& ours = allocator_of(0);
  { const c10::DataPtr first = bridge.allocate(1); }  // makes the device's allocator known
  bridge.beginAllocateToPool(0, kPool, [](cudaStream_t stream) { return stream == nullptr; });
  EXPECT_TRUE(ours.capturing());
  {
    const c10::DataPtr block = bridge.allocate(1000);
    EXPECT_FALSE(is_ours(block.get()));
    EXPECT_EQ(block.get_deleter(), bridge.raw_deleter());
    bridge.recordStream(block, c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CUDA, 0)));
    EXPECT_TRUE(native.recorded_as_its_own);
    EXPECT_EQ(native.live.size(), 1U);
  }
  EXPECT_TRUE(native.live.empty());
  bridge.endAllocateToPool(0, kPool);
  EXPECT_FALSE(ours.capturing());
  EXPECT_TRUE(native.called("begin") && native.called("end"));
  EXPECT_TRUE(is_ours(bridge.allocate(1000).get()));
}

TEST_F(BridgeTest, AFilterThatRefusesLeavesTheBlockToUs) {
  bridge.beginAllocateToPool(0, kPool, [](cudaStream_t) { return false; });
  EXPECT_TRUE(is_ours(bridge.allocate(1000).get()));
  bridge.endAllocateToPool(0, kPool);
}

TEST_F(BridgeTest, CheckpointedBlocksComeBackUnderOurDeleter) {
  native.checkpointed.push_back(native.allocate(100));
  auto delta = bridge.setCheckpointPoolState(0, nullptr);
  ASSERT_EQ(delta.dataptrs_allocd.size(), 1U);
  EXPECT_EQ(delta.dataptrs_allocd[0].get_deleter(), bridge.raw_deleter());
  delta.dataptrs_allocd.clear();
  EXPECT_TRUE(native.live.empty());
}

TEST_F(BridgeTest, WithoutCachingOnlyRegionsAreOurs) {
  bridge.enable(false);
  EXPECT_EQ(bridge.raw_deleter(), &NativeDouble::uncached_delete);
  EXPECT_EQ(bridge.allocate(1000).get_deleter(), &NativeDouble::uncached_delete);
  {
    const Scope scope;
    EXPECT_TRUE(is_ours(bridge.allocate(1000).get()));
  }
  bridge.enable(true);
  EXPECT_TRUE(is_ours(bridge.allocate(1000).get()));
}

TEST_F(BridgeTest, FiguresAreTheSumOfBothSides) {
  native.stats.allocated_bytes[0] = {.current = 100, .peak = 200, .allocated = 300, .freed = 200};
  native.stats.reserved_bytes[0].current = 1000;
  const c10::DataPtr block = bridge.allocate(1_MiB);
  const AllocatorStats ours = allocator_of(0).stats();
  const auto sum = bridge.getDeviceStats(0);
  EXPECT_EQ(sum.allocated_bytes[0].current, ours.allocated_bytes[0].current + 100);
  EXPECT_EQ(sum.allocated_bytes[0].peak, ours.allocated_bytes[0].peak + 200);
  EXPECT_EQ(sum.reserved_bytes[0].current, ours.reserved_bytes[0].current + 1000);
  EXPECT_EQ(sum.allocation[0].current, ours.allocations[0].current);
  EXPECT_EQ(sum.num_device_alloc, ours.num_page_creations);
  bridge.resetPeakStats(0);
  EXPECT_EQ(allocator_of(0).stats().allocated_bytes[0].peak, ours.allocated_bytes[0].current);
}

TEST_F(BridgeTest, SnapshotsTileTheirSegments) {
  const c10::DataPtr small = bridge.allocate(700);
  const c10::DataPtr large = bridge.allocate(5_MiB);
  native.segments.resize(1);
  native.segments[0].address = 16;
  native.segments[0].owner_private_pool_id = kPool;
  const auto info = bridge.snapshot(kDefaultPool, true);
  ASSERT_GE(info.segments.size(), 3U);
  EXPECT_EQ(info.segments[0].owner_private_pool_id, kPool);  // lowest address first
  std::int64_t allocated_in_segments = 0;
  bool found = false;
  for (const auto& segment : info.segments) {
    size_t sum = 0;
    for (const auto& block : segment.blocks) {
      if (segment.address + sum == reinterpret_cast<size_t>(large.get())) {
        found = true;
        EXPECT_TRUE(block.allocated && block.active);
        EXPECT_EQ(block.requested_size, 5_MiB);
        EXPECT_TRUE(segment.is_large);
      }
      sum += block.size;
    }
    EXPECT_EQ(sum, segment.total_size);
    allocated_in_segments += static_cast<std::int64_t>(segment.allocated_size);
  }
  EXPECT_TRUE(found);
  EXPECT_EQ(allocated_in_segments, allocated());
  EXPECT_EQ(bridge.snapshot(kPool, true).segments.size(), 1U);  // a pool's snapshot has nothing of ours
}

TEST_F(BridgeTest, OutOfMemoryTellsWhatCouldBeEvicted) {
  bridge.emptyCache(kDefaultPool);
  const c10::DataPtr state = [&] {
    const Scope scope;
    return bridge.allocate(16_MiB);
  }();
  static size_t asked = 0, total = 0;  // observers stay attached
  bridge.attachOutOfMemoryObserver([](int64_t, size_t size, size_t limit, size_t) { asked = size, total = limit; });
  const std::string text = failure([&] { bridge.allocate(1_GiB); });
  EXPECT_THAT(text,
              HasSubstr("CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 256.00 MiB"));
  EXPECT_THAT(text, HasSubstr("Offload regions hold 16.00 MiB that could still be evicted."));
  EXPECT_EQ(asked, 1_GiB);
  EXPECT_EQ(total, kMemory);
  EXPECT_TRUE(native.called("emptyCache"));
  EXPECT_THAT(failure([&] { bridge.allocate(8'000'000'000_GiB); }), HasSubstr("more than 1EB memory"));
  EXPECT_THAT(failure([&] { bridge.allocate(800'000'000_GiB); }), HasSubstr("Tried to allocate 800000000.00 GiB"));
  EXPECT_NO_THROW(bridge.allocate(1_MiB));
}

TEST_F(BridgeTest, ThePoolThatServesInNeedIsAskedFirst) {
  bridge.setUseOnOOM(0, kPool, true);
  const c10::DataPtr spare = [&] {
    void* const block = bridge.raw_alloc(1_GiB);
    return c10::DataPtr(block, block, bridge.raw_deleter(), c10::Device(c10::DeviceType::CUDA, 0));
  }();
  EXPECT_TRUE(native.live.contains(spare.get()));
  native.full = true;
  EXPECT_THAT(failure([&] { bridge.raw_alloc(1_GiB); }), HasSubstr("Tried to allocate 1.00 GiB"));
  bridge.setUseOnOOM(0, kPool, false);
  native.full = false;
  EXPECT_THAT(failure([&] { bridge.raw_alloc(1_GiB); }), HasSubstr("Tried to allocate 1.00 GiB"));
}

TEST_F(BridgeTest, NativeIsGivenOurPagesOnlyWhenTheDeviceIsShort) {
  bridge.announce();
  { const c10::DataPtr block = bridge.allocate(100_MiB); }
  CachingAllocator& ours = allocator_of(0);
  const auto run_callbacks = [] {
    auto* registry = c10::FreeCudaMemoryCallbacksRegistry();
    for (const auto& name : registry->Keys()) registry->Create(name)->Execute();
  };
  const auto reserved = [&] { return ours.stats().reserved_bytes[0].current; };
  ASSERT_GE(reserved(), static_cast<std::int64_t>(100_MiB));
  native.on_cache_miss = run_callbacks;
  bridge.beginAllocateToPool(0, kPool, [](cudaStream_t) { return true; });
  bridge.allocate(1_MiB);  // the device has that
  EXPECT_GE(reserved(), static_cast<std::int64_t>(100_MiB));
  bridge.endAllocateToPool(0, kPool);
  bridge.enable(false);
  bridge.allocate(200_MiB);
  bridge.enable(true);
  EXPECT_LT(reserved(), static_cast<std::int64_t>(100_MiB));
  { const c10::DataPtr block = bridge.allocate(100_MiB); }
  run_callbacks();  // a request that did not come through the bridge
  EXPECT_LT(reserved(), static_cast<std::int64_t>(100_MiB));
  EXPECT_EQ(c10::GetAllocator(c10::DeviceType::CUDA), &bridge);
}

TEST_F(BridgeTest, ReclaimingFromNativeDoesNotEmptyOurOwnCacheAgain) {
  bridge.announce();
  int nested = 0;
  native.on_empty_cache = [&] {
    auto* registry = c10::FreeCudaMemoryCallbacksRegistry();
    for (const auto& name : registry->Keys()) nested += registry->Create(name)->Execute() ? 1 : 0;
  };
  { const c10::DataPtr kept = bridge.allocate(64_MiB); }
  failure([&] { bridge.allocate(1_GiB); });
  EXPECT_EQ(nested, 0);
}

TEST_F(BridgeTest, HistoryHoldsOurBlocks) {
  using Entry = c10::CachingDeviceAllocator::TraceEntry;
  struct Here final : c10::GatheredContext {};
  bridge.recordHistory(true, []() -> std::shared_ptr<c10::GatheredContext> { return std::make_shared<Here>(); }, 100,
                       c10::CachingDeviceAllocator::RecordContext::ALL, true, {"free_requested"});
  std::string region = "compiled";
  bridge.pushCompileContext(region);
  void* const block = bridge.raw_alloc(3000);
  bridge.popCompileContext();
  const auto while_live = bridge.snapshot(kDefaultPool, false);
  bool context_shown = false;
  for (const auto& segment : while_live.segments) {
    for (const auto& shown : segment.blocks) context_shown |= shown.context_when_allocated != nullptr;
  }
  EXPECT_TRUE(context_shown);
  bridge.raw_delete(block);
  const auto traces = bridge.snapshot(kDefaultPool, true).device_traces;
  ASSERT_EQ(traces.size(), 1U);
  ASSERT_EQ(traces[0].size(), 2U);
  EXPECT_EQ(traces[0][0].action_, Entry::ALLOC);
  EXPECT_EQ(traces[0][0].size_, 3000U);
  EXPECT_EQ(traces[0][0].compile_context_, "compiled");
  EXPECT_EQ(traces[0][1].action_, Entry::FREE_COMPLETED);
  EXPECT_EQ(traces[0][1].addr_, reinterpret_cast<size_t>(block));
  EXPECT_NE(traces[0][1].context_, nullptr);
  EXPECT_LT(std::abs(traces[0][0].time_.t_ - c10::getTime() / 1000), 60'000'000);
  bridge.recordHistory(false, nullptr, 1, c10::CachingDeviceAllocator::RecordContext::NEVER, true, {});
  { const c10::DataPtr unrecorded = bridge.allocate(10); }
  EXPECT_TRUE(bridge.snapshot(kDefaultPool, true).device_traces[0].empty());
}

TEST_F(BridgeTest, LimitsAndCaches) {
  bridge.setMemoryFraction(0.25, 0);
  EXPECT_EQ(bridge.getMemoryFraction(0), 0.25);
  EXPECT_THAT(failure([&] { bridge.allocate(128_MiB); }), HasSubstr("64.00 MiB allowed; "));
  bridge.setMemoryFraction(1.0, 0);
  { const c10::DataPtr block = bridge.allocate(64_MiB); }
  size_t largest = 0;
  bridge.cacheInfo(0, &largest);
  EXPECT_GE(largest, 64_MiB);
  bridge.emptyCache(kDefaultPool);
  EXPECT_LT(bridge.getDeviceStats(0).reserved_bytes[0].current, static_cast<std::int64_t>(64_MiB));
}

TEST_F(BridgeTest, OurMemoryIsNotShared) {
  const c10::DataPtr block = bridge.allocate(100);
  EXPECT_THROW(bridge.shareIpcHandle(block.get()), c10::NotImplementedError);
  int foreign = 0;
  EXPECT_EQ(bridge.shareIpcHandle(&foreign).handle, "handle");
}

TEST_F(BridgeTest, FreeingWhatIsNoBlockOfOursIsReportedNotThrown) {
  const c10::DataPtr block = bridge.allocate(4096);
  EXPECT_NO_THROW(bridge.raw_delete(static_cast<char*>(block.get()) + 512));
  EXPECT_NO_THROW(bridge.raw_deleter()(&native));  // native throws at this one
}

}  // namespace
}  // namespace lowtide
