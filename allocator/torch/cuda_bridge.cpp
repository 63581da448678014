#include "allocator/torch/cuda_bridge.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/StringUtil.h>

#include <cstdlib>
#include <exception>

#include "allocator/allocation_scope.h"
#include "allocator/device_registry.h"
#include "allocator/errors.h"
#include "allocator/log_message.h"
#include "allocator/torch/reclaim.h"
#include "allocator/torch/torch_errors.h"

namespace lowtide {
namespace {

/// Raw and never destroyed: storages outlive every static object.
std::atomic<TorchCudaAllocator*> the_bridge{nullptr};

StreamHandle handle_of(cudaStream_t stream) { return StreamHandle{reinterpret_cast<std::uintptr_t>(stream)}; }

/// The deleter of every block. Runs in destructors, on any thread, with any current device, while the process exits.
void release_block(void* pointer) noexcept {
  // The parent's memory; and the locks that finding its owner takes may be held for ever here.
  if (pointer == nullptr || in_forked_child()) return;
  try {
    the_bridge.load(std::memory_order_acquire)->raw_delete(pointer);
  } catch (const std::exception& error) {
    log_message(LogLevel::Error, c10::str("block ", pointer, " is leaked, freeing it failed: ", reason_of(error)));
  }
}

/// Native frees blocks that it did not cache another way, and names that one while caching is off.
c10::DeleterFnPtr cached_deleter(torch_cuda::CUDAAllocator& native) {
  const bool was_enabled = native.isEnabled();
  native.enable(true);
  const c10::DeleterFnPtr deleter = native.raw_deleter();
  native.enable(was_enabled);
  return deleter;
}

int current_device() {
  c10::DeviceIndex device = 0;
  const cudaError_t status = c10::cuda::GetDevice(&device);
  if (status != cudaSuccess) C10_CUDA_CHECK(status);  // which calls torch on success too
  return device;
}

c10::Device cuda_device(int device) { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)}; }

}  // namespace

TorchCudaAllocator& TorchCudaAllocator::make(torch_cuda::CUDAAllocator& native) {
  static TorchCudaAllocator* const bridge = new TorchCudaAllocator(native);
  the_bridge.store(bridge, std::memory_order_release);
  return *bridge;
}

TorchCudaAllocator* TorchCudaAllocator::instance() noexcept { return the_bridge.load(std::memory_order_acquire); }

TorchCudaAllocator::TorchCudaAllocator(torch_cuda::CUDAAllocator& native)
    : native_(native),
      native_deleter_(cached_deleter(native)),
      caching_forbidden_(std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING") != nullptr),
      caching_enabled_(native.isEnabled()) {}

bool is_current_cuda_allocator() noexcept {
  const TorchCudaAllocator* const bridge = TorchCudaAllocator::instance();
  return bridge != nullptr && torch_cuda::get() == bridge;
}

void TorchCudaAllocator::announce() {
  // From torch 2.15 on an equal priority no longer replaces native, which has 0.
  c10::SetAllocator(c10::DeviceType::CUDA, this, /*priority=*/255);
  if (c10::GetAllocator(c10::DeviceType::CUDA) != this) {
    log_message(LogLevel::Warn,
                "torch.accelerator's memory functions do not see Lowtide: another allocator is registered");
  }
  register_free_memory_callback();
}

void TorchCudaAllocator::init(int device_count) {
  native_.init(device_count);
  // Where only change_current_allocator was called, nobody did this yet.
  if (initialized()) announce();
}

bool TorchCudaAllocator::initialized() { return torch_cuda::get() == this; }

std::string TorchCudaAllocator::name() { return "lowtide"; }

CachingAllocator& TorchCudaAllocator::ready(int device) {
  CachingAllocator* const allocator = ready_[static_cast<std::size_t>(device)].load(std::memory_order_acquire);
  return allocator != nullptr ? *allocator : make_ready(device);
}

CachingAllocator* TorchCudaAllocator::existing(int device) {
  for (CachingAllocator* allocator : existing_allocators()) {
    if (allocator->device().index() == device) return allocator;
  }
  return nullptr;
}

bool TorchCudaAllocator::bypassed() const {
  return caching_forbidden_ || !caching_enabled_.load(std::memory_order_relaxed);
}

bool TorchCudaAllocator::is_native(int device, cudaStream_t stream) const {
  if (pools_.routes(device, stream)) return true;
  // Regions are made of Lowtide's pages and of nothing else.
  return bypassed() && current_owner() == kNoOwner;
}

c10::DataPtr TorchCudaAllocator::allocate(size_t size) {
  const int device = current_device();
  if (size == 0) return {nullptr, nullptr, &release_block, cuda_device(device)};
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device));
  if (is_native(device, stream)) return allocate_native(size, device);
  void* const pointer = allocate_own(size, device, stream);
  return {pointer, pointer, &release_block, cuda_device(device)};
}

c10::DeleterFnPtr TorchCudaAllocator::raw_deleter() const {
  return bypassed() ? native_.raw_deleter() : &release_block;
}

void TorchCudaAllocator::copy_data(void* target, const void* source, size_t size) const {
  native_.copy_data(target, source, size);
}

bool TorchCudaAllocator::is_simple_data_ptr(const c10::DataPtr& data) const { return data.get() == data.get_context(); }

void* TorchCudaAllocator::raw_alloc(size_t size) {
  if (size == 0) return nullptr;
  return raw_alloc_with_stream(size, c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(current_device())));
}

void* TorchCudaAllocator::raw_alloc_with_stream(size_t size, cudaStream_t stream) {
  if (size == 0) return nullptr;
  const int device = current_device();
  if (!is_native(device, stream)) return allocate_own(size, device, stream);
  const NativeRequest request(device, size);
  return native_.raw_alloc_with_stream(size, stream);
}

void TorchCudaAllocator::raw_delete(void* pointer) {
  if (pointer == nullptr) return;
  if (CachingAllocator* const owner = owner_of(to_address(pointer))) {
    free_own(*owner, pointer);
  } else {
    native_.raw_delete(pointer);
  }
}

c10::DataPtr TorchCudaAllocator::allocate_native(size_t size, int device) {
  const NativeRequest request(device, size);
  return under_our_deleter(native_.allocate(size));
}

c10::DataPtr TorchCudaAllocator::under_our_deleter(c10::DataPtr data) const {
  // A block native did not cache keeps the deleter that knows so. While caching is off, raw_deleter() is that one.
  if (!bypassed()) (void)data.compare_exchange_deleter(native_deleter_, &release_block);
  return data;
}

void* TorchCudaAllocator::allocate_own(size_t size, int device, cudaStream_t stream) {
  CachingAllocator& allocator = ready(device);
  void* pointer = nullptr;
  try {
    pointer = to_pointer(allocator.allocate(size, handle_of(stream), current_owner()));
  } catch (const OutOfMemory& error) {
    log_message(LogLevel::Debug, error.what());
  } catch (...) {
    throw_as_torch_error();
  }
  // Outside the handler: what follows is torch's code, and may throw errors of its own.
  if (pointer == nullptr) return out_of_memory(allocator, size, stream);
  tell_allocated(allocator, pointer, size, stream);
  return pointer;
}

void TorchCudaAllocator::free_own(CachingAllocator& allocator, void* pointer) {
  try {
    tell_freed(allocator, pointer);
  } catch (const std::exception& error) {
    log_message(LogLevel::Warn, c10::str("freeing block ", pointer, " could not be reported: ", reason_of(error)));
  }
  if (!allocator.free(to_address(pointer))) {
    log_message(LogLevel::Error, c10::str("no live block starts at ", pointer, "; it is not freed"));
  }
}

void TorchCudaAllocator::tell_allocated(CachingAllocator& allocator, void* pointer, size_t size, cudaStream_t stream) {
  const int device = allocator.device().index();
  if (c10::memoryProfilingEnabled()) {
    const AllocatorStats stats = allocator.stats();
    c10::reportMemoryUsageToProfiler(pointer, static_cast<std::int64_t>(size),
                                     static_cast<size_t>(stats.allocated_bytes[0].current),
                                     static_cast<size_t>(stats.reserved_bytes[0].current), cuda_device(device));
  }
  if (history_.listening()) {
    history_.allocated({device, pointer, size, handle_of(stream), native_.getUserMetadata()});
  }
  if (const auto* python = c10::impl::GPUTrace::get_trace()) {
    (*python)->trace_gpu_memory_allocation(c10::DeviceType::CUDA, reinterpret_cast<std::uintptr_t>(pointer));
  }
}

void TorchCudaAllocator::tell_freed(CachingAllocator& allocator, void* pointer) {
  const bool profiling = c10::memoryProfilingEnabled();
  if (profiling || history_.listening()) {
    const auto block = allocator.find(to_address(pointer));
    if (block && profiling) {
      const AllocatorStats stats = allocator.stats();
      const auto left = static_cast<Bytes>(stats.allocated_bytes[0].current);
      c10::reportMemoryUsageToProfiler(
          pointer, -static_cast<std::int64_t>(block->requested), left > block->size ? left - block->size : 0,
          static_cast<size_t>(stats.reserved_bytes[0].current), cuda_device(allocator.device().index()));
    }
    if (block && history_.listening()) {
      history_.freed({allocator.device().index(), pointer, block->requested, block->stream, native_.getUserMetadata()});
    }
  }
  if (const auto* python = c10::impl::GPUTrace::get_trace()) {
    (*python)->trace_gpu_memory_deallocation(c10::DeviceType::CUDA, reinterpret_cast<std::uintptr_t>(pointer));
  }
}

void TorchCudaAllocator::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  recordStream(data, c10::cuda::CUDAStream(stream));
}

void TorchCudaAllocator::recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) {
  void* const pointer = data.get();
  if (pointer == nullptr) return;
  if (CachingAllocator* const owner = owner_of(to_address(pointer))) {
    with_torch_errors([&] { owner->record_stream(to_address(pointer), handle_of(stream.stream())); });
    return;
  }
  if (data.get_deleter() != &release_block) {
    native_.recordStream(data, stream);
    return;
  }
  // Native ignores blocks under a deleter that is not its own.
  c10::DataPtr as_native(pointer, data.get_context(), native_deleter_, data.device());
  struct Release {
    c10::DataPtr& data;
    ~Release() { data.release_context(); }
  } const release{as_native};
  native_.recordStream(as_native, stream);
}

void* TorchCudaAllocator::getBaseAllocation(void* pointer, size_t* size) {
  CachingAllocator* const owner = owner_of(to_address(pointer));
  if (owner == nullptr) return native_.getBaseAllocation(pointer, size);
  // Blocks of an arena come and go on their own, so a block is what stands for cudaMalloc's allocation here.
  const auto block = owner->find(to_address(pointer));
  TORCH_CHECK(block.has_value(), "invalid device pointer: ", pointer);
  if (size != nullptr) *size = block->size;
  return to_pointer(block->address);
}

void TorchCudaAllocator::enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) {
  // Our pages are mapped for their own device. Copies go through memcpyAsync() and need no more; a kernel of another
  // device that reads them directly, as torch uses for copies that are not contiguous, faults.
  static std::atomic_flag warned = ATOMIC_FLAG_INIT;
  if (!warned.test_and_set()) {
    log_message(LogLevel::Warn,
                c10::str("GPU ", static_cast<int>(device), " may not access memory of GPU ", static_cast<int>(peer),
                         " that Lowtide manages, except by contiguous copies; make tensors contiguous before copying "
                         "them between GPUs"));
  }
  native_.enablePeerAccess(device, peer);
}

cudaError_t TorchCudaAllocator::memcpyAsync(void* target, int target_device, const void* source, int source_device,
                                            size_t size, cudaStream_t stream, bool peer_access) {
  const bool ours = owner_of(to_address(target)) != nullptr || owner_of(to_address(source)) != nullptr;
  if (ours && target_device != source_device) {
    return cudaMemcpyPeerAsync(target, target_device, source, source_device, size, stream);
  }
  return native_.memcpyAsync(target, target_device, source, source_device, size, stream, peer_access);
}

torch_cuda::ShareableHandle TorchCudaAllocator::shareIpcHandle(void* pointer) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      owner_of(to_address(pointer)) == nullptr,
      "memory managed by Lowtide cannot be shared through CUDA IPC yet. Share a copy made inside "
      "`with torch.cuda.use_mem_pool(torch.cuda.MemPool()):`, which torch's native allocator serves");
  return native_.shareIpcHandle(pointer);
}

std::shared_ptr<void> TorchCudaAllocator::getIpcDevPtr(std::string handle) {
  return native_.getIpcDevPtr(std::move(handle));
}

#if LOWTIDE_TORCH_2_13
c10::DataPtr TorchCudaAllocator::allocateWithAddress(size_t size, void* address) {
  TORCH_CHECK_NOT_IMPLEMENTED(owner_of(to_address(address)) == nullptr,
                              "memory managed by Lowtide cannot be allocated at a given address; an evicted offload "
                              "region comes back at its old addresses by itself");
  const NativeRequest request(current_device(), size);
  return under_our_deleter(native_.allocateWithAddress(size, address));
}
#endif

}  // namespace lowtide
