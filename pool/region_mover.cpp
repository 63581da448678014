#include "pool/region_mover.h"

#include <algorithm>
#include <chrono>
#include <exception>

#include "allocator/errors.h"
#include "allocator/log.h"

namespace lowtide {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

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

EventHandle RegionMover::record(StreamHandle stream) {
  const MutexLock lock(mutex_);
  return events_.record(stream);
}

void RegionMover::give_event(EventHandle event) noexcept {
  const MutexLock lock(mutex_);
  events_.give(event);
}

void RegionMover::refuse_capture(const std::vector<StreamHandle>& streams) const {
  const bool captured = allocator_.capturing() ||
                        std::ranges::any_of(streams, [&](StreamHandle stream) { return device_.is_capturing(stream); });
  if (captured) {
    throw Misuse("a CUDA graph is being captured: evict and restore before the capture begins or after it ends");
  }
}

std::unique_ptr<Departure> RegionMover::depart(OwnerId owner, const std::vector<StreamHandle>& after) {
  std::vector<StreamHandle> streams = RegionPages(allocator_).streams(owner);
  streams.insert(streams.end(), after.begin(), after.end());
  std::ranges::sort(streams);
  streams.erase(std::unique(streams.begin(), streams.end()), streams.end());
  refuse_capture(streams);
  auto departure = std::make_unique<Departure>(*this, owner);
  if (!departure->empty()) departure->queue(streams);
  return departure;
}

std::unique_ptr<Arrival> RegionMover::arrive(OwnerId owner, const HostImages& images) {
  refuse_capture({});
  auto arrival = std::make_unique<Arrival>(*this, owner);
  if (!arrival->empty()) arrival->queue(images);
  return arrival;
}

void RegionMover::evict(OwnerId owner, const std::vector<StreamHandle>& after, HostImages& images) {
  const auto begin = std::chrono::steady_clock::now();
  auto departure = depart(owner, after);
  try {
    departure->commit(images);
  } catch (...) {
    const std::exception_ptr failure = std::current_exception();
    const bool some_left = departure->any_left();
    departure.reset();
    try {
      if (some_left) restore(owner, images);
    } catch (const std::exception& error) {
      log(LogLevel::Error, "part of a region stays evicted after a failed eviction; restore it to try again: {}",
          error.what());
    }
    std::rethrow_exception(failure);
  }
  count(*departure, seconds_since(begin));
}

void RegionMover::restore(OwnerId owner, HostImages& images) {
  const auto begin = std::chrono::steady_clock::now();
  const auto arrival = arrive(owner, images);
  arrival->commit(images);
  count(*arrival, seconds_since(begin));
}

void RegionMover::count(const Departure& departure, double seconds) {
  if (departure.empty()) return;
  const MutexLock lock(mutex_);
  ++stats_.evictions;
  stats_.copies += departure.counts().copies;
  stats_.evicted_bytes_total += departure.counts().bytes;
  stats_.evict_seconds += seconds;
}

void RegionMover::count(const Arrival& arrival, double seconds) {
  if (arrival.empty()) return;
  const MutexLock lock(mutex_);
  ++stats_.restores;
  stats_.copies += arrival.counts().copies;
  stats_.restored_bytes_total += arrival.counts().bytes;
  stats_.restore_seconds += seconds;
}

PoolStats RegionMover::stats() const {
  PoolStats stats;
  {
    const MutexLock lock(mutex_);
    stats = stats_;
  }
  stats.pinned_bytes = host_memory_.held_bytes();
  stats.pinned_leased_bytes = host_memory_.leased_bytes();
  stats.host_allocations = host_memory_.allocations();
  return stats;
}

}  // namespace lowtide
