// Holds a stream: work queued behind the latch starts only when the test says so. Works on both devices.
#pragma once

#include <functional>

#include "allocator/device.h"

namespace lowtide::testing {

class StreamLatch {
 public:
  /// Queues a wait on `stream` that nothing but release() ends. A FaultyDevice is looked through; the latch is none of
  /// the calls that it counts.
  StreamLatch(Device& device, StreamHandle stream);
  /// Releases: a test that fails half-way must not hang.
  ~StreamLatch();
  StreamLatch(const StreamLatch&) = delete;
  StreamLatch& operator=(const StreamLatch&) = delete;

  /// Lets the stream go on. Again: does nothing.
  void release() noexcept;

 private:
  std::function<void()> open_;
};

}  // namespace lowtide::testing
