// The history of allocations that torch.cuda.memory._record_memory_history asks for, of the blocks that Lowtide serves.
// torch's native allocator records its own blocks; snapshots hold both.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/ApproximateClock.h>

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "allocator/mutex.h"
#include "allocator/torch/version_adapter.h"
#include "allocator/types.h"

namespace lowtide {

/// Safe from any thread; one atomic load while nobody listens. Stack contexts are gathered before its lock is taken,
/// since gathering may need the GIL, and trace trackers are called without it.
class TraceHistory {
 public:
  using Context = std::shared_ptr<c10::GatheredContext>;
  using Entry = c10::CachingDeviceAllocator::TraceEntry;
  using Tracker = c10::CachingDeviceAllocator::AllocatorTraceTracker;
  using Level = c10::CachingDeviceAllocator::RecordContext;

  struct Settings {
    bool enabled = false;
    c10::CachingDeviceAllocator::CreateContextFn recorder = nullptr;
    std::size_t max_entries = 1;
    Level level = Level::NEVER;
    std::vector<std::string> skipped{};  // actions that are not recorded, by torch's names
  };

  /// `clear` forgets the entries so far.
  void configure(Settings settings, bool clear);
  void add_tracker(Tracker tracker);

  /// Whether allocations and frees have to be told.
  bool listening() const noexcept { return listening_.load(std::memory_order_relaxed); }

  struct Event {
    int device = 0;
    void* address = nullptr;
    Bytes size = 0;
    StreamHandle stream{};
    std::string metadata{};  // what the user set for this thread
  };
  void allocated(Event event);
  /// Called before the block can be handed out again. The memory of a block that other streams still use comes free
  /// later, but nothing else has its address before, so the end of its free is recorded here too.
  void freed(Event event);
  /// `address` is the free memory of the device, as torch has it.
  void out_of_memory(Event event);
#if LOWTIDE_TORCH_2_14
  /// The user says something about a live block: `metadata`.
  void annotated(Event event);
#endif

  /// Where the live block at `address` was allocated; null if that was not recorded.
  Context context_of(const void* address) const;
  /// Adds the entries of each device to `traces`, which are in order of time and stay so.
  void merge_into(std::vector<std::vector<Entry>>& traces) const;

  /// The region of compiled code this thread is in, as torch names it.
  static void push_compile_context(std::string name);
  static void pop_compile_context();

 private:
  Context gather(Level level) const;
  Entry make_entry(Entry::Action action, const Event& event, Context context) const;
  void record(Entry entry);

  // Snapshots carry wall time, entries the processor's clock. The rate is measured between this object's birth and a
  // snapshot, so it has to live long.
  mutable c10::ApproximateClockToUnixTimeConverter clock_;
  std::atomic<bool> listening_{false};
  mutable Mutex mutex_;
  std::shared_ptr<const Settings> settings_ LOWTIDE_GUARDED_BY(mutex_) = std::make_shared<const Settings>();
  std::shared_ptr<const std::vector<Tracker>> trackers_ LOWTIDE_GUARDED_BY(mutex_) =
      std::make_shared<const std::vector<Tracker>>();
  std::map<int, std::deque<Entry>> entries_ LOWTIDE_GUARDED_BY(mutex_);           // by device; at most max_entries each
  std::unordered_map<const void*, Context> contexts_ LOWTIDE_GUARDED_BY(mutex_);  // of live blocks
};

}  // namespace lowtide
