// The bytes of an evicted region: where each page's live bytes lie on the host.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "pool/copy_plan.h"
#include "pool/host_memory.h"

namespace lowtide {

/// The bytes of a region that are on the host: an image of each evicted page, and the memory the images lie in.
/// The transfer lock of the region guards it.
class HostImages {
 public:
  bool empty() const noexcept { return pages_.empty(); }
  void add(PageImage image, std::shared_ptr<HostLease> lease);
  /// The image of the page at `address`. Pre: there is one.
  const PageImage& at(DeviceAddress address) const { return pages_.at(address).image; }
  const std::shared_ptr<HostLease>& lease_of(DeviceAddress address) const { return pages_.at(address).lease; }
  void erase(DeviceAddress address) noexcept { pages_.erase(address); }
  void clear() noexcept { pages_.clear(); }
  /// Drops the images of all pages but these (in any order).
  void keep_only(const std::vector<DeviceAddress>& pages);
  /// Host memory held, in bytes.
  Bytes bytes() const;

 private:
  struct Held {
    PageImage image;
    std::shared_ptr<HostLease> lease;
  };
  std::map<DeviceAddress, Held> pages_;
};

/// The ranges that one copy may fill.
std::vector<HostRange> ranges_of(const HostLease& lease);

}  // namespace lowtide
