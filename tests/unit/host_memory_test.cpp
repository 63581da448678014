#include "pool/host_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "allocator/errors.h"
#include "allocator/host_device.h"
#include "tests/support/faulty_device.h"

namespace lowtide {
namespace {

using testing::FaultyDevice;
using testing::LiveCounts;

constexpr Bytes kSlice = 1_MiB;

class HostMemoryTest : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(device_.live(), LiveCounts{});
    EXPECT_EQ(device_.bad_releases(), 0u);
    EXPECT_EQ(budget_.used(), 0u);
  }

  /// Every slice, once it is ready; a test that waits for one that never will be fails instead of hanging.
  static void await(const HostLease& lease) {
    for (const auto& slice : lease.slices()) {
      auto waiting = std::async(std::launch::async, [&slice] { slice->await_ready(); });
      if (waiting.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
        ADD_FAILURE() << "a slice that nobody prepares";
        std::abort();  // the waiting thread cannot be ended
      }
    }
  }

  FaultyDevice device_{make_host_device({.index = 0, .memory = 16_MiB, .granularity = 2_MiB})};
  HostBudget budget_{64_MiB};
};

TEST(HostBudget, CountsUpToItsLimit) {
  HostBudget budget(10);
  EXPECT_TRUE(budget.take(6));
  EXPECT_FALSE(budget.take(5));
  EXPECT_EQ(budget.used(), 6u);
  EXPECT_TRUE(budget.take(4));
  budget.give(10);
  EXPECT_EQ(budget.used(), 0u);
  budget.set_limit(3);
  EXPECT_FALSE(budget.take(4));
}

TEST(HostBudget, TheDefaultIsAPartOfTheMachine) {
  EXPECT_GT(default_host_budget(), 0u);
  const auto machine = static_cast<Bytes>(sysconf(_SC_PHYS_PAGES)) * static_cast<Bytes>(sysconf(_SC_PAGESIZE));
  EXPECT_LE(default_host_budget(), machine / 5 * 4 + 4);
}

TEST_F(HostMemoryTest, ALeaseIsExactToThePageAndCutInSlices) {
  HostMemory memory(device_, budget_, {.slice = kSlice});
  const auto lease = memory.lease(2 * kSlice + 1);
  await(*lease);
  EXPECT_EQ(lease->bytes(), 2 * kSlice + 4_KiB);
  ASSERT_EQ(lease->slices().size(), 3u);
  EXPECT_EQ(lease->slices()[0]->size(), kSlice);
  EXPECT_EQ(lease->slices()[2]->size(), 4_KiB);
  EXPECT_EQ(memory.held_bytes(), lease->bytes());
  EXPECT_EQ(memory.leased_bytes(), lease->bytes());
  EXPECT_EQ(budget_.used(), lease->bytes());
  EXPECT_EQ(device_.live().registrations, 3u);
}

TEST_F(HostMemoryTest, EverySliceIsRegisteredAndWritable) {
  HostMemory memory(device_, budget_, {.slice = kSlice, .threads = 3});
  const auto lease = memory.lease(5 * kSlice);
  await(*lease);
  EXPECT_EQ(device_.live().registrations, 5u);
  for (const auto& slice : lease->slices()) std::memset(slice->data(), 0xA5, slice->size());
  for (const auto& slice : lease->slices()) {
    EXPECT_TRUE(slice->contains(slice->data() + slice->size() - 1));
    EXPECT_FALSE(slice->contains(slice->data() + slice->size()));
  }
}

TEST_F(HostMemoryTest, NothingIsLeasedForNothing) {
  HostMemory memory(device_, budget_, {.slice = kSlice});
  const auto lease = memory.lease(0);
  EXPECT_EQ(lease->bytes(), 0u);
  EXPECT_TRUE(lease->slices().empty());
  EXPECT_EQ(memory.allocations(), 0);
}

TEST_F(HostMemoryTest, TheSecondLeaseAllocatesNothing) {
  HostMemory memory(device_, budget_, {.slice = kSlice});
  memory.lease(3 * kSlice + 100).reset();
  EXPECT_EQ(memory.leased_bytes(), 0u);
  EXPECT_EQ(memory.held_bytes(), 3 * kSlice + 4_KiB);
  const auto allocations = memory.allocations();
  const auto registered = device_.calls("register_host");
  for (int round = 0; round < 3; ++round) {
    const auto lease = memory.lease(3 * kSlice + 100);
    await(*lease);
    EXPECT_EQ(lease->bytes(), 3 * kSlice + 4_KiB);
  }
  EXPECT_EQ(memory.allocations(), allocations);
  EXPECT_EQ(device_.calls("register_host"), registered);
}

TEST_F(HostMemoryTest, KeptSlicesAreUsedAndTheRestIsNew) {
  HostMemory memory(device_, budget_, {.slice = kSlice});
  memory.lease(kSlice).reset();
  const auto lease = memory.lease(2 * kSlice);
  await(*lease);
  EXPECT_EQ(lease->bytes(), 2 * kSlice);
  EXPECT_EQ(memory.allocations(), 2);
}

TEST_F(HostMemoryTest, TheSmallestKeptSliceThatHoldsTheRestIsTaken) {
  HostMemory memory(device_, budget_, {.slice = kSlice});
  auto large = memory.lease(kSlice);
  auto small = memory.lease(64_KiB);
  large.reset();
  small.reset();
  const auto lease = memory.lease(60_KiB);
  EXPECT_EQ(lease->bytes(), 64_KiB);
}

TEST_F(HostMemoryTest, TrimGivesBackWhatIsKeptAndOnlyThat) {
  HostMemory memory(device_, budget_, {.slice = kSlice});
  auto lease = memory.lease(kSlice);
  memory.lease(2 * kSlice).reset();
  EXPECT_EQ(memory.trim(), 2 * kSlice);
  EXPECT_EQ(memory.trim(), 0u);
  EXPECT_EQ(memory.held_bytes(), kSlice);
  EXPECT_EQ(budget_.used(), kSlice);
  lease.reset();
  EXPECT_EQ(device_.live().registrations, 1u);
  EXPECT_EQ(memory.trim(), kSlice);
  EXPECT_EQ(device_.live().registrations, 0u);
  EXPECT_EQ(memory.held_bytes(), 0u);
}

TEST_F(HostMemoryTest, ABudgetOfZeroRefusesAndNamesNeedAndBudget) {
  HostBudget none(0);
  HostMemory memory(device_, none, {.slice = kSlice});
  try {
    memory.lease(512_KiB);
    FAIL() << "a lease beyond the budget";
  } catch (const HostMemoryError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("0 bytes"), std::string::npos) << message;
    EXPECT_NE(message.find("512.00 KiB"), std::string::npos) << message;
  }
  EXPECT_EQ(memory.held_bytes(), 0u);
  EXPECT_EQ(memory.leased_bytes(), 0u);
}

TEST_F(HostMemoryTest, TheMessageNamesTheWholeNeedNotThatOfOneSlice) {
  HostBudget budget(2 * kSlice);
  HostMemory memory(device_, budget, {.slice = kSlice});
  try {
    memory.lease(10 * kSlice);
    FAIL() << "a lease beyond the budget";
  } catch (const HostMemoryError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("10.00 MiB"), std::string::npos) << message;
    EXPECT_NE(message.find("2.00 MiB"), std::string::npos) << message;
  }
  EXPECT_EQ(budget.used(), 0u);
}

TEST_F(HostMemoryTest, ARefusedLeaseLeavesEverythingUsable) {
  HostBudget budget(3 * kSlice);
  HostMemory memory(device_, budget, {.slice = kSlice});
  memory.lease(kSlice).reset();
  EXPECT_THROW(memory.lease(8 * kSlice), HostMemoryError);
  EXPECT_EQ(memory.leased_bytes(), 0u);
  EXPECT_EQ(memory.held_bytes(), budget.used());
  // What fits still works, and none of its slices is one that was never prepared.
  const auto lease = memory.lease(3 * kSlice);
  await(*lease);
  EXPECT_EQ(lease->bytes(), 3 * kSlice);
}

TEST_F(HostMemoryTest, TheBudgetIsSharedByAllHostMemory) {
  HostBudget budget(3 * kSlice);
  HostMemory one(device_, budget, {.slice = kSlice});
  HostMemory other(device_, budget, {.slice = kSlice});
  const auto lease = one.lease(2 * kSlice);
  EXPECT_THROW(other.lease(2 * kSlice), HostMemoryError);
  EXPECT_EQ(other.lease(kSlice)->bytes(), kSlice);
}

TEST_F(HostMemoryTest, WhereRegisteringIsRefusedTheMemoryIsPageableAndUsable) {
  HostMemory memory(device_, budget_, {.slice = kSlice, .threads = 1});
  device_.fail_at(1);
  const auto lease = memory.lease(2 * kSlice);
  await(*lease);
  EXPECT_TRUE(device_.failed());
  EXPECT_EQ(device_.live().registrations, 1u);
  for (const auto& slice : lease->slices()) std::memset(slice->data(), 0x5A, slice->size());
}

TEST_F(HostMemoryTest, ALeaseThatEndsBeforeItIsReadyIsSafe) {
  HostMemory memory(device_, budget_, {.slice = kSlice, .threads = 2});
  for (int i = 0; i < 20; ++i) {
    memory.lease(4 * kSlice).reset();
    memory.trim();
  }
  EXPECT_EQ(memory.held_bytes(), 0u);
}

TEST_F(HostMemoryTest, ConcurrentLeasesGetMemoryOfTheirOwn) {
  HostMemory memory(device_, budget_, {.slice = kSlice, .threads = 2});
  constexpr int kThreads = 4;
  std::vector<std::thread> threads;
  std::atomic<int> damaged{0};
  for (int id = 0; id < kThreads; ++id) {
    threads.emplace_back([&, id] {
      for (int round = 0; round < 12; ++round) {
        const auto lease = memory.lease((1 + (id + round) % 3) * kSlice);
        for (const auto& slice : lease->slices()) {
          slice->await_ready();
          std::memset(slice->data(), id + 1, 64);
          std::memset(slice->data() + slice->size() - 64, id + 1, 64);
        }
        std::this_thread::yield();
        for (const auto& slice : lease->slices()) {
          if (slice->data()[0] != std::byte(id + 1) || slice->data()[slice->size() - 1] != std::byte(id + 1)) ++damaged;
        }
        if (round % 5 == id) memory.trim();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(damaged, 0);
  EXPECT_EQ(memory.leased_bytes(), 0u);
  EXPECT_EQ(memory.held_bytes(), budget_.used());
}

}  // namespace
}  // namespace lowtide
