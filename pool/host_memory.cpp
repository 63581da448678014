#include "pool/host_memory.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

#include "allocator/bytes_format.h"
#include "allocator/errors.h"
#include "allocator/log.h"

namespace lowtide {
namespace {

constexpr Bytes kHugePage = 2_MiB;
constexpr unsigned kMaxThreads = 8;

Bytes system_page() {
  static const auto size = static_cast<Bytes>(sysconf(_SC_PAGESIZE));
  return size;
}

/// Anonymous memory aligned to huge pages, untouched. Throws HostMemoryError.
std::byte* map_memory(Bytes size) {
  const Bytes spare = size >= kHugePage ? kHugePage : 0;
  void* raw = mmap(nullptr, size + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    throw HostMemoryError(fmt::format("the system refuses {} of host memory: {}", format_bytes(size), strerror(errno)));
  }
  auto* begin = static_cast<std::byte*>(raw);
  if (spare == 0) return begin;
  auto* aligned = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(begin), kHugePage));
  if (aligned > begin) munmap(begin, static_cast<Bytes>(aligned - begin));
  std::byte* end = begin + size + spare;
  if (aligned + size < end) munmap(aligned + size, static_cast<Bytes>(end - (aligned + size)));
  // Refused where transparent huge pages are off: the memory then works with small pages.
  madvise(aligned, size, MADV_HUGEPAGE);
  return aligned;
}

void touch(std::byte* data, Bytes size) {
#ifdef MADV_POPULATE_WRITE
  if (madvise(data, size, MADV_POPULATE_WRITE) == 0) return;
#endif
  for (Bytes at = 0; at < size; at += system_page()) data[at] = std::byte{0};
}

}  // namespace

bool HostBudget::take(Bytes bytes) noexcept {
  Bytes used = used_.load();
  do {
    if (used + bytes > limit_.load()) return false;
  } while (!used_.compare_exchange_weak(used, used + bytes));
  return true;
}

Bytes default_host_budget() {
  Bytes memory = static_cast<Bytes>(sysconf(_SC_PHYS_PAGES)) * system_page();
  // Containers limit memory by cgroup: version 2, then version 1. "max" parses as nothing and leaves it unlimited.
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    Bytes limit = 0;
    if (std::ifstream(path) >> limit && limit > 0) memory = std::min(memory, limit);
  }
  return memory / 5 * 4;
}

HostSlice::HostSlice(Device& device, HostBudget& budget, Bytes size)
    : device_(device), budget_(budget), size_(size), data_(map_memory(size)) {}

HostSlice::~HostSlice() {
  if (registered_) device_.unregister_host(data_, size_);
  munmap(data_, size_);
  budget_.give(size_);
}

void HostSlice::prepare() noexcept {
  touch(data_, size_);
  try {
    device_.register_host(data_, size_);
    registered_ = true;
  } catch (const std::exception& error) {
    static std::once_flag once;
    std::call_once(once, [&] {
      log(LogLevel::Warn, "host memory stays pageable, so copies are slower: {} (check `ulimit -l`; said once)",
          error.what());
    });
  }
  const std::lock_guard lock(mutex_);
  ready_ = true;
  ready_changed_.notify_all();
}

void HostSlice::await_ready() {
  std::unique_lock lock(mutex_);
  ready_changed_.wait(lock, [this] { return ready_; });
}

HostLease::~HostLease() {
  for (std::thread& thread : preparers_) thread.join();
  from_.give_back(std::move(slices_));
}

Bytes HostLease::bytes() const noexcept {
  Bytes sum = 0;
  for (const auto& slice : slices_) sum += slice->size();
  return sum;
}

HostMemory::HostMemory(Device& device, HostBudget& budget, HostMemoryOptions options)
    : device_(device), budget_(budget), options_(options) {}

HostMemory::~HostMemory() = default;

std::shared_ptr<HostLease> HostMemory::lease(Bytes bytes) {
  auto lease = std::make_shared<HostLease>(*this);
  Bytes missing = round_up(bytes, system_page());
  lease->slices_.reserve(missing / options_.slice + 2);
  {
    const MutexLock lock(mutex_);
    lease->slices_.reserve(lease->slices_.capacity() + kept_.size());
    std::ranges::sort(kept_, {}, [](const auto& slice) { return slice->size(); });
    while (missing > 0 && !kept_.empty()) {
      // The smallest that holds the rest, or else the largest.
      auto fit = std::ranges::lower_bound(kept_, missing, {}, [](const auto& slice) { return slice->size(); });
      if (fit == kept_.end()) --fit;
      missing -= std::min(missing, (*fit)->size());
      leased_bytes_ += (*fit)->size();
      lease->slices_.push_back(std::move(*fit));
      kept_.erase(fit);
    }
  }
  auto made = make_slices(missing, bytes);
  std::vector<HostSlice*> fresh;
  for (const auto& slice : made) fresh.push_back(slice.get());
  {
    const MutexLock lock(mutex_);
    // Room for the way back of all slices alive, so that it cannot fail.
    kept_.reserve(alive_slices_ + made.size());
    alive_slices_ += made.size();
    leased_bytes_ += missing;
    held_bytes_ += missing;
    allocations_ += static_cast<std::int64_t>(made.size());
    for (auto& slice : made) lease->slices_.push_back(std::move(slice));
  }
  start_preparing(*lease, std::move(fresh));
  return lease;
}

std::vector<std::unique_ptr<HostSlice>> HostMemory::make_slices(Bytes bytes, Bytes asked_for) {
  if (!budget_.take(bytes)) {
    throw HostMemoryError(fmt::format(
        "{} of host memory are needed, {} of them new, but the host memory budget is {}, of which {} are in use. Raise "
        "it with lowtide.set_host_budget(), or give memory back with lowtide.trim_host()",
        format_bytes(asked_for), format_bytes(bytes), format_bytes(budget_.limit()), format_bytes(budget_.used())));
  }
  std::vector<std::unique_ptr<HostSlice>> made;
  try {
    made.reserve(bytes / options_.slice + 1);
    while (bytes > 0) {
      const Bytes size = std::min(bytes, options_.slice);
      made.push_back(std::make_unique<HostSlice>(device_, budget_, size));
      bytes -= size;
    }
  } catch (...) {
    budget_.give(bytes);  // the rest goes with the slices made so far
    throw;
  }
  return made;
}

void HostMemory::start_preparing(HostLease& lease, std::vector<HostSlice*> fresh) {
  if (fresh.empty()) return;
  struct Work {
    std::vector<HostSlice*> slices;
    std::atomic<std::size_t> next{0};
    void run() noexcept {
      for (std::size_t i = next++; i < slices.size(); i = next++) slices[i]->prepare();
    }
  };
  auto work = std::make_shared<Work>();
  work->slices = std::move(fresh);
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t wanted = options_.threads != 0 ? options_.threads : std::min(cores, kMaxThreads);
  const std::size_t threads = std::min(wanted, work->slices.size());
  try {
    lease.preparers_.reserve(threads);
    for (std::size_t i = 0; i < threads; ++i) lease.preparers_.emplace_back([work] { work->run(); });
  } catch (const std::exception& error) {
    log(LogLevel::Warn, "preparing host memory with {} threads only: {}", lease.preparers_.size(), error.what());
    if (lease.preparers_.empty()) work->run();
  }
}

void HostMemory::give_back(std::vector<std::unique_ptr<HostSlice>> slices) noexcept {
  const MutexLock lock(mutex_);
  for (auto& slice : slices) {
    leased_bytes_ -= slice->size();
    kept_.push_back(std::move(slice));
  }
}

Bytes HostMemory::trim() {
  std::vector<std::unique_ptr<HostSlice>> dropped;
  Bytes bytes = 0;
  {
    const MutexLock lock(mutex_);
    dropped.reserve(kept_.size());
    // Emptied rather than swapped away: the room for slices that are leased stays.
    for (auto& slice : kept_) {
      bytes += slice->size();
      dropped.push_back(std::move(slice));
    }
    kept_.clear();
    alive_slices_ -= dropped.size();
    held_bytes_ -= bytes;
  }
  // Unregistering waits for running kernels, so it happens without the lock.
  dropped.clear();
  return bytes;
}

Bytes HostMemory::held_bytes() const {
  const MutexLock lock(mutex_);
  return held_bytes_;
}

Bytes HostMemory::leased_bytes() const {
  const MutexLock lock(mutex_);
  return leased_bytes_;
}

std::int64_t HostMemory::allocations() const {
  const MutexLock lock(mutex_);
  return allocations_;
}

}  // namespace lowtide
