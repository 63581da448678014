// Lowtide as torch's CUDA allocator. Thin: which side serves a call, and the words torch expects; all policy is in
// allocator/. Design: docs/design.md, "Torch bridge".
//
// The class is wide because torch's interface is: every virtual function is overridden, so that a torch that changed
// one does not compile (version_adapter.h). Its parts lie in
//   cuda_bridge.cpp      blocks: allocate, free, streams, copies, peers
//   bridge_pools.cpp     private pools, captures, checkpoints: delegated to torch's native allocator
//   bridge_stats.cpp     figures, caches, limits
//   bridge_snapshot.cpp  memory snapshots, history, observers
//   bridge_oom.cpp       what happens when memory runs out
//
// Ordinary blocks and those of offload regions are ours; blocks of private pools are native's. A pointer is ours if its
// address is. Every block, ours or native's, is handed out with the one deleter that raw_deleter() names, because torch
// compares the two; it looks the owner up. Native is handed its own blocks under its own deleter, for the same reason.
//
// Nothing here needs a driver until torch initialises CUDA; every function may be called before init().
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "allocator/caching_allocator.h"
#include "allocator/mutex.h"
#include "allocator/torch/oom_message.h"
#include "allocator/torch/pool_router.h"
#include "allocator/torch/trace_history.h"
#include "allocator/torch/version_adapter.h"

namespace lowtide {

namespace torch_cuda = c10::cuda::CUDACachingAllocator;

/// Locks: takes its own only for short looks at its lists, never while calling native, an allocator of Lowtide or a
/// callback.
class TorchCudaAllocator final : public torch_cuda::CUDAAllocator {
 public:
  /// The one of this process, with `native` as torch's own allocator; made on the first call, never destroyed.
  static TorchCudaAllocator& make(torch_cuda::CUDAAllocator& native);
  /// Null until made.
  static TorchCudaAllocator* instance() noexcept;

  torch_cuda::CUDAAllocator& native() noexcept { return native_; }

  /// Makes the rest of torch know this allocator: torch.accelerator, and native in need of memory. Idempotent.
  void announce();

  // c10::Allocator

  c10::DataPtr allocate(size_t size) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* target, const void* source, size_t size) const override;
  bool is_simple_data_ptr(const c10::DataPtr& data) const override;

  // c10::DeviceAllocator

  /// Whether torch uses this allocator. True from installation on, so that torch refuses a second swap.
  bool initialized() override;
  void emptyCache(c10::MempoolId_t pool) override;
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;

  // CUDAAllocator: blocks

  void* raw_alloc(size_t size) override;
  void* raw_alloc_with_stream(size_t size, cudaStream_t stream) override;
  void raw_delete(void* pointer) override;
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override;
  void* getBaseAllocation(void* pointer, size_t* size) override;
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) override;
  cudaError_t memcpyAsync(void* target, int target_device, const void* source, int source_device, size_t size,
                          cudaStream_t stream, bool peer_access) override;
  torch_cuda::ShareableHandle shareIpcHandle(void* pointer) override;
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override;
#if LOWTIDE_TORCH_2_13
  c10::DataPtr allocateWithAddress(size_t size, void* address) override;
#endif

  // CUDAAllocator: the whole

  /// Called by torch when it initialises CUDA. Idempotent.
  void init(int device_count) override;
  /// "lowtide". torch compares it with the backend token of PYTORCH_CUDA_ALLOC_CONF when it first parses that
  /// variable; installing makes torch parse it while native is still current, so "backend:native" there does no harm.
  /// Claiming to be "native" would make programs that ask believe what is not so.
  std::string name() override;
  void enable(bool value) override;
  bool isEnabled() const override;
  void cacheInfo(c10::DeviceIndex device, size_t* largest) override;
  double getMemoryFraction(c10::DeviceIndex device) override;
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override;
  std::vector<torch_cuda::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex device) override;

  // CUDAAllocator: private pools

  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override;
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                          std::shared_ptr<torch_cuda::CUDAAllocator> allocator) override;
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom) override;
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override;
  std::shared_ptr<torch_cuda::AllocatorState> getCheckpointState(c10::DeviceIndex device,
                                                                 c10::MempoolId_t pool) override;
  torch_cuda::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex device,
                                                     std::shared_ptr<torch_cuda::AllocatorState> state) override;
#if LOWTIDE_TORCH_2_13
  void markCaptureBegin(c10::DeviceIndex device) override;
  void markCaptureEnd(c10::DeviceIndex device) override;
#endif

  // CUDAAllocator: looking in

  torch_cuda::SnapshotInfo snapshot(c10::MempoolId_t pool, bool include_traces) override;
  bool isHistoryEnabled() override;
  void recordHistory(bool enabled, torch_cuda::CreateContextFn recorder, size_t max_entries,
                     torch_cuda::RecordContext level, bool clear, const std::vector<std::string>& skipped) override;
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& annotation) override;
  void pushCompileContext(std::string& name) override;
  void popCompileContext() override;
  void setUserMetadata(const std::string& metadata) override;
  std::string getUserMetadata() override;
  void attachOutOfMemoryObserver(torch_cuda::OutOfMemoryObserver observer) override;
  void attachAllocatorTraceTracker(torch_cuda::AllocatorTraceTracker tracker) override;
#if LOWTIDE_TORCH_2_13
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer) override;
  void attachOomRejectionObserver(torch_cuda::OomRejectionObserver observer) override;
#endif
#if LOWTIDE_TORCH_2_14
  bool supportsUserMetadata() override;
  void annotateMemory(const void* pointer, const std::string& metadata) override;
#endif

 private:
  explicit TorchCudaAllocator(torch_cuda::CUDAAllocator& native);

  /// Ours for `device`, made ready on first use. Throws torch's errors.
  CachingAllocator& ready(int device);
  CachingAllocator& make_ready(int device);
  /// The allocator of `device` if there is one. Creates nothing.
  static CachingAllocator* existing(int device);

  /// Whether native serves an ordinary allocation now: caching is off, which users want to reach debugging tools.
  bool bypassed() const;
  bool is_native(int device, cudaStream_t stream) const;
  c10::DataPtr allocate_native(size_t size, int device);
  void* allocate_own(size_t size, int device, cudaStream_t stream);
  void free_own(CachingAllocator& allocator, void* pointer);
  c10::DataPtr under_our_deleter(c10::DataPtr data) const;
  void tell_allocated(CachingAllocator& allocator, void* pointer, size_t size, cudaStream_t stream);
  void tell_freed(CachingAllocator& allocator, void* pointer);

  /// A block for a request that Lowtide could not serve, from a native pool that may be used then; or throws
  /// c10::OutOfMemoryError.
  void* out_of_memory(CachingAllocator& allocator, size_t size, cudaStream_t stream);
  MemoryPicture memory_picture(CachingAllocator& allocator, size_t size);

  torch_cuda::CUDAAllocator& native_;
  const c10::DeleterFnPtr native_deleter_;  // what native's cached blocks are freed with
  const bool caching_forbidden_;            // by PYTORCH_NO_CUDA_MEMORY_CACHING, for the whole process
  std::atomic<bool> caching_enabled_;       // by torch.cuda.memory.caching_allocator_enable
  PoolRouter pools_;
  TraceHistory history_;

  static constexpr std::size_t kMaxDevices = 128;  // what c10::DeviceIndex can name
  std::array<std::atomic<CachingAllocator*>, kMaxDevices> ready_{};
  Mutex preparing_;

  mutable Mutex mutex_;
  std::vector<torch_cuda::OutOfMemoryObserver> oom_observers_ LOWTIDE_GUARDED_BY(mutex_);
  std::vector<std::pair<int, c10::MempoolId_t>> spare_pools_ LOWTIDE_GUARDED_BY(mutex_);  // usable when memory is short
};

/// Whether torch's CUDA allocations go through Lowtide.
bool is_current_cuda_allocator() noexcept;

}  // namespace lowtide
