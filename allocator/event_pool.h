// Events of one device, reused: creating one is a driver call, so the steady state creates none.
#pragma once

#include <vector>

#include "allocator/device.h"

namespace lowtide {

/// Not synchronised: its owner's mutex guards it.
class EventPool {
 public:
  explicit EventPool(Device& device) : device_(device) {}
  ~EventPool() {
    for (const EventHandle event : idle_) device_.destroy_event(event);
  }
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  /// An event recorded on `stream`. Throws DriverError.
  EventHandle record(StreamHandle stream) {
    const EventHandle event = take();
    try {
      device_.record(event, stream);
    } catch (...) {
      give(event);
      throw;
    }
    return event;
  }

  /// Pre: nobody waits for `event` any more.
  void give(EventHandle event) noexcept { idle_.push_back(event); }

 private:
  EventHandle take() {
    if (!idle_.empty()) {
      const EventHandle event = idle_.back();
      idle_.pop_back();
      return event;
    }
    // Room for the way back of this one and all others, so that give() cannot fail.
    idle_.reserve(++created_);
    try {
      return device_.create_event();
    } catch (...) {
      --created_;
      throw;
    }
  }

  Device& device_;
  std::vector<EventHandle> idle_;
  std::size_t created_ = 0;
};

}  // namespace lowtide
