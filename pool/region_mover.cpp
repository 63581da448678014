#include "pool/region_mover.h"

#include <algorithm>
#include <chrono>
#include <set>

#include "allocator/errors.h"
#include "allocator/log.h"

namespace lowtide {
namespace {

/// Copies of this size reach the link's speed (16 MiB: 99 %), and pages return while the next ones are under way.
constexpr Bytes kGroupBytes = 32_MiB;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::vector<HostRange> ranges_of(const HostLease& lease) {
  std::vector<HostRange> ranges;
  for (const auto& slice : lease.slices()) ranges.push_back({slice->data(), slice->size()});
  return ranges;
}

Bytes live_bytes(const std::vector<RegionPage>& pages) {
  Bytes sum = 0;
  for (const RegionPage& page : pages) {
    for (const Extent& run : page.live) sum += run.size;
  }
  return sum;
}

}  // namespace

void HostImages::add(PageImage image, std::shared_ptr<HostLease> lease) {
  const DeviceAddress address = image.address;
  pages_.insert_or_assign(address, Held{std::move(image), std::move(lease)});
}

Bytes HostImages::bytes() const {
  std::set<const HostLease*> leases;
  Bytes sum = 0;
  for (const auto& [address, held] : pages_) {
    if (held.lease && leases.insert(held.lease.get()).second) sum += held.lease->bytes();
  }
  return sum;
}

/// Events of one transfer, given back at its end.
class TransferEvents {
 public:
  TransferEvents(std::mutex& mutex, EventPool& pool) : mutex_(mutex), pool_(pool) {}
  ~TransferEvents() {
    const std::lock_guard lock(mutex_);
    for (const EventHandle event : events_) pool_.give(event);
  }
  TransferEvents(const TransferEvents&) = delete;
  TransferEvents& operator=(const TransferEvents&) = delete;

  EventHandle record(StreamHandle stream) {
    const std::lock_guard lock(mutex_);
    events_.reserve(events_.size() + 1);
    events_.push_back(pool_.record(stream));
    return events_.back();
  }

 private:
  std::mutex& mutex_;
  EventPool& pool_;
  std::vector<EventHandle> events_;
};

RegionMover::RegionMover(CachingAllocator& allocator, HostBudget& budget, HostMemoryOptions options)
    : allocator_(allocator),
      device_(allocator.device()),
      host_memory_(device_, budget, options),
      out_stream_(device_.create_stream()),
      in_stream_(device_.create_stream()),
      events_(device_) {}

RegionMover::~RegionMover() {
  device_.destroy_stream(out_stream_);
  device_.destroy_stream(in_stream_);
}

void RegionMover::refuse_capture(const std::vector<StreamHandle>& streams) const {
  const bool captured = allocator_.capturing() ||
                        std::ranges::any_of(streams, [&](StreamHandle stream) { return device_.is_capturing(stream); });
  if (captured) {
    throw Misuse("a CUDA graph is being captured: evict and restore before the capture begins or after it ends");
  }
}

/// An eviction under way. Until commit() nothing has left the device, and the end of this object undoes everything.
class RegionMover::Departure {
 public:
  Departure(RegionMover& mover, OwnerId owner)
      : mover_(mover), region_(mover.allocator_), pages_(region_.begin_evict(owner)), events_(mover.mutex_, mover.events_) {}

  ~Departure() {
    if (left_ == pages_.size()) return;
    settle();
    for (std::size_t i = left_; i < pages_.size(); ++i) region_.cancel_evict(pages_[i]);
  }

  bool nothing_to_do() const noexcept { return pages_.empty(); }

  /// Finds host memory and queues every copy, after `streams`.
  void queue(const std::vector<StreamHandle>& streams) {
    bytes_ = live_bytes(pages_);
    lease_ = mover_.host_memory_.lease(bytes_);
    const std::vector<HostRange> ranges = ranges_of(*lease_);
    HostPacker packer(ranges);
    for (const RegionPage& page : pages_) images_.push_back({page.address, page.size, packer.pack(page.live)});
    groups_ = plan_copies(images_, ranges, kGroupBytes);
    for (const StreamHandle stream : streams) mover_.device_.wait(mover_.out_stream_, events_.record(stream));
    queued_ = true;
    std::size_t ready = 0;
    for (const CopyGroup& group : groups_) {
      for (const CopyOp& copy : group.copies) {
        // Slices are filled in order, and each is awaited just before its first copy: copies run while later slices are
        // still being prepared.
        while (ready == 0 || !lease_->slices()[ready - 1]->contains(copy.host)) lease_->slices()[ready++]->await_ready();
        mover_.device_.copy_to_host(copy.host, copy.device, copy.size, mover_.out_stream_);
        ++copies_;
      }
      group_events_.push_back(events_.record(mover_.out_stream_));
    }
  }

  /// Lets each page go as its copy completes; `images` holds the bytes from then on. On a throw pages before the failure
  /// have left, the others stay.
  void commit(HostImages& images) {
    for (const PageImage& image : images_) images.add(image, lease_);
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      mover_.device_.synchronize(group_events_[g]);
      for (std::size_t i = groups_[g].first_page; i < groups_[g].end_page; ++i) {
        region_.finish_evict(pages_[i]);
        left_ = i + 1;
        if (images_[i].pieces.empty()) images.erase(images_[i].address);
      }
    }
  }

  void erase_images_of_pages_that_stayed(HostImages& images) const noexcept {
    for (std::size_t i = left_; i < pages_.size(); ++i) images.erase(pages_[i].address);
  }

  bool any_left() const noexcept { return left_ > 0; }
  Bytes bytes() const noexcept { return bytes_; }
  std::int64_t copies() const noexcept { return copies_; }

 private:
  /// Copies that are queued write to the lease: it may not be reused before they are over.
  void settle() noexcept {
    if (!queued_) return;
    try {
      mover_.device_.synchronize(mover_.out_stream_);
    } catch (const std::exception& error) {
      log().error("the device failed during an eviction; {} of host memory are not reused: {}", lease_->bytes(),
                  error.what());
      new std::shared_ptr<HostLease>(lease_);
    }
  }

  RegionMover& mover_;
  RegionPages region_;
  const std::vector<RegionPage> pages_;
  TransferEvents events_;
  std::shared_ptr<HostLease> lease_;
  std::vector<PageImage> images_;
  std::vector<CopyGroup> groups_;
  std::vector<EventHandle> group_events_;
  std::size_t left_ = 0;
  Bytes bytes_ = 0;
  std::int64_t copies_ = 0;
  bool queued_ = false;
};

/// A restore under way. Until commit() the pages count as evicted, and the end of this object undoes everything.
class RegionMover::Arrival {
 public:
  Arrival(RegionMover& mover, OwnerId owner)
      : mover_(mover), region_(mover.allocator_), pages_(region_.begin_restore(owner)) {}

  ~Arrival() {
    if (committed_) return;
    if (settle()) {
      for (std::size_t i = 0; i < mapped_; ++i) region_.unmap(pages_[i], memory_[i]);
      region_.give_back({memory_.begin() + static_cast<std::ptrdiff_t>(mapped_), memory_.end()});
    }
    for (const RegionPage& page : pages_) region_.cancel_restore(page);
  }

  bool nothing_to_do() const noexcept { return pages_.empty(); }

  /// Finds device memory, maps it and queues every copy.
  void queue(const HostImages& images) {
    memory_ = region_.acquire(pages_);
    std::vector<PageImage> arriving;
    std::set<HostLease*> leases;
    std::vector<HostRange> ranges;
    for (const RegionPage& page : pages_) {
      arriving.push_back(images.at(page.address));
      if (HostLease* lease = images.lease_of(page.address).get(); leases.insert(lease).second) {
        const auto more = ranges_of(*lease);
        ranges.insert(ranges.end(), more.begin(), more.end());
      }
    }
    for (const CopyGroup& group : plan_copies(arriving, ranges, kGroupBytes)) {
      // The copies of a group run while the pages of the next one are mapped.
      for (; mapped_ < group.end_page; ++mapped_) region_.map(pages_[mapped_], memory_[mapped_]);
      for (const CopyOp& copy : group.copies) {
        mover_.device_.copy_to_device(copy.device, copy.host, copy.size, mover_.in_stream_);
        bytes_ += copy.size;
        ++copies_;
      }
    }
  }

  void commit(HostImages& images) {
    mover_.device_.synchronize(mover_.in_stream_);
    committed_ = true;
    for (std::size_t i = 0; i < pages_.size(); ++i) {
      region_.finish_restore(pages_[i], memory_[i]);
      images.erase(pages_[i].address);
    }
  }

  Bytes bytes() const noexcept { return bytes_; }
  std::int64_t copies() const noexcept { return copies_; }

 private:
  /// Copies that are queued write to the mapped pages: these may not serve others before they are over.
  bool settle() noexcept {
    try {
      mover_.device_.synchronize(mover_.in_stream_);
      return true;
    } catch (const std::exception& error) {
      log().error("the device failed during a restore; its pages are not reused: {}", error.what());
      return false;
    }
  }

  RegionMover& mover_;
  RegionPages region_;
  const std::vector<RegionPage> pages_;
  std::vector<Page> memory_;
  std::size_t mapped_ = 0;
  Bytes bytes_ = 0;
  std::int64_t copies_ = 0;
  bool committed_ = false;
};

void RegionMover::evict(OwnerId owner, const std::vector<StreamHandle>& after, HostImages& images) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<StreamHandle> streams = RegionPages(allocator_).streams(owner);
  streams.insert(streams.end(), after.begin(), after.end());
  std::ranges::sort(streams);
  streams.erase(std::unique(streams.begin(), streams.end()), streams.end());
  refuse_capture(streams);
  bool some_left = false;
  try {
    Departure departure(*this, owner);
    if (departure.nothing_to_do()) return;
    departure.queue(streams);
    try {
      departure.commit(images);
    } catch (...) {
      some_left = departure.any_left();
      departure.erase_images_of_pages_that_stayed(images);
      throw;
    }
    const std::lock_guard lock(mutex_);
    ++stats_.evictions;
    stats_.copies += departure.copies();
    stats_.evicted_bytes_total += departure.bytes();
    stats_.evict_seconds += seconds_since(begin);
  } catch (...) {
    const std::exception_ptr failure = std::current_exception();
    if (some_left) {
      try {
        restore(owner, images);
      } catch (const std::exception& error) {
        log().error("part of a region stays evicted after a failed eviction; restore it to try again: {}", error.what());
      }
    }
    std::rethrow_exception(failure);
  }
}

void RegionMover::restore(OwnerId owner, HostImages& images) {
  const auto begin = std::chrono::steady_clock::now();
  refuse_capture({});
  Arrival arrival(*this, owner);
  if (arrival.nothing_to_do()) return;
  arrival.queue(images);
  arrival.commit(images);
  const std::lock_guard lock(mutex_);
  ++stats_.restores;
  stats_.copies += arrival.copies();
  stats_.restored_bytes_total += arrival.bytes();
  stats_.restore_seconds += seconds_since(begin);
}

PoolStats RegionMover::stats() const {
  PoolStats stats;
  {
    const std::lock_guard lock(mutex_);
    stats = stats_;
  }
  stats.pinned_bytes = host_memory_.held_bytes();
  stats.pinned_leased_bytes = host_memory_.leased_bytes();
  stats.host_allocations = host_memory_.allocations();
  return stats;
}

}  // namespace lowtide
