// Host memory as a copy needs it: whole pages, touched, registered with a device.
#pragma once

#include "allocator/device.h"

namespace lowtide::testing {

class PinnedBuffer {
 public:
  /// Throws what register_host() throws.
  PinnedBuffer(Device& device, Bytes size);
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  unsigned char* data() const noexcept { return data_; }
  Bytes size() const noexcept { return size_; }

 private:
  Device& device_;
  const Bytes size_;
  unsigned char* const data_;
};

}  // namespace lowtide::testing
