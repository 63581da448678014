#include "tests/support/faulty_device.h"

#include <algorithm>
#include <ostream>
#include <utility>

#include "allocator/errors.h"

namespace lowtide::testing {
namespace {

/// Removes `key` if it is there with this size.
template <typename Key>
bool erase_exact(std::map<Key, Bytes>& live, Key key, Bytes size) {
  const auto found = live.find(key);
  if (found == live.end() || found->second != size) return false;
  live.erase(found);
  return true;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const LiveCounts& counts) {
  return out << counts.reservations << " reservations, " << counts.pages << " pages, " << counts.mappings
             << " mappings, " << counts.streams << " streams, " << counts.events << " events, " << counts.registrations
             << " registrations";
}

FaultyDevice::FaultyDevice(std::unique_ptr<Device> inner) : owned_(std::move(inner)), inner_(*owned_) {}

FaultyDevice::FaultyDevice(Device& inner) : inner_(inner) {}

void FaultyDevice::fail_at(std::size_t k) {
  MutexLock lock(mutex_);
  fail_at_ = k;
  fallible_calls_ = 0;
}

bool FaultyDevice::failed() const {
  MutexLock lock(mutex_);
  return fail_at_ != 0 && fallible_calls_ >= fail_at_;
}

std::size_t FaultyDevice::fallible_calls() const {
  MutexLock lock(mutex_);
  return fallible_calls_;
}

std::size_t FaultyDevice::calls(std::string_view name) const {
  MutexLock lock(mutex_);
  const auto found = calls_.find(name);
  return found == calls_.end() ? 0 : found->second;
}

std::map<std::string, std::size_t, std::less<>> FaultyDevice::all_calls() const {
  MutexLock lock(mutex_);
  return calls_;
}

LiveCounts FaultyDevice::live() const {
  MutexLock lock(mutex_);
  return {.reservations = reservations_.size(),
          .pages = pages_.size(),
          .mappings = mappings_.size(),
          .streams = streams_.size(),
          .events = events_.size(),
          .registrations = registrations_.size()};
}

std::size_t FaultyDevice::bad_releases() const {
  MutexLock lock(mutex_);
  return bad_releases_;
}

void FaultyDevice::set_capturing(StreamHandle stream, bool capturing) {
  MutexLock lock(mutex_);
  if (capturing) {
    capturing_.insert(stream);
  } else {
    capturing_.erase(stream);
  }
}

void FaultyDevice::count(std::string_view name) { ++calls_[std::string(name)]; }

bool FaultyDevice::due(std::string_view name) {
  MutexLock lock(mutex_);
  count(name);
  return ++fallible_calls_ == fail_at_;
}

void FaultyDevice::enter(std::string_view name) {
  if (due(name)) throw DriverError(std::string(name) + "()", "a test asked for this failure");
}

void FaultyDevice::enter_allocation(std::string_view name, Bytes size) {
  if (due(name)) throw OutOfMemory(index(), size, std::string(name) + "() failed: a test asked for this failure");
}

void FaultyDevice::refuse_while_capturing(std::string_view name) const {
  MutexLock lock(mutex_);
  if (!capturing_.empty()) throw DriverError(std::string(name) + "()", "not permitted while a stream is captured");
}

DeviceMemory FaultyDevice::memory() {
  enter("memory");
  return inner_.memory();
}

DeviceAddress FaultyDevice::reserve(Bytes size) {
  enter_allocation("reserve", size);
  const DeviceAddress address = inner_.reserve(size);
  MutexLock lock(mutex_);
  reservations_.emplace(address, size);
  return address;
}

// What is given back is forgotten before the inner call: right after it, another thread may get the same address.

void FaultyDevice::release_address(DeviceAddress address, Bytes size) noexcept {
  {
    MutexLock lock(mutex_);
    count("release_address");
    const auto inside = mappings_.lower_bound(address);
    const bool mapped = inside != mappings_.end() && inside->first < address + size;
    if (mapped || !erase_exact(reservations_, address, size)) ++bad_releases_;
  }
  inner_.release_address(address, size);
}

PageHandle FaultyDevice::create(Bytes size) {
  enter_allocation("create", size);
  const PageHandle page = inner_.create(size);
  MutexLock lock(mutex_);
  pages_.emplace(page, size);
  return page;
}

void FaultyDevice::release(PageHandle page, Bytes size) noexcept {
  {
    MutexLock lock(mutex_);
    count("release");
    const bool mapped = std::any_of(mappings_.begin(), mappings_.end(),
                                    [page](const auto& mapping) { return mapping.second.page == page; });
    if (mapped || !erase_exact(pages_, page, size)) ++bad_releases_;
  }
  inner_.release(page, size);
}

void FaultyDevice::map(DeviceAddress address, Bytes size, PageHandle page) {
  enter("map");
  inner_.map(address, size, page);
  MutexLock lock(mutex_);
  mappings_.emplace(address, Mapping{.size = size, .page = page});
}

void FaultyDevice::unmap(DeviceAddress address, Bytes size) {
  enter("unmap");
  inner_.unmap(address, size);
  // After the inner call, which may refuse. The address stays the caller's, so nobody else can map there meanwhile.
  MutexLock lock(mutex_);
  mappings_.erase(address);
}

StreamHandle FaultyDevice::create_stream() {
  enter("create_stream");
  const StreamHandle stream = inner_.create_stream();
  MutexLock lock(mutex_);
  streams_.insert(stream);
  return stream;
}

void FaultyDevice::destroy_stream(StreamHandle stream) noexcept {
  {
    MutexLock lock(mutex_);
    count("destroy_stream");
    if (streams_.erase(stream) == 0) ++bad_releases_;
    capturing_.erase(stream);
  }
  inner_.destroy_stream(stream);
}

EventHandle FaultyDevice::create_event() {
  enter("create_event");
  const EventHandle event = inner_.create_event();
  MutexLock lock(mutex_);
  events_.insert(event);
  return event;
}

void FaultyDevice::destroy_event(EventHandle event) noexcept {
  {
    MutexLock lock(mutex_);
    count("destroy_event");
    if (events_.erase(event) == 0) ++bad_releases_;
  }
  inner_.destroy_event(event);
}

void FaultyDevice::record(EventHandle event, StreamHandle stream) {
  enter("record");
  inner_.record(event, stream);
}

bool FaultyDevice::query(EventHandle event) {
  enter("query");
  refuse_while_capturing("query");
  return inner_.query(event);
}

void FaultyDevice::synchronize(EventHandle event) {
  enter("synchronize_event");
  refuse_while_capturing("synchronize");
  inner_.synchronize(event);
}

void FaultyDevice::synchronize(StreamHandle stream) {
  enter("synchronize_stream");
  refuse_while_capturing("synchronize");
  inner_.synchronize(stream);
}

void FaultyDevice::wait(StreamHandle stream, EventHandle event) {
  enter("wait");
  inner_.wait(stream, event);
}

bool FaultyDevice::is_capturing(StreamHandle stream) {
  enter("is_capturing");
  {
    MutexLock lock(mutex_);
    if (capturing_.contains(stream)) return true;
  }
  return inner_.is_capturing(stream);
}

void FaultyDevice::copy_to_host(void* target, DeviceAddress source, Bytes size, StreamHandle stream) {
  enter("copy_to_host");
  inner_.copy_to_host(target, source, size, stream);
}

void FaultyDevice::copy_to_device(DeviceAddress target, const void* source, Bytes size, StreamHandle stream) {
  enter("copy_to_device");
  inner_.copy_to_device(target, source, size, stream);
}

void FaultyDevice::copy_on_device(DeviceAddress target, DeviceAddress source, Bytes size, StreamHandle stream) {
  enter("copy_on_device");
  inner_.copy_on_device(target, source, size, stream);
}

void FaultyDevice::register_host(void* memory, Bytes size) {
  enter("register_host");
  inner_.register_host(memory, size);
  MutexLock lock(mutex_);
  registrations_.emplace(memory, size);
}

void FaultyDevice::unregister_host(void* memory, Bytes size) noexcept {
  {
    MutexLock lock(mutex_);
    count("unregister_host");
    if (!erase_exact(registrations_, memory, size)) ++bad_releases_;
  }
  inner_.unregister_host(memory, size);
}

}  // namespace lowtide::testing
