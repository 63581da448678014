#include <lowtide/lowtide.h>

#include <ATen/core/Tensor.h>

#include "pool/torch/adopt.h"
#include "pool/torch/region_tensors.h"

namespace lowtide {

void install(InstallDevice device, const HostKindOptions& host) {
  install_allocator(device, host);
  install_region_tensors();
}

void track(const Region& region, const at::Tensor& tensor) {
  if (tensor.defined() && tensor.has_storage()) track(region, tensor.storage());
}

void adopt(const Region& region, const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage())
    throw Misuse("cannot move a tensor without a storage into an offload region");
  adopt(region, tensor.storage());
}

MemoryStats memory_stats(int device) { return {allocator_of(device).stats(), pool_stats(device)}; }

}  // namespace lowtide
