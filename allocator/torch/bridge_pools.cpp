// Private pools, captures and checkpoints: all of it is native's work. Lowtide keeps the filters, to know which
// allocations to pass on, and holds still while a capture may be under way.
#include <algorithm>
#include <utility>

#include "allocator/torch/cuda_bridge.h"
#include "allocator/torch/torch_errors.h"

namespace lowtide {

void TorchCudaAllocator::beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                                             std::function<bool(cudaStream_t)> filter) {
  native_.beginAllocateToPool(device, pool, filter);
  pools_.begin(device, pool, std::move(filter));
}

void TorchCudaAllocator::endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) {
  pools_.end(device, pool);
  native_.endAllocateToPool(device, pool);
}

void TorchCudaAllocator::releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) {
  native_.releasePool(device, pool);
}

int TorchCudaAllocator::getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) {
  return native_.getPoolUseCount(device, pool);
}

void TorchCudaAllocator::createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                                            std::shared_ptr<torch_cuda::CUDAAllocator> allocator) {
  native_.createOrIncrefPool(device, pool, std::move(allocator));
}

void TorchCudaAllocator::setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom) {
  native_.setUseOnOOM(device, pool, use_on_oom);
  const std::pair<int, c10::MempoolId_t> key{device, pool};
  const MutexLock lock(mutex_);
  std::erase(spare_pools_, key);
  if (use_on_oom) spare_pools_.push_back(key);
}

void TorchCudaAllocator::setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) {
  native_.setNoSplit(device, pool);
}

bool TorchCudaAllocator::checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                                  const std::unordered_set<void*>& expected) {
  return native_.checkPoolLiveAllocations(device, pool, expected);
}

std::shared_ptr<torch_cuda::AllocatorState> TorchCudaAllocator::getCheckpointState(c10::DeviceIndex device,
                                                                                   c10::MempoolId_t pool) {
  return native_.getCheckpointState(device, pool);
}

torch_cuda::CheckpointDelta TorchCudaAllocator::setCheckpointPoolState(
    c10::DeviceIndex device, std::shared_ptr<torch_cuda::AllocatorState> state) {
  torch_cuda::CheckpointDelta delta = native_.setCheckpointPoolState(device, std::move(state));
  for (c10::DataPtr& data : delta.dataptrs_allocd) data = under_our_deleter(std::move(data));
  return delta;
}

#if LOWTIDE_TORCH_2_13
// Here torch says when a capture really begins. Lowtide holds still from beginAllocateToPool() on all the same: that
// comes first, and an event queried between the two calls could already break the capture.
void TorchCudaAllocator::markCaptureBegin(c10::DeviceIndex device) { native_.markCaptureBegin(device); }
void TorchCudaAllocator::markCaptureEnd(c10::DeviceIndex device) { native_.markCaptureEnd(device); }
#endif

}  // namespace lowtide
