#include "allocator/torch/install.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include "allocator/cuda_device.h"
#include "allocator/errors.h"
#include "allocator/log_message.h"
#include "allocator/mutex.h"
#include "allocator/torch/allocator_settings.h"
#include "allocator/torch/cuda_bridge.h"
#include "allocator/torch/host_bridge.h"
#include "allocator/torch/torch_errors.h"
#include "allocator/torch/version_adapter.h"

namespace lowtide {
namespace {

Mutex installing;
bool host_installed LOWTIDE_GUARDED_BY(installing) = false;

void require_matching_torch() {
  if (const std::string mismatch = torch_mismatch(); !mismatch.empty()) throw Misuse(mismatch);
  if (in_forked_child())
    throw Misuse("Lowtide belongs to the parent process; install it in processes that are spawned");
}

/// torch's own allocator, while nothing has been allocated from it.
torch_cuda::CUDAAllocator& untouched_native() {
  torch_cuda::CUDAAllocator* const current = torch_cuda::get();
  if (current->name() != "native") {
    throw Misuse(
        c10::str("torch's CUDA allocator is \"", current->name(),
                 "\" already; Lowtide builds on torch's native one. Remove the other allocator, or the backend "
                 "token from PYTORCH_CUDA_ALLOC_CONF"));
  }
  if (current->initialized()) {
    throw Misuse(
        "CUDA is in use already; call lowtide.install() before the first use of CUDA, best right after importing "
        "torch");
  }
  return *current;
}

/// Everything that can fail before torch is touched.
TorchCudaAllocator& prepare_cuda_bridge() {
  require_matching_torch();
  if (TorchCudaAllocator* const bridge = TorchCudaAllocator::instance(); bridge != nullptr) {
    if (torch_cuda::get() != bridge) untouched_native();
    return *bridge;
  }
  if (cuda_device_count() == 0) throw Misuse("there is no CUDA device: " + cuda_unavailable_reason());
  torch_cuda::CUDAAllocator& native = untouched_native();
  select_devices(DeviceKind::Cuda);
  // torch parses its settings on first use and then asserts that a backend named there is the current allocator's
  // name: let it do so now.
  torch_cuda::CUDAAllocatorConfig::instance();
  return TorchCudaAllocator::make(native);
}

std::shared_ptr<torch_cuda::CUDAAllocator> unowned(TorchCudaAllocator& bridge) {
  return {std::shared_ptr<void>(), &bridge};
}

void install_cuda() LOWTIDE_REQUIRES(installing) {
  if (is_current_cuda_allocator()) return;
  TorchCudaAllocator& bridge = prepare_cuda_bridge();
  torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(unowned(bridge));
  bridge.announce();
  const std::string ignored =
      settings_without_effect(c10::CachingAllocator::AcceleratorAllocatorConfig::last_allocator_settings());
  if (!ignored.empty()) {
    log_message(LogLevel::Warn, c10::str("PYTORCH_CUDA_ALLOC_CONF: Lowtide's memory does not follow ", ignored,
                                         "; the private pools of CUDA graphs and MemPool, which are torch's, do"));
  }
  log_message(LogLevel::Info, "torch " TORCH_VERSION " allocates CUDA memory through Lowtide");
}

void install_host(const HostKindOptions& options) LOWTIDE_REQUIRES(installing) {
  if (host_installed) return;
  require_matching_torch();
  select_devices(DeviceKind::Host, options);
  install_host_bridge();
  host_installed = true;
  log_message(LogLevel::Info, "torch " TORCH_VERSION " allocates CPU tensors of offload regions through Lowtide");
}

}  // namespace

void install_allocator(InstallDevice device, const HostKindOptions& host) {
  const MutexLock lock(installing);
  const bool cuda_installed = is_current_cuda_allocator();
  if (device == InstallDevice::Auto) {
    if (cuda_installed || host_installed) return;
    device = cuda_device_count() > 0 ? InstallDevice::Cuda : InstallDevice::Host;
  }
  if (device == InstallDevice::Cuda) {
    if (host_installed) throw Misuse("Lowtide is installed for the host device; a process uses one kind of device");
    install_cuda();
  } else {
    if (cuda_installed) throw Misuse("Lowtide is installed for CUDA; a process uses one kind of device");
    install_host(host);
  }
}

std::string installed_device() {
  if (is_current_cuda_allocator()) return "cuda";
  const MutexLock lock(installing);
  return host_installed ? "host" : "";
}

std::shared_ptr<torch_cuda::CUDAAllocator> cuda_allocator() {
  const MutexLock lock(installing);
  if (host_installed) throw Misuse("Lowtide is installed for the host device; a process uses one kind of device");
  return unowned(prepare_cuda_bridge());
}

}  // namespace lowtide
