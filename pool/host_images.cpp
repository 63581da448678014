#include "pool/host_images.h"

#include <set>

namespace lowtide {

void HostImages::add(PageImage image, std::shared_ptr<HostLease> lease) {
  const DeviceAddress address = image.address;
  pages_.insert_or_assign(address, Held{std::move(image), std::move(lease)});
}

void HostImages::keep_only(const std::vector<DeviceAddress>& pages) {
  const std::set<DeviceAddress> kept(pages.begin(), pages.end());
  std::erase_if(pages_, [&](const auto& entry) { return !kept.contains(entry.first); });
}

Bytes HostImages::bytes() const {
  std::set<const HostLease*> leases;
  Bytes sum = 0;
  for (const auto& [address, held] : pages_) {
    if (held.lease && leases.insert(held.lease.get()).second) sum += held.lease->bytes();
  }
  return sum;
}

std::vector<HostRange> ranges_of(const HostLease& lease) {
  std::vector<HostRange> ranges;
  for (const auto& slice : lease.slices()) ranges.push_back({slice->data(), slice->size()});
  return ranges;
}

}  // namespace lowtide
