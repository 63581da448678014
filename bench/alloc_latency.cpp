// Time of CachingAllocator's allocate and free, without torch and Python around them: on the host device, and on a GPU where there
// is one. What torch and Python add to it: bench/alloc_latency.py.
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "allocator/caching_allocator.h"
#include "allocator/cuda_device.h"
#include "allocator/host_device.h"

namespace {

using lowtide::Bytes;
using lowtide::operator""_KiB;
using lowtide::operator""_MiB;
using lowtide::operator""_GiB;

/// One device and its allocator for the whole program; benchmarks give back every block. Leaked: at exit the driver may be gone first.
struct Bed {
  explicit Bed(std::unique_ptr<lowtide::Device> its_device) : device(std::move(its_device)), allocator(*device) {}
  std::unique_ptr<lowtide::Device> device;
  lowtide::CachingAllocator allocator;
};

Bed& host_bed() {
  static Bed& bed = *new Bed(lowtide::make_host_device({.index = 0, .memory = 16_GiB, .granularity = 2_MiB}));
  return bed;
}

Bed& cuda_bed() {
  static Bed& bed = *new Bed(lowtide::make_cuda_device(0));
  return bed;
}

using BedOf = Bed& (*)();

/// One block at a time: after the first time a block of that size is free and cached.
void one_block(benchmark::State& state, BedOf bed) {
  lowtide::CachingAllocator& allocator = bed().allocator;
  const auto size = static_cast<Bytes>(state.range(0));
  const lowtide::StreamHandle stream{};
  for (auto _ : state) {
    const lowtide::DeviceAddress address = allocator.allocate(size, stream);
    benchmark::DoNotOptimize(address);
    allocator.free(address);
  }
}

/// Replaces one of many live blocks by one of another size, log-uniform from 512 B to 8 MiB.
void among_live_blocks(benchmark::State& state, BedOf bed) {
  lowtide::CachingAllocator& allocator = bed().allocator;
  const lowtide::StreamHandle stream{};
  std::mt19937_64 dice(static_cast<std::uint64_t>(state.thread_index()));
  std::uniform_real_distribution<double> exponent(9.0, 23.0);
  const auto any_size = [&] { return static_cast<Bytes>(std::exp2(exponent(dice))); };

  std::vector<lowtide::DeviceAddress> live(static_cast<std::size_t>(state.range(0)));
  for (auto& address : live) address = allocator.allocate(any_size(), stream);
  // Drawn beforehand: the dice cost as much as the allocator.
  std::vector<std::pair<std::size_t, Bytes>> plan(std::size_t{1} << 14);
  for (auto& [slot, size] : plan) {
    slot = dice() % live.size();
    size = any_size();
  }

  std::size_t next = 0;
  for (auto _ : state) {
    const auto& [slot, size] = plan[next++ % plan.size()];
    allocator.free(live[slot]);
    live[slot] = allocator.allocate(size, stream);
  }
  for (const auto address : live) allocator.free(address);
}

void register_for(const std::string& device, BedOf bed) {
  benchmark::RegisterBenchmark((device + "/one_block").c_str(), one_block, bed)
      ->Arg(512)
      ->Arg(4_KiB)
      ->Arg(1_MiB)
      ->Arg(8_MiB)
      ->Arg(64_MiB)
      ->MinTime(0.2);
  benchmark::RegisterBenchmark((device + "/one_block").c_str(), one_block, bed)
      ->Arg(4_KiB)
      ->Threads(4)
      ->UseRealTime()
      ->MinTime(0.2);
  benchmark::RegisterBenchmark((device + "/among_live_blocks").c_str(), among_live_blocks, bed)
      ->Arg(10)
      ->Arg(1000)
      ->Arg(10000)
      ->MinTime(0.2);
}

/// Registered before main(), which is Google Benchmark's own.
const bool registered = [] {
  register_for("host", host_bed);
  if (lowtide::cuda_device_count() > 0) {
    register_for("cuda", cuda_bed);
  } else {
    benchmark::AddCustomContext("cuda", "skipped: no CUDA device (" + lowtide::cuda_unavailable_reason() + ")");
  }
  return true;
}();

}  // namespace
