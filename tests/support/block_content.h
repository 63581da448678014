// Patterns in device memory, written and read by copies on a stream, so that it works on every device.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include "allocator/device.h"
#include "tests/support/pinned_buffer.h"

namespace lowtide::testing {

/// Safe from any thread. Give it the real device where a FaultyDevice counts or fails calls.
class BlockContent {
 public:
  explicit BlockContent(Device& device) : device_(device), buffer_(device, 1_MiB) {}

  /// Fills [address, address + size) with pattern `cookie`, after the work queued on `stream`, and waits for it.
  void fill(DeviceAddress address, Bytes size, std::uint64_t cookie, StreamHandle stream);
  /// Offset of the first byte there that is not of the pattern, after the work queued on `stream`; nothing if all are.
  std::optional<Bytes> mismatch(DeviceAddress address, Bytes size, std::uint64_t cookie, StreamHandle stream);

  // The same for the bytes at both ends of the block and at every 256 KiB between them, for tests that check often: a
  // page that was not copied, or copied to a wrong place, shows all the same.
  void fill_samples(DeviceAddress address, Bytes size, std::uint64_t cookie, StreamHandle stream);
  std::optional<Bytes> sample_mismatch(DeviceAddress address, Bytes size, std::uint64_t cookie, StreamHandle stream);

 private:
  Device& device_;
  std::mutex mutex_;
  PinnedBuffer buffer_;  // mutex_
};

}  // namespace lowtide::testing
