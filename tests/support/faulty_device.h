// A decorator that makes a device fail on demand, counts its calls, and knows what is alive on it.
// For tests of the form "fail the k-th call for every k": after each, compare state and live() with what they were.
#pragma once

#include <cstddef>
#include <functional>
#include <iosfwd>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>

#include "allocator/device.h"
#include "allocator/mutex.h"

namespace lowtide::testing {

/// Objects that were made through a FaultyDevice and not given back yet.
struct LiveCounts {
  std::size_t reservations = 0;
  std::size_t pages = 0;
  std::size_t mappings = 0;
  std::size_t streams = 0;
  std::size_t events = 0;
  std::size_t registrations = 0;

  bool operator==(const LiveCounts&) const = default;
};

std::ostream& operator<<(std::ostream& out, const LiveCounts& counts);

/// Safe from any thread. mutex_ is never held during a call of the inner device, so a blocking call blocks nobody else.
class FaultyDevice final : public Device {
 public:
  explicit FaultyDevice(std::unique_ptr<Device> inner);
  /// `inner` must outlive this.
  explicit FaultyDevice(Device& inner);

  Device& inner() noexcept { return inner_; }

  /// The k-th fallible call from now on (1: the next) throws as a real device would, and changes nothing: OutOfMemory
  /// from create and reserve, DriverError from others. Then the device works again. 0 disarms.
  /// Fallible is every call that is not noexcept, but for name().
  void fail_at(std::size_t k);
  /// True once the failure that the last fail_at() asked for has happened.
  bool failed() const;
  /// Fallible calls since the last fail_at().
  std::size_t fallible_calls() const;

  /// How often a call was made, failed ones included. The name is that of the method; the two synchronize() are
  /// "synchronize_event" and "synchronize_stream".
  std::size_t calls(std::string_view name) const;
  /// The same for every call that was made.
  std::map<std::string, std::size_t, std::less<>> all_calls() const;
  LiveCounts live() const;
  /// Cleanup calls for something that was not alive or still mapped. A device only logs and leaks those; tests expect
  /// 0.
  std::size_t bad_releases() const;

  /// Pretends that `stream` is, or is no longer, being captured. While any stream is, query() and synchronize() throw
  /// DriverError, as CUDA does in its global capture mode.
  void set_capturing(StreamHandle stream, bool capturing);

  int index() const noexcept override { return inner_.index(); }
  std::string_view kind() const noexcept override { return inner_.kind(); }
  std::string name() const override { return inner_.name(); }
  Bytes granularity() const noexcept override { return inner_.granularity(); }
  DeviceMemory memory() override;

  DeviceAddress reserve(Bytes size) override;
  void release_address(DeviceAddress address, Bytes size) noexcept override;
  PageHandle create(Bytes size) override;
  void release(PageHandle page, Bytes size) noexcept override;
  void map(DeviceAddress address, Bytes size, PageHandle page) override;
  void unmap(DeviceAddress address, Bytes size) override;

  StreamHandle create_stream() override;
  void destroy_stream(StreamHandle stream) noexcept override;
  EventHandle create_event() override;
  void destroy_event(EventHandle event) noexcept override;
  void record(EventHandle event, StreamHandle stream) override;
  bool query(EventHandle event) override;
  void synchronize(EventHandle event) override;
  void synchronize(StreamHandle stream) override;
  void wait(StreamHandle stream, EventHandle event) override;
  bool is_capturing(StreamHandle stream) override;

  void copy_to_host(void* target, DeviceAddress source, Bytes size, StreamHandle stream) override;
  void copy_to_device(DeviceAddress target, const void* source, Bytes size, StreamHandle stream) override;
  void copy_on_device(DeviceAddress target, DeviceAddress source, Bytes size, StreamHandle stream) override;

  void register_host(void* memory, Bytes size) override;
  void unregister_host(void* memory, Bytes size) noexcept override;

 private:
  struct Mapping {
    Bytes size;
    PageHandle page;
  };

  void count(std::string_view name) LOWTIDE_REQUIRES(mutex_);
  /// True if this call is the one that fails.
  bool due(std::string_view name) LOWTIDE_EXCLUDES(mutex_);
  /// Counts a fallible call; throws DriverError if it is the one that fails.
  void enter(std::string_view name) LOWTIDE_EXCLUDES(mutex_);
  /// The same for calls that run out of memory.
  void enter_allocation(std::string_view name, Bytes size) LOWTIDE_EXCLUDES(mutex_);
  void refuse_while_capturing(std::string_view name) const LOWTIDE_EXCLUDES(mutex_);

  const std::unique_ptr<Device> owned_;
  Device& inner_;

  mutable Mutex mutex_;
  std::map<std::string, std::size_t, std::less<>> calls_ LOWTIDE_GUARDED_BY(mutex_);
  std::size_t fail_at_ LOWTIDE_GUARDED_BY(mutex_) = 0;  // 0: disarmed
  std::size_t fallible_calls_ LOWTIDE_GUARDED_BY(mutex_) = 0;
  std::size_t bad_releases_ LOWTIDE_GUARDED_BY(mutex_) = 0;
  std::map<DeviceAddress, Bytes> reservations_ LOWTIDE_GUARDED_BY(mutex_);
  std::map<PageHandle, Bytes> pages_ LOWTIDE_GUARDED_BY(mutex_);
  std::map<DeviceAddress, Mapping> mappings_ LOWTIDE_GUARDED_BY(mutex_);
  std::set<StreamHandle> streams_ LOWTIDE_GUARDED_BY(mutex_);
  std::set<EventHandle> events_ LOWTIDE_GUARDED_BY(mutex_);
  std::map<void*, Bytes> registrations_ LOWTIDE_GUARDED_BY(mutex_);
  std::set<StreamHandle> capturing_ LOWTIDE_GUARDED_BY(mutex_);
};

}  // namespace lowtide::testing
