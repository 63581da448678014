#include "pool/transfer.h"

#include <algorithm>
#include <set>
#include <span>

#include "allocator/bytes_format.h"
#include "allocator/log.h"
#include "pool/region_mover.h"

namespace lowtide {
namespace {

std::vector<Bytes> sizes_of(const std::vector<RegionPage>& pages) {
  std::vector<Bytes> sizes(pages.size());
  std::ranges::transform(pages, sizes.begin(), &RegionPage::size);
  return sizes;
}

}  // namespace

Departure::Departure(RegionMover& mover, OwnerId owner)
    : mover_(mover), region_(mover.allocator()), leaving_(region_.begin_evict(owner)) {}

Departure::~Departure() {
  if (left_ < leaving_.pages.size()) {
    settle();
    for (std::size_t i = left_; i < leaving_.pages.size(); ++i) region_.cancel_evict(leaving_.pages[i]);
  }
  for (const EventHandle event : stream_events_) mover_.give_event(event);
  for (const EventHandle event : group_events_) mover_.give_event(event);
}

void Departure::queue(const std::vector<StreamHandle>& streams) {
  const std::vector<RegionPage>& pages = leaving_.pages;
  lease_ = mover_.host_memory().lease(leaving_.live_bytes);
  const std::vector<HostRange> ranges = ranges_of(*lease_);
  HostPacker packer(ranges);
  const CopyPlanner planner(ranges);
  groups_ = group_pages(sizes_of(pages), kCopyGroup);
  images_.reserve(pages.size());
  stream_events_.reserve(streams.size());
  group_events_.reserve(groups_.size());

  Device& device = mover_.device();
  const StreamHandle out = mover_.out_stream();
  for (const StreamHandle stream : streams) {
    stream_events_.push_back(mover_.record(stream));
    device.wait(out, stream_events_.back());
  }
  queued_ = true;
  std::size_t ready = 0;
  for (const PageGroup& group : groups_) {
    // A group is planned while the copies of those before it run.
    for (std::size_t i = group.first_page; i < group.end_page; ++i) {
      images_.push_back({pages[i].address, pages[i].size, packer.pack(region_.live_runs(pages[i]))});
    }
    for (const CopyOp& copy : planner.plan(std::span(images_).subspan(group.first_page))) {
      // Slices are filled in order, and each is awaited just before its first copy: copies run while later slices are
      // still being prepared.
      while (ready == 0 || !lease_->slices()[ready - 1]->contains(copy.host)) lease_->slices()[ready++]->await_ready();
      device.copy_to_host(copy.host, copy.device, copy.size, out);
      counts_.bytes += copy.size;
      ++counts_.copies;
    }
    group_events_.push_back(mover_.record(out));
  }
}

void Departure::commit(HostImages& images) {
  try {
    for (const PageImage& image : images_) {
      if (!image.pieces.empty()) images.add(image, lease_);
    }
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      mover_.device().synchronize(group_events_[g]);
      for (; left_ < groups_[g].end_page; ++left_) region_.finish_evict(leaving_.pages[left_]);
    }
  } catch (...) {
    for (std::size_t i = left_; i < images_.size(); ++i) images.erase(images_[i].address);
    throw;
  }
}

/// Copies that are queued write to the lease: it may not serve others before they are over.
void Departure::settle() noexcept {
  if (!queued_) return;
  try {
    mover_.device().synchronize(mover_.out_stream());
  } catch (const std::exception& error) {
    log(LogLevel::Error, "the device failed during an eviction; {} of host memory are not used again: {}",
        format_bytes(lease_->bytes()), error.what());
    new std::shared_ptr<HostLease>(lease_);
  }
}

Arrival::Arrival(RegionMover& mover, OwnerId owner)
    : mover_(mover), region_(mover.allocator()), pages_(region_.begin_restore(owner)) {}

Arrival::~Arrival() {
  if (committed_) return;
  if (settle()) {
    for (std::size_t i = 0; i < mapped_; ++i) region_.unmap(pages_[i], memory_[i]);
    region_.give_back({memory_.begin() + static_cast<std::ptrdiff_t>(mapped_), memory_.end()});
  }
  for (const RegionPage& page : pages_) region_.cancel_restore(page);
}

void Arrival::queue(const HostImages& images) {
  std::vector<PageImage> arriving;
  std::vector<HostRange> ranges;
  std::set<const HostLease*> leases;
  for (const RegionPage& page : pages_) {
    arriving.push_back(images.at(page.address));
    const HostLease& lease = *images.lease_of(page.address);
    if (!leases.insert(&lease).second) continue;
    const auto more = ranges_of(lease);
    ranges.insert(ranges.end(), more.begin(), more.end());
  }
  memory_ = region_.acquire(pages_);
  const CopyPlanner planner(ranges);
  for (const PageGroup& group : group_pages(sizes_of(pages_), kCopyGroup)) {
    // The copies of a group run while the pages of the next one are mapped.
    for (; mapped_ < group.end_page; ++mapped_) region_.map(pages_[mapped_], memory_[mapped_]);
    const auto images_of_group = std::span(arriving).subspan(group.first_page, group.end_page - group.first_page);
    for (const CopyOp& copy : planner.plan(images_of_group)) {
      mover_.device().copy_to_device(copy.device, copy.host, copy.size, mover_.in_stream());
      counts_.bytes += copy.size;
      ++counts_.copies;
    }
  }
}

void Arrival::commit(HostImages& images) {
  mover_.device().synchronize(mover_.in_stream());
  committed_ = true;
  for (std::size_t i = 0; i < pages_.size(); ++i) {
    region_.finish_restore(pages_[i], memory_[i]);
    images.erase(pages_[i].address);
  }
}

/// Copies that are queued write to the mapped pages: these may not serve others before they are over.
bool Arrival::settle() noexcept {
  try {
    mover_.device().synchronize(mover_.in_stream());
    return true;
  } catch (const std::exception& error) {
    log(LogLevel::Error, "the device failed during a restore; its pages are not used again: {}", error.what());
    return false;
  }
}

}  // namespace lowtide
