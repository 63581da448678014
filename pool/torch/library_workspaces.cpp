#include "pool/torch/library_workspaces.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/StringUtil.h>
#include <torch_declarations/cublas_workspaces.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "allocator/allocation_scope.h"
#include "allocator/log_message.h"
#include "pool/torch/block_marks.h"

namespace lowtide {
namespace {

using Workspaces = at::cuda::WorkspaceMapWithMutex;
using Key = decltype(Workspaces::map)::key_type;  // handle, stream

struct Misplaced {
  Key key;
  const void* address;
  c10::Device device;
  Bytes size;
};

struct OutsideRegions {
  OutsideRegions() { enter_scope(kNoOwner); }
  ~OutsideRegions() { leave_scope(kNoOwner); }
};

// A map holds the memory of each handle and stream, since torch 2.15 or a minor before it with its size.
template <class Value>
auto& memory_of(Value& value) {
  if constexpr (requires { value.first; }) {
    return value.first;
  } else {
    return value;
  }
}

const void* address_of(const decltype(Workspaces::map)::value_type& entry) { return memory_of(entry.second).get(); }

// Calls are frequent and workspaces few: `seen` holds the addresses of the last look that found nothing to do.
std::optional<Misplaced> find_misplaced(Workspaces& workspaces, std::vector<const void*>& seen) {
  const std::shared_lock lock(workspaces.mutex);
  if (std::ranges::equal(workspaces.map, seen, {}, address_of)) return std::nullopt;
  for (const auto& entry : workspaces.map) {
    const void* const address = address_of(entry);
    const auto block = block_at(address);
    if (block && block->owner != kNoOwner) {
      return Misplaced{entry.first, address, memory_of(entry.second).device(), block->requested};
    }
  }
  seen.clear();
  std::ranges::transform(workspaces.map, std::back_inserter(seen), address_of);
  return std::nullopt;
}

void replace(Workspaces& workspaces, const Misplaced& misplaced) {
  const auto stream = static_cast<cudaStream_t>(std::get<1>(misplaced.key));
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(stream, misplaced.device.index()));
  const OutsideRegions outside;
  // Freed after the lock.
  c10::DataPtr memory = c10::cuda::CUDACachingAllocator::get()->allocate(static_cast<std::size_t>(misplaced.size));
  const std::unique_lock lock(workspaces.mutex);
  const auto entry = workspaces.map.find(misplaced.key);
  if (entry != workspaces.map.end() && address_of(*entry) == misplaced.address)
    std::swap(memory_of(entry->second), memory);
}

void move_out(Workspaces& workspaces, std::vector<const void*>& seen) {
  while (const auto misplaced = find_misplaced(workspaces, seen)) replace(workspaces, *misplaced);
}

}  // namespace

void move_library_workspaces_out() noexcept {
  thread_local std::vector<const void*> seen_blas;
  thread_local std::vector<const void*> seen_blas_lt;
  try {
    move_out(at::cuda::cublas_handle_stream_to_workspace(), seen_blas);
    move_out(at::cuda::cublaslt_handle_stream_to_workspace(), seen_blas_lt);
  } catch (const std::exception& error) {
    log_message(LogLevel::Debug, c10::str("a cuBLAS workspace stays in its offload region: ", error.what()));
  }
}

}  // namespace lowtide
