// Stands for torch's native CUDA allocator where there is no GPU: memory from malloc, and a note of every call.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "allocator/torch/version_adapter.h"

namespace lowtide::test {

class NativeDouble final : public c10::cuda::CUDACachingAllocator::CUDAAllocator {
 public:
  using MempoolId = c10::MempoolId_t;

  std::vector<std::string> calls;
  std::map<void*, size_t> live;
  c10::CachingDeviceAllocator::DeviceStats stats;
  bool enabled = true;
  bool full = false;                 // raw_alloc and allocate fail
  bool recorded_as_its_own = false;  // recordStream() saw a block under native's deleter
  std::function<void()> on_empty_cache = [] {};
  std::function<void()> on_cache_miss = [] {};  // each allocation is one
  std::vector<c10::CachingDeviceAllocator::SegmentInfo> segments;
  std::vector<c10::DataPtr> checkpointed;

  static NativeDouble& instance() {
    static auto* const native = new NativeDouble;
    return *native;
  }
  static void cached_delete(void* pointer) { instance().raw_delete(pointer); }
  static void uncached_delete(void* pointer) { instance().raw_delete(pointer); }

  bool called(const std::string& call) const { return std::find(calls.begin(), calls.end(), call) != calls.end(); }

  c10::DataPtr allocate(size_t size) override {
    void* const pointer = raw_alloc(size);
    return {pointer, pointer, raw_deleter(), c10::Device(c10::DeviceType::CUDA, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return enabled ? &cached_delete : &uncached_delete; }
  void copy_data(void* target, const void* source, size_t size) const override { std::memcpy(target, source, size); }
  bool initialized() override { return true; }
  void* raw_alloc(size_t size) override {
    TORCH_CHECK_WITH(OutOfMemoryError, !full, "native has nothing");
    on_cache_miss();
    void* const pointer = std::malloc(size);
    live[pointer] = size;
    calls.push_back("allocate");
    return pointer;
  }
  void* raw_alloc_with_stream(size_t size, cudaStream_t) override { return raw_alloc(size); }
  void raw_delete(void* pointer) override {
    TORCH_CHECK(live.erase(pointer) == 1, "invalid device pointer");
    calls.push_back("free");
    std::free(pointer);
  }
  void init(int) override { calls.push_back("init"); }
  double getMemoryFraction(c10::DeviceIndex) override { return 1.0; }
  void setMemoryFraction(double, c10::DeviceIndex) override { calls.push_back("setMemoryFraction"); }
  std::vector<c10::cuda::CUDACachingAllocator::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex) override {
    return {};
  }
  void enable(bool value) override { enabled = value; }
  bool isEnabled() const override { return enabled; }
  void cacheInfo(c10::DeviceIndex, size_t* largest) override { *largest = std::max<size_t>(*largest, 1); }
  void* getBaseAllocation(void* pointer, size_t*) override { return pointer; }
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream) override {
    recorded_as_its_own = data.get_deleter() == &cached_delete;
    calls.push_back("recordStream");
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return stats; }
  void resetAccumulatedStats(c10::DeviceIndex) override { calls.push_back("resetAccumulatedStats"); }
  void resetPeakStats(c10::DeviceIndex) override { calls.push_back("resetPeakStats"); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {1, 2}; }
  void emptyCache(MempoolId) override {
    calls.push_back("emptyCache");
    on_empty_cache();
  }
  c10::cuda::CUDACachingAllocator::SnapshotInfo snapshot(MempoolId, bool) override {
    c10::cuda::CUDACachingAllocator::SnapshotInfo info{};
    info.segments = segments;
    info.device_traces.resize(1);
    return info;
  }
  void beginAllocateToPool(c10::DeviceIndex, MempoolId, std::function<bool(cudaStream_t)>) override {
    calls.push_back("begin");
  }
  void endAllocateToPool(c10::DeviceIndex, MempoolId) override { calls.push_back("end"); }
  void releasePool(c10::DeviceIndex, MempoolId) override { calls.push_back("releasePool"); }
  int getPoolUseCount(c10::DeviceIndex, MempoolId) override { return 7; }
  void createOrIncrefPool(c10::DeviceIndex, MempoolId, std::shared_ptr<CUDAAllocator>) override {
    calls.push_back("createOrIncrefPool");
  }
  void setUseOnOOM(c10::DeviceIndex, MempoolId, bool) override { calls.push_back("setUseOnOOM"); }
  void setNoSplit(c10::DeviceIndex, MempoolId) override { calls.push_back("setNoSplit"); }
  bool checkPoolLiveAllocations(c10::DeviceIndex, MempoolId, const std::unordered_set<void*>&) override { return true; }
  c10::cuda::CUDACachingAllocator::ShareableHandle shareIpcHandle(void*) override { return {3, "handle"}; }
  std::shared_ptr<void> getIpcDevPtr(std::string) override { return nullptr; }
  bool isHistoryEnabled() override { return false; }
  void recordHistory(bool, c10::cuda::CUDACachingAllocator::CreateContextFn, size_t,
                     c10::cuda::CUDACachingAllocator::RecordContext, bool, const std::vector<std::string>&) override {
    calls.push_back("recordHistory");
  }
  void attachOutOfMemoryObserver(c10::cuda::CUDACachingAllocator::OutOfMemoryObserver) override {}
  void attachAllocatorTraceTracker(c10::cuda::CUDACachingAllocator::AllocatorTraceTracker) override {}
#if LOWTIDE_TORCH_2_13
  void attachOomRejectionObserver(c10::cuda::CUDACachingAllocator::OomRejectionObserver) override {}
#endif
  void enablePeerAccess(c10::DeviceIndex, c10::DeviceIndex) override { calls.push_back("enablePeerAccess"); }
  cudaError_t memcpyAsync(void*, int, const void*, int, size_t, cudaStream_t, bool) override {
    calls.push_back("memcpyAsync");
    return cudaSuccess;
  }
  std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> getCheckpointState(c10::DeviceIndex,
                                                                                      MempoolId) override {
    return nullptr;
  }
  c10::cuda::CUDACachingAllocator::CheckpointDelta setCheckpointPoolState(
      c10::DeviceIndex, std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState>) override {
    return {{}, std::move(checkpointed)};
  }
  std::string name() override { return "native"; }

 private:
  NativeDouble() = default;
};

}  // namespace lowtide::test
