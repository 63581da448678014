#include "allocator/host_pages.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <iterator>
#include <system_error>

#include "allocator/errors.h"
#include "allocator/log.h"

namespace lowtide {
namespace {

std::string error_text(int error) { return std::generic_category().message(error); }

int open_memfd(const std::string& name) {
  const int descriptor = memfd_create(name.c_str(), MFD_CLOEXEC);
  if (descriptor < 0) throw DriverError(fmt::format("memfd_create({})", name), error_text(errno));
  return descriptor;
}

}  // namespace

HostPages::HostPages(const std::string& name) : descriptor_(open_memfd(name)) {}

HostPages::~HostPages() { close(descriptor_); }

Bytes HostPages::allocate(Bytes size) {
  MutexLock lock(mutex_);
  for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
    const auto [offset, length] = *hole;
    if (length < size) continue;
    if (length > size) free_.emplace(offset + size, length - size);
    free_.erase(hole);
    return offset;
  }
  if (ftruncate(descriptor_, static_cast<off_t>(end_ + size)) != 0) {
    throw DriverError(fmt::format("ftruncate(memfd, {})", end_ + size), error_text(errno));
  }
  end_ += size;
  return end_ - size;
}

void HostPages::free(Bytes offset, Bytes size) noexcept {
  // Before the range can be handed out again, and without the lock: dropping many pages takes milliseconds.
  if (fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                static_cast<off_t>(size)) != 0) {
    log(LogLevel::Error, "fallocate(PUNCH_HOLE, {}, {}) failed: {}; the memory is leaked", offset, size,
        error_text(errno));
    return;
  }
  MutexLock lock(mutex_);
  const auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + size) {
    size += next->second;
    free_.erase(next);
  }
  const auto after = free_.lower_bound(offset);
  if (after != free_.begin()) {
    const auto previous = std::prev(after);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      size += previous->second;
      free_.erase(previous);
    }
  }
  if (offset + size == end_) {
    // Forgetting the tail is enough: nothing is stored there, and allocate() sets the file's length anew.
    end_ = offset;
    return;
  }
  try {
    free_.emplace(offset, size);
  } catch (const std::exception& error) {
    log(LogLevel::Error, "a hole of {} bytes in the memfd is forgotten: {}", size, error.what());
  }
}

}  // namespace lowtide
