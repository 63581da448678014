#include "tests/support/pinned_buffer.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace lowtide::testing {
namespace {

unsigned char* touched_pages(Bytes size) {
  void* const memory = std::aligned_alloc(4_KiB, size);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, size);
  return static_cast<unsigned char*>(memory);
}

}  // namespace

PinnedBuffer::PinnedBuffer(Device& device, Bytes size)
    : device_(device), size_(round_up(size, 4_KiB)), data_(touched_pages(size_)) {
  try {
    device_.register_host(data_, size_);
  } catch (...) {
    std::free(data_);
    throw;
  }
}

PinnedBuffer::~PinnedBuffer() {
  device_.unregister_host(data_, size_);
  std::free(data_);
}

}  // namespace lowtide::testing
