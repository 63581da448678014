// Threads that allocate, write, read back and free on streams while regions leave and come back. Every block carries a
// cookie at its start and end. It is read back by copies that are only queued when the block is freed, so memory that is
// handed out or unmapped too early shows as a wrong cookie or as a fault.
// LOWTIDE_STRESS_SEED chooses the seed (printed with every failure), LOWTIDE_STRESS_SECONDS the duration.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "allocator/caching_allocator.h"
#include "allocator/errors.h"
#include "allocator/heap.h"
#include "pool/region_mover.h"
#include "tests/support/devices.h"
#include "tests/support/faulty_device.h"
#include "tests/support/patterns.h"
#include "tests/support/pinned_buffer.h"

namespace lowtide {
namespace {

using testing::DeviceKindUnderTest;
using testing::FaultyDevice;
using testing::LiveCounts;
using testing::PinnedBuffer;
using Clock = std::chrono::steady_clock;

constexpr Bytes kCookie = 64;  // bytes of pattern at each end of a block
constexpr std::size_t kRegions = 3;
constexpr std::size_t kStreams = 8;

std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 0);
}

/// Slots of pinned host memory: what a queued copy reads or writes stays alive until its stream is past it.
class Slots {
 public:
  static constexpr Bytes kSize = 2 * kCookie;

  Slots(Device& device, std::size_t count) : memory_(device, count * kSize) {
    for (std::size_t i = 0; i < count; ++i) free_.push_back(memory_.data() + i * kSize);
  }
  /// Null if all are in use.
  unsigned char* take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return nullptr;
    unsigned char* slot = free_.back();
    free_.pop_back();
    return slot;
  }
  void give(unsigned char* slot) {
    const std::lock_guard lock(mutex_);
    free_.push_back(slot);
  }

 private:
  PinnedBuffer memory_;
  std::mutex mutex_;
  std::vector<unsigned char*> free_;  // mutex_
};

struct Block {
  DeviceAddress address{};
  Bytes size = 0;
  std::uint64_t cookie = 0;
  StreamHandle stream{};
  std::size_t region = kRegions;     // kRegions: none
  unsigned char* written = nullptr;  // the slot that its first copies read
};

/// Copies that are queued, with what they must have read once `event` has passed.
struct Reading {
  EventHandle event{};
  unsigned char* slot = nullptr;
  unsigned char* written = nullptr;
  Bytes part = 0;
  Bytes size = 0;
  std::uint64_t cookie = 0;
};

struct RegionUnderStress {
  OwnerId owner{};
  /// Shared by threads that use blocks of the region, exclusive for who moves it.
  std::shared_mutex in_use;
  HostImages images;  // in_use, exclusive
};

class Stress {
 public:
  Stress(Device& inner, Bytes memory, std::uint64_t seed)
      : seed_(seed), memory_(memory), device_(inner), slots_(std::make_unique<Slots>(device_, 2048)) {
    for (StreamHandle& stream : streams_) stream = device_.create_stream();
    allocator_ = std::make_unique<CachingAllocator>(device_);
    allocator_->set_memory_fraction(testing::fraction_for(device_, memory));
    mover_ = std::make_unique<RegionMover>(*allocator_, budget_, HostMemoryOptions{.slice = 8_MiB, .threads = 2});
    for (std::size_t i = 0; i < kRegions; ++i) regions_[i].owner = OwnerId{static_cast<std::uint32_t>(i + 1)};
  }

  void run(unsigned threads, std::chrono::milliseconds duration, std::size_t max_steps) {
    const auto end = Clock::now() + duration;
    std::vector<std::thread> workers;
    for (unsigned id = 0; id < threads; ++id) {
      workers.emplace_back([&, id] {
        try {
          work(id, end, max_steps);
        } catch (const std::exception& error) {
          ADD_FAILURE() << "thread " << id << ": " << error.what() << seed_text();
          stop_ = true;
        }
      });
    }
    for (std::thread& worker : workers) worker.join();
  }

  /// Checks and frees what is resident, then what comes back, then the rest; and looks for what is left over.
  void finish() {
    std::vector<Reading> readings;
    const auto free_resident = [&] {
      std::erase_if(blocks_, [&](Block& block) {
        if (!allocator_->is_resident(block.address)) return false;
        free(block, readings, block.stream);
        collect(readings, true);
        return true;
      });
    };
    free_resident();
    for (std::size_t i = 0; i < kRegions; ++i) {
      restore(i);  // more may be away than the device holds
      free_resident();
    }
    for (Block& block : blocks_) free(block, readings, block.stream);
    blocks_.clear();
    for (RegionUnderStress& region : regions_) region.images.clear();
    EXPECT_NO_THROW(allocator_->check()) << seed_text();
    {
      MutexLock lock(allocator_->heap().mutex);
      EXPECT_NO_THROW(allocator_->heap().check_pages()) << seed_text();
    }
    allocator_->trim();
    const auto stats = allocator_->stats();
    EXPECT_EQ(stats.active_bytes[0].current, 0) << seed_text();
    EXPECT_EQ(stats.reserved_bytes[0].current, 0) << seed_text();
    EXPECT_EQ(stats.evicted_bytes.current, 0) << seed_text();
    EXPECT_EQ(mover_->host_memory().leased_bytes(), 0u) << seed_text();
    mover_.reset();
    allocator_.reset();
    for (const StreamHandle stream : streams_) device_.destroy_stream(stream);
    slots_.reset();
    EXPECT_EQ(device_.live(), LiveCounts{}) << seed_text();
    EXPECT_EQ(device_.bad_releases(), 0u) << seed_text();
    EXPECT_EQ(budget_.used(), 0u) << seed_text();
  }

  std::string seed_text() const { return "\nreplay with LOWTIDE_STRESS_SEED=" + std::to_string(seed_); }

  std::atomic<std::uint64_t> allocations{0}, verified{0}, evictions{0}, restores{0}, freed_away{0}, shortages{0};

 private:
  using Random = std::mt19937_64;

  /// 1 byte to 1 GiB, or to an eighth of the memory there is; every magnitude is as likely as another.
  Bytes random_size(Random& random) const {
    const Bytes limit = std::min(1_GiB, memory_ / 8);
    const double magnitude = std::uniform_real_distribution(0.0, std::log2(static_cast<double>(limit)))(random);
    return std::clamp<Bytes>(static_cast<Bytes>(std::exp2(magnitude)), 1, limit);
  }

  void work(unsigned id, Clock::time_point end, std::size_t max_steps) {
    Random random(seed_ * 1000 + id);
    const auto below = [&](std::size_t limit) { return static_cast<std::size_t>(random() % limit); };
    std::vector<Reading> readings;
    for (std::size_t step = 0; step < max_steps && Clock::now() < end && !stop_; ++step) {
      const std::size_t what = below(100);
      if (what < 45) {
        allocate(random_size(random), streams_[below(kStreams)], below(kRegions + 1));
      } else if (what < 92) {
        free_one(below(1 << 20), streams_[below(kStreams)], readings);
      } else if (what < 95) {
        evict(below(kRegions));
      } else if (what < 99) {
        restore(below(kRegions));
      } else if (below(4) == 0) {
        allocator_->trim();
        mover_->host_memory().trim();
      }
      collect(readings, false);
    }
    collect(readings, true);
  }

  void allocate(Bytes size, StreamHandle stream, std::size_t region) {
    unsigned char* slot = slots_->take();
    if (slot == nullptr) return;
    // Not while the region moves: the block is used at once.
    std::shared_lock<std::shared_mutex> in_use;
    if (region < kRegions) in_use = std::shared_lock(regions_[region].in_use);
    Block block{{}, size, ++last_cookie_, stream, region, slot};
    try {
      block.address = allocator_->allocate(size, stream, region < kRegions ? regions_[region].owner : kNoOwner);
    } catch (const OutOfMemory&) {
      ++shortages;
      slots_->give(slot);
      return;
    }
    ++allocations;
    const Bytes part = std::min(size, kCookie);
    testing::fill_pattern(slot, part, block.cookie);
    testing::fill_pattern(slot + kCookie, part, block.cookie, size - part);
    // Tail first, so that the head of a block shorter than both is right as well: they agree where they overlap.
    device_.copy_to_device(block.address + (size - part), slot + kCookie, part, stream);
    device_.copy_to_device(block.address, slot, part, stream);
    const std::lock_guard lock(blocks_mutex_);
    blocks_.push_back(block);
  }

  /// Frees any thread's block.
  void free_one(std::size_t pick, StreamHandle reader, std::vector<Reading>& readings) {
    Block block;
    {
      const std::lock_guard lock(blocks_mutex_);
      if (blocks_.empty() || (blocks_.size() < 40 && pick % 4 != 0)) return;
      const auto chosen = blocks_.begin() + static_cast<std::ptrdiff_t>(pick % blocks_.size());
      block = *chosen;
      *chosen = blocks_.back();
      blocks_.pop_back();
    }
    free(block, readings, reader);
  }

  /// Queues the copies that read the cookie back, on `reader`, and frees the block without waiting for them.
  void free(Block& block, std::vector<Reading>& readings, StreamHandle reader) {
    std::shared_lock<std::shared_mutex> in_use;
    if (block.region < kRegions) in_use = std::shared_lock(regions_[block.region].in_use, std::try_to_lock);
    // A block that is away or on its way can be freed, but not read.
    const bool readable = (block.region == kRegions || in_use.owns_lock()) && allocator_->is_resident(block.address);
    unsigned char* slot = readable ? slots_->take() : nullptr;
    if (slot == nullptr) {
      ++freed_away;
      // What wrote it may still be queued, so its slot is not given back before that is done.
      device_.synchronize(block.stream);
      slots_->give(block.written);
      EXPECT_TRUE(allocator_->free(block.address)) << seed_text();
      return;
    }
    if (reader != block.stream) {
      const EventHandle written = device_.create_event();
      device_.record(written, block.stream);
      device_.wait(reader, written);
      device_.destroy_event(written);
      EXPECT_TRUE(allocator_->record_stream(block.address, reader)) << seed_text();
    }
    const Bytes part = std::min(block.size, kCookie);
    device_.copy_to_host(slot, block.address, part, reader);
    device_.copy_to_host(slot + kCookie, block.address + (block.size - part), part, reader);
    const EventHandle event = device_.create_event();
    device_.record(event, reader);
    EXPECT_TRUE(allocator_->free(block.address)) << seed_text();
    readings.push_back({event, slot, block.written, part, block.size, block.cookie});
  }

  void collect(std::vector<Reading>& readings, bool all) {
    std::erase_if(readings, [&](Reading& reading) {
      if (all || readings.size() > 64) {
        device_.synchronize(reading.event);
      } else if (!device_.query(reading.event)) {
        return false;
      }
      verify(reading);
      return true;
    });
  }

  void verify(Reading& reading) {
    const bool right =
        testing::has_pattern(reading.slot, reading.part, reading.cookie) &&
        testing::has_pattern(reading.slot + kCookie, reading.part, reading.cookie, reading.size - reading.part);
    EXPECT_TRUE(right) << "a block of " << reading.size << " bytes lost its cookie " << reading.cookie << seed_text();
    if (!right) stop_ = true;
    ++verified;
    device_.destroy_event(reading.event);
    slots_->give(reading.slot);
    slots_->give(reading.written);
  }

  void evict(std::size_t index) {
    RegionUnderStress& region = regions_[index];
    const std::unique_lock in_use(region.in_use, std::try_to_lock);
    // More than can come back would stay away for good, and blocks that are away are not read.
    if (!in_use.owns_lock() || RegionPages(*allocator_).usage(region.owner).allocated > memory_ / 4) return;
    try {
      mover_->evict(region.owner, {}, region.images);
      ++evictions;
    } catch (const HostMemoryError&) {
      ++shortages;
    }
  }

  void restore(std::size_t index) {
    RegionUnderStress& region = regions_[index];
    const std::unique_lock in_use(region.in_use, std::try_to_lock);
    if (!in_use.owns_lock() || region.images.empty()) return;
    try {
      mover_->restore(region.owner, region.images);
      // What is left belongs to blocks that were all freed while away.
      region.images.clear();
      ++restores;
    } catch (const OutOfMemory&) {
      ++shortages;
    }
  }

  const std::uint64_t seed_;
  const Bytes memory_;
  FaultyDevice device_;
  std::unique_ptr<Slots> slots_;
  std::array<StreamHandle, kStreams> streams_{};
  HostBudget budget_{2 * memory_};
  std::unique_ptr<CachingAllocator> allocator_;
  std::unique_ptr<RegionMover> mover_;
  std::array<RegionUnderStress, kRegions> regions_;
  std::mutex blocks_mutex_;
  std::vector<Block> blocks_;  // blocks_mutex_
  std::atomic<std::uint64_t> last_cookie_{0};
  std::atomic<bool> stop_{false};
};

class StressTest : public ::testing::TestWithParam<DeviceKindUnderTest> {
 protected:
  void SetUp() override {
    const std::string missing = GetParam().missing();
    if (!missing.empty()) GTEST_SKIP() << GetParam().name << ": " << missing;
    memory_ = GetParam().name == "Host" ? 512_MiB : 12_GiB;
    device_ = GetParam().make(memory_);
  }

  Bytes memory_ = 0;
  std::unique_ptr<Device> device_;
};

void print(const Stress& stress) {
  std::cout << stress.allocations << " allocations, " << stress.verified << " blocks verified, " << stress.evictions
            << " evictions, " << stress.restores << " restores, " << stress.freed_away << " freed while away, "
            << stress.shortages << " times out of memory\n";
}

TEST_P(StressTest, ManyThreads) {
  const auto seed = number_from("LOWTIDE_STRESS_SEED", std::random_device{}());
  const auto seconds = number_from("LOWTIDE_STRESS_SECONDS", 10);
  Stress stress(*device_, memory_, seed);
  stress.run(6, std::chrono::seconds(seconds), ~std::size_t{0});
  stress.finish();
  print(stress);
  // A run that never did what it is for proves nothing.
  EXPECT_GT(stress.verified, 50u) << stress.seed_text();
  EXPECT_GT(stress.evictions, 3u) << stress.seed_text();
  EXPECT_GT(stress.restores, 3u) << stress.seed_text();
}

/// Sixteen threads on four devices, eight streams on each.
TEST_P(StressTest, ManyDevices) {
  if (GetParam().name != "Host") GTEST_SKIP() << "devices are made up on the host only";
  const auto seed = number_from("LOWTIDE_STRESS_SEED", std::random_device{}());
  const auto seconds = number_from("LOWTIDE_STRESS_SECONDS", 8);
  constexpr Bytes kEach = 128_MiB;
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<std::unique_ptr<Stress>> stresses;
  for (std::uint64_t i = 0; i < 4; ++i) {
    devices.push_back(GetParam().make(kEach));
    stresses.push_back(std::make_unique<Stress>(*devices.back(), kEach, seed + i));
  }
  std::vector<std::thread> runs;
  for (const auto& stress : stresses) {
    runs.emplace_back([&stress, seconds] { stress->run(4, std::chrono::seconds(seconds), ~std::size_t{0}); });
  }
  for (std::thread& run : runs) run.join();
  for (const auto& stress : stresses) {
    stress->finish();
    EXPECT_GT(stress->verified, 20u) << stress->seed_text();
    EXPECT_GT(stress->evictions, 0u) << stress->seed_text();
  }
}

/// One thread does the same things in the same order for the same seed, so what fails here fails again.
TEST_P(StressTest, OneThreadThroughManySeeds) {
  const auto first = number_from("LOWTIDE_STRESS_SEED", 1);
  for (std::uint64_t seed = first; seed < first + 8 && !HasFailure(); ++seed) {
    Stress stress(*device_, memory_, seed);
    stress.run(1, std::chrono::seconds(20), 400);
    stress.finish();
  }
}

INSTANTIATE_TEST_SUITE_P(Device, StressTest, ::testing::ValuesIn(testing::devices_under_test()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace lowtide
