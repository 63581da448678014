// Memory snapshots, allocation history and observers. Native keeps its own record of its blocks; here ours is added.
#include <algorithm>
#include <utility>

#include "allocator/device_registry.h"
#include "allocator/torch/cuda_bridge.h"
#include "allocator/torch/torch_errors.h"

namespace lowtide {
namespace {

using c10::CachingDeviceAllocator::BlockInfo;
using c10::CachingDeviceAllocator::SegmentInfo;

/// Withheld tiles are unused and on pages that are away, or as good as away.
bool has_memory(const ArenaSnapshot::Tile& tile) {
  return tile.kind != TileKind::Vacant && tile.kind != TileKind::Withheld && !tile.evicted;
}

SegmentInfo begin_segment(int device, const ArenaSnapshot& arena, DeviceAddress address) {
  SegmentInfo segment;
  segment.device = static_cast<c10::DeviceIndex>(device);
  segment.address = static_cast<std::size_t>(address);
  segment.stream = reinterpret_cast<void*>(arena.stream);
  segment.is_large = arena.size_class == SizeClass::Large;
  segment.is_expandable = true;
  return segment;
}

void append(SegmentInfo& segment, const ArenaSnapshot::Tile& tile, const TraceHistory& history) {
  BlockInfo block;
  block.size = tile.size;
  block.allocated = tile.kind == TileKind::Allocated && !tile.pending_free;
  block.active = block.allocated || tile.pending_free;
  if (block.active) block.requested_size = tile.requested;
  if (block.allocated) block.context_when_allocated = history.context_of(to_pointer(tile.address));
  segment.total_size += block.size;
  segment.requested_size += block.requested_size;
  if (block.allocated) segment.allocated_size += block.size;
  if (block.active) segment.active_size += block.size;
  segment.blocks.push_back(std::move(block));
}

/// A segment is a run of tiles with memory behind them, side by side: readers find a block's address by adding sizes.
/// Evicted blocks are not on the device, so they are in no segment.
void append_segments(int device, const ArenaSnapshot& arena, const TraceHistory& history,
                     std::vector<SegmentInfo>& segments) {
  bool open = false;
  DeviceAddress end{};
  for (const ArenaSnapshot::Tile& tile : arena.tiles) {
    if (!has_memory(tile)) {
      open = false;
      continue;
    }
    if (!open || tile.address != end) segments.push_back(begin_segment(device, arena, tile.address));
    append(segments.back(), tile, history);
    open = true;
    end = tile.address + tile.size;
  }
}

}  // namespace

torch_cuda::SnapshotInfo TorchCudaAllocator::snapshot(c10::MempoolId_t pool, bool include_traces) {
  torch_cuda::SnapshotInfo info = native_.snapshot(pool, include_traces);
  if (include_traces) history_.merge_into(info.device_traces);
  if (pool != c10::MempoolId_t{0, 0}) return info;  // all pools are native's
  for (CachingAllocator* allocator : existing_allocators()) {
    for (const ArenaSnapshot& arena : allocator->snapshot()) {
      append_segments(allocator->device().index(), arena, history_, info.segments);
    }
  }
  std::sort(info.segments.begin(), info.segments.end(),
            [](const SegmentInfo& a, const SegmentInfo& b) { return a.address < b.address; });
  return info;
}

bool TorchCudaAllocator::isHistoryEnabled() { return native_.isHistoryEnabled(); }

void TorchCudaAllocator::recordHistory(bool enabled, torch_cuda::CreateContextFn recorder, size_t max_entries,
                                       torch_cuda::RecordContext level, bool clear,
                                       const std::vector<std::string>& skipped) {
  native_.recordHistory(enabled, recorder, max_entries, level, clear, skipped);
  history_.configure({enabled, recorder, max_entries, level, skipped}, clear);
}

void TorchCudaAllocator::recordAnnotation(const std::vector<std::pair<std::string, std::string>>& annotation) {
  native_.recordAnnotation(annotation);
}

void TorchCudaAllocator::pushCompileContext(std::string& name) {
  TraceHistory::push_compile_context(name);
  native_.pushCompileContext(name);
}

void TorchCudaAllocator::popCompileContext() {
  TraceHistory::pop_compile_context();
  native_.popCompileContext();
}

void TorchCudaAllocator::setUserMetadata(const std::string& metadata) { native_.setUserMetadata(metadata); }

std::string TorchCudaAllocator::getUserMetadata() { return native_.getUserMetadata(); }

void TorchCudaAllocator::attachOutOfMemoryObserver(torch_cuda::OutOfMemoryObserver observer) {
  native_.attachOutOfMemoryObserver(observer);
  const MutexLock lock(mutex_);
  oom_observers_.push_back(std::move(observer));
}

/// Trackers hear of our blocks, not of our pages: what they register, NCCL's buffers, must not leave the device.
void TorchCudaAllocator::attachAllocatorTraceTracker(torch_cuda::AllocatorTraceTracker tracker) {
  native_.attachAllocatorTraceTracker(tracker);
  history_.add_tracker(std::move(tracker));
}

#if LOWTIDE_TORCH_2_13
std::shared_ptr<c10::GatheredContext> TorchCudaAllocator::getContextForPointer(const void* pointer) {
  if (owner_of(to_address(pointer)) == nullptr) return native_.getContextForPointer(pointer);
  return history_.context_of(pointer);
}

// Only native rejects requests without trying them, where throw_on_cudamalloc_oom is set.
void TorchCudaAllocator::attachOomRejectionObserver(torch_cuda::OomRejectionObserver observer) {
  native_.attachOomRejectionObserver(std::move(observer));
}
#endif

#if LOWTIDE_TORCH_2_14
bool TorchCudaAllocator::supportsUserMetadata() { return native_.supportsUserMetadata(); }

void TorchCudaAllocator::annotateMemory(const void* pointer, const std::string& metadata) {
  if (CachingAllocator* const owner = owner_of(to_address(pointer))) {
    const auto block = owner->find(to_address(pointer));
    if (!block || !history_.listening()) return;
    history_.annotated({owner->device().index(), to_pointer(block->address), block->size, block->stream, metadata});
    return;
  }
  native_.annotateMemory(pointer, metadata);
}
#endif

}  // namespace lowtide
