#include "allocator/torch/oom_message.h"

#include "allocator/bytes_format.h"

namespace lowtide {

std::string out_of_memory_message(const MemoryPicture& picture) {
  if (picture.requested > kLargestRequest) return "CUDA out of memory. Tried to allocate more than 1EB memory.";
  const auto size = [](Bytes n) { return format_bytes(n); };
  std::string text = "CUDA out of memory. Tried to allocate " + size(picture.requested) + ". GPU " +
                     std::to_string(picture.device) + " has a total capacity of " + size(picture.total) + " of which " +
                     size(picture.free) + " is free. ";
  if (picture.allowed) text += size(*picture.allowed) + " allowed; ";
  text += "Of the allocated memory " + size(picture.allocated) + " is allocated by PyTorch, ";
  if (picture.private_pools > 0) {
    text += "with " + size(picture.private_pools) + " allocated in private pools (e.g., CUDA Graphs), ";
  }
  text += "and " + size(picture.unallocated) + " is reserved by PyTorch but unallocated. ";
  text += "Offload regions hold " + size(picture.evictable) + " that could still be evicted.";
  return text;
}

}  // namespace lowtide
