// Blocks that were freed while other streams than their own may still use them.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <vector>

#include "allocator/arena_directory.h"
#include "allocator/event_pool.h"

namespace lowtide {

/// Each stream passes its uses in the order of their events, so a look asks about the first one of each stream and stops there.
/// Not synchronised: the heap's mutex guards it.
class PendingFrees {
 public:
  struct Block {
    PlacedArena* placed = nullptr;
    Bytes offset = 0;
    Bytes size = 0;
  };

  PendingFrees(Device& device, EventPool& events) : device_(device), events_(events) {}
  ~PendingFrees();
  PendingFrees(const PendingFrees&) = delete;
  PendingFrees& operator=(const PendingFrees&) = delete;

  /// `block` waits for the work queued so far on `streams`; without `record` for what is queued when record() is called.
  /// Throws DriverError and has changed nothing then. Pre: streams is not empty.
  void add(const Block& block, const std::vector<StreamHandle>& streams, bool record);
  /// Records the events that are not yet. Throws DriverError; may then be called again.
  void record();
  /// Calls `end` with each block that all its streams are past, which is then no longer here. Throws what `end` throws, and
  /// DriverError; may then be called again. Pre: record().
  template <class End>
  void process(End&& end) {
    for (auto& [stream, uses] : uses_) {
      while (!uses.empty() && device_.query(uses.front().event)) {
        const auto pending = uses.front().pending;
        if (pending->waits_for == 1) {
          end(pending->block);
          pending_.erase(pending);
        } else {
          --pending->waits_for;
        }
        events_.give(uses.front().event);
        uses.pop_front();
      }
    }
  }

  bool empty() const noexcept { return pending_.empty(); }
  /// Streams that blocks of `owner` (kNoOwner: of all) wait for.
  std::vector<StreamHandle> streams(OwnerId owner) const;
  /// Of all blocks here.
  Bytes bytes() const noexcept;

 private:
  struct Pending {
    Block block;
    std::size_t waits_for = 0;  // streams
  };
  struct Use {
    std::list<Pending>::iterator pending;
    EventHandle event{};
  };

  Device& device_;
  EventPool& events_;
  std::list<Pending> pending_;
  std::map<StreamHandle, std::deque<Use>> uses_;
  std::size_t unrecorded_ = 0;
};

}  // namespace lowtide
