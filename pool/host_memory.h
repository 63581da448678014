// Pinned host memory for the bytes of evicted regions, of one device: exact in size, on huge pages where the system has
// them, touched by several threads, registered in slices, and kept for reuse when a lease ends.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "allocator/device.h"
#include "allocator/mutex.h"

namespace lowtide {

/// Limits what all HostMemory of a process may hold together. Safe from any thread.
class HostBudget {
 public:
  explicit HostBudget(Bytes limit) : limit_(limit) {}
  /// Counts `bytes`; false, counting nothing, if that passes the limit.
  bool take(Bytes bytes) noexcept;
  void give(Bytes bytes) noexcept { used_.fetch_sub(bytes); }
  Bytes used() const noexcept { return used_.load(); }
  Bytes limit() const noexcept { return limit_.load(); }
  void set_limit(Bytes limit) noexcept { limit_.store(limit); }

 private:
  std::atomic<Bytes> limit_;
  std::atomic<Bytes> used_{0};
};

/// 80 % of the memory of this machine, or of this process's memory cgroup if that is less.
Bytes default_host_budget();

struct HostMemoryOptions {
  /// Registering a slice stalls kernel launches of other threads (64 MiB: about 1.1 ms), and a copy cannot cross one.
  Bytes slice = 64_MiB;
  /// Threads that touch and register new slices; 0: as many as cores, at most 8.
  unsigned threads = 0;
};

class HostMemory;

/// One registered range. Ready once its thread has touched and registered it.
class HostSlice {
 public:
  /// Pre: `size` is counted in `budget`; it is given back at the end of this. Throws HostMemoryError.
  HostSlice(Device& device, HostBudget& budget, Bytes size);
  ~HostSlice();
  HostSlice(const HostSlice&) = delete;
  HostSlice& operator=(const HostSlice&) = delete;

  std::byte* data() const noexcept { return data_; }
  Bytes size() const noexcept { return size_; }
  bool contains(const std::byte* at) const noexcept { return at >= data_ && at < data_ + size_; }

  /// Touches and registers the memory, on the calling thread. Where registering is refused the memory stays pageable:
  /// copies of it are slower, and right.
  void prepare() noexcept;
  /// Blocks until prepare() is done.
  void await_ready();

 private:
  Device& device_;
  HostBudget& budget_;
  const Bytes size_;
  std::byte* const data_;
  bool registered_ = false;
  std::mutex mutex_;
  std::condition_variable ready_changed_;
  bool ready_ = false;
};

/// Memory for one eviction. Its slices go back to the HostMemory, for reuse, when it ends.
class HostLease {
 public:
  explicit HostLease(HostMemory& from) : from_(from) {}
  ~HostLease();
  HostLease(const HostLease&) = delete;
  HostLease& operator=(const HostLease&) = delete;

  const std::vector<std::unique_ptr<HostSlice>>& slices() const noexcept { return slices_; }
  Bytes bytes() const noexcept;

 private:
  friend class HostMemory;
  HostMemory& from_;
  std::vector<std::unique_ptr<HostSlice>> slices_;
  std::vector<std::thread> preparers_;  // joined before the slices go
};

/// Safe from any thread. Its leases must end before it does.
class HostMemory {
 public:
  HostMemory(Device& device, HostBudget& budget, HostMemoryOptions options = {});
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  Bytes slice_size() const noexcept { return options_.slice; }

  /// Slices that hold `bytes`, rounded up to the system's page: kept ones first, then new ones of at most slice_size().
  /// New ones are touched and registered in the background: await_ready() each before its first use.
  /// Throws HostMemoryError, naming what is needed and what is allowed.
  std::shared_ptr<HostLease> lease(Bytes bytes);

  /// Gives memory kept for reuse to the system; returns its bytes.
  Bytes trim();

  Bytes held_bytes() const;
  Bytes leased_bytes() const;
  /// Slices made so far: in the steady state this stands still.
  std::int64_t allocations() const;

 private:
  friend class HostLease;
  /// Slices of `bytes` in all, not prepared yet, for a lease of `asked_for`. All or none. Throws HostMemoryError.
  std::vector<std::unique_ptr<HostSlice>> make_slices(Bytes bytes, Bytes asked_for);
  void give_back(std::vector<std::unique_ptr<HostSlice>> slices) noexcept;
  void start_preparing(HostLease& lease, std::vector<HostSlice*> fresh);

  Device& device_;
  HostBudget& budget_;
  const HostMemoryOptions options_;
  mutable Mutex mutex_;
  std::vector<std::unique_ptr<HostSlice>> kept_ LOWTIDE_GUARDED_BY(mutex_);
  std::size_t alive_slices_ LOWTIDE_GUARDED_BY(mutex_) = 0;  // kept and leased
  Bytes leased_bytes_ LOWTIDE_GUARDED_BY(mutex_) = 0;
  Bytes held_bytes_ LOWTIDE_GUARDED_BY(mutex_) = 0;
  std::int64_t allocations_ LOWTIDE_GUARDED_BY(mutex_) = 0;
};

}  // namespace lowtide
