// Lowtide and torch's own allocator side by side in one process, through the interface that torch calls both by: what a tensor's
// memory costs without the tensor. Needs a GPU. bench/run.py prints the ratios.
//
// Names are <workload>/<allocator>. No work is queued on the GPU, so every event has passed when it is asked for.
#include <benchmark/benchmark.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cmath>
#include <cstdint>
#include <iostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "allocator/torch/install.h"

namespace {

using Allocator = c10::cuda::CUDACachingAllocator::CUDAAllocator;
using c10::cuda::CUDAStream;

enum class Streams { One, Own };

/// The stream that thread `index` of a benchmark allocates on.
CUDAStream stream_of(Streams streams, int index) {
  static const std::vector<CUDAStream> pool = [] {
    std::vector<CUDAStream> made;
    for (int i = 0; i < 8; ++i) made.push_back(c10::cuda::getStreamFromPool());
    return made;
  }();
  return streams == Streams::One ? pool.front() : pool.at(static_cast<std::size_t>(index));
}

void one_block(benchmark::State& state, Allocator* allocator, std::size_t size, Streams streams) {
  const c10::cuda::CUDAStreamGuard guard(stream_of(streams, state.thread_index()));
  for (auto _ : state) {
    c10::DataPtr block = allocator->allocate(size);
    benchmark::DoNotOptimize(block.get());
  }
}

/// Replaces one of many live blocks by one of another size, log-uniform from 512 B to 8 MiB.
void among_live_blocks(benchmark::State& state, Allocator* allocator, std::size_t count) {
  const c10::cuda::CUDAStreamGuard guard(stream_of(Streams::One, 0));
  std::mt19937_64 dice(1);
  std::uniform_real_distribution<double> exponent(9.0, 23.0);
  const auto any_size = [&] { return static_cast<std::size_t>(std::exp2(exponent(dice))); };
  std::vector<c10::DataPtr> live(count);
  for (auto& block : live) block = allocator->allocate(any_size());
  // Drawn beforehand: the dice cost as much as the allocator.
  std::vector<std::pair<std::size_t, std::size_t>> plan(std::size_t{1} << 14);
  for (auto& [slot, size] : plan) {
    slot = dice() % count;
    size = any_size();
  }
  std::size_t next = 0;
  for (auto _ : state) {
    const auto& [slot, size] = plan[next++ % plan.size()];
    live[slot].clear();
    live[slot] = allocator->allocate(size);
  }
}

void used_on_another_stream(benchmark::State& state, Allocator* allocator, std::size_t size) {
  const c10::cuda::CUDAStreamGuard guard(stream_of(Streams::Own, 0));
  const CUDAStream other = stream_of(Streams::Own, 1);
  for (auto _ : state) {
    c10::DataPtr block = allocator->allocate(size);
    allocator->recordStream(block, other);
  }
}

void register_for(const std::string& name, Allocator* allocator) {
  const std::pair<const char*, std::size_t> sizes[] = {
      {"512 B", 512}, {"4 KB", 4 << 10}, {"1 MB", 1 << 20}, {"8 MB", 8 << 20}, {"64 MB", 64 << 20}};
  for (const auto& [label, size] : sizes) {
    benchmark::RegisterBenchmark((std::string("one block of ") + label + "/" + name).c_str(), one_block, allocator,
                                 size, Streams::One);
  }
  for (const std::size_t count : {10, 100, 1000, 10000}) {
    benchmark::RegisterBenchmark(("among " + std::to_string(count) + " live blocks/" + name).c_str(), among_live_blocks,
                                 allocator, count);
  }
  const std::pair<const char*, Streams> threads[] = {{"8 threads, own streams", Streams::Own},
                                                     {"8 threads, one stream", Streams::One}};
  for (const auto& [label, streams] : threads) {
    benchmark::RegisterBenchmark((std::string(label) + "/" + name).c_str(), one_block, allocator, std::size_t{4 << 10},
                                 streams)
        ->Threads(8)
        ->UseRealTime();
  }
  benchmark::RegisterBenchmark(("4 KB used on another stream/" + name).c_str(), used_on_another_stream, allocator,
                               std::size_t{4 << 10});
}

}  // namespace

int main(int argc, char** argv) {
  namespace native_api = c10::cuda::CUDACachingAllocator;
  if (c10::cuda::device_count() == 0) {
    std::cout << "skipped: no CUDA device\n";
    return 0;
  }
  Allocator* const native = native_api::get();
  lowtide::install_allocator(lowtide::InstallDevice::Cuda);
  Allocator* const ours = native_api::get();
  native_api::init(c10::cuda::device_count());  // ours, which passes it on
  stream_of(Streams::One, 0);
  register_for("native", native);
  register_for("lowtide", ours);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
