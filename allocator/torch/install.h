// Puts Lowtide into torch: one call, before CUDA is used. Design: docs/design.md, "Torch bridge".
#pragma once

#include <memory>
#include <string>

#include "allocator/device_registry.h"

namespace c10::cuda::CUDACachingAllocator {
class CUDAAllocator;
}

namespace lowtide {

enum class InstallDevice {
  Auto,  // CUDA where there is a driver and a GPU, else the host device
  Cuda,
  Host,  // CPU tensors made inside a region are its tensors
};

/// Makes Lowtide torch's allocator for `device`. Again with the same device, or Auto, it does nothing.
/// Throws Misuse, having changed nothing, where the running torch is not the one this was built for, CUDA was used
/// already, another allocator took torch's place, there is no such device, or another device was installed before.
/// Call it before other threads allocate: torch's own registry is not synchronised.
void install_allocator(InstallDevice device, const HostKindOptions& host = {});

/// "cuda", "host", or empty where Lowtide is not torch's allocator.
std::string installed_device();

/// Lowtide's allocator for torch.cuda.memory.change_current_allocator, which then makes it current; torch tells the
/// rest when it initialises CUDA. Owns nothing: the allocator lives for ever. Throws as install_allocator(Cuda) does.
std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator> cuda_allocator();

}  // namespace lowtide
