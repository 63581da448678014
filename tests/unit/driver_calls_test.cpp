// What the allocator asks of the driver, for each of a few workloads: driver_calls.golden has the counts, and a change of any of them
// shows as a difference of lines. In the steady state there are none.
//
// With LOWTIDE_UPDATE_GOLDEN=1 in the environment the file is written anew instead.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "allocator/caching_allocator.h"
#include "allocator/host_device.h"
#include "pool/region_mover.h"
#include "tests/support/faulty_device.h"

namespace lowtide {
namespace {

using testing::FaultyDevice;
using Calls = std::map<std::string, std::size_t, std::less<>>;

constexpr OwnerId kRegion{7};

/// A device with an allocator, and what was asked of the device.
class Bed {
 public:
  Bed()
      : device_(make_host_device({.index = 0, .memory = 4_GiB})),
        budget_(2_GiB),
        allocator_(std::make_unique<CachingAllocator>(device_)),
        mover_(*allocator_, budget_, {.slice = 64_MiB, .threads = 1}),
        main(device_.create_stream()),
        other(device_.create_stream()) {}
  ~Bed() {
    device_.destroy_stream(main);
    device_.destroy_stream(other);
  }
  Bed(const Bed&) = delete;
  Bed& operator=(const Bed&) = delete;

  DeviceAddress allocate(Bytes size, StreamHandle stream, OwnerId owner = kNoOwner) {
    return allocator_->allocate(size, stream, owner);
  }
  void free(DeviceAddress address) { allocator_->free(address); }
  void record_stream(DeviceAddress address, StreamHandle stream) { allocator_->record_stream(address, stream); }
  void trim() { allocator_->trim(); }
  void evict() { mover_.evict(kRegion, {}, images_); }
  void restore() { mover_.restore(kRegion, images_); }
  /// A wait of the program's own, which is not counted.
  void await(StreamHandle stream) { device_.inner().synchronize(stream); }

  /// Calls of the device while `work` runs.
  Calls count(const std::function<void()>& work) {
    const Calls before = device_.all_calls();
    work();
    Calls made;
    for (const auto& [name, calls] : device_.all_calls()) {
      const auto found = before.find(name);
      const std::size_t earlier = found == before.end() ? 0 : found->second;
      if (calls > earlier) made[name] = calls - earlier;
    }
    return made;
  }

 private:
  FaultyDevice device_;
  HostBudget budget_;
  std::unique_ptr<CachingAllocator> allocator_;
  RegionMover mover_;
  HostImages images_;

 public:
  const StreamHandle main, other;
};

/// A workload is prepared, and then counted.
struct Workload {
  std::string name;
  std::function<void(Bed&)> prepare;
  std::function<void(Bed&)> run;
};

void nothing(Bed&) {}

std::vector<DeviceAddress> allocate_many(Bed& bed, int count, Bytes size, OwnerId owner = kNoOwner) {
  std::vector<DeviceAddress> blocks;
  for (int i = 0; i < count; ++i) blocks.push_back(bed.allocate(size, bed.main, owner));
  return blocks;
}

void free_all(Bed& bed, const std::vector<DeviceAddress>& blocks) {
  for (const DeviceAddress block : blocks) bed.free(block);
}

std::function<void(Bed&)> one_block(Bytes size, int times) {
  return [=](Bed& bed) {
    for (int i = 0; i < times; ++i) bed.free(bed.allocate(size, bed.main));
  };
}

/// Replaces one of 1 000 live blocks of log-uniform sizes, 512 B to 8 MiB, again and again; the same ones each time.
void replace_among_1000(Bed& bed) {
  std::mt19937_64 dice(1);
  const auto any_size = [&] {
    return static_cast<Bytes>(std::exp2(9 + 14 * (static_cast<double>(dice() % 4096) / 4096)));
  };
  std::vector<DeviceAddress> live(1000);
  for (auto& address : live) address = bed.allocate(any_size(), bed.main);
  for (int i = 0; i < 2'000; ++i) {
    auto& address = live[dice() % live.size()];
    bed.free(address);
    address = bed.allocate(any_size(), bed.main);
  }
  free_all(bed, live);
}

void use_on_two_streams(Bed& bed) {
  for (int i = 0; i < 100; ++i) {
    const auto block = bed.allocate(1_MiB, bed.main);
    bed.record_stream(block, bed.other);
    bed.free(block);
    bed.await(bed.other);
  }
}

std::vector<Workload> workloads() {
  return {
      {"10 000 times one block of 512 B", one_block(512, 1), one_block(512, 10'000)},
      {"10 000 times one block of 64 MiB", one_block(64_MiB, 1), one_block(64_MiB, 10'000)},
      {"2 000 replacements among 1 000 live blocks", replace_among_1000, replace_among_1000},
      {"100 times a block used on two streams", use_on_two_streams, use_on_two_streams},
      {"1 GiB in blocks of 4 MiB, from nothing", nothing, [](Bed& bed) { allocate_many(bed, 256, 4_MiB); }},
      {"4 MiB in blocks of 4 KiB, from nothing", nothing, [](Bed& bed) { allocate_many(bed, 1024, 4_KiB); }},
      {"256 MiB freed on one stream, allocated on another",
       [](Bed& bed) {
         free_all(bed, allocate_many(bed, 64, 4_MiB));
         bed.allocate(4_MiB, bed.other);  // asks whether `main` is past its pages, which it is once it is awaited
         bed.await(bed.main);
       },
       [](Bed& bed) {
         for (int i = 0; i < 63; ++i) bed.allocate(4_MiB, bed.other);
       }},
      {"trim of 256 MiB", [](Bed& bed) { free_all(bed, allocate_many(bed, 64, 4_MiB)); }, [](Bed& bed) { bed.trim(); }},
      {"first evict of 256 MiB in blocks of 1 MiB", [](Bed& bed) { allocate_many(bed, 256, 1_MiB, kRegion); },
       [](Bed& bed) { bed.evict(); }},
      {"restore and evict of 256 MiB in blocks of 1 MiB",
       [](Bed& bed) {
         allocate_many(bed, 256, 1_MiB, kRegion);
         bed.evict();
       },
       [](Bed& bed) {
         bed.restore();
         bed.evict();
       }},
      {"restore and evict of 64 MiB in blocks of 4 KiB, every second one freed",
       [](Bed& bed) {
         const auto blocks = allocate_many(bed, 16'384, 4_KiB, kRegion);
         for (std::size_t i = 0; i < blocks.size(); i += 2) bed.free(blocks[i]);
         bed.evict();
       },
       [](Bed& bed) {
         bed.restore();
         bed.evict();
       }},
  };
}

std::string measured() {
  std::string text;
  for (const Workload& workload : workloads()) {
    Bed bed;
    workload.prepare(bed);
    const Calls calls = bed.count([&] { workload.run(bed); });
    text += fmt::format("{}\n", workload.name);
    if (calls.empty()) text += "  none\n";
    for (const auto& [name, count] : calls) text += fmt::format("  {} {}\n", name, count);
  }
  return text;
}

TEST(DriverCalls, AreThoseOfTheGoldenFile) {
  const auto file = std::filesystem::path(__FILE__).parent_path() / "driver_calls.golden";
  const std::string text = measured();
  if (std::getenv("LOWTIDE_UPDATE_GOLDEN") != nullptr) {
    std::ofstream(file) << text;
    return;
  }
  std::ifstream stored(file);
  ASSERT_TRUE(stored) << file;
  std::ostringstream golden;
  golden << stored.rdbuf();
  EXPECT_EQ(golden.str(), text) << "where the change is wanted: LOWTIDE_UPDATE_GOLDEN=1, and look at the difference";
}

}  // namespace
}  // namespace lowtide
