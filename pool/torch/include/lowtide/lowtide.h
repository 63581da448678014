// Lowtide for LibTorch programs: everything that such a program needs, in one header. It includes no torch header.
//
//   lowtide::install();                                  // before CUDA is used
//   lowtide::Region state("adam");
//   { lowtide::OffloadRegion guard(state); optimizer.step(); }   // the state it makes lives in the region
//   state.evict();                                       // its memory serves others; its tensors raise
//   state.restore();                                     // the same tensors, the same addresses, the same bytes
//
// Sizes are in bytes everywhere. Link against Lowtide::torch of find_package(Lowtide).
#pragma once

#include <string>

#include "allocator/device_registry.h"
#include "allocator/errors.h"
#include "allocator/stats.h"
#include "allocator/torch/install.h"
#include "pool/offload_region.h"
#include "pool/pool_stats.h"

namespace at {
class Tensor;
}

namespace lowtide {

// From pool/offload_region.h: Region (evict, restore, state, counts), OffloadRegion and NoRegion (scope guards).
// From pool/pool_stats.h: pool_stats(device), trim_host(), set_host_budget().
// From allocator/torch/install.h: installed_device().

/// Makes Lowtide torch's allocator and tensors part of evict and restore. Again it does nothing.
/// Throws Misuse as install_allocator() does: CUDA is in use already, there is no such device, another torch than this
/// was built for.
void install(InstallDevice device = InstallDevice::Auto, const HostKindOptions& host = {});

/// Adds the tensor's storage to those that are guarded while `region` is evicted. Needed only for tensors that no
/// operator returned while the region's guard was open. Throws Misuse if its memory is not in `region`.
void track(const Region& region, const at::Tensor& tensor);

/// Moves a tensor made outside every region into `region`: the same tensor at another address. See pool/torch/adopt.h.
void adopt(const Region& region, const at::Tensor& tensor);

/// Figures of one device: its allocator, and what moving regions has cost.
struct MemoryStats {
  AllocatorStats allocator;
  PoolStats pool;
};

/// Throws Misuse for a device that Lowtide does not serve.
MemoryStats memory_stats(int device = 0);

}  // namespace lowtide
